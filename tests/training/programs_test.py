"""The programs of a run: one compilation each, the same numbers on any mesh."""

import dataclasses
import functools
from unittest import mock

import jax
import numpy as np
import pytest

from rlpost import errors, sharding
from rlpost.algorithms import recipes
from rlpost.data import packing, zigzag
from rlpost.models import transformer
from rlpost.rollouts import engine as engines
from rlpost.training import programs as program_lib
from rlpost.training import state as states
from rlpost.training import step as steps
from tests import compilation, reference
from tests.training import batches

# 1 to 8 devices; every axis is split somewhere, three models are stacked.
MESHES = {
    'one': ({}, False, 'dense'),
    'three': ({'context': 3}, False, 'ring'),
    'four': ({'fsdp': 2, 'tensor': 2}, True, 'dense'),
    'offloaded': ({}, False, 'dense'),
    'eight': ({'data': 2, 'fsdp': 2, 'context': 2}, True, 'ring'),
    'ring of two': ({'context': 2}, False, 'ring'),
    'ring of four': ({'context': 4, 'tensor': 2}, True, 'ring'),
    'ring of eight': ({'context': 8}, False, 'ring'),
    'ulysses': ({'context': 2, 'fsdp': 2}, False, 'ulysses'),
    'all_gather': ({'context': 4}, True, 'all_gather'),
}
SLOW = {'ring of two', 'ring of eight', 'ulysses', 'all_gather'}
SOME = [
    pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else [])
    for n in MESHES
]
ROWS, MICRO = 4, 2
OPTIMIZER = states.adamw(
    0.05, total_steps=4, warmup_steps=2, eps=1e-2, weight_decay=0.1
)


def shapes(
    stacked=False, trainable='.*', name='grpo', backend='dense', ways=1,
    offload=False, **more
):
  recipe = recipes.recipe(name, anchor='old', correction='token_truncation')
  return program_lib.Shapes(
      step=steps.StepConfig(
          batches.MODEL, recipe, chunk=64, backend=backend,
          layout=batches.LAYOUT if backend == 'dense' else None,
          offload=offload,
      ),
      stacked=stacked, trainable=trainable, optimizer=OPTIMIZER, rows=ROWS,
      micro=MICRO, slots=batches.SLOTS, scored=True,
      length=zigzag.padded(batches.LENGTH, ways), **more,
  )


@pytest.fixture(autouse=True)
def fast_compilation():
  with mock.patch.object(program_lib, 'CPU_OPTIONS', compilation.FAST):
    yield


@pytest.fixture(scope='module')
def params():
  return reference.random_params(batches.MODEL)


@pytest.fixture(scope='module')
def rows(params):
  """[8, ...]: all groups, one of them twice, among rows of padding."""
  rows = batches.packed(batches.groups(params))
  return batches.rows(rows, [3, -1, 0, 2, -1, 1, -1, 0])


@pytest.fixture(scope='module')
def batch(rows):
  return packing.micro_batches(rows, MICRO)


def placed(shapes, mesh, params):
  known = program_lib.abstract(shapes, mesh).params
  if shapes.stacked:
    params = transformer.stack(params)
  return {k: jax.device_put(v, known[k].sharding) for k, v in params.items()}


def host(params):
  params = {k: np.asarray(v) for k, v in params.items()}
  return transformer.unstack(params) if 'layers/attn/qkv' in params else params


def two_updates(name, params, rows):
  """Both reports and the parameters after each update on a mesh."""
  sizes, stacked, backend = MESHES[name]
  mesh = sharding.make_mesh(**sizes)
  config = shapes(
      stacked, backend=backend, ways=mesh.shape['context'],
      offload=name == 'offloaded',
  )
  batch = program_lib.batch_of(config, mesh, rows)
  count, out = np.int32(MICRO), {'reports': [], 'params': [], 'scores': []}
  with sharding.use(mesh):
    made = program_lib.programs(config, mesh)
    state = made['init'](placed(config, mesh, params))
    for weight in (1.0, 0.5):
      old = made['score'](state.trainable, batch, count)
      out['scores'].append(jax.device_get(old))
      before = state
      state, report = made['train'](
          state, {}, batch, count, np.float32(weight), old
      )
      if weight == 1:  # later ones have been read, which keeps them
        assert all(x.is_deleted() for x in jax.tree.leaves(before))
        assert not old.is_deleted()
      out['reports'].append(jax.device_get(report))
      out['params'].append(host(state.trainable))
  moments = next(s for s in state.opt if hasattr(s, 'mu'))
  out['moments'] = host(moments.mu), host(moments.nu)
  out['shardings'] = {
      k: {v.sharding, moments.mu[k].sharding, moments.nu[k].sharding}
      for k, v in state.trainable.items()
  }
  out['programs'], out['state'] = made, state
  return out


