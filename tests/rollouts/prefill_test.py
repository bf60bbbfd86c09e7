"""Prompts in pieces and whole, and what devices send each other meanwhile."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rlpost import sharding
from rlpost.models import transformer
from rlpost.models.config import ModelConfig
from rlpost.ops.attention import Rule, attention, causal
from rlpost.rollouts import prefill
from rlpost.rollouts.cache import Layout
from rlpost.training import programs as program_lib
from tests import compilation, reference
from tests.rollouts import collectives, decoders

MODEL = dataclasses.replace(decoders.MODEL, num_layers=4, windows=(5, None))
PREFIX, T = 9, 70
LENGTH = np.array([T, 1, 33])
START = np.array([PREFIX, 0, 4])


def tokens():
  rng = np.random.default_rng(5)
  return rng.integers(0, 40, (3, PREFIX + T)).astype(np.int32)


@functools.cache
def params():
  return reference.random_params(MODEL, scale=0.3)


def rows():
  """[3, PREFIX], [3, T]: the real tokens, padding at the end of each part."""
  head, tail = np.zeros((3, PREFIX), np.int32), np.zeros((3, T), np.int32)
  for a, (row, n, m) in enumerate(zip(tokens(), START, LENGTH, strict=True)):
    head[a, :n], tail[a, :m] = row[:n], row[n : n + m]
  return head, tail


@functools.cache
def run(chunk, stacked=False, backend='dense', ways=1):
  """(cache, hidden) behind a prefix, which is in pieces too."""
  layout = Layout(MODEL, jnp.dtype('float32'), stacked, ways)
  weights = transformer.stack(params()) if stacked else params()
  (n, c), (m, d) = (layout.pieces(x, chunk) for x in (PREFIX, T))
  columns = layout.columns(n * c + m * d, PREFIX + T)
  more = {'chunk': chunk, 'backend': backend}

  def program(weights, head, tail):
    zero, which = jnp.zeros(3, jnp.int32), jnp.arange(3)
    shared = layout.empty(3, (columns[0], n * c))
    shared, _ = prefill.prefill(
        layout, weights, head, START, shared, zero, 0, **more
    )
    cache = prefill.behind(layout, shared, which, layout.empty(3, columns))
    return prefill.prefill(
        layout, weights, tail, LENGTH, cache, START, n * c, **more
    )

  with sharding.use(sharding.make_mesh(context=ways)):
    compiled = compilation.compiled(program, weights, *rows())
    return jax.device_get(compiled(weights, *rows()))


def by_position(cache, stacked):
  """{(layer, sequence, position): (keys, values)}."""
  found = {}
  period = len(MODEL.windows)
  for i in range(MODEL.num_layers):
    at = (i % period, i // period) if stacked else (i, slice(None))
    k, v = (x[at[0]][at[1]] for x in (cache.keys, cache.values))
    for a, position in enumerate(cache.position[i % period]):
      for column, p in enumerate(position):
        if p >= 0:
          assert (i, a, p) not in found
          found[i, a, p] = np.stack([k[a, :, column], v[a, :, column]])
  return found


@pytest.mark.parametrize('chunk, more', [
    (1, {'stacked': True}), (7, {}), (64, {}), (T, {}),
    (7, {'stacked': True, 'backend': 'blockwise'}),
    (16, {'backend': 'ring', 'ways': 4, 'stacked': True}),
    (0, {'backend': 'all_gather', 'ways': 4}),
])
def test_pieces_of_any_size_give_the_cache_of_the_whole(chunk, more):
  wanted, hidden = run(0)
  cache, found = run(chunk, **more)
  np.testing.assert_allclose(found, hidden, atol=1e-4)
  wanted = by_position(wanted, False)
  found = by_position(cache, more.get('stacked', False))
  assert found.keys() >= wanted.keys()
  for key, x in wanted.items():
    np.testing.assert_allclose(found[key], x, atol=1e-4)


def test_a_whole_prompt_is_the_teacher_forced_model():
  """And a window keeps the last tokens alone, the others all of them."""
  cache, hidden = run(0)
  at = np.arange(PREFIX + T)[None]
  for a in range(3):
    total = START[a] + LENGTH[a]
    where = causal(np.zeros((1, total), np.int32))

    def attend(q, k, v, window, where=where):
      return attention(q, k, v, where, rule=Rule(window=window))

    expected = transformer.hidden(
        MODEL, params(), tokens()[a : a + 1, :total], at[:, :total], attend
    )
    np.testing.assert_allclose(hidden[a], expected[0, -1], atol=1e-4)
    last = {p for i, b, p in by_position(cache, False) if (i, b) == (0, a)}
    every = {p for i, b, p in by_position(cache, False) if (i, b) == (1, a)}
    assert last == set(range(max(total - 5, 0), total))
    assert every == set(range(total))


WIDE = ModelConfig(
    vocab_size=96, width=64, num_layers=4, num_heads=32, num_kv_heads=8,
    head_dim=8, hidden=256, windows=(None, 16),
)


def compiled(name, stacked, **more):
  """A program of decoding, with matrices split over both axes of a mesh."""
  settings = decoders.setting(
      2, 2, mesh={'context': 4, 'tensor': 2}, stacked=stacked, model=WIDE,
      prompt_len=448, prefix_len=64, width=512, **more,
  )
  mesh = settings.make_mesh()
  program = program_lib.programs(settings.shapes(), mesh)[f'rollout/{name}']
  axes = transformer.spec(WIDE, stacked).axes
  placed = {
      k: jax.ShapeDtypeStruct(
          x.shape, x.dtype, sharding=NamedSharding(
              mesh, PartitionSpec(*(sharding.DECODING[a] for a in axes[k]))
          ),
      )
      for k, x in program.arguments[0].items()
  }
  program.arguments = (placed, *program.arguments[1:])
  with sharding.use(mesh):
    return program.lower().compile(compilation.FAST)


@pytest.mark.parametrize('stacked', [False, True])
def test_a_decoded_token_moves_neither_weights_nor_caches(stacked):
  rows = 2 * 2
  sent = collectives.found(compiled('run', stacked))
  # States of all rows. A device has 4 times as many numbers of the smallest
  # matrix, and more of a layer's keys or of what weighs them.
  assert 'all-reduce' in {kind for kind, _ in sent}
  assert max(n for _, n in sent) <= rows * WIDE.num_heads * WIDE.head_dim // 2


@pytest.mark.parametrize('chunk', [0, 224])
def test_prefill_keeps_tokens_spread(chunk):
  """A layer's weights are gathered; of tokens, no more than a piece moves."""
  sent = collectives.found(
      compiled('admit', True, backend='ring', prefill_chunk=chunk)
  )
  states = 2 * (chunk or 448) * WIDE.width
  matrix = 2 * WIDE.hidden * WIDE.width
  assert max(n for kind, n in sent if kind == 'all-gather') <= matrix // 2
  # Half of a device's gates and half of what they gate change places.
  assert max(n for _, n in sent) <= max(states // 4 * 2, matrix // 2)
  assert 'collective-permute' in {kind for kind, _ in sent}
