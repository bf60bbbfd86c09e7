"""Prefill and decoding as pure functions over a fixed set of slots.

A prompt slot holds one prompt's keys and values once; its R rows sample
completions of it and read that cache in one product. A row keeps its own keys
in a ring of W columns: all live rows write the same column at every step, so
a row may begin at any column and refilling needs no copy. The maths of a
layer is `models.layers.Block`, the same code that training runs.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlpost import sharding
from rlpost.models import transformer
from rlpost.ops import logprobs, sampling
from rlpost.ops.attention import (
  Where,
  attention,
  decode_attention,
  score_masks,
)


class Cache(NamedTuple):
  """Of A token sequences: keys, values [layers, A, J, T, P], mask [A, T]."""

  keys: Any
  values: Any
  filled: Any


class Slots(NamedTuple):
  """Device state of Q prompt slots with R rows each, B = Q R.

  Attributes:
    prompt: the cache of each slot's prompt, what it shares first.
    hidden: [Q, D], the final hidden state at each prompt's last token.
    keys, values: per layer [B, J, W, P], the rows' own rings.
    column: int32, the column that is written next.
    token, count: int32 [B], the last token and how many are sampled.
    live: bool [B].
    tokens, logp: [B, W], what was sampled.
  """

  prompt: Cache
  hidden: Any
  keys: tuple
  values: tuple
  column: Any
  token: Any
  count: Any
  live: Any
  tokens: Any
  logp: Any


class Start(NamedTuple):
  """What rows begin with; each [B]. Only rows in `fresh` are (re)started.

  `group` and `sample` name the random stream: a row's tokens depend on
  (root key, group, sample, token index), never on the slot it runs in.
  """

  fresh: Any
  temperature: Any
  budget: Any
  group: Any
  sample: Any


def empty(config, *, prompts, rows, prefix_len, prompt_len, width, dtype):
  """Slots with nothing in them."""
  B = prompts * rows

  def zeros():
    shape = B, config.num_kv_heads, width, config.head_dim
    return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))

  return Slots(
      prompt=empty_cache(config, prompts, prefix_len + prompt_len, dtype),
      hidden=jnp.zeros((prompts, config.width), dtype),
      keys=zeros(), values=zeros(),
      column=jnp.int32(0), token=jnp.zeros(B, jnp.int32),
      count=jnp.zeros(B, jnp.int32), live=jnp.zeros(B, bool),
      tokens=jnp.zeros((B, width), jnp.int32),
      logp=jnp.zeros((B, width), jnp.float32),
  )


def empty_cache(config, count, length, dtype) -> Cache:
  """Room for `count` sequences of `length` tokens."""
  shape = config.num_layers, count, config.num_kv_heads, length, config.head_dim
  return Cache(
      jnp.zeros(shape, dtype), jnp.zeros(shape, dtype),
      jnp.zeros((count, length), bool),
  )


def prefill(config, params, tokens_AT, length_A, prefix=None, dtype=None):
  """Runs prompts once; returns their `Cache` and last hidden states [A, D].

  Args:
    tokens_AT: right-padded tokens.
    length_A: real tokens of each.
    prefix: a `Cache` of A sequences of tokens that stand before these, or None.
  """
  A, T = tokens_AT.shape
  index = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (A, T))
  filled = index < length_A[:, None]

  def where(order, position, filled):
    return Where(
        order, position, jnp.where(filled, 0, -1), jnp.full_like(order, -2)
    )

  if prefix is None:
    query = key = where(index, index, filled)
  else:
    before = prefix.filled.shape[1]
    at = jnp.broadcast_to(jnp.arange(before)[None], (A, before))
    start = prefix.filled.sum(1, keepdims=True)
    query = where(index + before, index + start, filled)
    key = jax.tree.map(
        lambda a, b: jnp.concatenate([a, b], 1),
        where(at, at, prefix.filled), query,
    )
  cos, sin = transformer.rope(config, query.position)
  masks = score_masks(query, key)

  @jax.jit
  def one(w, x, cos, sin, ahead):
    def attend(q, k, v):
      cache = k.swapaxes(1, 2), v.swapaxes(1, 2)
      if ahead is not None:
        k = jnp.concatenate([ahead[0].swapaxes(1, 2), k], 1)
        v = jnp.concatenate([ahead[1].swapaxes(1, 2), v], 1)
      return attention(q, k, v, query, key, masks=masks), cache

    return transformer.block(config, w)(x, (cos, sin), attend)

  x = transformer.embed(params, tokens_AT, dtype or jnp.float32)
  keys, values = [], []
  for i in range(config.num_layers):
    ahead = None if prefix is None else (prefix.keys[i], prefix.values[i])
    x, (k, v) = one(transformer.layer(params, i), x, cos, sin, ahead)
    keys.append(k)
    values.append(v)
  last = x[jnp.arange(A), jnp.maximum(length_A - 1, 0)]
  hidden = transformer.norm(config, params, last)
  return Cache(jnp.stack(keys), jnp.stack(values), filled), hidden


def admit(
    config, params, slots, shared, which_A, tokens_AT, length_A, source_Q
):
  """Prefills prompts and puts them into slots.

  Args:
    shared: `Cache` of the Z prefixes that prompts share.
    which_A: which of them stands before each prompt.
    source_Q: which prompt goes into each slot; -1 leaves the slot alone.
  """
  prefix = None
  if shared.filled.shape[1]:
    prefix = Cache(
        shared.keys[:, which_A], shared.values[:, which_A],
        shared.filled[which_A],
    )
  prompt, hidden = prefill(
      config, params, tokens_AT, length_A, prefix, slots.hidden.dtype
  )
  if prefix is not None:
    prompt = Cache(
        jnp.concatenate([prefix.keys, prompt.keys], 3),
        jnp.concatenate([prefix.values, prompt.values], 3),
        jnp.concatenate([prefix.filled, prompt.filled], 1),
    )
  source = jnp.maximum(source_Q, 0)

  def put(into, x, axis):
    taken = jnp.take(x, source, axis)
    new = jnp.expand_dims(
        source_Q >= 0, [a for a in range(x.ndim) if a != axis]
    )
    return jnp.where(new, taken, into)

  return slots._replace(
      prompt=Cache(
          put(slots.prompt.keys, prompt.keys, 1),
          put(slots.prompt.values, prompt.values, 1),
          put(slots.prompt.filled, prompt.filled, 0),
      ),
      hidden=put(slots.hidden, hidden, 0),
  )


def _uniforms(root, start, width):
  """[B, W] in [0, 1): what decides each row's tokens."""

  def draw(group, sample, index):
    key = jax.random.fold_in(jax.random.fold_in(root, group), sample)
    return jax.random.uniform(jax.random.fold_in(key, index))

  over = jax.vmap(draw, (None, None, 0))
  return jax.vmap(over, (0, 0, None))(
      start.group, start.sample, jnp.arange(width)
  )


