"""The mesh, and the one table from logical axes to mesh axes.

Models name logical axes; only this table and configs name mesh axes. An axis
of size 1 costs nothing, so the four exist from the start.
"""

import contextlib
import math
from collections.abc import Mapping

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rlpost import errors

MESH_AXES = ('data', 'fsdp', 'tensor', 'context')

RULES = {
    'batch': ('data', 'fsdp'),
    'time': 'context',
    'vocab': 'tensor',
    'heads': 'tensor',
    'hidden': 'tensor',
    'embed': 'fsdp',
    'layers': None,
    'norm': None,
    None: None,
}


def make_mesh(data=1, fsdp=1, tensor=1, context=1, devices=None):
  """A mesh of the given sizes; one size may be -1, "all that is left"."""
  devices = jax.devices() if devices is None else devices
  sizes = dict(zip(MESH_AXES, (data, fsdp, tensor, context), strict=True))
  free = [name for name, size in sizes.items() if size == -1]
  known = math.prod(size for size in sizes.values() if size != -1)
  if len(free) > 1 or min(sizes.values()) < -1 or not known:
    raise errors.InputError(
        f'{sizes} may hold one -1 and nothing else below 1.'
    )
  if free:
    if len(devices) % known:
      raise errors.InputError(
          f'{len(devices)} devices do not divide by {known} for {sizes}.'
      )
    sizes[free[0]] = len(devices) // known
    known = len(devices)
  if known > len(devices):
    raise errors.InputError(
        f'mesh {sizes} needs {known} devices; there are {len(devices)}.'
    )
  return jax.make_mesh(
      tuple(sizes.values()), MESH_AXES, devices=devices[:known],
      axis_types=(AxisType.Auto,) * len(MESH_AXES),
  )


def spec(axes) -> PartitionSpec:
  """The partition of an array whose logical axes are `axes`."""
  return PartitionSpec(*(RULES[a] for a in axes))


def named(mesh, axes) -> NamedSharding:
  """The sharding of an array with these logical axes."""
  return NamedSharding(mesh, spec(axes))


def replicated(mesh) -> NamedSharding:
  """A whole copy on every device."""
  return NamedSharding(mesh, PartitionSpec())


def for_params(mesh, shapes: Mapping, axes: Mapping) -> dict:
  """A sharding per parameter; a dimension that does not divide is whole."""
  return {k: fitting(mesh, shapes[k].shape, axes[k]) for k in shapes}


def fitting(mesh, shape, axes) -> NamedSharding:
  """The sharding of an array, without the axes that do not divide it."""
  parts = []
  for size, part in zip(shape, spec(axes), strict=True):
    names = (part,) if isinstance(part, str) else part or ()
    ways = 1
    for name in names:
      ways *= mesh.shape[name]
    parts.append(part if size % ways == 0 else None)
  return NamedSharding(mesh, PartitionSpec(*parts))


def batch_ways(mesh) -> int:
  """In how many parts the rows of a batch are split."""
  return mesh.shape['data'] * mesh.shape['fsdp']


def check_rows(rows: int, mesh, what: str):
  """Raises unless `rows` divide over the mesh, and says what would."""
  ways = batch_ways(mesh)
  if rows % ways:
    raise errors.InputError(
        f'{what}={rows} must divide over {ways} devices (data x fsdp); '
        f'try {max(ways, rows // ways * ways)}.'
    )


def check_tokens(length: int, mesh, what: str):
  """Raises unless tokens divide over the context axis; says what would."""
  ways = mesh.shape['context']
  if length % ways:
    raise errors.InputError(
        f'{length} {what} must divide over {ways} devices of the context '
        f'axis; make it {-(-length // ways) * ways}.'
    )


def constrain(x, axes):
  """Asks for the sharding of `axes` inside a program; none without a mesh.

  A dimension that does not divide is whole: one token of a row, in decoding.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return x
  return jax.lax.with_sharding_constraint(x, fitting(mesh, x.shape, axes).spec)


@contextlib.contextmanager
def use(mesh):
  """Makes the mesh the one that programs are traced for."""
  with jax.set_mesh(mesh):
    yield mesh
