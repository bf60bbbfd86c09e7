"""Continuous batching: keeps the slots of `decode` full of work.

A request is one prompt and the samples wanted of it. It takes as many prompt
slots as its samples fill, or what is free, but prefills once; its samples run
in the slots' rows and refill them as rows end; when the last sample has a row,
a slot is free for the next prompt once its rows are done.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlpost import errors, sharding
from rlpost.ops.attention import BACKENDS
from rlpost.rollouts import cache as caches
from rlpost.rollouts import decode, prefill
from rlpost.rollouts.cache import Cache, Layout


@dataclasses.dataclass(frozen=True)
class EngineConfig:
  """Static shapes of the decoding programs.

  Attributes:
    prompts: Q, prompt slots.
    rows: R, rows of each; a larger group takes several slots, or refills.
    prefix_len, prompt_len: room for the tokens that prompts share, and for
      those after them.
    width: W, most tokens sampled per row.
    prefixes: Z, shared prefixes held at one time.
    admit: prompts in one prefill; free slots are refilled in such batches.
    refill: with samples of admitted prompts left, decoding pauses when this
      many rows are idle.
    prefill_chunk: tokens of a prompt that are run at one time; 0 for all.
    backend: of attention in prefill; see `ops.attention.attention`.
  """

  prompts: int
  rows: int
  prefix_len: int
  prompt_len: int
  width: int
  prefixes: int = 1
  admit: int = 0
  refill: int = 0
  prefill_chunk: int = 0
  backend: str = 'dense'

  def __post_init__(self):
    for name in ('prompts', 'rows', 'prompt_len', 'width', 'prefixes'):
      if getattr(self, name) < 1:
        raise errors.InputError(f'{name}={getattr(self, name)} must be >= 1.')
    if self.prefill_chunk < 0:
      raise errors.InputError(
          f'{self.prefill_chunk=} must be >= 1, or 0 for whole prompts.'
      )
    if self.backend not in BACKENDS:
      raise errors.InputError(f'{self.backend=} must be one of {BACKENDS}.')
    if self.admit > self.prompts:
      raise errors.InputError(
          f'{self.admit=} must not exceed {self.prompts=}.'
      )

  @property
  def batch(self) -> int:
    return self.prompts * self.rows


class Programs(NamedTuple):
  """The jitted functions of `decode`, bound to a model.

  `shared(params, tokens_ZT, length_Z) -> Shared`;
  `admit(params, slots, cache, which, tokens, length, source) -> slots`;
  `run(params, slots, start, stop, root, pause) -> slots`;
  `empty() -> slots`.
  """

  shared: Callable
  admit: Callable
  run: Callable
  empty: Callable


class Shared(NamedTuple):
  """Z prefixes that prompts share: their cache, and tokens of each."""

  cache: Cache
  length: Any


class Request(NamedTuple):
  """A prompt as token ids, and (sample id, temperature) of each completion."""

  group: int
  prefix: tuple[int, ...]
  suffix: tuple[int, ...]
  samples: tuple[tuple[int, float], ...]


class Completion(NamedTuple):
  """What a row sampled; `stop_reason` as in `types.Trajectory`."""

  group: int
  sample: int
  temperature: float
  tokens: np.ndarray
  logp: np.ndarray
  stop_reason: str


class Engine:
  """Decodes requests with one set of compiled programs."""

  def __init__(self, config: EngineConfig, programs: Programs, stop_V):
    """`stop_V`: boolean [V], the tokens that end an answer."""
    self.config = config
    self._programs = programs
    self._stop_V = np.asarray(stop_V, bool)
    self._cache = None  # (version, {prefix: index}, Shared)

  def generate(
      self, params, version: int, requests: Sequence[Request], root,
      budget: int | None = None,
  ) -> Iterator[list[Completion]]:
    """Yields completions as they end, in batches.

    What a row samples depends on `params`, `root`, its group and its sample
    id, and on nothing else.

    Args:
      version: of `params`; caches of another version are never reused.
      root: PRNG key.
      budget: most sampled tokens; the config's width if None.
    """
    config = self.config
    budget = config.width if budget is None else budget
    if not 0 < budget <= config.width:
      raise errors.InputError(f'{budget=} must be in 1..{config.width}.')
    fit, refused = [], []
    for request in requests:
      fits = (
          len(request.prefix) <= config.prefix_len
          and 0 < len(request.suffix) <= config.prompt_len
      )
      (fit if fits else refused).append(request)
    if refused:
      yield [_overlong(r, s, t) for r in refused for s, t in r.samples]
    for part in _by_prefix(fit, config.prefixes):
      which = self._share(params, version, part)
      yield from _Session(self, params, which, part, root, budget).run()

  def _share(self, params, version, requests) -> dict:
    """Prefills the prefixes of `requests` unless this version has them."""
    # The same rows in the same order, or rounding could depend on what an
    # earlier call asked for, and a resumed run would differ.
    wanted = sorted({r.prefix for r in requests})
    if self._cache is not None and self._cache[0] == version:
      if list(self._cache[1]) == wanted:
        return self._cache[1]
    self._cache = None
    config = self.config
    tokens = np.zeros((config.prefixes, config.prefix_len), np.int32)
    length = np.zeros(config.prefixes, np.int32)
    for i, prefix in enumerate(wanted):
      tokens[i, : len(prefix)] = prefix
      length[i] = len(prefix)
    cache = self._programs.shared(params, tokens, length)
    which = {prefix: i for i, prefix in enumerate(wanted)}
    self._cache = version, which, cache
    return which


def _overlong(request, sample, temperature):
  empty = np.zeros(0, np.int32)
  return Completion(
      request.group, sample, temperature, empty, empty.astype(np.float32),
      'overlong',
  )


def _by_prefix(requests, most):
  """Parts with at most `most` distinct prefixes each, in stable order."""
  groups = collections.defaultdict(list)
  for request in requests:
    groups[request.prefix].append(request)
  parts = list(groups.values())
  if len(parts) <= most:
    return [requests] if requests else []
  return [
      [r for part in parts[i : i + most] for r in part]
      for i in range(0, len(parts), most)
  ]


class _Session:
  """One `generate` over requests whose prefixes are cached.

  Its slots go with it, so an update has their memory.
  """

  def __init__(self, engine, params, which, requests, root, budget):
    self._engine, self._params, self._which = engine, params, which
    self._root, self._budget = root, budget
    config = engine.config
    self._waiting = collections.deque(requests)
    self._requests = [None] * config.prompts
    self._left = [collections.deque() for _ in range(config.prompts)]
    self._slots = engine._programs.empty()
    self._rows = [None] * config.batch  # (request, sample, temperature)
    self._start = decode.Start(
        fresh=np.zeros(config.batch, bool),
        temperature=np.ones(config.batch, np.float32),
        budget=np.full(config.batch, budget, np.int32),
        group=np.zeros(config.batch, np.int32),
        sample=np.zeros(config.batch, np.int32),
    )

  def run(self) -> Iterator[list[Completion]]:
    programs, stop_V = self._engine._programs, self._engine._stop_V
    while True:
      self._admit()
      self._assign()
      live = sum(row is not None for row in self._rows)
      if not live:
        return
      # Copies: the program may read its arguments after the call returns.
      start = jax.tree.map(np.copy, self._start)
      self._slots = programs.run(
          self._params, self._slots, start, stop_V, self._root,
          self._pause(live),
      )
      self._start.fresh[:] = False
      yield self._collect()

  def _pause(self, live: int) -> np.ndarray:
    """When decoding returns so that idle rows can be refilled."""
    config = self._engine.config
    rows = busy = 0
    if any(self._left):
      rows = max(live - max(config.refill, 1), 0)
    elif self._waiting:
      free = min(config.admit or config.prompts, len(self._waiting))
      busy = config.prompts - free
    return np.array([rows, busy], np.int32)

  def _admit(self):
    """Prefills waiting prompts into free slots, a batch at a time."""
    config = self._engine.config
    most = config.admit or config.prompts
    while self._waiting:
      free = [q for q in range(config.prompts) if self._free(q)]
      busy = len(free) < config.prompts
      if not free or (busy and len(free) < min(most, len(self._waiting))):
        return
      self._prefill(free, most)

  def _free(self, q):
    rows = self._rows[q * self._engine.config.rows:][: self._engine.config.rows]
    return not self._left[q] and all(row is None for row in rows)

  def _prefill(self, free, most):
    """Fills free slots from at most `most` prompts."""
    engine, config = self._engine, self._engine.config
    tokens = np.zeros((most, config.prompt_len), np.int32)
    which, length = np.zeros((2, most), np.int32)
    source = np.full(config.prompts, -1, np.int32)
    for i in range(most):
      if not (self._waiting and free):
        break
      request = self._waiting.popleft()
      left = collections.deque(request.samples)
      wanted = max(-(-len(left) // config.rows), 1)
      for q in free[:wanted]:
        self._requests[q], self._left[q], source[q] = request, left, i
      free = free[wanted:]
      tokens[i, : len(request.suffix)] = request.suffix
      length[i] = len(request.suffix)
      which[i] = self._which[request.prefix]
    self._slots = engine._programs.admit(
        self._params, self._slots, engine._cache[2], which, tokens, length,
        source,
    )

  def _assign(self):
    """Gives idle rows the next sample of their slot's prompt."""
    R = self._engine.config.rows
    for b in range(len(self._rows)):
      q = b // R
      if self._rows[b] is None and self._left[q]:
        sample, temperature = self._left[q].popleft()
        request = self._requests[q]
        self._rows[b] = request, sample, temperature
        self._start.fresh[b] = True
        self._start.temperature[b] = temperature
        self._start.group[b] = request.group
        self._start.sample[b] = sample

  def _collect(self) -> list[Completion]:
    slots = self._slots
    live, count, tokens, logp = jax.device_get(
        (slots.live, slots.count, slots.tokens, slots.logp)
    )
    done = []
    for b, row in enumerate(self._rows):
      if row is None or live[b]:
        continue
      request, sample, temperature = row
      n = int(count[b])
      ended = bool(self._engine._stop_V[tokens[b, n - 1]])
      done.append(
          Completion(
              request.group, sample, temperature, tokens[b, :n].copy(),
              logp[b, :n].copy(), 'stop' if ended else 'length',
          )
      )
      self._rows[b] = None
    return done


