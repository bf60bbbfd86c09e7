"""Operations and bytes against a count one pair, or one leaf, at a time."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.experimental.layout import Layout

from rlpost import sharding
from rlpost.algorithms import recipes
from rlpost.models import config as model_configs
from rlpost.models import transformer
from rlpost.planning import cost, roofline, topology
from rlpost.rollouts import engine as engines
from rlpost.training import programs as program_lib
from rlpost.training import state as states
from rlpost.training import step as steps

MODEL = model_configs.named('tiny', windows=(None, 5))


def shapes(**changes):
  engine = engines.EngineConfig(
      prompts=2, rows=3, prefix_len=4, prompt_len=12, width=6, admit=2
  )
  return program_lib.Shapes(
      step=steps.StepConfig(MODEL, recipes.recipe('grpo'), chunk=8),
      stacked=False, trainable='.*', optimizer=states.adamw(1, total_steps=1),
      rows=2, micro=2, slots=18, length=34, rollout=engine, scored=True,
      **changes,
  )


@pytest.mark.parametrize('queries', [1, 4, 9])
@pytest.mark.parametrize('before', [0, 3, 8])
@pytest.mark.parametrize('window', [None, 1, 5, 40])
def test_pairs_are_counted_one_by_one(queries, before, window):
  want = sum(
      1
      for q in range(before, before + queries)
      for k in range(before + queries)
      if k <= q and (window is None or q - k < window)
  )
  assert cost.causal_pairs(queries, before, window) == want


def test_an_update_is_three_forwards_and_a_score_is_one():
  matrices = sum(
      np.prod(v.shape) for k, v in transformer.spec(MODEL).shapes.items()
      if k.startswith('layers/') and len(v.shape) == 2
  )
  rows, width = 4, MODEL.num_heads * MODEL.head_dim
  pairs = 0
  for window in MODEL.windows:
    prompt = cost.causal_pairs(16, 0, window)
    answers = 3 * cost.causal_pairs(6, 16, window)
    pairs += MODEL.num_layers / 2 * rows * (prompt + answers)
  forward = 2 * matrices * rows * 34 + 4 * width * pairs
  forward += 2 * MODEL.width * MODEL.vocab_size * rows * 18
  found = cost.work(shapes(), 'score')
  assert found.flops == pytest.approx(forward)
  train = cost.work(shapes(), 'train')
  assert train.flops == pytest.approx(3 * forward) and not train.again
  step = dataclasses.replace(shapes().step, remat='full')
  again = cost.work(dataclasses.replace(shapes(), step=step), 'train').again
  head = 2 * MODEL.width * MODEL.vocab_size * rows * 18
  assert again == pytest.approx(forward - head)


def test_a_decoding_step_and_a_prefill_count_what_they_run():
  found = cost.work(shapes(), 'rollout/run')
  assert found.tokens == 6
  assert cost.work(shapes(), 'rollout/admit').tokens == 24
  assert cost.work(shapes(), 'rollout/empty') is None
  assert cost.work(shapes(), 'init') is None


def test_bytes_of_arguments_are_those_of_their_pieces():
  mesh = sharding.make_mesh(fsdp=2, context=2, tensor=2)
  step = dataclasses.replace(shapes().step, backend='ring')
  known = program_lib.programs(
      dataclasses.replace(shapes(), step=step, length=36), mesh
  )
  params = sum(
      np.prod(x.sharding.shard_shape(x.shape)) * 4
      for x in known['train'].arguments[0].trainable.values()
  )
  kinds = cost.argument_bytes(known['train'])
  assert kinds['parameters'] == params
  assert 2 * params <= kinds['optimizer'] <= 2 * params + 64
  assert kinds['batch'] and not kinds['cache'] and not kinds['host']
  kinds = cost.argument_bytes(known['rollout/run'])
  assert kinds['cache'] > kinds['batch'] > 0 == kinds['optimizer']


def test_offloaded_moments_are_bytes_of_the_host():
  step = dataclasses.replace(shapes().step, offload=True)
  known = program_lib.programs(
      dataclasses.replace(shapes(), step=step), sharding.make_mesh()
  )
  kinds = cost.argument_bytes(known['train'])
  assert kinds['host'] == 8 * MODEL.num_params
  assert kinds['optimizer'] < 64


def test_what_a_run_holds_is_handed_over_or_beside():
  """Each program: its own and the rest are the run's, reference included."""
  run = shapes()
  assert run.step.recipe.kl != 'none'
  known = program_lib.programs(run, sharding.make_mesh(fsdp=2))
  params = 4 * sum(
      np.prod(x.sharding.shard_shape(x.shape))
      for x in known['train'].arguments[0].trainable.values()
  )
  moments = cost.argument_bytes(known['train'])['optimizer']
  assert 0 < 2 * params <= moments
  want = {
      'train': params,
      'init': params,
      'score': params + moments,
      'publish': params + moments,
      'rollout/run': 2 * params + moments,
  }
  assert want == {name: cost.beside(run, known, name) for name in want}
  step = dataclasses.replace(run.step, recipe=recipes.recipe('dapo'))
  run = dataclasses.replace(run, step=step, scored=False)
  alone = program_lib.programs(run, sharding.make_mesh())
  assert 'publish' not in alone  # decoding runs on the state's own parameters
  assert cost.beside(run, alone, 'rollout/run') == (
      cost.argument_bytes(alone['train'])['optimizer']
  )
  assert cost.beside(run, alone, 'train') == 0