_results = {}


def result(name, params, rows):
  if name not in _results:
    _results[name] = two_updates(name, params, rows)
  return _results[name]


@pytest.mark.parametrize('name', SOME[1:])
def test_updates_are_the_same_on_any_mesh(params, rows, name):
  found, wanted = (result(n, params, rows) for n in (name, 'one'))
  for ours, theirs in zip(found['scores'], wanted['scores'], strict=True):
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
  for ours, theirs in zip(found['reports'], wanted['reports'], strict=True):
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
      np.testing.assert_allclose(
          ours[key], value, rtol=1e-5, atol=1e-6, err_msg=key
      )
  for ours, theirs, before in zip(
      found['params'], wanted['params'], [params, wanted['params'][0]],
      strict=True,
  ):
    for key, value in theirs.items():
      np.testing.assert_allclose(ours[key], value, atol=2e-6, err_msg=key)
      assert np.abs(value - before[key]).max() > 1e-4, f'{key} stands still'
  for ours, theirs in zip(found['moments'], wanted['moments'], strict=True):
    for key, value in theirs.items():
      np.testing.assert_allclose(
          ours[key], value, atol=1e-5 * np.abs(value).max(), err_msg=key
      )


@pytest.mark.parametrize('name', SOME)
def test_parameters_and_moments_lie_where_the_table_says(params, rows, name):
  sizes, stacked, _ = MESHES[name]
  mesh = sharding.make_mesh(**sizes)
  known = program_lib.abstract(shapes(stacked), mesh)
  host = 'pinned_host' if name == 'offloaded' else 'device'
  for key, found in result(name, params, rows)['shardings'].items():
    place = known.params[key].sharding
    assert found == {place, place.with_memory_kind(host)}, key
  parts = {
      np.prod(x.shape) // np.prod(x.sharding.shard_shape(x.shape))
      for x in known.params.values()
  }
  # Rows of some matrix divide over all devices but those of `data`.
  assert max(parts) == mesh.size // sizes.get('data', 1)


def test_each_program_is_compiled_once_for_any_data(params, rows, batch):
  made = result('one', params, rows)
  programs, state = made['programs'], made['state']
  events = []
  jax.monitoring.register_event_duration_secs_listener(
      lambda event, *_, **__: events.append(event)
      if 'backend_compile' in event else None
  )
  jax.jit(lambda x: x + 3.25)(np.arange(7)).block_until_ready()
  assert events, 'the event has another name'
  events.clear()
  with sharding.use(sharding.make_mesh()):
    for i in range(3):
      count = np.int32(1 + i % 2)
      moved = batch._replace(advantage=batch.advantage * (i + 1))
      old = programs['score'](state.trainable, moved, count)
      state, report = programs['train'](
          state, {}, moved, count, np.float32(0.5 + i), old
      )
      jax.device_get(report)
  made['state'] = state
  assert not events
  assert {p.compilations for p in programs.values()} == {1}


def test_the_state_is_given_away_and_nothing_else():
  mesh = sharding.make_mesh()
  config = shapes(trainable='layers/.*')
  program = program_lib.programs(config, mesh)['train']
  state, frozen, *_ = program.arguments
  assert state.trainable.keys() | frozen.keys() == transformer.spec(
      batches.MODEL
  ).shapes.keys()
  assert sorted(frozen) == ['embed/table', 'norm/scale']
  given = program.lower().as_text().count('tf.aliasing_output')
  assert given == len(jax.tree.leaves(state))


ENGINE = engines.EngineConfig(
    prompts=4, rows=2, prefix_len=4, prompt_len=4, width=4, prefixes=2, admit=2
)


