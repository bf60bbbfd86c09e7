"""Decoding as pure functions over a fixed set of slots.

A prompt slot holds one prompt's keys and values once; its R rows sample
completions of it and read that cache in one product. A row keeps its own keys
in a ring, of W columns or of a layer's window: all live rows write the same
column at every step, so a row may begin at any column and refilling needs no
copy. The maths of a layer is `models.layers.Block`, the same code that
training runs.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlpost.models import transformer
from rlpost.ops import logprobs, sampling
from rlpost.ops.decoding import decode_attention
from rlpost.rollouts import cache as caches
from rlpost.rollouts.cache import Cache, Layout


class Slots(NamedTuple):
  """Device state of Q prompt slots with R rows each, B = Q R.

  Attributes:
    prompt: the cache of each slot's prompt.
    hidden: [Q, D], the final hidden state at each prompt's last token.
    length: int32 [Q], tokens of each prompt.
    keys, values: per layer [B, J, columns, P], the rows' own rings.
    step: int32, tokens that were fed so far: where all rings are written next.
    token, count: int32 [B], the last token and how many are sampled.
    live: bool [B].
    tokens, logp: [B, W], what was sampled.
  """

  prompt: Cache
  hidden: Any
  length: Any
  keys: tuple
  values: tuple
  step: Any
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


def rings(layout: Layout, width: int) -> tuple[int, ...]:
  """Columns of a row's own cache, for each window of a period."""
  return layout.columns(layout.rounded(width), width)


def empty(layout: Layout, *, prompts, rows, columns, width) -> Slots:
  """Slots with nothing in them; `columns` of a prompt's cache."""
  B = prompts * rows
  own = rings(layout, width)
  return Slots(
      prompt=layout.empty(prompts, columns),
      hidden=jnp.zeros((prompts, layout.model.width), layout.dtype),
      length=jnp.zeros(prompts, jnp.int32),
      keys=layout.zeros(B, own), values=layout.zeros(B, own),
      step=jnp.int32(0), token=jnp.zeros(B, jnp.int32),
      count=jnp.zeros(B, jnp.int32), live=jnp.zeros(B, bool),
      tokens=jnp.zeros((B, width), jnp.int32),
      logp=jnp.zeros((B, width), jnp.float32),
  )


def admit(slots: Slots, prompt: Cache, hidden_AD, length_A, source_Q) -> Slots:
  """Puts prompts that `prefill` has run into slots.

  Args:
    prompt, hidden_AD: of A prompts.
    length_A: tokens of each, what they share included.
    source_Q: which prompt goes into each slot; -1 leaves the slot alone.
  """
  source = jnp.maximum(source_Q, 0)

  def put(into, x, axis=0):
    new = jnp.expand_dims(
        source_Q >= 0, [a for a in range(x.ndim) if a != axis]
    )
    if x.shape[axis] > 1:  # of one, which may be long, no copy is made
      x = jnp.take(x, source, axis)
    return jnp.where(new, x, into)

  def put_layers(into, x):
    return tuple(
        put(a, b, b.ndim - 4) for a, b in zip(into, x, strict=True)
    )

  return slots._replace(
      prompt=Cache(
          put_layers(slots.prompt.keys, prompt.keys),
          put_layers(slots.prompt.values, prompt.values),
          tuple(map(put, slots.prompt.position, prompt.position)),
      ),
      hidden=put(slots.hidden, hidden_AD),
      length=put(slots.length, length_A),
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
  return logprobs.logits_transposed(hidden_BD, transformer.head(params))


def run(layout: Layout, params, slots, start, stop_V, root, pause):
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

  def begin(slots):  # a prompt's first token comes from its prefill
    return slots, jnp.repeat(slots.hidden, R, axis=0)

  def advance(slots):
    return _advance(layout, params, slots)

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


def _seen(windows, slots: Slots, position_B, columns):
  """What each row sees, for each window: of its prompt [Q, R or 1, T], and of
  its own ring [B, columns]."""
  Q, B = slots.hidden.shape[0], position_B.shape[0]
  prompt, own = [], []
  for window, at_QT, width in zip(
      windows, slots.prompt.position, columns, strict=True
  ):
    seen = at_QT[:, None] >= 0
    age = (slots.step - jnp.arange(width)) % width
    mine = age[None] < slots.count[:, None]
    if window is not None:
      query = position_B.reshape(Q, B // Q, 1)
      seen &= query - at_QT[:, None] < window
      mine &= age[None] < window
    prompt.append(seen)
    own.append(mine)
  return prompt, own


def _advance(layout: Layout, params, slots: Slots):
  """Feeds each row's last token; returns (slots, final hidden [B, D])."""
  model = layout.model
  B = slots.token.shape[0]
  before = jnp.repeat(slots.length, B // slots.length.shape[0])
  position = before + slots.count - 1
  rope = transformer.rope(model, position[:, None])
  columns = [x.shape[-2] for x in slots.keys[: len(model.windows)]]
  seen = _seen(model.windows, slots, position, columns)

  def one(kind, w, x, prompt, state, at):

    def attend(q, *new):
      after = tuple(
          caches.put(old, x.swapaxes(1, 2), slots.step % columns[kind], at)
          for old, x in zip(state, new, strict=True)
      )
      own = [caches.get(x, at) for x in after]
      o = decode_attention(
          q[:, 0], prompt, own, seen[0][kind], seen[1][kind]
      )
      return o[:, None], after

    return transformer.block(model, w)(x, rope, attend)

  x = transformer.embed(params, slots.token[:, None], layout.dtype)
  x, state = caches.through(
      layout, params, one, x,
      tuple(zip(slots.prompt.keys, slots.prompt.values, strict=True)),
      tuple(zip(slots.keys, slots.values, strict=True)),
  )
  keys, values = zip(*state, strict=True)
  slots = slots._replace(keys=keys, values=values, step=slots.step + 1)
  return slots, transformer.norm(model, params, x[:, 0])
