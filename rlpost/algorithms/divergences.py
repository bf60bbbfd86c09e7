"""Divergence from a reference policy: estimates, and a loss that descends it.

With x = log p - log p_ref of a token sampled from p, three estimates of
KL(p || p_ref) (Schulman, 2020, "Approximating KL divergence"):

| name | value         | its own gradient, in expectation on policy |
|------|---------------|--------------------------------------------|
| k1   | x             | 0                                          |
| k2   | x^2 / 2       | grad KL(p || p_ref)                        |
| k3   | e^-x - 1 + x  | grad KL(p_ref || p): the other direction   |

So differentiating an estimate is not estimating the gradient. With samples of
a behaviour policy and w = p / p_behavior,

  grad KL(p || p_ref) = E_behavior[w x grad log p]

which stop(w) k2, and w k3 differentiated through w, both have exactly, token
by token. `kl_loss` has that gradient whichever estimate gives its value.
"""

import jax
import jax.numpy as jnp

from rlpost.algorithms import slots

stop = jax.lax.stop_gradient


def k1(logp_BK, ref_logp_BK):
  """x: unbiased, may be negative."""
  return logp_BK - ref_logp_BK


def k2(logp_BK, ref_logp_BK):
  """x^2 / 2: biased by the third order, never negative."""
  return 0.5 * jnp.square(logp_BK - ref_logp_BK)


def k3(logp_BK, ref_logp_BK):
  """e^-x - 1 + x: unbiased, never negative."""
  x_BK = logp_BK - ref_logp_BK
  return jnp.expm1(-x_BK) + x_BK


DIVERGENCES = {'k1': k1, 'k2': k2, 'k3': k3}


def kl_loss(
    logp_BK, batch, *, estimator='k3', weight_cap=10.0, clamp=20.0
):
  """w k(x) per slot, with the gradient w x grad log p of the reverse KL.

  w = min(p / p_behavior, weight_cap), 1 on policy; x is held in
  [-clamp, clamp]. Where x is clamped the value is a constant and *all* of the
  gradient is 0: none leaks through the weight. The same unbiased form for k3
  as in DeepSeek-V3.2, 2025, arXiv:2512.02556, section 3.1.

  Args:
    logp_BK: fp32, log-probabilities under the trained policy, nats.
    batch: `mask`, `behavior_logp` and `ref_logp` are read.
    estimator: a key of `DIVERGENCES`; decides the value, not the gradient.
    weight_cap: truncates the importance weight, in value and gradient alike.
    clamp: largest |log p - log p_ref| in nats.

  Returns:
    fp32 [B, K], 0 on padding.

  Raises:
    ValueError: an unknown estimator, or arrays that are not fp32 [B, K].
  """
  if estimator not in DIVERGENCES:
    raise ValueError(f'{estimator=} is not one of {sorted(DIVERGENCES)}.')
  slots.check(
      batch.mask,
      logp=logp_BK,
      behavior_logp=batch.behavior_logp,
      ref_logp=batch.ref_logp,
  )
  logp_BK, behavior_BK, ref_BK = slots.select(
      batch.mask, logp_BK, batch.behavior_logp, batch.ref_logp
  )
  x_BK = stop(logp_BK - ref_BK)
  inside_BK = jnp.abs(x_BK) <= clamp
  x_BK = jnp.clip(x_BK, -clamp, clamp)
  weight_BK = stop(jnp.minimum(jnp.exp(logp_BK - behavior_BK), weight_cap))
  value_BK = weight_BK * DIVERGENCES[estimator](x_BK, jnp.zeros_like(x_BK))
  slope_BK = jnp.where(inside_BK, weight_BK * x_BK, 0.0)
  return value_BK + slope_BK * (logp_BK - stop(logp_BK))
