"""Compiles one program of a run for a slice, in a process of its own.

  python -m rlpost.planning.compilation < request.json

so that a compiler that takes too long can be ended, and several can run at
once. The request says config, topology, program and cache; the verdict is the
last line of the output.
"""

import hashlib
import json
import pathlib
import re
import sys
import time

import ml_collections

from rlpost import errors, types
from rlpost.planning import topology

# Of what a kept verdict says; verdicts of another format are made anew.
FORMAT = 4
_UNITS = {'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}


def shapes_of(config, mesh):
  """`programs.Shapes` of a config, read as the trainer reads it.

  No file is read where the config states the model's shape and the room for
  prompts; else prompts are measured as the trainer measures them.
  """
  from rlpost.training import setup, supervised

  if config.launcher == 'experiments.sft':
    return supervised.shapes(config, mesh, _measured(config))
  stated = config.rollout.get('prefix_len') and config.rollout.get('prompt_len')
  return setup.shapes(
      config, mesh, (0, 0, 0) if stated else _measured(config)
  )


def _measured(config):
  from rlpost.training import setup

  model = setup.load_model(**config.model, seed=config.seed)
  return setup.longest(setup.make_tasks(**config.domains), model.tokenizer)


def programs_of(config, topology_name: str):
  """(shapes, mesh, programs) on the devices of a slice."""
  from rlpost import sharding
  from rlpost.training import programs

  devices = topology.devices(topology_name)
  mesh = sharding.make_mesh(**config.mesh, devices=devices)
  if mesh.size < len(devices):
    raise errors.InputError(
        f'config.mesh uses {mesh.size} of the {len(devices)} devices of '
        f'{topology_name}; set one of its sizes to -1, or take a smaller slice.'
    )
  shapes = shapes_of(config, mesh)
  with sharding.use(mesh):
    return shapes, mesh, programs.programs(shapes, mesh)


def verdict(config, topology_name: str, name: str, cache: pathlib.Path) -> dict:
  """What the compiler says of one program; kept by the program's hash."""
  from rlpost import sharding
  from rlpost.planning import report

  shapes, mesh, programs = programs_of(config, topology_name)
  program = programs[name]
  with sharding.use(mesh):
    lowered = program.lower()
  version = topology.require_compiler()
  key = digest(lowered.as_text(), topology_name, version)
  kept = cache / f'{key}-{FORMAT}.json'
  if kept.exists():
    return json.loads(kept.read_text()) | {'cached': True}
  start = time.monotonic()
  try:
    compiled = lowered.compile()
  except Exception as error:  # jaxlib's own classes are not public
    found = overflow(str(error))
    if found is None:
      raise
    found['bytes'] = report.asked(program, found['needed'])
  else:
    found = report.of(compiled, program, shapes, mesh, name, topology_name)
  found |= {
      'hash': key, 'compiler': version, 'topology': topology_name,
      'compile_s': round(time.monotonic() - start, 1),
  }
  cache.mkdir(parents=True, exist_ok=True)
  part = kept.with_suffix(f'.{time.monotonic_ns()}')
  part.write_text(json.dumps(found, indent=1))
  part.replace(kept)
  return found


def digest(stablehlo: str, topology_name: str, version: str) -> str:
  """Names a verdict: the program, what for, and by which compiler."""
  text = '\n'.join((topology_name, version, stablehlo))
  return hashlib.sha256(text.encode()).hexdigest()[:24]


def overflow(message: str) -> dict | None:
  """The verdict in an out-of-memory error; None if it is another error."""
  if 'RESOURCE_EXHAUSTED' not in message:
    return None
  found = re.search(
      r'([\d.]+)([KMGT])\)? (?:of|exceeds available HBM) \(?([\d.]+)([KMGT])',
      message,
  )
  needed = limit = None
  if found:
    needed = float(found[1]) * _UNITS[found[2]]
    limit = float(found[3]) * _UNITS[found[4]]
  return {
      'fits': False, 'needed': needed, 'limit': limit,
      'error': ' '.join(message.split())[:600],
  }


def main():
  """Reads the request, prints the verdict."""
  request = json.load(sys.stdin)
  config = ml_collections.ConfigDict(types.tuples(request['config'])).lock()
  try:
    found = verdict(
        config, request['topology'], request['program'],
        pathlib.Path(request['cache']),
    )
  except errors.RunError as error:
    found = {'input_error': str(error), 'exit_code': error.exit_code}
  print(json.dumps(found))


if __name__ == '__main__':
  main()
