"""Prints what a checkpoint holds: digests, sizes, leaves.

  python -m experiments.inspect --workdir=runs/NAME [--step=N] [--json]

Every item is read back and must have the digest that was recorded. Without
--step it takes the latest step that is whole. Exit code 5: it is damaged.
"""

import json
import warnings

from absl import flags, logging

from experiments import launching
from rlpost import errors

STEP = launching.step_flag()
JSON = flags.DEFINE_bool(
  'json', False, 'Print one JSON object.', allow_override=True
)


def main(config, workdir):
  """Reads a step back, item by item, and prints what it found."""
  del config
  from rlpost.training import checkpoint

  # Orbax warns about every item that it describes and does not restore.
  logging.set_verbosity(logging.ERROR)
  warnings.filterwarnings('ignore', 'Sharding info not provided')
  saved = checkpoint.Checkpoints(workdir, read_only=True)
  report = inspect_step(saved, STEP.value)
  if JSON.value:
    print(json.dumps(report, indent=2))
    return
  print(f'step {report["step"]} of {saved.directory}')
  print(f'state_sha256 {report["state_sha256"]}')
  for name, item in report['items'].items():
    digest = item['sha256'] or '(not part of the state)'
    size = item['bytes'] / 1e6
    print(f'{name:14s} {item["leaves"]:5d} leaves {size:10.3f} MB  {digest}')
  for step, why in report['damaged'].items():
    print(f'step {step} is damaged: {why}')


def inspect_step(saved, step: int | None = None) -> dict:
  """Reads a step back, every item of it, and describes it.

  Args:
    saved: the checkpoints of a workdir.
    step: None for the latest that is whole.

  Returns:
    `step`, `steps`, `best_step`, `metrics`, `state_sha256`, `items` {name:
    {sha256, leaves, bytes (on disk)}} and `damaged` {step: why}.

  Raises:
    DamagedStateError: the step, or every step, is damaged.
    InputError: there is no such step.
  """
  steps = saved.steps()
  if not steps:
    raise errors.InputError(f'{saved.directory} holds no checkpoint.')
  for candidate in [step] if step is not None else reversed(steps):
    try:
      report = _read_back(saved, candidate)
    except errors.DamagedStateError:
      if candidate in (step, steps[0]):
        raise
    else:
      return report | {'steps': steps, 'damaged': dict(saved.damaged)}


def _read_back(saved, step):
  from rlpost.training import digest

  saved.restore({}, step)  # Raises if there is no such step.
  record = saved.describe(step)
  items = {}
  # Item by item, so that memory holds one of them at a time; what differs
  # from its recorded digest is an error.
  for name, leaves in digest.leaves_in(record).items():
    if leaves[0].dtype == 'json':
      saved.restore({name: 'json'}, step)
    else:
      saved.restore_arrays(step, [name])
    items[name] = {
        'sha256': record['items'].get(name),
        'leaves': len(leaves),
        'bytes': _size(saved.directory / str(step) / name),
    }
  return {
      'step': step,
      'best_step': saved.best_step(),
      'metrics': record['metrics'],
      'state_sha256': record['state_sha256'],
      'items': items,
  }


def _size(path) -> int:
  if path.is_dir():
    return sum(_size(p) for p in path.iterdir())
  return path.stat().length


if __name__ == '__main__':
  launching.run(main)