def layout(model, dtype, mesh, stacked=False) -> Layout:
  """How caches lie on a mesh.

  Raises:
    InputError: heads do not divide over the mesh.
  """
  tensor = mesh.shape['tensor']
  for name in ('num_heads', 'num_kv_heads'):
    heads = getattr(model, name)
    if heads % tensor:
      raise errors.InputError(
          f'{name}={heads} must divide over {tensor} devices of the tensor '
          f'axis; make it {math.gcd(heads, tensor)} and the context axis '
          f'{tensor // math.gcd(heads, tensor)} times as large.'
      )
  return Layout(model, jnp.dtype(dtype), stacked, mesh.shape['context'])


class _Room(NamedTuple):
  """Columns of caches for each window of a period, and where, in layers
  without a window, a prompt's own tokens begin."""

  prefix: tuple[int, ...]
  prompt: tuple[int, ...]
  begin: int


def _room(config: EngineConfig, layout: Layout) -> _Room:
  begin, own = (
      math.prod(layout.pieces(length, config.prefill_chunk))
      for length in (config.prefix_len, config.prompt_len)
  )
  prompt = layout.columns(begin + own, config.prefix_len + config.prompt_len)
  prefix = tuple(
      begin if window is None else columns if begin else 0
      for window, columns in zip(layout.model.windows, prompt, strict=True)
  )
  return _Room(prefix, prompt, begin)


