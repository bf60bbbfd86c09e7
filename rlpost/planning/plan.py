"""A plan: a verdict on each program of a run, or on the meshes it may take."""

import itertools
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import ml_collections

from rlpost import errors
from rlpost.planning import compilation, cost, report, topology

# A program that is still compiling then is unknown, never a fit.
LIMIT_S = 600
MOST_COMPILED = 6


def programs(
    config, topology_name: str, cache: pathlib.Path, *,
    only: tuple[str, ...] = (), say: Callable[[str], Any] = print,
    limit_s: float = LIMIT_S,
) -> dict[str, Any]:
  """Compiles the programs of a config, one after the other.

  Args:
    config: of a run; its mesh must use the whole slice.
    cache: folder of verdicts.
    only: names of programs; all if empty.
    say: told of the progress.
    limit_s: most seconds for one program.

  Returns:
    {'topology', 'chips', 'programs': {name: verdict}}; see `report.of`.

  Raises:
    InputError: the config cannot run there at all; nothing is compiled.
  """
  chip, chips = topology.parse(topology_name)
  shapes, _, known = compilation.programs_of(config, topology_name)
  for name in only:
    if name not in known:
      raise errors.InputError(
          f'There is no program {name!r}; the run has {", ".join(known)}.'
      )
  check_room(shapes, known, topology_name)
  found = {}
  for name in only or known:
    found[name] = report.judged(
        _compile(config, topology_name, name, cache, say, limit_s),
        cost.beside(shapes, known, name), chip.hbm_bytes / chip.cores,
    )
  return {'topology': topology_name, 'chips': chips, 'programs': found}


def check_room(shapes, known, topology_name: str) -> None:
  """Refuses, by arithmetic, what a program is called with and cannot hold."""
  chip, _ = topology.parse(topology_name)
  limit = chip.hbm_bytes / chip.cores
  for name, program in known.items():
    kinds = cost.argument_bytes(program)
    needed = sum(v for k, v in kinds.items() if k != 'host')
    if needed > limit:
      words = ', '.join(
          f'{k} {v / 2**30:.1f}' for k, v in kinds.items() if v > 2**20
      )
      raise errors.DoesNotFitError(
          f'{name} is called with {needed / 2**30:.1f} GiB per device '
          f'({words}), a device of {topology_name} has {limit / 2**30:.1f}. '
          f'Take a larger slice, or a larger mesh.fsdp, tensor or context'
          f'{", or fewer rollout.slots" if kinds["cache"] else ""}.'
      )


def _compile(config, topology_name, name, cache, say, limit_s) -> dict:
  request = {
      'config': json.loads(config.to_json()), 'topology': topology_name,
      'program': name, 'cache': str(cache),
  }
  say(f'compiling {name} for {topology_name} ...')
  start = time.monotonic()
  child = subprocess.Popen(
      [sys.executable, '-m', 'rlpost.planning.compilation'],
      stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
      text=True,
  )
  try:
    out, err = child.communicate(json.dumps(request), timeout=limit_s)
  except subprocess.TimeoutExpired:
    say(f'{name}: still compiling after {limit_s:.0f} s, unknown')
    return {'fits': None, 'error': f'no verdict after {limit_s:.0f} s'}
  finally:
    child.kill()
    child.wait()
  if child.returncode:
    last = [x for x in err.splitlines() if x.strip()][-1:]
    return {'fits': None, 'error': f'the compiler failed: {" ".join(last)}'}
  found = json.loads(out.splitlines()[-1])
  if 'input_error' in found:
    raise errors.InputError(found['input_error'])
  word = {True: 'fits', False: 'does not fit'}[found['fits']]
  kept = ', known from before' if found.get('cached') else ''
  say(f'{name}: {word}{kept}, {time.monotonic() - start:.0f} s')
  return found


def fits(plan: dict) -> bool:
  """Whether every program is known to fit."""
  return all(v['fits'] for v in plan['programs'].values())


def price(plan: dict, per_chip_hour: float) -> dict:
  """Adds what an update costs at best, in the unit of the price."""
  train = plan['programs'].get('train', {})
  limit = train.get('roofline')
  if limit:
    usd = limit['seconds'] / 3600 * plan['chips'] * per_chip_hour
    plan['usd_per_update'] = usd
    plan['usd_per_million_tokens'] = usd / limit['tokens'] * 1e6
  return plan


