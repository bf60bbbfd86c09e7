"""Prompts in, caches and the last hidden states out."""


import jax
import jax.numpy as jnp

from rlpost import sharding
from rlpost.models import transformer
from rlpost.ops.attention import Rule, Where, attention, score_masks
from rlpost.rollouts import cache as caches
from rlpost.rollouts.cache import Cache, Layout


def _where(position):
  """Tokens of one document: their order is their position, -1 is padding."""
  segment = jnp.where(position >= 0, 0, -1)
  return Where(position, position, segment, jnp.full_like(position, -2))


def prefill(
    layout: Layout, params, tokens_AT, length_A, cache: Cache, start_A,
    column: int, *, chunk=0, backend='dense',
):
  """Runs prompts once; returns their `Cache` and last hidden states [A, D].

  Args:
    tokens_AT: right-padded tokens.
    length_A: real tokens of each.
    cache: of what stands before these tokens, with room for them.
    start_A: how many tokens that are.
    column: where these tokens begin, in layers without a window.
    chunk: tokens that are run at one time; 0 for all. The result is the same.
    backend: see `ops.attention.attention`.
  """
  A, T = tokens_AT.shape
  count, size = layout.pieces(T, chunk)
  tokens_AT = jnp.pad(tokens_AT, ((0, 0), (0, count * size - T)))
  last = jnp.zeros((A, layout.model.width), layout.dtype)

  def piece(carry, xs):
    i, tokens = xs
    return _piece(
        layout, params, tokens, length_A, i * size, *carry, start_A,
        column + i * size, backend,
    ), None

  carry = cache, last
  if count == 1:
    cache, last = piece(carry, (0, tokens_AT))[0]
  else:
    pieces = tokens_AT.reshape(A, count, size).swapaxes(0, 1)
    (cache, last), _ = jax.lax.scan(piece, carry, (jnp.arange(count), pieces))
  return cache, transformer.norm(layout.model, params, last)


def _piece(
    layout, params, tokens_Ac, length_A, first, cache, last_AD, start_A, column,
    backend,
):
  """Tokens `first`, ... of prompts: (cache, last hidden states, not normed)."""
  model, ways = layout.model, layout.ways
  A, c = tokens_Ac.shape
  index = first + jnp.broadcast_to(jnp.arange(c)[None], (A, c))
  filled = index < length_A[:, None]
  position = jnp.where(filled, start_A[:, None] + index, -1)
  begin, end = start_A + first, start_A + jnp.minimum(length_A, first + c)

  def put(into, new, at=None):
    return caches.put(into, new, column // ways, at, ways)

  query, keys, kept = _where(position), [], []
  for window, old in zip(model.windows, cache.position, strict=True):
    old, new = caches.columns_of(old), caches.columns_of(position)
    if window is None:
      seen = after = put(old, new)[:, 0, :, 0]
    else:
      seen = caches.join(old, new, ways)[:, 0, :, 0]
      after = caches.newest(old.shape[2], end)
    keys.append(_where(seen))
    kept.append(after)
  rules = [Rule(window=window) for window in model.windows]
  masks = [
      score_masks(query, key, rule=rule) if backend == 'dense' else None
      for key, rule in zip(keys, rules, strict=True)
  ]
  rope = transformer.rope(model, jnp.maximum(position, 0))
  axes = transformer.layer_axes(model)

  def update(kind, state, new, at):
    """(keys and values that are seen, the layer's new state)."""
    if model.windows[kind] is None:
      after = [put(old, x, at) for old, x in zip(state, new, strict=True)]
      return [caches.get(x, at) for x in after], after
    before = [caches.get(x, at) for x in state]
    pairs = list(zip(before, new, strict=True))
    after = [caches.roll(*pair, kept[kind], begin) for pair in pairs]
    if at is not None:
      after = [
          caches.put(old, x, 0, at) for old, x in zip(state, after, strict=True)
      ]
    return [caches.join(*pair, ways) for pair in pairs], after

  def one(kind, w, x, read, state, at):
    del read
    # Many tokens, spread over the context, share the weights: these move.
    w = {k: sharding.constrain(x, axes[k]) for k, x in w.items()}

    def attend(q, *new):
      new = [caches.placed(x.swapaxes(1, 2)) for x in new]
      seen, after = update(kind, state, new, at)
      o = attention(
          q, *(x.swapaxes(1, 2) for x in seen), query, keys[kind],
          backend=backend, rule=rules[kind], masks=masks[kind],
      )
      return o, tuple(map(caches.kept, after))

    return transformer.block(model, w)(x, rope, attend)

  x = transformer.embed(params, tokens_Ac, layout.dtype)
  x = sharding.constrain(x, ('batch', 'time', None))
  state = tuple(zip(cache.keys, cache.values, strict=True))
  x, state = caches.through(
      layout, params, one, x, (None,) * len(state), state
  )
  at = length_A - 1 - first
  here = x[jnp.arange(A), jnp.clip(at, 0, c - 1)]
  # Of all pieces that a prompt reaches the last one counts.
  last = jnp.where((at >= 0)[:, None], here, last_AD)
  return Cache(*map(tuple, zip(*state, strict=True)), tuple(kept)), last


def behind(layout: Layout, shared: Cache, which_A, cache: Cache) -> Cache:
  """`cache` of A prompts with a shared prefix at the beginning of each.

  Args:
    shared: of Z prefixes.
    which_A: the prefix of each prompt.
  """
  windows = layout.model.windows

  def begin(kind, into, prefix):
    taken = jnp.take(prefix, which_A, axis=prefix.ndim - 4)
    if windows[kind % len(windows)] is not None:
      return taken
    if not taken.shape[-2]:
      return into
    return caches.put(into, taken, 0, ways=layout.ways)

  keys, values = (
      tuple(begin(k, *pair) for k, pair in enumerate(zip(*x, strict=True)))
      for x in zip(cache[:2], shared[:2], strict=True)
  )
  position = tuple(
      begin(k, caches.columns_of(a), caches.columns_of(b))[:, 0, :, 0]
      for k, (a, b) in enumerate(
          zip(cache.position, shared.position, strict=True)
      )
  )
  return Cache(keys, values, position)