def test_a_prefill_is_not_given_the_head_that_it_does_not_read():
  model = model_configs.named('tiny', tied=False)
  step = dataclasses.replace(shapes().step, model=model)
  run = dataclasses.replace(shapes(), step=step, stacked=True)
  known = program_lib.programs(run, sharding.make_mesh())
  for name, unused in (('shared', 1), ('run', 0)):
    program = known[f'rollout/{name}']
    kinds = cost.argument_bytes(program)
    layouts = cost.taken(program, program.compile())
    read = cost.argument_bytes(program, layouts)
    # The norm before the head, too.
    lost = 4 * model.width * (model.vocab_size + 1) * unused
    assert kinds['parameters'] - read['parameters'] == lost


def test_kinds_of_bytes_sum_to_what_the_compiler_says():
  known = program_lib.programs(shapes(), sharding.make_mesh())
  for name in ('train', 'score', 'rollout/run', 'rollout/shared'):
    compiled = known[name].compile()
    memory = compiled.memory_analysis()
    layouts = cost.taken(known[name], compiled)
    kinds = cost.argument_bytes(known[name], layouts)
    assert sum(kinds.values()) == pytest.approx(
        memory.argument_size_in_bytes, rel=0.02
    ), name


def test_the_largest_limit_is_the_time():
  chip = topology.CHIPS['v5e']
  work = cost.Work(flops=197e12 * 8, again=0, tokens=100, unit='update')
  found = roofline.roofline(work, chip, 8, hbm_bytes=0.82e12 / 2)
  assert found.seconds == pytest.approx(1) and found.bound == 'compute'
  assert found.mfu == pytest.approx(1)
  assert found.tokens_per_s == pytest.approx(100)
  found = roofline.roofline(work, chip, 8, hbm_bytes=0.82e12 * 2)
  assert (found.bound, found.mfu) == ('memory', pytest.approx(0.5))


# Llama 2 70B, bf16, without a context axis: utilisation that MaxText's page
# "Run Llama2" publishes for 64 chips of v4 and v5p and 256 of v5e.
@pytest.mark.parametrize('kind, chips, published', [
    ('v4', 64, 0.57), ('v5p', 64, 0.65), ('v5e', 256, 0.57),
])
@pytest.mark.parametrize('remat', ['none', 'full'])
def test_the_bound_is_above_what_others_reach(kind, chips, published, remat):
  model = model_configs.named('llama3.1-70b', vocab_size=32_000)
  rows = chips * 4
  step = steps.StepConfig(
      model, recipes.recipe('grpo'), remat=remat, dtype='bfloat16'
  )
  run = program_lib.Shapes(
      step=step, stacked=True, trainable='.*', optimizer=None, rows=rows,
      micro=1, slots=4096, length=4096,
  )
  moved = 3 * cost.weight_bytes(run, 1) + 24 * model.num_params / chips
  found = roofline.roofline(
      cost.work(run, 'train'), topology.CHIPS[kind], chips, hbm_bytes=moved
  )
  assert published <= found.mfu <= 1


def test_every_kind_of_leaf_has_a_size():
  key = jax.eval_shape(lambda: jax.random.key(0))
  assert cost.device_bytes(key) == 8
  assert cost.device_bytes(jax.ShapeDtypeStruct((3, 2), np.float32)) == 24


@pytest.mark.parametrize('shape, dtype, order, tiling, size', [
    # What a v5e's compiler counted for these three: 39,424 bytes in all.
    ((20, 3, 100), np.float32, (1, 0, 2), ((8, 128),), 36_864),
    ((16,), np.int8, (0,), ((512,), (128,), (4, 1)), 512),
    ((1, 5, 64), np.float16, (0, 1, 2), ((8, 128), (2, 1)), 2048),
])
def test_tiles_are_paid_for(shape, dtype, order, tiling, size):
  layout = Layout(major_to_minor=order, tiling=tiling)
  leaf = jax.ShapeDtypeStruct(shape, dtype)
  assert cost.device_bytes(leaf, layout) == size
