"""What a restore is asked for: structure, shapes, dtypes and placement."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlpost import errors
from rlpost.training import digest as digests


def is_json(target: Any) -> bool:
  """Whether a target is an item of JSON, or a tree without leaves."""
  return isinstance(target, str) or not jax.tree.leaves(target)


def mesh_of(targets: Any) -> Mesh:
  """The mesh of the first leaf that has one, the active one, or one device."""
  for leaf in jax.tree.leaves(targets):
    sharding = getattr(leaf, 'sharding', None)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
      return sharding.mesh
  active = jax.sharding.get_mesh()
  one = Mesh(np.array(jax.devices()[:1]), ('one',))
  return one if active.empty else active


def place(leaf: Any, mesh: Mesh) -> Any:
  """What Orbax is to restore: every leaf on the mesh.

  The optimizer's counts, and all that `eval_shape` returns, have no sharding;
  restored as they are they land on one device, and the next step fails.
  """
  if isinstance(leaf, np.ndarray):
    return leaf
  sharding = getattr(leaf, 'sharding', None)
  if not isinstance(sharding, NamedSharding):
    sharding = NamedSharding(mesh, PartitionSpec())
  elif not isinstance(sharding.mesh, Mesh):
    sharding = NamedSharding(mesh, sharding.spec)
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def check(name: str, target: Any, saved: Sequence[digests.Leaf]) -> None:
  """Refuses a target that differs from what was saved.

  Orbax casts dtypes in silence; and a changed model is not a damaged file.

  Raises:
    InputError: another structure, shape or dtype.
  """
  if is_json(target):
    wanted = {'': ('json', ())}
  else:
    flat = digests.flatten(target)
    wanted = {k: (str(x.dtype), tuple(x.shape)) for k, x in flat.items()}
  found = {x.path: (x.dtype, x.shape) for x in saved}
  wrong = [
      f'{name}/{path}: saved {found.get(path, "nothing")}, '
      f'wanted {wanted.get(path, "nothing")}'
      for path in sorted(wanted.keys() | found.keys())
      if wanted.get(path) != found.get(path)
  ]
  if wrong:
    more = f' and {len(wrong) - 3} more' if len(wrong) > 3 else ''
    raise errors.InputError(
        f'the checkpoint is of another state: {"; ".join(wrong[:3])}{more}. '
        'Use the config it was made with, or another --workdir.'
    )