def cache_bytes(config: EngineConfig, model, dtype, mesh) -> dict[str, int]:
  """Bytes of keys and values on each device, by what they belong to.

  'prompts' and 'rows' of the slots, shared 'prefixes', and 'admitted': prompts
  that have been prefilled and are on their way into slots.
  """
  lay = layout(model, dtype, mesh)
  room = _room(config, lay)

  def held(count, columns, sequences='batch'):
    elements = 0
    for shape in lay.shapes(count, columns):
      axes = caches.axes(len(shape), sequences)
      place = sharding.fitting(mesh, shape, axes)
      elements += 2 * math.prod(place.shard_shape(shape))
    return elements * lay.dtype.itemsize

  return {
      'prompts': held(config.prompts, room.prompt),
      'rows': held(config.batch, decode.rings(lay, config.width)),
      'prefixes': held(config.prefixes, room.prefix, None),
      'admitted': held(config.admit or config.prompts, room.prompt),
  }


def functions(config: EngineConfig, layout: Layout) -> dict[str, Any]:
  """The pure functions behind `Programs`, by name, not yet jitted."""
  more = {'chunk': config.prefill_chunk, 'backend': config.backend}
  room = _room(config, layout)

  def shared(params, tokens, length):
    cache = layout.empty(config.prefixes, room.prefix)
    if not config.prefix_len:
      return Shared(cache, length)
    start = jnp.zeros_like(length)
    cache, _ = prefill.prefill(
        layout, params, tokens, length, cache, start, 0, **more
    )
    return Shared(cache, length)

  def admit(params, slots, cache, which, tokens, length, source):
    start = cache.length[which]
    prompt = layout.empty(tokens.shape[0], room.prompt)
    if config.prefix_len:
      prompt = prefill.behind(layout, cache.cache, which, prompt)
    prompt, hidden = prefill.prefill(
        layout, params, tokens, length, prompt, start, room.begin, **more
    )
    return decode.admit(slots, prompt, hidden, start + length, source)

  def run(params, slots, start, stop, root, pause):
    return decode.run(layout, params, slots, start, stop, root, pause)

  def empty():
    return decode.empty(
        layout, prompts=config.prompts, rows=config.rows,
        columns=room.prompt, width=config.width,
    )

  return {'shared': shared, 'admit': admit, 'run': run, 'empty': empty}
