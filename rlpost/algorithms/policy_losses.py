"""Policy losses: one value per loss slot, never a mean, never a model.

`loss(logp_BK, batch, *, hyper-parameters) -> fp32 [B, K]`, 0 on padding, where

* `logp_BK` is the log-probability in nats of each slot's target under the
  policy being trained, at the temperature that it was sampled at;
* `batch.behavior_logp` is the log-probability that the ratio is taken to;
* `batch.advantage` is a constant of the update.

At ratio 1 every loss has the gradient of REINFORCE, -A grad log p.
"""

import jax
import jax.numpy as jnp

from rlpost.algorithms import slots

stop = jax.lax.stop_gradient


def _clean(logp_BK, batch):
  """(logp, behavior_logp, advantage), checked, and 0 outside the mask."""
  slots.check(
      batch.mask,
      logp=logp_BK,
      behavior_logp=batch.behavior_logp,
      advantage=batch.advantage,
  )
  return slots.select(
      batch.mask, logp_BK, batch.behavior_logp, batch.advantage
  )


def token_ratio(logp_BK, batch):
  """r_t = p(token) / p_behavior(token); 1 on padding."""
  logp_BK, behavior_BK, _ = _clean(logp_BK, batch)
  return jnp.exp(logp_BK - behavior_BK)


def sequence_ratio(logp_BK, batch):
  """s_t = stop(s) r_t / stop(r_t), s the geometric mean of r over a sequence.

  Its value is s = exp(mean_t log r_t); its gradient at slot t is
  s grad log p_t. Averaged over the sequence that is the gradient of s itself,
  and tokens may carry different advantages.

  Zheng et al., 2025 (GSPO), arXiv:2507.18071, eqs. 7 and 14 (GSPO-token).
  """
  logp_BK, behavior_BK, _ = _clean(logp_BK, batch)
  log_s_BK = slots.sequence_means(
      logp_BK - behavior_BK, batch.mask, batch.sequence
  )
  return jnp.exp(stop(log_s_BK) + logp_BK - stop(logp_BK))


def _surrogate(ratio_BK, advantage_BK, clip_low, clip_high, dual_clip=None):
  """-min(r A, clip(r) A), and at most -c A where A < 0."""
  clipped_BK = jnp.clip(ratio_BK, 1 - clip_low, 1 + clip_high)
  gain_BK = jnp.minimum(ratio_BK * advantage_BK, clipped_BK * advantage_BK)
  if dual_clip is not None:
    if dual_clip <= 1:
      raise ValueError(f'{dual_clip=} must be above 1; 3 is usual.')
    floor_BK = jnp.maximum(gain_BK, dual_clip * advantage_BK)
    gain_BK = jnp.where(advantage_BK < 0, floor_BK, gain_BK)
  return -gain_BK


def reinforce(logp_BK, batch):
  """-A log p.

  Williams, 1992. No ratio: the gradient is right only for samples of the
  policy itself.
  """
  logp_BK, _, advantage_BK = _clean(logp_BK, batch)
  return -advantage_BK * logp_BK


def clipped_surrogate(
    logp_BK, batch, *, clip_low=0.2, clip_high=0.2, dual_clip=None
):
  """PPO's objective, negated: -min(r A, clip(r, 1 - low, 1 + high) A).

  Schulman et al., 2017, arXiv:1707.06347, eq. 7. Separate clips: Yu et al.,
  2025 (DAPO), arXiv:2503.14476, eq. 8. `dual_clip` c bounds what a token with
  A < 0 and a huge ratio can do, max(min(...), c A): Ye et al., 2020,
  arXiv:1912.09729, eq. 5.
  """
  ratio_BK = token_ratio(logp_BK, batch)
  *_, advantage_BK = _clean(logp_BK, batch)
  return _surrogate(ratio_BK, advantage_BK, clip_low, clip_high, dual_clip)


