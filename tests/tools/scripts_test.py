"""The shell commands refuse bad input at once, before any set-up."""

import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def call(*words, **environment):
  return subprocess.run(
    words,
    cwd='/',
    env=os.environ | environment,
    stdin=subprocess.DEVNULL,
    capture_output=True,
    text=True,
    timeout=60,
  )


def test_unknown_config_lists_those_that_exist():
  result = call(ROOT / 'tools/run', 'nope:smoke')
  assert result.returncode == 2
  assert 'no configs/nope.py' in result.stderr
  for path in (ROOT / 'configs').glob('*.py'):
    assert f' {path.stem} ' in result.stderr


def test_help_is_the_head_of_the_script():
  result = call(ROOT / 'tools/run', '--help')
  assert result.returncode == 0
  assert result.stdout.startswith('tools/run [NAME[:VARIANT]] [flags]')
  assert result.stdout.rstrip().endswith('goes on where it stopped.')


def test_an_old_python_is_refused():
  result = call(ROOT / 'tools/test', PYTHON='/bin/false')
  assert result.returncode == 2
  assert 'PYTHON=/path/to/python3.11' in result.stderr


@pytest.mark.parametrize('name', ['tools/setup.sh', 'tools/run', '.ci/run'])
def test_bash_can_parse(name):
  assert call('bash', '-n', ROOT / name).returncode == 0
