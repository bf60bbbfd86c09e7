"""Corrections for a sampler that is not quite the policy being trained.

Three policies, never to be mixed up: the *sampler* wrote the tokens
(`behavior_logp`), the *old* policy is the trainer's before its first update on
this batch (`old_logp`), and the *current* one is being trained. A correction
weighs slots by old / sampler; the loss takes its ratio current / old.

`correction(old_logp_BK, behavior_logp_BK, mask_BK, sequence_BK, *, ...)
-> weight_BK`: fp32, without gradient, 0 on padding. It multiplies the policy
loss only. A dropped sequence weighs 0 and still counts in denominators, like an
advantage of 0: the update gets smaller instead of leaning on the others.
"""

import jax
import jax.numpy as jnp

from rlpost.algorithms import slots


def none(old_logp_BK, behavior_logp_BK, mask_BK, sequence_BK):
  """Weight 1 on every trained slot."""
  del old_logp_BK, behavior_logp_BK, sequence_BK
  return (mask_BK > 0).astype(jnp.float32)


def token_truncation(
    old_logp_BK, behavior_logp_BK, mask_BK, sequence_BK, *, cap=2.0
):
  """min(p_old / p_sampler, cap) per token.

  Truncated importance sampling: Ionides, 2008; Yao et al., 2025, "Your
  efficient RL framework secretly brings you off-policy RL training".
  """
  del sequence_BK
  log_ratio_BK = _log_ratio(old_logp_BK, behavior_logp_BK, mask_BK)
  weight_BK = jnp.minimum(jnp.exp(log_ratio_BK), cap)
  return jnp.where(mask_BK > 0, weight_BK, 0.0)


def geometric_sequence_mask(
    old_logp_BK, behavior_logp_BK, mask_BK, sequence_BK, *, low=0.5, high=2.0
):
  """1 where low <= exp(mean_t log p_old / p_sampler) <= high, else 0.

  The geometric mean does not drift with length, as a product of ratios does: a
  gap of 1e-3 per token is a factor of 3,000 after 8,000 tokens.
  Liu et al., 2025, "When speed kills stability" (sequence rejection).
  """
  log_ratio_BK = _log_ratio(old_logp_BK, behavior_logp_BK, mask_BK)
  mean_BK = slots.sequence_means(log_ratio_BK, mask_BK, sequence_BK)
  inside_BK = (mean_BK >= jnp.log(low)) & (mean_BK <= jnp.log(high))
  return jnp.where(inside_BK & (mask_BK > 0), 1.0, 0.0).astype(jnp.float32)


def truncate_and_mask(
    old_logp_BK,
    behavior_logp_BK,
    mask_BK,
    sequence_BK,
    *,
    cap=2.0,
    low=0.5,
    high=2.0,
):
  """`token_truncation` times `geometric_sequence_mask`."""
  arrays = old_logp_BK, behavior_logp_BK, mask_BK, sequence_BK
  kept_BK = geometric_sequence_mask(*arrays, low=low, high=high)
  return token_truncation(*arrays, cap=cap) * kept_BK


CORRECTIONS = {
    'none': none,
    'token_truncation': token_truncation,
    'geometric_sequence_mask': geometric_sequence_mask,
    'truncate_and_mask': truncate_and_mask,
}


def _log_ratio(old_logp_BK, behavior_logp_BK, mask_BK):
  """log p_old - log p_sampler without gradient, 0 on padding."""
  slots.check(mask_BK, old_logp=old_logp_BK, behavior_logp=behavior_logp_BK)
  old_logp_BK, behavior_logp_BK = slots.select(
      mask_BK, old_logp_BK, behavior_logp_BK
  )
  return jax.lax.stop_gradient(old_logp_BK - behavior_logp_BK)
