"""How values per slot become one objective, whatever the split.

A mean over a micro-batch, a row or a device depends on what shares it. So a
mode is a weight per slot and a unit to count, and

  objective = sum over the update of weight * value
              / `denominator`(unit, sum over the update of `count`)

Both sums are plain sums over rows, and a sequence lies within one row: the
objective is the same for any micro-batches, packing, padding, row order and
mesh. Only the training step divides.

| mode            | objective                                    | unit     |
|-----------------|----------------------------------------------|----------|
| token_mean      | mean over all trained tokens                 | token    |
| sequence_mean   | mean over sequences of their token means     | sequence |
| constant_length | mean over sequences of token sum / constant  | sequence |
| token_sum       | sum over all trained tokens / constant       | one      |
"""

import jax.numpy as jnp

from rlpost.algorithms import slots

# token_mean: Yu et al., 2025 (DAPO), arXiv:2503.14476, eq. 8, over the whole
# update. sequence_mean: Shao et al., 2024, arXiv:2402.03300, eq. 3.
# constant_length: Liu et al., 2025 (Dr. GRPO), arXiv:2503.20783, section 3.
UNITS = {
    'token_mean': 'token',
    'sequence_mean': 'sequence',
    'constant_length': 'sequence',
    'token_sum': 'one',
}


def unit_of(mode: str) -> str:
  """The unit that a mode's denominator counts.

  Raises:
    ValueError: the mode is unknown.
  """
  if mode not in UNITS:
    raise ValueError(f'{mode=} is not one of {sorted(UNITS)}.')
  return UNITS[mode]


def weights(mode: str, mask_BK, sequence_BK, *, constant=None):
  """fp32 [B, K]: what a slot's value counts in the numerator; 0 on padding.

  Args:
    mode: a key of `UNITS`.
    mask_BK: 1 where a slot trains.
    sequence_BK: int, the slot's sequence inside its row.
    constant: tokens; divides in 'constant_length' (the generation budget, or 1
      for plain sequence sums) and 'token_sum'.

  Raises:
    ValueError: an unknown mode, or a constant missing, not positive, or given
      to a mode without one.
  """
  needs_constant = unit_of(mode) == 'one' or mode == 'constant_length'
  if needs_constant and not (constant and constant > 0):
    raise ValueError(
        f'{mode=} needs a positive constant, got {constant}; the generation '
        f'budget in tokens is the usual one.'
    )
  if constant is not None and not needs_constant:
    raise ValueError(f'{mode=} has no constant; remove {constant=}.')
  trained_BK = (mask_BK > 0).astype(jnp.float32)
  if needs_constant:
    return trained_BK / constant
  if mode == 'token_mean':
    return trained_BK
  length_BK = slots.sequence_lengths(mask_BK, sequence_BK)
  return trained_BK / jnp.maximum(length_BK, 1)


def count(unit: str, mask_BK, sequence_BK):
  """This part's share of the global denominator: add it up over the update.

  Args:
    unit: 'token' (trained slots), 'sequence' (sequences with at least one) or
      'one' (nothing to count).
    mask_BK: 1 where a slot trains.
    sequence_BK: int, the slot's sequence inside its row.

  Returns:
    fp32 scalar; rows without slots add 0.

  Raises:
    ValueError: the unit is unknown.
  """
  if unit == 'token':
    return jnp.sum((mask_BK > 0).astype(jnp.float32))
  if unit == 'sequence':
    return slots.sequence_count(mask_BK, sequence_BK)
  if unit == 'one':
    return jnp.zeros((), jnp.float32)
  raise ValueError(f"{unit=} is not one of ['one', 'sequence', 'token'].")


def denominator(unit: str, total_count):
  """What the update's sum is divided by; 1 where there was nothing to count."""
  if unit == 'one':
    return jnp.ones((), jnp.float32)
  return jnp.maximum(total_count, 1).astype(jnp.float32)
