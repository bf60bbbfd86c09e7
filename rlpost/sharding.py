"""The mesh, and the one table from logical axes to mesh axes.

Models name logical axes; only this table and configs name mesh axes. An axis
of size 1 costs nothing, so the four exist from the start.

In training every matrix is split, along its rows, over the devices that could
otherwise only hold copies (`fsdp` and `context`), and gathered where it is
used. In decoding, where each token would wait for that, they stay split as
`DECODING` says.
"""

import contextlib
import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.experimental import mesh_utils
from jax.sharding import (
  AbstractMesh,
  AxisType,
  Mesh,
  NamedSharding,
  PartitionSpec,
)

from rlpost import errors

MESH_AXES = ('data', 'fsdp', 'tensor', 'context')

RULES = {
    'batch': ('data', 'fsdp'),
    'time': 'context',
    'vocab': 'tensor',
    'heads': 'tensor',
    'hidden': 'tensor',
    'embed': None,
    'layers': None,
    'norm': None,
    None: None,
}

_RESIDENT = dict.fromkeys(('vocab', 'heads', 'hidden'), ('tensor', 'context'))
DECODING = {**RULES, **_RESIDENT}
COPIES = 'fsdp', 'context'


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
  # Neighbours on a torus stay neighbours; 8 of a 4x4x4 are a 4x2 of it.
  grid = mesh_utils.create_device_mesh(
      tuple(sizes.values()), devices[:known], allow_split_physical_axes=True
  )
  return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def abstract_mesh(data=1, fsdp=1, tensor=1, context=1) -> AbstractMesh:
  """A mesh without devices, to ask how large pieces would be."""
  return AbstractMesh((data, fsdp, tensor, context), MESH_AXES)


def spec(axes) -> PartitionSpec:
  """The partition of an array whose logical axes are `axes`."""
  return PartitionSpec(*(RULES[a] for a in axes))


def fitted(mesh, shape, axes, rules: Mapping = RULES) -> PartitionSpec:
  """The partition of an array, without the mesh axes that do not divide it.

  Of several mesh axes for one dimension the first ones that divide are kept.
  """
  parts = []
  for size, axis in zip(shape, axes, strict=True):
    parts.append(_dividing(mesh, size, mesh_axes(rules[axis])))
  return PartitionSpec(*parts)


def _dividing(mesh, size, names):
  while size % math.prod(mesh.shape[n] for n in names):
    names = names[:-1]
  return names[0] if len(names) == 1 else names or None


def named(mesh, axes) -> NamedSharding:
  """The sharding of an array with these logical axes."""
  return NamedSharding(mesh, spec(axes))


def replicated(mesh) -> NamedSharding:
  """A whole copy on every device."""
  return NamedSharding(mesh, PartitionSpec())


def stored(mesh, shape, axes) -> PartitionSpec:
  """The partition of a parameter in training.

  As `fitted`, and rows of matrices over `COPIES` too. Rows: pieces of a few
  columns are less than a TPU's 128 lanes, and gathered at twice the price.
  """
  parts = [*fitted(mesh, shape, axes)]
  row = next(i for i, a in enumerate(axes) if a != 'layers')
  if row < len(axes) - 1:
    names = (*mesh_axes(parts[row]), *COPIES)
    parts[row] = _dividing(mesh, shape[row], names)
  return PartitionSpec(*parts)


def mesh_axes(part) -> tuple[str, ...]:
  """Names in one entry of a PartitionSpec."""
  return (part,) if isinstance(part, str) else part or ()


def for_params(
    mesh, shapes: Mapping, axes: Mapping, partition=stored
) -> dict:
  """A sharding per parameter; a dimension that does not divide is whole."""
  return {
      k: NamedSharding(mesh, partition(mesh, shapes[k].shape, axes[k]))
      for k in shapes
  }


def fitting(mesh, shape, axes) -> NamedSharding:
  """The sharding of an array, without the axes that do not divide it."""
  return NamedSharding(mesh, fitted(mesh, shape, axes))


def gathered(x, axes, dtype):
  """A stored matrix in `dtype`, split by `RULES` alone, ready for use.

  Its gradient goes straight to where the matrix is stored: partial sums are
  scattered, never summed on every device.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1 or x.ndim < 2:
    return x
  return _gathered(x, axes, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(x, axes, dtype):
  x = x.astype(dtype)
  for spec_ in _stages(x.shape, axes)[1:]:
    x = jax.lax.with_sharding_constraint(x, spec_)
  return x


def _stages(shape, axes):
  """Partitions between stored and gathered, one mesh axis at a time.

  A TPU's compiler gathers and scatters along one axis natively; along two at
  once it sums the whole matrix on every device.
  """
  mesh = jax.sharding.get_abstract_mesh()
  specs, spec_ = [], [*stored(mesh, shape, axes)]
  for copies in ((), *((name,) for name in reversed(COPIES))):
    spec_ = [
        tuple(n for n in mesh_axes(part) if n not in copies) or None
        for part in spec_
    ]
    specs.append(PartitionSpec(*spec_))
  return specs


def _scattered(axes, dtype, like, g):
  del dtype
  for spec_ in reversed(_stages(g.shape, axes)[:-1]):
    g = jax.lax.with_sharding_constraint(g, spec_)
  return (g.astype(like.dtype),)


_gathered.defvjp(
    lambda x, axes, dtype: (
        _gathered(x, axes, dtype), jnp.zeros((), x.dtype)
    ),
    _scattered,
)


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


def varying(x, axes=MESH_AXES):
  """`x` inside a `shard_map` as a value that differs along these axes.

  The gradient of what is the same on all devices is summed over them.
  """
  known = jax.typeof(x).manual_axis_type.varying
  axes = tuple(a for a in axes if a not in known)
  return jax.lax.pcast(x, axes, to='varying') if axes else x


def as_varying_as(x, like):
  """`x`, differing along the axes along which `like` does."""
  return varying(x, jax.typeof(like).manual_axis_type.varying)


@contextlib.contextmanager
def use(mesh):
  """Makes the mesh the one that programs are traced for."""
  with jax.set_mesh(mesh):
    yield mesh
