"""Arithmetic on loss slots that every loss needs: select, check, segment sums.

Arrays are [B, K], or have more leading axes (micro-batches); a sequence lies
within one row.
"""

import chex
import jax
import jax.numpy as jnp


def check(mask_BK, **fp32_arrays) -> None:
  """Refuses arrays that are not fp32 or not shaped like the mask.

  bf16 keeps 8 bits: a log-probability of -5 is off by up to 0.016, as much as
  the ratios that the losses clip.

  Raises:
    ValueError: a shape or a dtype is wrong; the message names the array.
  """
  for name, array in fp32_arrays.items():
    if jnp.shape(array) != jnp.shape(mask_BK):
      raise ValueError(
          f'{name} has shape {jnp.shape(array)}, the mask '
          f'{jnp.shape(mask_BK)}; all per-slot arrays share [B, K].'
      )
    if jnp.dtype(array.dtype).itemsize < 4:
      raise ValueError(
          f'{name} is {array.dtype}; store and compute it in float32.'
      )


def select(mask_BK, *arrays):
  """Each array where the mask is 1, else 0.

  Before any exp: selecting afterwards gives the right loss and, where padding
  holds NaN or overflows, a NaN gradient.
  """
  return tuple(jnp.where(mask_BK > 0, x, jnp.zeros_like(x)) for x in arrays)


def sequence_totals(values_BK, sequence_BK):
  """Sum of values over each slot's sequence, at every slot of that sequence.

  Args:
    values_BK: 0 outside the mask.
    sequence_BK: int, ids in [0, K) inside a row; slots of a sequence need not
      be adjacent. Padding may share the id 0, as its values are 0.

  Returns:
    [B, K].
  """
  chex.assert_equal_shape([values_BK, sequence_BK])
  slots = values_BK.shape[-1]

  def row(values_K, sequence_K):
    totals_K = jax.ops.segment_sum(values_K, sequence_K, num_segments=slots)
    return totals_K[sequence_K]

  flat_BK = jax.vmap(row)(
      values_BK.reshape(-1, slots), sequence_BK.reshape(-1, slots)
  )
  return flat_BK.reshape(values_BK.shape)


def sequence_count(mask_BK, sequence_BK):
  """fp32 scalar: sequences with at least one trained slot."""
  slots = mask_BK.shape[-1]
  (sequence_BK,) = select(mask_BK, sequence_BK)

  def row(trained_K, sequence_K):
    return jax.ops.segment_sum(trained_K, sequence_K, num_segments=slots) > 0

  present_BK = jax.vmap(row)(
      (mask_BK > 0).astype(jnp.float32).reshape(-1, slots),
      sequence_BK.reshape(-1, slots),
  )
  return jnp.sum(present_BK.astype(jnp.float32))


def sequence_lengths(mask_BK, sequence_BK):
  """fp32 [B, K]: trained slots of each slot's sequence; 0 on padding."""
  trained_BK = (mask_BK > 0).astype(jnp.float32)
  (sequence_BK,) = select(mask_BK, sequence_BK)
  return sequence_totals(trained_BK, sequence_BK) * trained_BK


def sequence_means(values_BK, mask_BK, sequence_BK):
  """Mean over the trained slots of each slot's sequence; 0 on padding."""
  values_BK, sequence_BK = select(mask_BK, values_BK, sequence_BK)
  length_BK = sequence_lengths(mask_BK, sequence_BK)
  total_BK = sequence_totals(values_BK, sequence_BK)
  (mean_BK,) = select(mask_BK, total_BK / jnp.maximum(length_BK, 1))
  return mean_BK
