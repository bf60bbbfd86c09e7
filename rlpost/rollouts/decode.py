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
from rlpost.ops.attention import Where, attention, decode_attention


class Cache(NamedTuple):
  """Keys and values: per layer [A, J, T, P]; int32 [A] tokens that count."""

  keys: tuple
  values: tuple
  length: Any


class Slots(NamedTuple):
  """Device state of Q prompt slots with R rows each, B = Q R.

  Attributes:
    prefix, prompt: caches of what prompts share, and of the prompts' own
      tokens, indexed by prompt slot.
    hidden: [Q, D], the final hidden state at each prompt's last token.
    keys, values: per layer [B, J, W, P], the rows' own rings.
    column: int32, the column that is written next.
    token, count: int32 [B], the last token and how many are sampled.
    live: bool [B].
    tokens, logp: [B, W], what was sampled.
  """

  prefix: Cache
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
  J, P, N = config.num_kv_heads, config.head_dim, config.num_layers
  B = prompts * rows

  def zeros(lead, length):
    return tuple(jnp.zeros((lead, J, length, P), dtype) for _ in range(N))

  def cache(length):
    return Cache(
        zeros(prompts, length), zeros(prompts, length),
        jnp.zeros(prompts, jnp.int32),
    )

  return Slots(
      prefix=cache(prefix_len), prompt=cache(prompt_len),
      hidden=jnp.zeros((prompts, config.width), dtype),
      keys=zeros(B, width), values=zeros(B, width),
      column=jnp.int32(0), token=jnp.zeros(B, jnp.int32),
      count=jnp.zeros(B, jnp.int32), live=jnp.zeros(B, bool),
      tokens=jnp.zeros((B, width), jnp.int32),
      logp=jnp.zeros((B, width), jnp.float32),
  )


def prefill(config, params, tokens_AT, length_A, prefix=None, dtype=None):
  """Runs prompts once; returns their `Cache` and last hidden states [A, D].

  Args:
    tokens_AT: right-padded tokens.
    length_A: real tokens of each.
    prefix: a `Cache` of tokens that stand before these, or None.
  """
  A, T = tokens_AT.shape
  index = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (A, T))
  before = 0 if prefix is None else prefix.keys[0].shape[2]
  start = jnp.zeros(A, jnp.int32) if prefix is None else prefix.length
  query = Where(
      index + before, index + start[:, None],
      jnp.where(index < length_A[:, None], 0, -1), jnp.full((A, T), -2),
  )
  key = query
  if prefix is not None:
    at = jnp.broadcast_to(jnp.arange(before)[None], (A, before))
    ahead = Where(
        at, at, jnp.where(at < start[:, None], 0, -1),
        jnp.full((A, before), -2),
    )
    key = Where(*(jnp.concatenate(x, 1) for x in zip(ahead, query,
                                                     strict=True)))
  cos, sin = transformer.rope(config, query.position)

  @jax.jit
  def one(w, x, cos, sin, ahead):
    def attend(q, k, v):
      cache = k.swapaxes(1, 2), v.swapaxes(1, 2)
      if ahead is not None:
        k = jnp.concatenate([ahead[0].swapaxes(1, 2), k], 1)
        v = jnp.concatenate([ahead[1].swapaxes(1, 2), v], 1)
      return attention(q, k, v, query, key), cache

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
  return Cache(tuple(keys), tuple(values), length_A), hidden


def admit(config, params, slots, shared, which_A, tokens_AT, length_A, slot_A):
  """Prefills prompts and puts them into slots.

  Args:
    shared: `Cache` of the prefixes that prompts share, [Z, J, T0, P].
    which_A: which of them stands before each prompt.
    slot_A: the slot of each prompt; one past the last for padding.
  """
  prefix = jax.tree.map(lambda x: x[which_A], shared)
  if not shared.keys[0].shape[2]:
    prefix = None
  prompt, hidden = prefill(
      config, params, tokens_AT, length_A, prefix, slots.hidden.dtype
  )

  def put(into, x):
    return into.at[slot_A].set(x, mode='drop')

  slots = slots._replace(
      prompt=jax.tree.map(put, slots.prompt, prompt),
      hidden=put(slots.hidden, hidden),
  )
  if prefix is None:
    return slots
  return slots._replace(prefix=jax.tree.map(put, slots.prefix, prefix))


def _sampler(root, start):
  """Draws each row's next token; returns (token, log-probability)."""

  def uniform(group, sample, count):
    key = jax.random.fold_in(jax.random.fold_in(root, group), sample)
    return jax.random.uniform(jax.random.fold_in(key, count))

  def draw(logits_VB, count):
    u = jax.vmap(uniform)(start.group, start.sample, count)
    return sampling.sample(logits_VB, u, start.temperature)

  return draw


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
  R = slots.token.shape[0] // slots.hidden.shape[0]
  draw = _sampler(root, start)

  def record(slots, hidden, active):
    logits = _logits(params, hidden)
    if logits.shape[1] < active.shape[0]:
      logits = jnp.repeat(logits, R, axis=1)
    return _record(slots, draw(logits, slots.count), active, start, stop_V)

  slots = slots._replace(
      count=jnp.where(start.fresh, 0, slots.count),
      live=slots.live & ~start.fresh,
  )
  # A prompt's first token comes from its prefill.
  slots = record(slots, slots.hidden, start.fresh)
  prompts = _prompts(slots)

  def step(slots):
    slots, hidden = _advance(config, params, slots, prompts)
    return record(slots, hidden, slots.live)

  def busy(slots):
    by_prompt = slots.live.reshape(-1, R).any(1)
    return (slots.live.sum() > pause[0]) & (by_prompt.sum() > pause[1])

  return jax.lax.while_loop(busy, step, slots)


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


def _prompts(slots) -> list:
  """Per layer (keys, values) [Q, J, T0 + T, P]: prefix, then prompt."""

  def joined(a, b):
    return jnp.concatenate([a, b], 2) if a.shape[2] else b

  return [
      (joined(a, b), joined(c, d))
      for a, b, c, d in zip(slots.prefix.keys, slots.prompt.keys,
                            slots.prefix.values, slots.prompt.values,
                            strict=True)
  ]


def _advance(config, params, slots, prompts):
  """Feeds each row's last token; returns (slots, final hidden [B, D])."""
  B, W = slots.tokens.shape
  R = B // slots.hidden.shape[0]
  seen_QT = jnp.concatenate(
      [_filled(slots.prefix), _filled(slots.prompt)], 1
  )
  age = (slots.column - jnp.arange(W)) % W
  seen_BW = age[None] < slots.count[:, None]
  before = jnp.repeat(slots.prefix.length + slots.prompt.length, R)
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


def _filled(cache):
  """Boolean [Q, T]: cached keys that count."""
  T = cache.keys[0].shape[2]
  return jnp.arange(T)[None] < cache.length[:, None]
