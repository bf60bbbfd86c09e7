"""Rows over the context axis: the same log-probs, values, loss and gradients.

Two kinds of row, one with prompts that completions share and one of packed
documents; in both some tokens that were not sampled stand between those that
were, as a tool's answer does.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from rlpost import sharding, types
from rlpost.algorithms import recipes
from rlpost.data import packing, zigzag
from rlpost.models import transformer
from rlpost.training import programs as program_lib
from rlpost.training import step as steps
from tests import reference
from tests.training import batches

MODEL = dataclasses.replace(batches.MODEL, value_head=True, tied=False)
RECIPE = recipes.recipe('grpo')


def shared():
  """Four groups; the second token of a long answer was not sampled."""
  rows = batches.packed(batches.groups(batches_params()))
  holes = (rows.target % 5 == 0) & (rows.sequence < 2)
  mask = np.where(holes, 0, rows.mask).astype(np.float32)
  assert 0 < mask.sum() < rows.mask.sum()
  return rows._replace(mask=mask)


def documents():
  """Rows of documents of every length, ends anywhere, with holes."""
  rng = np.random.default_rng(0)
  made = []
  for n in (7, 3, 9, 2, 5, 11, 4, 6, 8):
    trained = rng.random(n) < 0.6
    trained[0], trained[-1] = False, True
    tokens = rng.integers(0, MODEL.vocab_size, n).astype(np.int32)
    made.append(packing.Document(tokens, trained))
  rows = packing.pack_documents(made, length=17)
  rng = np.random.default_rng(1)
  noise = rng.normal(size=(3, *rows.mask.shape)).astype(np.float32)
  return packing.pad_rows(
      rows._replace(
          advantage=noise[0] * rows.mask, behavior_logp=noise[1] * rows.mask,
          ref_logp=noise[2] * rows.mask,
      ), 4,
  )


@functools.cache
def batches_params():
  return reference.random_params(MODEL)


def found(rows, ways=1, stacked=False, chunk=4, **mesh):
  """(log-probs, entropies, values, gradient, loss) of four rows."""
  backend = 'ring' if mesh.get('context', 1) > 1 else 'dense'
  config = steps.StepConfig(
      MODEL, RECIPE, backend=backend, chunk=chunk,
      remat='full' if stacked else 'none',
  )
  made = sharding.make_mesh(**mesh)
  shapes = program_lib.Shapes(
      step=config, stacked=stacked, trainable='.*', optimizer=None,
      rows=len(rows.mask), micro=1, slots=rows.mask.shape[1],
      length=zigzag.padded(rows.tokens.shape[1], made.shape['context']),
  )
  batch = program_lib.batch_of(shapes, made, rows)
  assert batch.tokens.shape[2] == shapes.length
  params = batches_params()
  params = transformer.stack(params) if stacked else params

  def both(params, batch):
    one = types.Batch(*(x[0] for x in batch))
    out = steps.outputs(config, params, one)
    # A value head learns from its own loss; here its gradient, whatever it is.
    pull = jax.grad(lambda p: steps.outputs(config, p, one).value_BK.sum())
    grads, terms, *_ = steps.gradient(config, params, {}, batch)
    return out[:3], grads, terms, pull(params)['value/kernel']

  with sharding.use(made):
    out, grads, terms, value = jax.device_get(jax.jit(both)(params, batch))
  grads = transformer.unstack(grads) if stacked else grads
  return out, {k: np.asarray(v) for k, v in grads.items()}, terms, value


@functools.cache
def alone(kind):
  return found({'shared': shared, 'documents': documents}[kind](), chunk=512)


def same(kind, **choices):
  rows = {'shared': shared, 'documents': documents}[kind]()
  for ours, theirs in zip(found(rows, **choices), alone(kind), strict=True):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        ours, theirs,
    )


@pytest.mark.parametrize('kind', ['shared', 'documents'])
def test_four_devices_give_what_one_gives(kind):
  same(kind, context=4)


def test_beside_every_other_axis_and_scanned():
  same('documents', context=2, tensor=2, fsdp=2, stacked=True)


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['shared', 'documents'])
@pytest.mark.parametrize('mesh', [
    {'context': 2}, {'context': 8}, {'context': 2, 'data': 4},
    {'context': 4, 'tensor': 2}, {'fsdp': 4, 'context': 2}, {'tensor': 4},
    {'fsdp': 2, 'tensor': 2},
])
@pytest.mark.parametrize('stacked', [False, True])
def test_any_mesh_gives_what_one_device_gives(kind, mesh, stacked):
  same(kind, stacked=stacked, **mesh)


def test_a_device_without_a_loss_slot_or_a_token_harms_nothing():
  rows = documents()
  late = np.arange(rows.mask.shape[1])[None] >= 3
  short = rows._replace(mask=np.where(late, 0, rows.mask).astype(np.float32))
  empty = packing.blank(3, *rows.tokens.shape[1:], rows.mask.shape[1])
  first = types.Batch(*(
      np.concatenate([a[:1], b]) for a, b in zip(short, empty, strict=True)
  ))
  one, four = found(first), found(first, context=8)
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(four), strict=True):
    assert np.isfinite(b).all()
    np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('length, ways', [(40, 2), (41, 4), (3, 8), (48, 1)])
def test_spread_rows_hold_what_they_held(length, ways):
  rng = np.random.default_rng(length)
  rows = packing.blank(2, length, 5)
  tokens = rng.integers(1, 99, (2, length)).astype(np.int32)
  rows = rows._replace(
      tokens=tokens, segment=np.zeros_like(tokens),
      predictor=rng.integers(0, length, (2, 5)).astype(np.int32),
      mask=np.array([[1, 1, 1, 1, 0], [1, 0, 1, 0, 1]], np.float32),
  )
  moved = zigzag.spread(rows, ways)
  total = moved.tokens.shape[1]
  assert total == zigzag.padded(length, ways)
  assert total - length < 2 * ways and (ways == 1 or total % (2 * ways) == 0)
  back = np.argsort(moved.order, axis=1)
  for name in types.PER_TOKEN:
    found = np.take_along_axis(getattr(moved, name), back, 1)
    np.testing.assert_array_equal(found[:, :length], getattr(rows, name))
  assert (np.take_along_axis(moved.segment, back, 1)[:, length:] < 0).all()
  for b, k in zip(*np.nonzero(rows.mask), strict=True):
    assert moved.tokens[b, moved.predictor[b, k]] == tokens[
        b, rows.predictor[b, k]
    ]
  slots = [n for n in types.Batch._fields if n not in types.PER_TOKEN]
  for name in slots:
    if name != 'predictor':
      assert getattr(moved, name) is getattr(rows, name)


@pytest.mark.parametrize('ways', [1, 2, 4])
def test_zigzag_shares_the_work_of_a_causal_mask(ways):
  order = zigzag.places(48, ways)
  np.testing.assert_array_equal(np.sort(order), np.arange(48))
  # A causal query sees as many keys as its order; each device has as many.
  work = (order + 1).reshape(ways, -1).sum(1)
  assert len(set(work.tolist())) == 1
