"""Runs a config's sweep, one run after the other, in WORKDIR/000, 001, ...

  python -m experiments.sweep --config=configs/NAME.py[:VARIANT]

The config file's `get_sweep()` yields the overrides, a dict of dotted keys for
each run; its launcher runs them. The same command again goes on with the sweep.
"""

import signal
import subprocess
import sys

from absl import flags
from ml_collections import config_flags

from experiments import launching
from rlpost import errors


def main(config, workdir):
  """Checks all runs first, then runs them; the worst exit code is its own."""
  flag = flags.FLAGS['config']
  spec = config_flags.get_config_filename(flag)
  common = config_flags.get_override_values(flag)
  module = launching.load_module(spec.partition(':')[0])
  if not hasattr(module, 'get_sweep'):
    raise errors.InputError(f'{spec} has no get_sweep().')
  runs = [dict(overrides) for overrides in module.get_sweep()]
  for overrides in runs:
    _check(spec, overrides)
  codes = []
  for i, overrides in enumerate(runs):
    words = ' '.join(f'{k}={v}' for k, v in overrides.items())
    print(f'sweep {i + 1} of {len(runs)}: {words}', flush=True)
    command = [sys.executable, '-m', config.launcher, f'--config={spec}']
    command += [f'--config.{k}={v}' for k, v in (common | overrides).items()]
    codes.append(_call([*command, f'--workdir={workdir}/{i:03d}']))
    print(f'sweep {i + 1} of {len(runs)}: exit {codes[-1]}', flush=True)
    if codes[-1] == errors.SavedAfterSignal.exit_code or codes[-1] < 0:
      break
  sys.exit(max((abs(code) for code in codes), default=0))


def _check(spec, overrides):
  """An unknown key or a wrong type is an error before the first run."""
  try:
    launching.read_config(spec).update_from_flattened_dict(overrides)
  except (AttributeError, KeyError, TypeError, ValueError) as e:
    raise errors.InputError(f'{spec}: get_sweep(), {overrides}: {e}') from e


def _call(command):
  """Runs it; a SIGTERM to the sweep is one to the run."""
  child = subprocess.Popen(command)
  before = signal.signal(signal.SIGTERM, lambda *_: child.terminate())
  try:
    return child.wait()
  finally:
    signal.signal(signal.SIGTERM, before)


if __name__ == '__main__':
  launching.run(main)
