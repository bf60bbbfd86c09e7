"""Supervised updates: completions alone, packed as unpacked; the warm-up."""

import contextlib
import dataclasses
import io
import types as python_types

import jax
import numpy as np
import pytest

from rlpost import sharding, types
from rlpost.data import packing
from rlpost.data import tokenizer as tokenizers
from rlpost.models import config as model_configs
from rlpost.models import transformer
from rlpost.training import display as displays
from rlpost.training import imitation, setup
from rlpost.training import programs as program_lib
from rlpost.training import state as states
from rlpost.training import step as steps
from tests import compilation, reference
from tests.training import batches

CONFIG = steps.StepConfig(batches.MODEL, imitation.RECIPE, chunk=5)
LENGTH, SLOTS = 16, 9
# Per document: tokens, and which of them train.
SIZES = ((5, (3, 4)), (9, (2, 3, 5, 8)), (3, (2,)), (7, (1, 2, 3, 4, 5, 6)))


@pytest.fixture(scope='module')
def params():
  return reference.random_params(batches.MODEL)


@pytest.fixture(scope='module')
def documents():
  rng = np.random.default_rng(0)
  out = []
  for size, trained in SIZES:
    tokens = rng.integers(0, batches.MODEL.vocab_size, size).astype(np.int32)
    out.append(packing.Document(tokens, np.isin(np.arange(size), trained)))
  return out


@pytest.fixture(scope='module')
def learn(params):
  """(loss, gradient) of two rows, with one executable."""
  blank = packing.micro_batches(packing.blank(2, LENGTH, SLOTS), 1)
  program = compilation.compiled(
      lambda p, b: steps.gradient(CONFIG, p, {}, b)[:2], params, blank
  )

  def run(rows):
    rows = packing.micro_batches(packing.pad_rows(rows, 2), 1)
    grads, terms = program(params, rows)
    return float(sum(terms.values())), jax.device_get(grads)

  return run


def pack(documents):
  return packing.pack_documents(documents, length=LENGTH, slots=SLOTS)


def nats(params, document):
  """-log p of each trained token, by the oracle."""
  logp = batches.oracle_logp(batches.MODEL, params, document.tokens)
  return -logp[document.trained[1:]]


def test_the_loss_is_that_of_the_completions_alone(learn, params, documents):
  wanted = np.concatenate([nats(params, d) for d in documents]).mean()
  assert learn(pack(documents))[0] == pytest.approx(wanted, rel=1e-5)


def test_packed_is_unpacked_per_example(learn, params, documents):
  packed = pack(documents)
  assert len(packed.tokens) == 2  # else nothing was packed
  total = {k: 0 for k in params}
  for document in documents:
    alone = learn(pack([document]))
    # The same document inside the packed rows, its neighbours untrained.
    own = np.zeros(packed.mask.shape, bool)
    for b, s in np.argwhere(packed.mask > 0):
      place = packed.segment[b] == packed.sequence[b, s]
      own[b, s] = np.array_equal(packed.tokens[b, place], document.tokens)
    kept = types.Batch(*(
        np.where(own, leaf, 0).astype(leaf.dtype)
        if name in ('mask', 'advantage') else leaf
        for name, leaf in zip(packed._fields, packed, strict=True)
    ))
    inside = learn(kept)
    assert inside[0] == pytest.approx(alone[0], rel=1e-6)
    assert inside[0] == pytest.approx(nats(params, document).mean(), rel=1e-5)
    for name in params:
      np.testing.assert_allclose(
          inside[1][name], alone[1][name], rtol=1e-5, atol=1e-6
      )
      count = document.trained.sum()
      total[name] = total[name] + alone[1][name] * count
  loss, grads = learn(packed)
  tokens = sum(d.trained.sum() for d in documents)
  for name in params:
    np.testing.assert_allclose(
        grads[name], total[name] / tokens, rtol=1e-5, atol=1e-6
    )


def test_what_follows_a_document_changes_nothing(learn, documents):
  loss, grads = learn(pack(documents[:1]))
  longer = documents[0]._replace(
      tokens=np.append(documents[0].tokens, np.int32(7)),
      trained=np.append(documents[0].trained, False),
  )
  after = learn(pack([longer]))
  assert after[0] == pytest.approx(loss, rel=1e-6)
  shifted = documents[0]._replace(trained=np.roll(documents[0].trained, -1))
  assert abs(learn(pack([shifted]))[0] - loss) > 1e-3


# The warm-up.


@pytest.fixture(scope='module')
def run():
  """What a warm-up reads of a run, with a model of 20 thousand parameters."""
  model = model_configs.named(
      'tiny', width=32, num_layers=1, num_heads=2, num_kv_heads=1,
      head_dim=16, hidden=64,
  )
  settings = imitation.Warmup(
      steps=12, rows=2, length=64, slots=32, examples=64, learning_rate=1e-2
  )
  mesh = sharding.make_mesh()
  shapes = program_lib.Shapes(
      step=steps.StepConfig(model, imitation.RECIPE, chunk=64),
      stacked=False, trainable='(?!norm).*', optimizer=states.adamw(
          1.0, total_steps=1
      ), rows=2, micro=1, slots=32, length=64,
  )
  tokenizer = tokenizers.bytes_tokenizer()
  return python_types.SimpleNamespace(
      warmup=settings, mesh=mesh, shapes=shapes,
      config=python_types.SimpleNamespace(seed=3),
      tasks=setup.make_tasks(
          names=('tiny_first', 'tiny_sort'), heldout=8, validation=4
      ),
      model=python_types.SimpleNamespace(tokenizer=tokenizer, config=model),
  )


def warm_up(run, **changes):
  run = python_types.SimpleNamespace(**vars(run) | changes)
  fresh = transformer.init(run.model.config, jax.random.key(0))
  params = setup.on_mesh(run, fresh)
  file = io.StringIO()
  with (
      sharding.use(run.mesh),
      contextlib.closing(displays.Display(0, file, live=False)) as display,
  ):
    params, shown = imitation.warm_up(run, params, display)
  return jax.device_get(params), shown, file.getvalue()


def test_the_warm_up_learns_and_depends_on_the_seed_alone(run):
  params, shown, said = warm_up(run)
  losses = [float(x.split()[-1]) for x in said.splitlines() if 'loss' in x]
  assert len(losses) == 4 and losses[-1] < 0.7 * losses[0]
  assert len(shown) == 128
  fresh = jax.device_get(
      transformer.init(run.model.config, jax.random.key(0))
  )
  moved = {k for k in fresh if not np.array_equal(fresh[k], params[k])}
  assert moved == {k for k in fresh if not k.startswith('norm')}
  again, _, _ = warm_up(run)
  for name in params:
    np.testing.assert_array_equal(params[name], again[name])
  other, seen, _ = warm_up(run, config=python_types.SimpleNamespace(seed=4))
  assert set(seen) != set(shown)
  assert not np.array_equal(params['embed/table'], other['embed/table'])


def test_the_rate_of_the_warm_up_falls(run):
  one = dataclasses.replace(run.warmup, steps=1)
  fresh = transformer.init(run.model.config, jax.random.key(0))
  params, _, _ = warm_up(run, warmup=one)
  step = np.abs(params['embed/table'] - np.asarray(fresh['embed/table']))
  # AdamW's first step has the size of the rate wherever there is a gradient.
  assert step.max() == pytest.approx(one.learning_rate, rel=1e-3)
