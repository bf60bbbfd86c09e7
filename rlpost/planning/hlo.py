"""Collectives of a compiled program, from its scheduled HLO text."""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

KINDS = (
    'all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all',
    'collective-permute',
)
_BITS = {
    'pred': 8, 's4': 4, 'u4': 4, 's8': 8, 'u8': 8, 's16': 16, 'u16': 16,
    'bf16': 16, 'f16': 16, 's32': 32, 'u32': 32, 'f32': 32, 's64': 64,
    'u64': 64, 'f64': 64, 'c64': 64,
}
_HEADER = re.compile(r'^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$')
_LINE = re.compile(
    r'^\s+(?:ROOT )?%?([\w.\-]+) = (.+?) ([a-z][a-z0-9\-]*)\((.*)$'
)
_CALLS = re.compile(
    r'(?:calls|to_apply|body|condition|called_computations)=%?([\w.\-]+)'
)
_BRANCHES = re.compile(r'branch_computations=\{([^}]*)\}')
_TRIPS = re.compile(r'known_trip_count[^0-9]*(\d+)')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line: `name = type opcode(rest`."""

  name: str
  type: str
  opcode: str
  rest: str


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective operation of a program.

  Attributes:
    kind: of `KINDS`.
    bytes: of what it makes (of what it takes, for a reduce-scatter), on one
      device.
    axes: mesh axes that it runs along, joined by '+'.
    ways: devices that take part together.
    times: how often the program runs it.
  """

  kind: str
  bytes: int
  axes: str
  ways: int
  times: int

  @property
  def sent(self) -> float:
    """Bytes that a device sends in all, by the ring algorithm.

    Of n devices: (n - 1) / n of the bytes, twice that for an all-reduce; all of
    them for a permute.
    """
    share = (self.ways - 1) / self.ways
    if self.kind == 'collective-permute':
      share = 1.0
    elif self.kind == 'all-reduce':
      share *= 2
    return share * self.bytes * self.times


def parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
  """({computation: instructions in order}, the entry's name)."""
  found, entry, current = {}, '', None
  for line in text.splitlines():
    header = _HEADER.match(line)
    if header:
      current = found.setdefault(header[2], [])
      entry = header[2] if header[1] else entry
    elif current is not None:
      instruction = _LINE.match(line)
      if instruction:
        current.append(Instruction(*instruction.groups()))
  return found, entry


def size(type_: str) -> int:
  """Bytes of a type, tuples summed."""
  total = 0
  for name, dims in re.findall(r'\b([a-z]+\d+|pred)\[([\d,]*)\]', type_):
    if name in _BITS:
      count = math.prod(int(d) for d in dims.split(',') if d)
      total += count * _BITS[name] // 8
  return total


def _trips(loop: Instruction, computations) -> int | None:
  """How often a loop runs: told, or i < constant; None: only the data knows."""
  known = _TRIPS.search(loop.rest)
  if known:
    return int(known[1])
  condition = computations.get(
      re.search(r'condition=%?([\w.\-]+)', loop.rest)[1], []
  )
  constants = {
      line.name: int(line.rest.partition(')')[0])
      for line in condition
      if line.opcode == 'constant' and line.type.startswith('s32[]')
  }
  for line in condition:
    if line.opcode == 'compare' and 'direction=LT' in line.rest:
      bound = re.findall(r'%([\w.\-]+)', line.rest.partition(')')[0])[-1]
      return constants.get(bound)
  return None


def walk(text: str, loops: Mapping[str, int] | int = 1) -> Iterator[tuple]:
  """(times, computation's name, its instructions), entry first.

  Args:
    loops: trips of a loop whose count the compiler does not know.
  """
  computations, entry = parse(text)

  def visit(name, times):
    body = computations.get(name, [])
    yield times, name, body
    for line in body:
      trips = 1
      if line.opcode == 'while':
        trips = _trips(line, computations) or loops
      inner = _CALLS.findall(line.rest)
      for group in _BRANCHES.findall(line.rest):
        inner += [x.strip().lstrip('%') for x in group.split(',')]
      for other in inner:
        yield from visit(other, times * trips)

  yield from visit(entry, 1)


