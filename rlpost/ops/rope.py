"""Rotary position embedding and its extensions to longer contexts."""

import math

import jax
import jax.numpy as jnp
import numpy as np


def frequencies(head_dim, theta, scaling=None):
  """Rotation per position of each pair of coordinates, and the mscale.

  Su et al., 2021, arXiv:2104.09864, eq. 15: `theta ** (-2 i / P)`. The
  scalings change these numbers and nothing else; YaRN also scales queries and
  keys by `0.1 ln(factor) + 1` (arXiv:2309.00071, eq. 22).

  Args:
    head_dim: P, even.
    theta: base of the frequencies.
    scaling: a `models.config.RopeScaling`, or None.

  Returns:
    (fp32 NumPy array [P / 2] in radians per position, scale of cos and sin).
  """
  exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
  inverse = theta**-exponents
  mscale = 1.0
  if scaling is None:
    pass
  elif scaling.kind == 'linear':
    inverse = inverse / scaling.factor
  elif scaling.kind == 'ntk':
    stretched = theta * scaling.factor ** (head_dim / (head_dim - 2))
    inverse = stretched**-exponents
  elif scaling.kind == 'llama3':
    inverse = _llama3(inverse, scaling)
  else:
    inverse = _yarn(inverse, head_dim, theta, scaling)
    mscale = 0.1 * math.log(scaling.factor) + 1.0
  return inverse.astype(np.float32), mscale


def _llama3(inverse, scaling):
  """Long wavelengths are interpolated, short ones kept, the middle blended."""
  rotations = scaling.original_max_position * inverse / (2 * math.pi)
  low, high = scaling.low_freq_factor, scaling.high_freq_factor
  keep = np.clip((rotations - low) / (high - low), 0, 1)
  return keep * inverse + (1 - keep) * inverse / scaling.factor


def _yarn(inverse, head_dim, theta, scaling):
  """arXiv:2309.00071, eq. 17-18: a linear ramp over the pair index."""

  def pair_with(rotations):
    ratio = scaling.original_max_position / (rotations * 2 * math.pi)
    return head_dim * math.log(ratio) / (2 * math.log(theta))

  low = max(math.floor(pair_with(scaling.beta_fast)), 0)
  high = min(math.ceil(pair_with(scaling.beta_slow)), head_dim - 1)
  span = max(high - low, 1e-3)
  interpolate = np.clip((np.arange(len(inverse)) - low) / span, 0, 1)
  return interpolate * inverse / scaling.factor + (1 - interpolate) * inverse


def angles(position_BT, inverse_frequencies, mscale=1.0):
  """(cos, sin), each fp32 [B, T, P / 2], of the rotation at each position."""
  angle = position_BT[..., None].astype(jnp.float32) * inverse_frequencies[
      (None,) * position_BT.ndim
  ]
  # One table for all layers: XLA would compute it anew in each.
  return jax.lax.optimization_barrier(
      (jnp.cos(angle) * mscale, jnp.sin(angle) * mscale)
  )


@jax.custom_vjp
def rotate(x_BTHP, cos, sin):
  """Rotates pairs (i, i + P/2) of the last axis, computed in fp32.

  Its gradient is the opposite rotation; the angles are constants.
  """
  half = x_BTHP.shape[-1] // 2
  cos, sin = cos[:, :, None], sin[:, :, None]
  first = x_BTHP[..., :half].astype(jnp.float32)
  second = x_BTHP[..., half:].astype(jnp.float32)
  out = [first * cos - second * sin, second * cos + first * sin]
  return jnp.concatenate(out, axis=-1).astype(x_BTHP.dtype)


rotate.defvjp(
    lambda x, cos, sin: (rotate(x, cos, sin), (cos, sin)),
    lambda angle, g: (rotate(g, angle[0], -angle[1]), None, None),
)
