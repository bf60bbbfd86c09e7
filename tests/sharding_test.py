"""The mesh and the one table from logical to mesh axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from rlpost import errors, sharding
from rlpost.models import transformer
from rlpost.models.config import CONFIGS


def test_one_size_may_be_what_is_left():
  assert dict(sharding.make_mesh().shape) == dict.fromkeys(
      sharding.MESH_AXES, 1
  )
  mesh = sharding.make_mesh(data=-1, tensor=2)
  assert dict(mesh.shape) == {
      'data': 4, 'fsdp': 1, 'tensor': 2, 'context': 1
  }
  assert sharding.make_mesh(fsdp=3).size == 3, 'of 8 devices'
  few = sharding.make_mesh(context=-1, devices=jax.devices()[5:])
  assert few.shape['context'] == 3
  assert set(few.devices.flat) == set(jax.devices()[5:])


@pytest.mark.parametrize('sizes, message', [
    ({'data': 16}, 'needs 16 devices; there are 8'),
    ({'data': -1, 'fsdp': 3}, '8 devices do not divide by 3'),
    ({'data': -1, 'fsdp': -1}, 'may hold one -1'),
    ({'data': 0}, 'nothing else below 1'),
    ({'tensor': -2}, 'nothing else below 1'),
    ({'data': -2, 'tensor': -2}, 'nothing else below 1'),
])
def test_impossible_meshes_are_refused(sizes, message):
  with pytest.raises(errors.InputError, match=message):
    sharding.make_mesh(**sizes)


def test_rows_that_do_not_divide_are_refused_with_a_number_that_does():
  mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
  assert sharding.batch_ways(mesh) == 4
  sharding.check_rows(8, mesh, 'rows')
  with pytest.raises(
      errors.InputError, match='rows=11 must divide over 4 devices.*try 8'
  ):
    sharding.check_rows(11, mesh, 'rows')
  with pytest.raises(errors.InputError, match='try 4'):
    sharding.check_rows(3, mesh, 'rows')


def test_a_dimension_that_does_not_divide_stays_whole():
  mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)

  def spec(shape, axes):
    return sharding.fitting(mesh, shape, axes).spec

  assert spec((6, 4), ('vocab', 'embed')) == PartitionSpec('tensor', None)
  assert spec((7, 4), ('vocab', 'embed')) == PartitionSpec(None, None)
  # Of two mesh axes for one dimension, the first ones that divide.
  assert spec((8,), ('batch',)) == PartitionSpec(('data', 'fsdp'))
  assert spec((6,), ('batch',)) == PartitionSpec('data')
  assert spec((7,), ('batch',)) == PartitionSpec(None)
  assert spec((5, 3), ('layers', 'norm')) == PartitionSpec(None, None)


@pytest.mark.parametrize('shape, axes, wanted', [
    ((8, 4), ('vocab', 'embed'), (('tensor', 'fsdp', 'context'), None)),
    ((4, 4), ('vocab', 'embed'), (('tensor', 'fsdp'), None)),
    ((7, 4), ('vocab', 'embed'), (None, None)),
    ((3, 4, 8), ('layers', 'embed', 'heads'),
     (None, ('fsdp', 'context'), 'tensor')),
    ((4,), ('norm',), (None,)),
    ((3, 4), ('layers', 'norm'), (None, None)),
])
def test_rows_of_stored_matrices_are_split_over_all_copies(
    shape, axes, wanted
):
  mesh = sharding.make_mesh(fsdp=2, tensor=2, context=2)
  assert sharding.stored(mesh, shape, axes) == PartitionSpec(*wanted)


@pytest.mark.parametrize('stacked', [False, True])
@pytest.mark.parametrize('name', CONFIGS)
def test_every_matrix_of_a_model_is_split_over_all_but_data(name, stacked):
  mesh = sharding.make_mesh(fsdp=2, tensor=2, context=2)
  spec = transformer.spec(CONFIGS[name], stacked)
  placed = sharding.for_params(mesh, spec.shapes, spec.axes)
  assert placed.keys() == spec.shapes.keys()
  for k, shape in spec.shapes.items():
    matrix = not k.endswith('/scale')
    # All heads and widths here are even, so nothing is left whole.
    part = placed[k].shard_shape(shape.shape)
    assert np.prod(part) * (8 if matrix else 1) == np.prod(shape.shape)


def test_every_mesh_axis_has_a_logical_one():
  used = set()
  for axes in sharding.RULES.values():
    used |= {axes} if isinstance(axes, str) else set(axes or ())
  assert used == set(sharding.MESH_AXES)


def test_constraints_act_inside_a_mesh_and_not_without_one():
  def double(x):
    return sharding.constrain(2 * x, ('batch', 'time', None))

  x = jnp.arange(32.0).reshape(4, 4, 2)
  assert sharding.constrain(x, ('batch', 'time', None)) is x
  mesh = sharding.make_mesh(data=2, fsdp=2, context=2)
  with sharding.use(mesh) as active:
    assert active == mesh
    y = jax.jit(double)(x)
  assert y.sharding.shard_shape(y.shape) == (1, 2, 2)
  np.testing.assert_array_equal(y, 2 * x)
