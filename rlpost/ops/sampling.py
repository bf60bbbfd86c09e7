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
  e = jnp.exp(blocks - tops.max(0)[None, None])
  masses = e.sum(1)
  cumulative = jnp.cumsum(masses, 0)
  total = cumulative[-1]
  goal = uniform_B * total
  block = _first_beyond(cumulative, masses, goal)
  block = jnp.where(greedy, tops.argmax(0), block)
  columns = jnp.arange(B)
  before = jnp.where(block > 0, cumulative[block - 1, columns], 0.0)
  inside = e[block, :, columns].T
  offset = _first_beyond(jnp.cumsum(inside, 0), inside, goal - before)
  offset = jnp.where(greedy, inside.argmax(0), offset)
  token = (block * C + offset).astype(jnp.int32)
  return token, jnp.log(inside[offset, columns] / total)


def _first_beyond(cumulative_CB, mass_CB, goal_B):
  """Per column the first entry whose cumulative sum exceeds the goal.

  Rounding may carry a sum past the goal at an entry without mass, or keep all
  sums below it; neither may draw a token of probability zero, so only entries
  with mass count, and the last of them is the limit.
  """
  some = mass_CB > 0
  beyond = (cumulative_CB > goal_B[None]) & some
  last = some.shape[0] - 1 - some[::-1].argmax(0)
  return jnp.where(beyond.any(0), beyond.argmax(0), last)
