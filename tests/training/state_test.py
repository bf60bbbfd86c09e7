"""The optimizer against NumPy, its schedule, and what it may touch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from rlpost import errors, sharding
from rlpost.training import state as states

PARAMS = {
    'embed/table': np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4),
    'layers/0/attn/qkv': np.linspace(0.5, 2, 8, dtype=np.float32).reshape(2, 4),
    'layers/0/attn_norm/scale': np.ones(4, np.float32),
    'norm/scale': np.full(4, 2, np.float32),
}


def rates(total, **changes):
  made = states.schedule(2.0, total_steps=total, **changes)
  return [float(made(i)) for i in range(total)]


def test_warm_up_ends_at_the_peak_and_decay_at_the_planned_end():
  linear = rates(20, warmup_steps=4, decay='linear', final_scale=0.1)
  np.testing.assert_allclose(linear[:4], [0.5, 1, 1.5, 2], rtol=1e-6)
  # 10, 50 and 100 % of the planned updates; the fall has 15 equal parts.
  np.testing.assert_allclose(linear[1], 1.0, rtol=1e-6)
  np.testing.assert_allclose(linear[9], 2 - 1.8 * 5 / 15, rtol=1e-6)
  np.testing.assert_allclose(linear[-1], 0.2, rtol=1e-6)
  cosine = rates(20, warmup_steps=4, decay='cosine', final_scale=0.1)
  np.testing.assert_allclose(cosine[:4], linear[:4], rtol=1e-6)
  half = 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * 5 / 15))
  np.testing.assert_allclose(cosine[9], 2 * half, rtol=1e-6)
  np.testing.assert_allclose(cosine[-1], 0.2, rtol=1e-5)
  constant = rates(20, warmup_steps=4)
  np.testing.assert_allclose(constant[4:], 2, rtol=1e-6)


def test_the_schedule_scales_with_the_number_of_planned_updates():
  for total in (11, 101, 1001):
    made = rates(total, warmup_steps=0, decay='linear', final_scale=0.0)
    at = [made[round(share * (total - 1))] for share in (0, 0.1, 0.5, 1)]
    np.testing.assert_allclose(at, [2, 1.8, 1, 0], atol=1e-6)


def test_short_runs_have_a_schedule():
  assert rates(1, warmup_steps=1) == rates(1, warmup_steps=0) == [2]
  np.testing.assert_allclose(
      rates(3, warmup_steps=3, decay='cosine'), [2 / 3, 4 / 3, 2], rtol=1e-6
  )


def test_a_warm_up_longer_than_the_run_is_refused():
  with pytest.raises(errors.InputError, match='warmup_steps=9 must not'):
    states.schedule(1.0, warmup_steps=9, total_steps=8)
  with pytest.raises(errors.InputError, match="decay='steps' must be one of"):
    states.schedule(1.0, warmup_steps=0, total_steps=8, decay='steps')


def test_adamw_equals_numpy_for_three_steps():
  rate, b1, b2, eps, decay = [0.05, 0.1, 0.1], 0.8, 0.95, 1e-6, 0.3
  optimizer = states.adamw(
      0.1, total_steps=3, warmup_steps=2, b1=b1, b2=b2, eps=eps,
      weight_decay=decay,
  )
  rng = np.random.default_rng(0)
  params, opt = PARAMS, optimizer.init(PARAMS)
  own = {k: v.astype(np.float64) for k, v in PARAMS.items()}
  first = {k: np.zeros(v.shape) for k, v in PARAMS.items()}
  second = {k: np.zeros(v.shape) for k, v in PARAMS.items()}
  for t in range(3):
    grads = {
        k: rng.normal(size=v.shape).astype(np.float32)
        for k, v in PARAMS.items()
    }
    updates, opt = optimizer.update(grads, opt, params)
    params = optax.apply_updates(params, updates)
    for k, g in grads.items():
      first[k] = b1 * first[k] + (1 - b1) * g
      second[k] = b2 * second[k] + (1 - b2) * np.square(g, dtype=np.float64)
      m = first[k] / (1 - b1 ** (t + 1))
      v = second[k] / (1 - b2 ** (t + 1))
      shrink = 0 if k.endswith('/scale') else decay * own[k]
      own[k] = own[k] - rate[t] * (m / (np.sqrt(v) + eps) + shrink)
      np.testing.assert_allclose(params[k], own[k], rtol=2e-6, atol=2e-6)


def test_partition_is_by_whole_names():
  trainable, frozen = states.partition(PARAMS, 'layers/.*')
  assert sorted(trainable) == ['layers/0/attn/qkv', 'layers/0/attn_norm/scale']
  assert states.union(trainable, frozen) == PARAMS
  assert not trainable.keys() & frozen.keys()
  # 'norm/scale' is one parameter, not a part of another's name.
  assert list(states.partition(PARAMS, 'norm/scale')[0]) == ['norm/scale']
  assert states.partition(PARAMS, '.*')[1] == {}
  with pytest.raises(errors.InputError, match="'lora.*' matches none of 4"):
    states.partition(PARAMS, 'lora.*')


def test_the_optimizer_holds_nothing_of_frozen_parameters():
  optimizer = states.adamw(0.1, total_steps=3, weight_decay=0.1)
  trainable, _ = states.partition(PARAMS, 'layers/.*')
  made = states.create(trainable, optimizer)
  names = {
      p.key
      for path, _ in jax.tree_util.tree_leaves_with_path(made)
      for p in path if isinstance(p, jax.tree_util.DictKey)
  }
  assert names == set(trainable)
  assert int(made.step) == 0


def test_moments_lie_where_their_parameter_lies():
  mesh = sharding.make_mesh(fsdp=2, tensor=2)
  optimizer = states.adamw(0.1, total_steps=3, weight_decay=0.1)
  placed = {
      'embed/table': sharding.named(mesh, ('vocab', 'embed')),
      'layers/0/attn/qkv': sharding.named(mesh, ('heads', None)),
      'layers/0/attn_norm/scale': sharding.named(mesh, ('norm',)),
      'norm/scale': sharding.named(mesh, ('norm',)),
  }
  whole = sharding.replicated(mesh)
  create = functools.partial(states.create, optimizer=optimizer)
  abstract = jax.eval_shape(create, PARAMS)
  places = states.shardings(abstract, placed, whole)
  assert places.trainable == placed
  adam = next(s for s in places.opt if hasattr(s, 'mu'))
  assert adam.mu == adam.nu == placed
  assert adam.count == places.step == whole
  assert adam.mu['embed/table'].spec == PartitionSpec('tensor', None)
  # And a program may be told so.
  state = jax.jit(create, out_shardings=places)(PARAMS)
  assert not any(jnp.any(x) for x in jax.tree.leaves(state.opt))