def gspo(logp_BK, batch, *, clip_low=3e-4, clip_high=4e-4):
  """-min(s A, clip(s, 1 - low, 1 + high) A) with the sequence's ratio s.

  Zheng et al., 2025, arXiv:2507.18071, eqs. 5 and 13 (GSPO-token); clips from
  section 5.1. Meant for the aggregation 'sequence_mean', with which it is
  their eq. 5.
  """
  ratio_BK = sequence_ratio(logp_BK, batch)
  *_, advantage_BK = _clean(logp_BK, batch)
  return _surrogate(ratio_BK, advantage_BK, clip_low, clip_high)


def cispo(logp_BK, batch, *, clip_low=1.0, clip_high=4.0):
  """-stop(clip(r, 1 - low, 1 + high)) A log p: no token loses its gradient.

  MiniMax, 2025 (MiniMax-M1), arXiv:2506.13585, eqs. 4 and 5. The default has
  no lower bound, as there; weights up to 5 as in Khatri et al., 2025
  (ScaleRL), arXiv:2510.13786.
  """
  logp_BK, _, advantage_BK = _clean(logp_BK, batch)
  ratio_BK = token_ratio(logp_BK, batch)
  weight_BK = stop(jnp.clip(ratio_BK, 1 - clip_low, 1 + clip_high))
  return -weight_BK * advantage_BK * logp_BK


LOSSES = {
    'reinforce': reinforce,
    'clipped_surrogate': clipped_surrogate,
    'gspo': gspo,
    'cispo': cispo,
}

# What each loss clips; reinforce clips nothing.
RATIOS = {
    'reinforce': token_ratio,
    'clipped_surrogate': token_ratio,
    'gspo': sequence_ratio,
    'cispo': token_ratio,
}


def clipped(loss, logp_BK, batch, *, clip_low=jnp.inf, clip_high=jnp.inf, **_):
  """bool [B, K]: slots whose ratio the named loss holds at a bound.

  For the surrogates, slots that lost their gradient: above the upper bound
  with A > 0, below the lower with A < 0 (`dual_clip` not counted). For cispo,
  slots whose weight was cut.
  """
  ratio_BK = RATIOS[loss](logp_BK, batch)
  *_, advantage_BK = _clean(logp_BK, batch)
  above_BK, below_BK = ratio_BK > 1 + clip_high, ratio_BK < 1 - clip_low
  if loss == 'cispo':
    return (above_BK | below_BK) & (batch.mask > 0)
  return (above_BK & (advantage_BK > 0)) | (below_BK & (advantage_BK < 0))


def clipped_value(
    value_BK, old_value_BK, target_BK, mask_BK, *, clip=0.2
):
  """1/2 max((v - R)^2, (v_old + clip(v - v_old, -c, c) - R)^2).

  The critic's loss of PPO's reference code (Schulman et al., 2017; Engstrom
  et al., 2020, arXiv:2005.12729, section 3). `clip=None` leaves the square.

  Args:
    value_BK: the critic's output, in the rewards' unit.
    old_value_BK: the same when the advantages were made.
    target_BK: advantage + old value.
    mask_BK: 1 where a slot trains.
    clip: how far the value may move for free, in the rewards' unit.

  Returns:
    fp32 [B, K], 0 on padding.
  """
  slots.check(
      mask_BK, value=value_BK, old_value=old_value_BK, target=target_BK
  )
  value_BK, old_value_BK, target_BK = slots.select(
      mask_BK, value_BK, old_value_BK, target_BK
  )
  error_BK = jnp.square(value_BK - target_BK)
  if clip is not None:
    near_BK = old_value_BK + jnp.clip(value_BK - old_value_BK, -clip, clip)
    error_BK = jnp.maximum(error_BK, jnp.square(near_BK - target_BK))
  return 0.5 * error_BK


def entropy_bonus(entropy_BK, mask_BK):
  """-H(p), in nats: added with a coefficient, it keeps the policy random.

  Williams & Peng, 1991; Mnih et al., 2016, arXiv:1602.01783.
  """
  slots.check(mask_BK, entropy=entropy_BK)
  (entropy_BK,) = slots.select(mask_BK, entropy_BK)
  return -entropy_BK
