"""Keys and values that have been computed, and where they are kept.

Caches are tuples of arrays [A, J, columns, P]. Where layers have parameters
of their own there is one array per layer; where they are stacked, and so
scanned, one per layer of a period of `ModelConfig.windows`, with a leading
axis over periods. Both are written in place and never copied into the other.

A layer with a window keeps only what can still be seen: position p stands in
column p % columns. In other layers tokens stand in the order they came.
Nothing reads an order from the columns: `Cache.position` says what is where,
so columns may be spread over the context axis. Then each device has a part of
every piece of tokens that was written, and writing moves nothing.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout as DeviceLayout
from jax.experimental.layout import with_layout_constraint

from rlpost import sharding
from rlpost.models import transformer
from rlpost.models.config import ModelConfig


class Cache(NamedTuple):
  """Of A sequences.

  Attributes:
    keys, values: see the module.
    position: for each window of a period int32 [A, columns]; -1: empty.
  """

  keys: tuple
  values: tuple
  position: tuple


@dataclasses.dataclass(frozen=True)
class Layout:
  """How a model's caches are laid out.

  Attributes:
    model: the shape of the decoder.
    dtype: of keys and values.
    stacked: layers are scanned.
    ways: over how many devices columns are spread.
  """

  model: ModelConfig
  dtype: Any
  stacked: bool = False
  ways: int = 1

  def rounded(self, length: int) -> int:
    """So many columns that each device has the same number."""
    return -(-length // self.ways) * self.ways

  def pieces(self, length: int, chunk: int) -> tuple[int, int]:
    """(how many, tokens of each) in which `length` tokens are prefilled.

    Args:
      chunk: most tokens at one time, before rounding; 0 for all.
    """
    if not length:
      return 0, 0
    size = self.rounded(min(chunk or length, length))
    return -(-length // size), size

  def columns(self, length: int, most: int) -> tuple[int, ...]:
    """Columns of a cache, for each window of a period.

    Args:
      length: columns where there is no window.
      most: tokens that a sequence may have.
    """
    return tuple(
        length if window is None else self.rounded(min(window, most))
        for window in self.model.windows
    )

  def shapes(self, count: int, columns: tuple[int, ...]) -> list[tuple]:
    """Of the arrays with the keys of `count` sequences."""
    model, period = self.model, len(columns)
    lead, entries = (), model.num_layers
    if self.stacked:
      lead, entries = (model.num_layers // period,), period
    return [
        (*lead, count, model.num_kv_heads, columns[i % period], model.head_dim)
        for i in range(entries)
    ]

  def zeros(self, count: int, columns: tuple[int, ...]) -> tuple:
    """Room for the keys of `count` sequences."""
    return tuple(
        jnp.zeros(shape, self.dtype) for shape in self.shapes(count, columns)
    )

  def empty(self, count: int, columns: tuple[int, ...]) -> Cache:
    """A cache with nothing in it."""
    return Cache(
        self.zeros(count, columns), self.zeros(count, columns),
        tuple(jnp.full((count, n), -1, jnp.int32) for n in columns),
    )


def through(layout: Layout, params, one, x, read, state):
  """Runs `x` through all layers, each of which changes its own state.

  Args:
    one: `one(kind, w, x, read, state, at) -> (x, state)` is a layer with the
      parameters w and the window `windows[kind]`. `at` is None, or the layer's
      place in the leading axis of its state, for `get` and `put`.
    read, state: of each layer, as a cache's tuples are.

  Returns:
    (x, state).
  """
  model, period = layout.model, len(layout.model.windows)
  if not layout.stacked:
    layers = [jax.jit(functools.partial(one, k)) for k in range(period)]
    state = list(state)
    for i in range(model.num_layers):
      w = transformer.layer(params, i)
      x, state[i] = layers[i % period](w, x, read[i], state[i], None)
    return x, tuple(state)
  stacked = transformer.by_period(model, params)

  def some(carry, xs):
    x, state = carry
    at, w, read = xs
    state = list(state)
    for k in range(period):
      own = {name: v[k] for name, v in w.items()}
      x, state[k] = one(k, own, x, read[k], state[k], at)
    return (x, tuple(state)), None

  # The state is carried, so that it is written in place.
  places = jnp.arange(model.num_layers // period)
  return jax.lax.scan(some, (x, state), (places, stacked, read))[0]


def get(x, at=None):
  """One layer's array of a state."""
  if at is None:
    return x
  return jax.lax.dynamic_index_in_dim(x, at, keepdims=False)


def put(into, new_AJcP, column, at=None, ways=1):
  """Writes c columns into a layer's array of a state.

  Args:
    column: where, in each of `ways` parts, into which both are cut.
  """
  new = new_AJcP.astype(into.dtype)
  new = new if at is None else new[None]

  def cut(x):
    return x.reshape(*x.shape[:-2], ways, -1, x.shape[-1])

  start = [0] * (into.ndim + 1)
  start[0], start[-2] = 0 if at is None else at, column
  return jax.lax.dynamic_update_slice(cut(into), cut(new), start).reshape(
      into.shape
  )


def join(first, second, ways=1):
  """[.., a, P] and [.., b, P] -> [.., a + b, P], in each of `ways` parts."""

  def cut(x):
    return x.reshape(*x.shape[:-2], ways, -1, x.shape[-1])

  both = jnp.concatenate([cut(first), cut(second)], -2)
  return both.reshape(*first.shape[:-2], -1, first.shape[-1])


def placed(x):
  """An array of a cache where `axes` say."""
  return sharding.constrain(x, axes(x.ndim))


def kept(x):
  """A stacked array of a cache, stored as it is between programs.

  Else a TPU's compiler keeps it transposed while it is filled piece by piece,
  and the copy of a cache in its own order is as large as the cache.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if x.ndim == 4 or mesh.empty:
    return placed(x)
  place = sharding.fitting(mesh, x.shape, axes(x.ndim)).spec
  order = DeviceLayout(tuple(range(x.ndim)))
  # In a `shard_map`, or each device would first gather all of it.
  return jax.shard_map(
      lambda x: with_layout_constraint(x, order), in_specs=place,
      out_specs=place,
  )(x)


def axes(ndim: int, sequences='batch') -> tuple:
  """Logical axes of an array of a cache."""
  return (*[None] * (ndim - 4), sequences, 'heads', 'time', None)


def columns_of(x):
  """[A, n] seen as [A, 1, n, 1], for the functions above."""
  return x[:, None, :, None]


def newest(columns: int, end_A):
  """The position that belongs in each column of a rolling cache [A, columns].

  Args:
    end_A: tokens so far; the last `columns` of them are kept.
  """
  last = end_A[:, None] - 1
  position = last - (last - jnp.arange(columns)[None]) % columns
  return jnp.where((last >= 0) & (position >= 0), position, -1)


def roll(old_AJnP, new_AJcP, position_An, first_A):
  """Brings a rolling cache up to date.

  Args:
    new_AJcP: c tokens in order, from position `first_A` on.
    position_An: what `newest` says with them.
  """
  index = position_An - first_A[:, None]
  taken = jnp.take_along_axis(
      new_AJcP, columns_of(jnp.clip(index, 0, new_AJcP.shape[2] - 1)), axis=2
  )
  # Whole on every device: few columns, and any of them may come from any.
  taken = sharding.constrain(taken, ('batch', 'heads', None, None))
  taken = taken.astype(old_AJnP.dtype)
  return jnp.where(columns_of(index >= 0), taken, old_AJnP)
