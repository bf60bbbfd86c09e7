"""Tests of the inspection of checkpoints."""

import json
import os
import subprocess
import sys

import jax.numpy as jnp
import pytest

from experiments import inspect
from rlpost import errors
from rlpost.training import checkpoint, digest


def _items(step):
  return {
      'trainable': {'w': jnp.arange(300.0) + step},
      'opt': ({'count': jnp.asarray(step)}, {'w': jnp.ones((2, 3))}),
      'plan': {'cursor': step},
      'timing': {'cpu_s': 3.0},
  }


def _workdir(path):
  (path / 'config.json').write_text('{}')
  saved = checkpoint.Checkpoints(path)
  for step in (2, 4):
    saved.save(step, _items(step), metrics={'validation': 1 / step})
  saved.close()
  return path


def test_the_command_prints_the_digests(tmp_path):
  _workdir(tmp_path)
  command = [sys.executable, '-m', 'experiments.inspect', '--step=2', '--json']
  out = subprocess.run(
      [*command, f'--workdir={tmp_path}'],
      check=True, capture_output=True, text=True,
      env=os.environ | {'JAX_PLATFORMS': 'cpu'},
  )
  assert not out.stderr
  report = json.loads(out.stdout)
  whole, items = digest.state_sha256(_items(2))
  assert report['state_sha256'] == whole
  assert (report['step'], report['best_step']) == (2, 2)
  assert report['steps'] == [2, 4]
  found = {k: v['sha256'] for k, v in report['items'].items()}
  assert found == items | {'timing': None}
  assert report['items']['opt']['leaves'] == 2
  assert report['items']['trainable']['bytes'] > 1200
  assert report['metrics'] == {'validation': 0.5}


def test_a_damaged_step_is_named(tmp_path):
  saved = checkpoint.Checkpoints(_workdir(tmp_path), read_only=True)
  assert inspect.inspect_step(saved)['step'] == 4
  (tmp_path / checkpoint.DIRECTORY / '4' / 'opt' / 'manifest.ocdbt').unlink()
  report = inspect.inspect_step(saved)
  assert report['step'] == 2
  assert list(report['damaged']) == [4]
  with pytest.raises(errors.DamagedStateError, match='step 4'):
    inspect.inspect_step(saved, 4)
  with pytest.raises(errors.InputError, match='no step 3'):
    inspect.inspect_step(saved, 3)
  (tmp_path / checkpoint.DIRECTORY / '2' / 'plan' / 'metadata').write_text('')
  with pytest.raises(errors.DamagedStateError, match='step 2'):
    inspect.inspect_step(saved)


def test_a_workdir_without_checkpoints(tmp_path):
  saved = checkpoint.Checkpoints(tmp_path, read_only=True)
  with pytest.raises(errors.InputError, match='no checkpoint'):
    inspect.inspect_step(saved)