def groups(line: str, devices: int) -> list[tuple[int, ...]]:
  """Devices that take part together, from any way of writing it."""
  pairs = re.search(r'source_target_pairs=\{(\{.*?\})\}', line)
  if pairs:
    return [tuple(map(int, p)) for p in
            re.findall(r'\{(\d+),(\d+)\}', pairs[1])]
  named = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line)
  if named:
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
    shape = [int(n) for n in sizes.values()]
    names = re.findall(r"'(\w+)'", named[2])
    axes = [list(sizes).index(n) for n in names]
    ids = np.arange(math.prod(shape)).reshape(shape)
    ids = np.moveaxis(ids, axes, range(-len(axes), 0))
    ways = math.prod(shape[a] for a in axes)
    return [tuple(row) for row in ids.reshape(-1, ways).tolist()]
  iota = re.search(
      r'replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', line
  )
  if iota:
    shape, source = ([int(n) for n in iota[i].split(',')] for i in (1, 2))
    ids = np.arange(math.prod(source)).reshape(source)
    if iota[3]:
      ids = ids.transpose([int(n) for n in iota[3].split(',')])
    return [tuple(row) for row in ids.reshape(-1, shape[-1]).tolist()]
  listed = re.search(r'replica_groups=\{(\{.*?\})\}', line)
  if listed:
    return [tuple(map(int, g.split(',')))
            for g in re.findall(r'\{([\d,]+)\}', listed[1])]
  return [tuple(range(devices))]


def axes_of(members: list[tuple[int, ...]], mesh_shape: Mapping) -> str:
  """Mesh axes along which the members of a group differ."""
  names, shape = list(mesh_shape), tuple(mesh_shape.values())
  differ = set()
  for group in members:
    at = np.array(np.unravel_index(group, shape))
    differ |= {names[i] for i in np.flatnonzero((at != at[:, :1]).any(1))}
  return '+'.join(n for n in names if n in differ) or 'none'


def collectives(text: str, mesh_shape: Mapping, loops=1) -> list[Collective]:
  """All collectives of a program, with how often they run.

  Args:
    mesh_shape: axis -> size, in the mesh's order.
    loops: see `walk`.
  """
  devices = math.prod(mesh_shape.values())
  found = []
  for times, name, body in walk(text, loops):
    targets = {t for line in body for t in _TARGET.findall(line.rest)}
    # One gather that runs beside products is written three times: where it
    # begins, in the product, and where it ends. It counts where it begins.
    beside = name.startswith('async_collective_fusion')
    if 'AsyncCollectiveDone' in targets or (
        beside and 'AsyncCollectiveStart' not in targets
    ):
      continue
    for line in body:
      kind = line.opcode.removesuffix('-start')
      if kind not in KINDS or line.opcode.endswith('-done'):
        continue
      bytes_ = size(line.type)
      if line.opcode.endswith('-start') and line.type.startswith('('):
        parts = re.findall(r'[a-z]+\d+\[[\d,]*\]', line.type)
        half = len(parts) // 2 if kind != 'collective-permute' else 1
        bytes_ = sum(map(size, parts[half:2 * half]))
      if name.startswith('all-reduce-scatter'):
        kind = 'reduce-scatter'
      elif kind == 'reduce-scatter':
        bytes_ *= len(groups(line.rest, devices)[0])
      together = groups(line.rest, devices)
      ways = len(together[0])
      found.append(Collective(
          kind, bytes_, axes_of(together, mesh_shape), ways, times
      ))
  return found


def totals(found: list[Collective]) -> list[dict]:
  """Summed by kind and axes, the most bytes sent first."""
  sums = collections.defaultdict(lambda: [0, 0, 0.0])
  for c in found:
    entry = sums[c.kind, c.axes]
    entry[0] += c.times
    entry[1] += c.bytes * c.times
    entry[2] += c.sent
  rows = [
      {'kind': kind, 'axes': axes, 'times': n, 'bytes': b, 'sent': sent}
      for (kind, axes), (n, b, sent) in sums.items()
  ]
  return sorted(rows, key=lambda row: -row['sent'])


def overlap(text: str, loops=1) -> dict[str, int]:
  """Permutes, and those on their way while a loop or a product runs.

  In scheduled order, a permute is hidden if a loop, or a fusion with a product
  in it, stands between its start and its end.
  """
  computations, _ = parse(text)

  def works(line):
    if line.opcode in ('while', 'dot', 'convolution'):
      return True
    inner = itertools.chain.from_iterable(
        computations.get(n, []) for n in _CALLS.findall(line.rest)
    ) if line.opcode == 'fusion' else ()
    return any(x.opcode in ('dot', 'convolution') for x in inner)

  total = hidden = 0
  for times, _, body in walk(text, loops):
    busy, open_ = 0, {}
    for line in body:
      if line.opcode == 'collective-permute-start':
        open_[line.name] = busy
        total += times
      elif line.opcode == 'collective-permute-done':
        start = re.match(r'%?([\w.\-]+)', line.rest)[1]
        hidden += times * (start in open_ and busy > open_[start])
      elif works(line):
        busy += 1
  return {'permutes': total, 'hidden': hidden}
