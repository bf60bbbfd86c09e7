"""Sampling a token, with its exact log-probability."""

import chex
import jax.numpy as jnp

_BLOCK = 256


def sample(logits_VB, uniform_B, temperature_B):
  """Draws a token per column by inverse CDF; greedy where temperature is 0.

  Two levels: choose a block of the vocabulary, then a token inside it, so the
  long cumulative sum is over V / 256 numbers. One uniform number per row
  decides, so a row's token depends on nothing but its own key.

  Args:
    logits_VB: fp32, vocabulary first.
    uniform_B: in [0, 1).
    temperature_B: the logits are divided by it; 0 takes the largest logit,
      and its log-probability is the one at temperature 1.

  Returns:
    (int32 [B] tokens, fp32 [B] log-probabilities at the temperature).
  """
  V, B = logits_VB.shape
  chex.assert_shape([uniform_B, temperature_B], (B,))
  C = next(c for c in range(min(_BLOCK, V), 0, -1) if V % c == 0)
  greedy = temperature_B <= 0
  scaled = logits_VB / jnp.where(greedy, 1.0, temperature_B)[None]
  blocks = scaled.reshape(V // C, C, B)
  tops = blocks.max(1)
  top = tops.max(0)
  e = jnp.exp(blocks - top[None, None])
  cumulative = jnp.cumsum(e.sum(1), 0)
  total = cumulative[-1]
  goal = uniform_B * total
  block = jnp.minimum((cumulative <= goal[None]).sum(0), V // C - 1)
  block = jnp.where(greedy, tops.argmax(0), block)
  columns = jnp.arange(B)
  before = jnp.where(block > 0, cumulative[block - 1, columns], 0.0)
  inside = e[block, :, columns]
  reached = jnp.cumsum(inside, 1) <= (goal - before)[:, None]
  # Rounding may carry the goal past the block's sum; a token of probability
  # zero must not be drawn, so the last one that has any is the limit.
  last = C - 1 - (inside[:, ::-1] > 0).argmax(1)
  offset = jnp.minimum(reached.sum(1), last)
  offset = jnp.where(greedy, inside.argmax(1), offset)
  token = (block * C + offset).astype(jnp.int32)
  return token, jnp.log(inside[columns, offset] / total)