@pytest.mark.parametrize('stacked', [False, True])
def test_every_program_lowers_for_eight_devices(stacked):
  mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
  config = shapes(
      stacked, rollout=ENGINE,
      evaluation=engines.EngineConfig(3, 5, 0, 8, 4),
  )
  said = []

  def say(text):
    said.append(text)
    return mock.MagicMock()

  with sharding.use(mesh):
    programs = program_lib.programs(config, mesh, say)
    kinds = {'empty', 'shared', 'admit', 'run'}
    assert programs.keys() == {
        'train', 'init', 'score', 'publish', *(f'rollout/{k}' for k in kinds),
        *(f'evaluation/{k}' for k in kinds),
    }
    for name, program in programs.items():
      text = program.lower().as_text()
      assert 'num_partitions = 8' in text, name
      assert program.name == name and not program.compilations
    assert not said
    programs['rollout/empty'].compile()
    assert said == ['compiling rollout/empty']
  decoding = program_lib.decoding(programs, 'evaluation')
  assert decoding.run is programs['evaluation/run']


@pytest.mark.parametrize('stacked', [False, True])
def test_published_parameters_are_those_that_products_would_use(
    params, stacked
):
  mesh = sharding.make_mesh(fsdp=2, context=2, tensor=2)
  config = shapes(stacked, rollout=ENGINE, backend='ring', ways=2)
  config = dataclasses.replace(config, step=dataclasses.replace(
      config.step, dtype='bfloat16',
      model=dataclasses.replace(batches.MODEL, value_head=True),
  ))
  value = np.ones((1, batches.MODEL.width), np.float32)
  whole = params | {'value/kernel': value}
  with sharding.use(mesh):
    programs = program_lib.programs(config, mesh)
    found = programs['publish'](placed(config, mesh, whole))
    taken = programs['rollout/run'].arguments[0]
  assert found.keys() == taken.keys()
  for key, x in found.items():
    assert (x.sharding, x.dtype) == (taken[key].sharding, taken[key].dtype)
    kept = key.endswith('scale')
    assert x.dtype == (jax.numpy.float32 if kept else jax.numpy.bfloat16), key
    # Rows of heads and widths are split, and nothing else: no gathers.
    parts = np.prod(x.shape) // np.prod(x.sharding.shard_shape(x.shape))
    assert parts == (1 if kept else 4), key
  want = {k: v for k, v in params.items()}
  for key, x in host(found).items():
    np.testing.assert_array_equal(x, want[key].astype(x.dtype), err_msg=key)


def test_one_device_in_fp32_decodes_with_the_parameters_it_trains():
  config = shapes(rollout=ENGINE)
  programs = program_lib.programs(config, sharding.make_mesh())
  assert 'publish' not in programs
  bf16 = dataclasses.replace(
      config, step=dataclasses.replace(config.step, dtype='bfloat16')
  )
  assert 'publish' in program_lib.programs(bf16, sharding.make_mesh())


def test_what_one_program_returns_another_takes():
  """Shardings of results are those that the next program was lowered for."""
  mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
  config = shapes(rollout=ENGINE)

  def places(tree):
    return [x.sharding for x in jax.tree.leaves(tree)]

  with sharding.use(mesh):
    programs = program_lib.programs(config, mesh)
    slots = programs['rollout/run'].arguments[1]
    for name in ('empty', 'admit', 'run'):
      lowered = programs[f'rollout/{name}'].lower()
      shapes_ = [(x.shape, x.dtype) for x in jax.tree.leaves(lowered.out_info)]
      assert shapes_ == [(x.shape, x.dtype) for x in jax.tree.leaves(slots)]
    assert places(programs['rollout/admit'].arguments[1]) == places(slots)
    empty = programs['rollout/empty']()
  assert places(empty) == places(slots)
  # Rows of decoding are spread like rows of training, heads over tensors,
  # columns of caches over the context.
  assert slots.keys[0].sharding == sharding.named(
      mesh, ('batch', 'heads', 'time', None)
  )


def test_rows_that_do_not_divide_over_the_mesh_are_refused():
  mesh = sharding.make_mesh(data=8)
  with pytest.raises(errors.InputError, match='rows=4 must divide over 8'):
    program_lib.programs(shapes(), mesh)


def test_recipes_that_need_no_scores_have_no_program_for_them():
  config = functools.partial(program_lib.Shapes, **{
      k: v for k, v in vars(shapes()).items() if k != 'scored'
  })
  made = program_lib.programs(config(scored=False), sharding.make_mesh())
  assert made.keys() == {'train', 'init'}
