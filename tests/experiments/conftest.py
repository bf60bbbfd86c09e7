"""A finished run of `quickstart:smoke`, shared by the tests of launchers."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = '--config=configs/quickstart.py:smoke'


@pytest.fixture(scope='session')
def launch():
  """Calls `python -m MODULE FLAGS...` and returns the finished process."""
  # Executables are kept between runs of the tests, as a user's are.
  cache = os.path.join(os.environ['JAX_COMPILATION_CACHE_DIR'], 'launched')

  def call(module, *flags, **environment):
    return subprocess.run(
      [sys.executable, '-m', module, *map(str, flags)],
      cwd=ROOT,
      env=os.environ | {'RLPOST_CACHE': cache} | environment,
      capture_output=True,
      text=True,
      timeout=600,
    )

  return call


@pytest.fixture(scope='session')
def finished(launch, tmp_path_factory):
  """Its workdir, and what it printed."""
  workdir = tmp_path_factory.mktemp('finished') / 'run'
  result = launch('experiments.train', CONFIG, f'--workdir={workdir}')
  assert not result.returncode, result.stdout + result.stderr
  return workdir, result.stdout