def candidates(config, topology_name: str) -> Iterator[tuple[float, dict]]:
  """(estimated seconds of an update, changes) of meshes, remat and offload.

  By arithmetic alone: only those whose parameters, moments, kept activations
  and one layer's gathered weights are less than the memory; the estimate adds
  products, repeated ones included, and weights and keys on the links.
  """
  chip, chips = topology.parse(topology_name)
  count = chips * chip.cores
  section = {k: v for k, v in config.model.items()}
  from rlpost import sharding
  from rlpost.training.model import split_model

  model = split_model(section).model
  limit = chip.hbm_bytes / chip.cores
  divisors = [n for n in range(1, count + 1) if count % n == 0]
  for fsdp, context, tensor in itertools.product(divisors, repeat=3):
    if fsdp * context * tensor != count or config.train.rows % fsdp:
      continue
    if model.num_kv_heads % tensor:
      continue
    for remat, offload in itertools.product(('full', 'none'), (False, True)):
      changes = {
          'mesh': {'data': 1, 'fsdp': fsdp, 'tensor': tensor,
                   'context': context},
          'train.remat': remat, 'train.offload': offload,
      }
      if context > 1 and config.train.backend in ('dense', 'blockwise'):
        continue
      mesh = sharding.abstract_mesh(**changes['mesh'])
      shapes = compilation.shapes_of(changed(config, changes), mesh)
      needed, seconds = _estimate(shapes, changes, chip, count)
      if needed <= limit:
        yield seconds, changes


def _estimate(shapes, changes, chip, count) -> tuple[float, float]:
  """(bytes of a device, seconds of an update)."""
  model, mesh = shapes.step.model, changes['mesh']
  tokens = shapes.rows * shapes.length / (count / mesh['tensor'])
  item = 2 if shapes.step.dtype != 'float32' else 4
  kept = 1 if shapes.step.remat == 'full' else 10 + 3 * model.hidden / (
      model.width * mesh['tensor'])
  activations = kept * model.num_layers * tokens * model.width * item
  layer = (model.num_params / model.num_layers) * item / mesh['tensor']
  head = 2 * model.vocab_size * model.width * item
  moments = 4 if shapes.step.offload else 12
  state = (moments + 4) * model.num_params / count
  work = cost.work(shapes, 'train')
  rate = chip.flops / chip.cores
  compute = (work.flops + work.again) / count / rate
  passes = 4 if shapes.step.remat == 'full' else 3
  links = 2 * chip.link_bandwidth
  traffic = passes * shapes.micro * item * model.num_params / mesh['tensor']
  keys = tokens * (mesh['context'] - 1) * 2 * model.num_kv_heads
  keys *= model.head_dim * item * model.num_layers * shapes.micro * 5
  sums = 4 * passes * shapes.micro * tokens * model.width * item
  sums *= model.num_layers * (mesh['tensor'] > 1)
  seconds = max(compute, keys / links) + traffic / links * (
      count > mesh['tensor']) + sums / links
  if shapes.step.offload:
    seconds += 16 * model.num_params / count / 16e9  # over a host's bus
  return state + activations + 3 * layer + head, seconds


def changed(config, changes: dict):
  """A copy of a config with dotted keys replaced."""
  copy = ml_collections.ConfigDict(config.copy_and_resolve_references())
  with copy.unlocked():
    for key, value in changes.items():
      *path, last = key.split('.')
      part = copy
      for name in path:
        part = part[name]
      part[last] = value
  return copy.lock()


def search(
    config, topology_name: str, cache: pathlib.Path, say=print
) -> list[dict]:
  """The update on the best meshes by estimate: at most `MOST_COMPILED`."""
  ranked = sorted(candidates(config, topology_name), key=lambda x: x[0])
  if not ranked:
    raise errors.DoesNotFitError(
        f'By arithmetic no mesh of {topology_name} holds this run; take a '
        'larger slice, or fewer train.rows.'
    )
  say(f'{len(ranked)} settings may fit; compiling {MOST_COMPILED} at most')
  found = []
  for seconds, changes in ranked[:MOST_COMPILED]:
    plan = programs(
        changed(config, changes), topology_name, cache, only=('train',),
        say=say,
    )
    found.append(
        {'changes': changes, 'estimated_s': seconds} | plan['programs']['train']
    )
  return sorted(found, key=lambda v: (
      not v['fits'], v['roofline']['seconds'] if v['fits'] else 0
  ))
