"""Slices of TPUs that can be compiled for, and what a chip of each can do."""

import dataclasses
import importlib.util
import math
import os

from rlpost import errors


@dataclasses.dataclass(frozen=True)
class Chip:
  """Published limits of one chip.

  Attributes:
    cores: devices that JAX sees on a chip.
    flops: bf16 operations per second.
    hbm_bytes: memory that the compiler lets programs have.
    hbm_bandwidth: bytes per second.
    link_bandwidth: bytes per second of one link in one direction.
    axes: dimensions of the torus, two links in each.
  """

  cores: int
  flops: float
  hbm_bytes: float
  hbm_bandwidth: float
  link_bandwidth: float
  axes: int


# Google Cloud's pages of the TPU generations ("System architecture"): peak
# compute and HBM bandwidth of a chip. Links: the interconnect bandwidth of a
# chip there (v4 2,400, v5e 1,600, v5p 4,800 Gbit/s in one direction; v6e 800
# and tpu7x 1,200 GB/s in both) over its links (2 per axis). Memory: what
# libtpu's errors call available, not the 32, 16, 95, 32 and 192 of the pages.
CHIPS = {
    'v4': Chip(2, 275e12, 30.5 * 2**30, 1.228e12, 50e9, 3),
    'v5e': Chip(1, 197e12, 15.75 * 2**30, 0.82e12, 50e9, 2),
    'v5p': Chip(1, 459e12, 95.74 * 2**30, 2.765e12, 100e9, 3),
    'v6e': Chip(1, 918e12, 31.25 * 2**30, 1.64e12, 100e9, 2),
    'tpu7x': Chip(2, 2307e12, 189.5 * 2**30, 7.38e12, 100e9, 3),
}
# Shapes that the compiler was seen to know; others may work.
SLICES = {
    'v4': ('2x2x1', '2x2x2', '4x4x4'),
    'v5e': ('2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16'),
    'v5p': ('2x2x1', '2x2x2', '2x2x4', '4x4x4', '4x4x8', '8x8x8', '8x16x16',
            '16x16x24'),
    'v6e': ('2x2', '2x4', '4x4', '4x8', '8x8', '16x16', '32x32'),
    'tpu7x': ('2x2x1', '2x2x2', '4x4x4'),
}
# Before JAX starts: TPUs are compiled for, not looked for, and by several
# processes at once.
ENVIRONMENT = {
    'JAX_PLATFORMS': 'cpu',
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
    'TPU_SKIP_MDS_QUERY': '1',
}


def known() -> str:
  """All slices in words."""
  return ', '.join(f'{k}:{s}' for k in SLICES for s in SLICES[k])


def parse(name: str) -> tuple[Chip, int]:
  """The chip of a topology, and how many of them.

  Raises:
    InputError: there is no such topology; lists those there are.
  """
  kind, _, shape = name.partition(':')
  sizes = shape.split('x')
  if kind not in CHIPS or not all(s.isdigit() and int(s) for s in sizes):
    raise errors.InputError(
        f'There is no topology {name!r}; known: {known()}.'
    )
  chips = math.prod(map(int, sizes))
  if len(sizes) != CHIPS[kind].axes or chips % 4:
    raise errors.InputError(
        f'{name!r} is no slice: {kind} has {CHIPS[kind].axes} dimensions and '
        f'hosts of four chips; known: {known()}.'
    )
  return CHIPS[kind], chips


def require_compiler() -> str:
  """The version of the TPU compiler.

  Raises:
    InputError: it is not installed; says which extra has it.
  """
  if importlib.util.find_spec('libtpu') is None:
    raise errors.InputError(
        "Planning needs the TPU compiler: pip install -e '.[tpu-aot]' (about "
        '700 MB; no TPU is needed).'
    )
  import libtpu

  return getattr(libtpu, '__version__', 'unknown')


def devices(name: str) -> list:
  """Devices of a slice that is not here, for `sharding.make_mesh`."""
  parse(name)
  require_compiler()
  missing = [k for k, v in ENVIRONMENT.items() if os.environ.get(k) != v]
  if missing:
    raise RuntimeError(f'{missing} must be set as in ENVIRONMENT before JAX.')
  from jax.experimental import topologies

  try:
    found = topologies.get_topology_desc(platform='tpu', topology_name=name)
  except Exception as error:  # jaxlib has no class of its own for this
    raise errors.InputError(
        f'The compiler knows no topology {name!r} ({error}); known: {known()}.'
    ) from error
  return list(found.devices)