def _logits(params, hidden_BD):
  """fp32 [V, B], vocabulary first, as the sampler reads it."""
  out = logprobs.logits_transposed(hidden_BD, transformer.head(params))
  return sharding.constrain(out, ('vocab', 'batch'))


def run(config, params, slots, start, stop_V, root, pause):
  """Starts the fresh rows, then decodes until there is room for more.

  Args:
    start: `Start`; its temperature and so on hold for running rows too.
    stop_V: bool, tokens that end an answer; the token is kept.
    root: PRNG key of this step.
    pause: int32 [2]; returns when no more rows than the first, or no more
      prompt slots than the second, are live.

  Returns:
    Slots.
  """
  B, W = slots.tokens.shape
  R = B // slots.hidden.shape[0]
  uniform_BW = _uniforms(root, start, W)
  slots = slots._replace(
      count=jnp.where(start.fresh, 0, slots.count),
      live=slots.live & ~start.fresh,
  )
  # Sliced here, not in the loop, which would copy them at every step.
  prompts = list(zip(slots.prompt.keys, slots.prompt.values, strict=True))

  def begin(slots):  # a prompt's first token comes from its prefill
    return slots, jnp.repeat(slots.hidden, R, axis=0)

  def advance(slots):
    return _advance(config, params, slots, prompts)

  def step(carry):
    began, slots = carry
    slots, hidden = jax.lax.cond(began, advance, begin, slots)
    active = jnp.where(began, slots.live, start.fresh)
    at = jnp.minimum(slots.count, W - 1)
    drawn = sampling.sample(
        _logits(params, hidden), uniform_BW[jnp.arange(B), at],
        start.temperature,
    )
    return jnp.bool_(True), _record(slots, drawn, active, start, stop_V)

  def busy(carry):
    began, slots = carry
    by_prompt = slots.live.reshape(-1, R).any(1)
    wanted = (slots.live.sum() > pause[0]) & (by_prompt.sum() > pause[1])
    return wanted | ~began

  return jax.lax.while_loop(busy, step, (jnp.bool_(False), slots))[1]


def _record(slots, drawn, active, start, stop_V) -> Slots:
  """Notes a new token of the active rows, and ends those that are done."""
  token, logp = drawn
  B, W = slots.tokens.shape
  rows = jnp.arange(B)
  at = jnp.where(active, slots.count, W)  # out of range: dropped
  count = slots.count + active
  over = stop_V[token] | (count >= start.budget)
  return slots._replace(
      token=jnp.where(active, token, slots.token), count=count,
      live=jnp.where(active, ~over, slots.live),
      tokens=slots.tokens.at[rows, at].set(token, mode='drop'),
      logp=slots.logp.at[rows, at].set(logp, mode='drop'),
  )


def _advance(config, params, slots, prompts):
  """Feeds each row's last token; returns (slots, final hidden [B, D])."""
  B, W = slots.tokens.shape
  R = B // slots.hidden.shape[0]
  seen_QT = slots.prompt.filled
  age = (slots.column - jnp.arange(W)) % W
  seen_BW = age[None] < slots.count[:, None]
  before = jnp.repeat(seen_QT.sum(1), R)
  position = (before + slots.count - 1)[:, None]
  cos, sin = transformer.rope(config, position)

  @jax.jit
  def one(w, x, cos, sin, prompt, own, column, seen_QT, seen_BW):

    def attend(q, k, v):
      new = tuple(
          jax.lax.dynamic_update_slice(
              old, x.swapaxes(1, 2).astype(old.dtype), (0, 0, column, 0)
          )
          for old, x in zip(own, (k, v), strict=True)
      )
      o = decode_attention(q[:, 0], prompt, new, seen_QT, seen_BW)
      return o[:, None], new

    return transformer.block(config, w)(x, (cos, sin), attend)

  x = transformer.embed(params, slots.token[:, None], slots.hidden.dtype)
  keys, values = [], []
  for i in range(config.num_layers):
    x, (k, v) = one(
        transformer.layer(params, i), x, cos, sin, prompts[i],
        (slots.keys[i], slots.values[i]), slots.column, seen_QT, seen_BW,
    )
    keys.append(k)
    values.append(v)
  slots = slots._replace(
      keys=tuple(keys), values=tuple(values), column=(slots.column + 1) % W
  )
  return slots, transformer.norm(config, params, x[:, 0])

