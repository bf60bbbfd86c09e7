"""Who sees whom: the one rule that every attention follows.

A key is seen by a query iff its order is not later than the query's and its
segment is the query's own or the query's parent; a `Rule` may drop the first
of these, and may ask that their RoPE positions lie near each other. A negative
segment is padding: never seen, and its own output is 0.
"""

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlpost import errors

# Score of a key that is not seen. Finite, so that a row without visible keys
# gives 0 and never NaN.
MASKED = -1e30


@dataclasses.dataclass(frozen=True)
class Rule:
  """What else decides who sees whom, the same for every token.

  Attributes:
    window: see only keys less than this many positions back (without `causal`
      also: less than as many ahead).
    causal: see no key of a later order. Without it a document sees all of
      itself; a prompt still sees none of its completions.
    chunk: see only keys whose position lies in the same chunk of this many,
      `position // chunk`.
    first: with a window or chunks, see a document's first positions, as many
      as this, from everywhere behind them (Xiao et al., 2023,
      arXiv:2309.17453).

  Raises:
    InputError: a size below 1, or `first` with nothing to be excepted from.
  """

  window: int | None = None
  causal: bool = True
  chunk: int | None = None
  first: int = 0

  def __post_init__(self):
    for name in ('window', 'chunk'):
      size = getattr(self, name)
      if size is not None and size < 1:
        raise errors.InputError(
            f'{name}={size} must be at least 1, or None to see everything.'
        )
    if self.first < 0:
      raise errors.InputError(f'first={self.first} must be at least 0.')
    if self.first and self.window is None and self.chunk is None:
      raise errors.InputError(
          f'first={self.first} excepts positions from a window or chunks, and '
          'there are none: give window or chunk, or leave first at 0.'
      )


PLAIN = Rule()


class Where(NamedTuple):
  """Where each token stands: int32 [B, T] each; see the module's rule."""

  order: Any
  position: Any
  segment: Any
  parent: Any


@dataclasses.dataclass(frozen=True)
class SharedPrefix:
  """A promise about a row: `prefix` tokens, then `samples` of `width` each.

  Tokens of a sample see only the prefix and their own sample, so the scores
  between samples need not be computed. The visibility rule still applies
  inside the blocks; the promise changes the cost, not the result.
  """

  prefix: int
  samples: int
  width: int

  @property
  def length(self) -> int:
    return self.prefix + self.samples * self.width


def causal(segment_BT) -> Where:
  """`Where` of plain rows: one document per segment id, in row order.

  Positions restart with each segment; segments must be contiguous.
  """
  B, T = segment_BT.shape
  order = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (B, T))
  first = jnp.concatenate(
      [
          jnp.ones((B, 1), bool),
          segment_BT[:, 1:] != segment_BT[:, :-1],
      ],
      axis=1,
  )
  start = jax.lax.cummax(jnp.where(first, order, 0), axis=1)
  return Where(order, order - start, segment_BT, jnp.full((B, T), -2))


def visible(query: Where, key: Where, rule: Rule = PLAIN):
  """Boolean [B, T, S]: the module's rule."""
  segment = key.segment[:, None, :]
  own = query.segment[:, :, None] == segment
  parent = query.parent[:, :, None] == segment
  seen = (own | parent) & (segment >= 0) & (query.segment[:, :, None] >= 0)
  seen &= (key.order[:, None, :] <= query.order[:, :, None]) | (not rule.causal)
  near = _near(query.position[:, :, None], key.position[:, None, :], rule)
  return seen if near is None else seen & near


def _near(query, key, rule):
  """Whether these positions are near enough; None if any are."""
  tests = []
  if rule.window is not None:
    tests.append(query - key < rule.window)
    if not rule.causal:
      tests.append(key - query < rule.window)
  if rule.chunk is not None:
    tests.append(query // rule.chunk == key // rule.chunk)
  if not tests:
    return None
  near = functools.reduce(operator.and_, tests)
  return near | (key < rule.first) if rule.first else near


def blank(x_BT, segment_BT):
  """`x` [B, T, ...] with zeros at padding, whatever stands there.

  A weight of 0 does not silence a NaN; a select does, in both directions.
  """
  valid = segment_BT >= 0
  valid = valid.reshape(valid.shape + (1,) * (x_BT.ndim - 2))
  return jnp.where(valid, x_BT, jnp.zeros((), x_BT.dtype))
