"""Tests of restoring into other placements, and of refusing other states."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from rlpost import errors
from rlpost.training import checkpoint, digest, targeting

OPTIMIZER = optax.adamw(1e-2)


def _params(step=0):
  return {
      'layers/0/attn/qkv': jnp.arange(64.0).reshape(8, 8) + step,
      'layers/0': jnp.full((8, 4), step, jnp.bfloat16),
      'norm/scale': jnp.linspace(-1, 1, 7) * (step + 1),
  }


def _items(step=0, params=None):
  params = _params(step) if params is None else params
  return {
      'trainable': params,
      'opt': jax.jit(OPTIMIZER.init)(params),
      'plan': {'cursor': {'add': 3 + step, 'sort': 5}, 'weights': [0.5, 0.5]},
      'timing': {'cpu_s': 1.5},
  }


def _targets(shapes=None):
  shapes = shapes or jax.eval_shape(_params)
  return {
      'trainable': shapes,
      'opt': jax.eval_shape(OPTIMIZER.init, shapes),
      'plan': 'json',
      'timing': 'json',
  }


def _sha(items):
  return digest.state_sha256(items)[0]


def _update(params, opt):
  grads = jax.tree.map(jnp.ones_like, params)
  updates, opt = OPTIMIZER.update(grads, opt, params)
  return optax.apply_updates(params, updates), opt


def test_another_model_is_not_damage(tmp_path):
  saved = checkpoint.Checkpoints(tmp_path)
  saved.save(2, _items(2), wait=True)
  before = sorted(tmp_path.rglob('*'))
  for change in (
      {'norm/scale': jax.ShapeDtypeStruct((8,), jnp.float32)},
      {'norm/scale': jax.ShapeDtypeStruct((7,), jnp.bfloat16)},
      {'head/kernel': jax.ShapeDtypeStruct((7,), jnp.float32)},
  ):
    targets = _targets()
    targets['trainable'] = targets['trainable'] | change
    with pytest.raises(errors.InputError, match=next(iter(change))):
      saved.restore(targets)
  with pytest.raises(errors.InputError, match='plan'):
    saved.restore({'plan': jax.eval_shape(_params)})
  assert not saved.damaged
  assert sorted(tmp_path.rglob('*')) == before


@pytest.mark.parametrize('active', [False, True])
def test_eight_devices_to_four_and_back(tmp_path, active):
  def mesh(shape):
    return jax.make_mesh(
        shape, ('data', 'fsdp'), devices=jax.devices()[: np.prod(shape)],
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
    )

  def placed(mesh, spec, tree):
    """Shardings on matrices only: the rest is to be filled in."""

    def place(x):
      if x.ndim != 2:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
      sharding = NamedSharding(mesh, PartitionSpec(*spec))
      return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(place, jax.eval_shape(lambda: tree))

  items = _items(3)
  sha = _sha(items)
  layouts = [(mesh((2, 4)), ('fsdp', None)), (mesh((2, 2)), ('data', 'fsdp')),
             (mesh((4, 2)), (None, 'fsdp'))]
  first = layouts[0][0]
  state = {k: items[k] for k in ('trainable', 'opt')}
  state = jax.tree.map(
      lambda x, s: jax.device_put(
          x, s.sharding or NamedSharding(first, PartitionSpec())
      ),
      state, placed(*layouts[0], state),
  )
  for step, (onto, spec) in enumerate(layouts[1:] + layouts[:1]):
    saved = checkpoint.Checkpoints(tmp_path)
    saved.save(step, items | state, wait=True)
    targets = _targets() | placed(onto, spec, state)
    if active:
      with jax.set_mesh(onto):
        found = checkpoint.Checkpoints(tmp_path).restore(targets)[1]
    else:
      found = checkpoint.Checkpoints(tmp_path).restore(targets)[1]
    assert _sha(found) == sha
    state = {k: found[k] for k in ('trainable', 'opt')}
    assert {x.sharding.mesh for x in jax.tree.leaves(state)} == {onto}
    qkv = found['opt'][0].mu['layers/0/attn/qkv']
    assert qkv.sharding.spec == PartitionSpec(*spec)
    # Scalars without a sharding would make this fail: incompatible devices.
    jax.block_until_ready(jax.jit(_update)(*state.values()))


def test_every_leaf_gets_a_sharding_of_a_real_mesh():
  mesh = jax.make_mesh(
      (2, 4), ('data', 'fsdp'), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  abstract = AbstractMesh((2, 4), ('data', 'fsdp'))
  spec = PartitionSpec('fsdp')
  leaf = jax.ShapeDtypeStruct((8,), jnp.float32)
  for sharding, expected in (
      (None, PartitionSpec()), (NamedSharding(abstract, spec), spec),
      (jax.sharding.SingleDeviceSharding(jax.devices()[3]), PartitionSpec()),
  ):
    placed = targeting.place(leaf.update(sharding=sharding), mesh)
    assert placed.sharding == NamedSharding(mesh, expected)
  assert targeting.mesh_of({'a': leaf}).size == 1
  with jax.set_mesh(mesh):
    assert targeting.mesh_of({'a': leaf}) == mesh
  known = leaf.update(sharding=NamedSharding(mesh, spec))
  assert targeting.mesh_of({'a': leaf, 'b': known}) == mesh
