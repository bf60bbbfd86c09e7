"""Launchers: flags, exit codes, the config that a workdir holds."""

import errno
import importlib
import json
import os
import pathlib
import re
import resource
import subprocess
import sys
import textwrap

import ml_collections
import pytest

from experiments import launching
from rlpost import errors, types

ROOT = pathlib.Path(__file__).parents[2]
LAUNCHERS = sorted(
  p.stem
  for p in (ROOT / 'experiments').glob('*.py')
  if '\n  launching.run(' in p.read_text()
)
CONFIGS = sorted(p.stem for p in (ROOT / 'configs').glob('*.py'))

CONFIG = """
  import ml_collections

  def get_config(variant=''):
    if variant not in ('', 'smoke'):
      raise ValueError(f'{variant!r} must be smoke.')
    config = ml_collections.ConfigDict()
    config.launcher = 'launcher'
    config.steps = 2 if variant else 10
    config.widths = (1, 2)
    config.optimizer = ml_collections.ConfigDict()
    config.optimizer.learning_rate = 1e-3
    config.optimizer.b1 = 0.9
    return config

  def get_sweep():
    yield {'optimizer.b1': 0.5, 'widths': (3,)}
    yield {'optimizer.b1': 0.7}
"""

LAUNCHER = """
  '''A launcher that fails on demand.'''
  import os, sys
  from absl import flags
  from experiments import launching
  from rlpost import errors

  FAIL = flags.DEFINE_string('fail', '', 'How to fail.')

  def main(config, workdir):
    resumed = launching.settle_config(config, workdir)
    print('ran', workdir, config.steps, config.optimizer.b1, resumed)
    if FAIL.value.startswith('os '):
      raise OSError(int(FAIL.value[3:]), 'no luck')
    if FAIL.value:
      raise getattr(errors, FAIL.value)('no luck')

  if __name__ == '__main__':
    launching.run(main)
"""


@pytest.fixture
def folder(tmp_path):
  """A folder with a config, a launcher and a way to call it."""
  (tmp_path / 'configs').mkdir()
  (tmp_path / 'configs/toy.py').write_text(textwrap.dedent(CONFIG))
  (tmp_path / 'launcher.py').write_text(textwrap.dedent(LAUNCHER))
  return tmp_path


def call(folder, *flags, module='launcher'):
  path = f'{folder}:{ROOT}'
  return subprocess.run(
    [sys.executable, '-m', module, *flags],
    cwd=folder,
    env=os.environ | {'PYTHONPATH': path},
    capture_output=True,
    text=True,
    timeout=60,
  )


def toy(**changes):
  config = ml_collections.ConfigDict(
    {'steps': 10, 'widths': (1, 2), 'optimizer': {'b1': 0.9, 'b2': 0.99}}
  )
  config.update_from_flattened_dict(changes)
  return config.lock()


def test_a_run_gets_its_config_and_default_workdir(folder):
  result = call(folder, '--config=configs/toy.py:smoke', '--config.steps=4')
  assert not result.returncode, result.stderr
  assert 'config: steps = 4' in result.stdout
  assert 'ran runs/toy-smoke 4 0.9 False' in result.stdout
  stored = json.loads((folder / 'runs/toy-smoke/config.json').read_text())
  assert stored['steps'] == 4
  # The workdir alone names the run from now on.
  again = call(folder, '--workdir', 'runs/toy-smoke')
  assert 'ran runs/toy-smoke 4 0.9 True' in again.stdout, again.stderr
  # Without the variant it is another config, and another default.
  other = call(folder, '--config', 'configs/toy.py')
  assert 'ran runs/toy 10 0.9 False' in other.stdout, other.stderr
  refused = call(folder, '--config=configs/toy.py', '--workdir=runs/toy-smoke')
  assert refused.returncode == 0  # 4 -> 10 steps: it may grow
  refused = call(folder, '--config=configs/toy.py:smoke', '--workdir=runs/toy')
  assert refused.returncode == 2
  assert '  steps: 10 -> 2\n' in refused.stderr


@pytest.mark.parametrize(
  ('flags', 'words'),
  [
    (['--config.optimizer.learning_rte=1'], 'mean optimizer.learning_rate?'),
    (['--config.b1=0.5'], 'mean optimizer.b1?'),
    (['--config.noflag'], "no key 'noflag'"),
    (['--config.steps=many'], 'steps'),
    (['--config.steps=1e3'], 'steps'),
    (['--stepz=3'], 'stepz'),
    (['--traceback', 'steps=3'], "'steps=3' is not a flag"),
    (['--config=configs/toy.py:big'], "no variant 'big'"),
    (['--config=configs/nope.py'], 'there are: toy.py'),
    (['--config='], 'there are: toy.py'),
  ],
)
def test_bad_input_is_one_line_and_exit_2(folder, flags, words):
  result = call(folder, '--config=configs/toy.py', *flags)
  assert result.returncode == 2, result.stderr
  assert words in result.stderr
  if '--traceback' not in flags:
    assert result.stderr.startswith('error: ')
    assert result.stderr.count('\n') == 1, result.stderr
  assert not (folder / 'runs').exists()


def test_no_config_at_all(folder):
  result = call(folder)
  assert result.returncode == 2
  assert '--config=configs/NAME.py' in result.stderr
  assert 'toy.py' in result.stderr


@pytest.mark.parametrize(
  ('name', 'code', 'word'),
  [
    ('InputError', 2, 'error'),
    ('DoesNotFitError', 3, 'error'),
    ('NonFiniteError', 4, 'error'),
    ('LostWorkerError', 5, 'error'),
    ('DamagedStateError', 5, 'error'),
    ('SavedAfterSignal', 75, 'stopped'),
  ],
)
def test_errors_become_exit_codes(folder, name, code, word):
  result = call(folder, '--config=configs/toy.py', f'--fail={name}')
  assert result.returncode == code
  assert result.stderr == f'{word}: no luck\n'
  result = call(
    folder, '--config=configs/toy.py', f'--fail={name}', '--traceback'
  )
  assert result.returncode == code
  assert 'Traceback' in result.stderr


def test_full_disk_is_said_and_other_os_errors_are_not_hidden(folder):
  config = '--config=configs/toy.py'
  result = call(folder, config, f'--fail=os {errno.ENOSPC}')
  assert (result.returncode, result.stderr.count('\n')) == (3, 1)
  assert 'the disk is full' in result.stderr
  result = call(folder, config, f'--fail=os {errno.EACCES}')
  assert result.returncode == 1
  assert 'Traceback' in result.stderr


def test_help_shows_the_docstring_and_all_flags(folder):
  result = call(folder, '--help')
  assert result.returncode == 0
  for word in ('fails on demand', '--fail', '--config', '--workdir'):
    assert word in result.stdout


@pytest.mark.parametrize('name', LAUNCHERS)
def test_help_of_every_launcher_answers_at_once(name):
  before = resource.getrusage(resource.RUSAGE_CHILDREN)
  result = call(ROOT, '--help', module=f'experiments.{name}')
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  assert result.returncode == 0, result.stderr
  assert '--workdir' in result.stdout
  cpu_s = sum(after[:2]) - sum(before[:2])  # user and system
  assert cpu_s < 1.0, f'{cpu_s:.1f} CPU s: import jax inside main.'


@pytest.mark.parametrize('name', CONFIGS)
def test_every_config_names_its_command(name):
  spec = f'configs/{name}.py'
  config = launching.read_config(str(ROOT / spec))
  smoke = launching.read_config(f'{ROOT / spec}:smoke')
  assert config.launcher == smoke.launcher
  importlib.import_module(config.launcher)
  doc = launching.load_module(str(ROOT / spec)).__doc__ or ''
  # `tools/run` alone runs the quickstart.
  command = rf'tools/run {name}\b|{re.escape(config.launcher)} --config={spec}'
  command += '|tools/run$' if name == 'quickstart' else ''
  assert re.search(command, doc, re.M), f'{spec}: its docstring lacks it.'
  # A stored config is equal to the one it was written from.
  stored = types.tuples(json.loads(config.to_json()))
  assert ml_collections.ConfigDict(stored).to_json() == config.to_json()


def test_equal_config_resumes_and_steps_may_grow(tmp_path):
  workdir = str(tmp_path / 'a/b')
  assert launching.load_config(workdir) is None
  assert not launching.settle_config(toy(), workdir)
  assert launching.settle_config(toy(), workdir)
  assert launching.settle_config(toy(steps=20), workdir)
  assert launching.load_config(workdir).to_dict() == toy(steps=20).to_dict()
  with pytest.raises(errors.InputError, match=r'steps: 20 -> 10'):
    launching.settle_config(toy(), workdir)
  assert launching.load_config(workdir).steps == 20
  with pytest.raises(errors.InputError, match=r'steps: 20 -> 30'):
    launching.settle_config(toy(steps=30), workdir, may_grow=())


def test_sections_that_may_change_are_stored_anew(tmp_path):
  workdir = str(tmp_path)
  launching.settle_config(toy(), workdir)
  changed = toy(**{'optimizer.b1': 0.5})
  with pytest.raises(errors.InputError, match='may change: mesh'):
    launching.settle_config(changed, workdir)
  launching.settle_config(changed, workdir, may_change=('optimizer',))
  assert launching.load_config(workdir).optimizer.b1 == 0.5
  with pytest.raises(errors.InputError, match='widths'):  # and no other
    launching.settle_config(
      toy(widths=(3,)), workdir, may_change=('optimizer',)
    )


def test_each_difference_is_shown(tmp_path):
  launching.settle_config(toy(), str(tmp_path))
  changed = toy(**{'optimizer.b1': 0.5, 'widths': (1, 3)}).unlock()
  changed.seed = 7
  del changed.optimizer.b2
  with pytest.raises(errors.InputError) as caught:
    launching.settle_config(changed.lock(), str(tmp_path))
  lines = str(caught.value).splitlines()
  assert lines[1:-1] == [
    '  optimizer.b1: 0.9 -> 0.5',
    '  optimizer.b2: 0.99 -> (absent)',
    '  seed: (absent) -> 7',
    '  widths: (1, 2) -> (1, 3)',
  ]


def test_other_processes_do_not_write(tmp_path):
  launching.settle_config(toy(), str(tmp_path), write=False)
  assert not list(tmp_path.iterdir())


def test_damaged_config_is_named(tmp_path):
  launching.settle_config(toy(), str(tmp_path))
  path = tmp_path / 'config.json'
  path.write_text(path.read_text()[:20])
  with pytest.raises(errors.InputError, match=r'config\.json is damaged'):
    launching.settle_config(toy(), str(tmp_path))


def build(key, *, learning_rate, b1=0.9):
  return key, learning_rate, b1


def test_a_section_is_the_arguments_of_what_it_builds():
  def check(**section):
    launching.check_section(section, build, 'optimizer', given=('key',))

  check(learning_rate=1e-3)
  check(learning_rate=1e-3, b1=0.5)
  with pytest.raises(errors.InputError, match=r'mean learning_rate\?'):
    check(learning_rte=1e-3)
  with pytest.raises(errors.InputError, match='lacks learning_rate'):
    check(b1=0.5)
  with pytest.raises(errors.InputError, match=r'optimizer\.key is no arg'):
    check(learning_rate=1e-3, key=0)
  with pytest.raises(TypeError, match='any keyword'):
    launching.check_section({}, lambda **kw: kw, 'optimizer')


def test_a_config_is_the_sections_that_are_read():
  sections = {
    'steps': None, 'widths': None, 'optimizer': (lambda b1, b2: None, ())
  }
  launching.check_config(toy(), sections)
  with pytest.raises(errors.InputError, match='nothing reads config.widths'):
    launching.check_config(
      toy(), {k: v for k, v in sections.items() if k != 'widths'}
    )
  with pytest.raises(errors.InputError, match='the config lacks seed'):
    launching.check_config(toy(), sections | {'seed': None})
  with pytest.raises(errors.InputError, match='lacks rows; build needs it'):
    def build(*, rows):
      return rows

    launching.check_config(toy(), sections | {'train': (build, ())})


def test_describe_says_what_tools_run_needs(folder):
  result = call(folder, 'configs/toy.py', module='experiments.launching')
  assert result.stdout == 'launcher -\n'
  path = folder / 'configs/toy.py'
  model = "config.model = ml_collections.ConfigDict({'source': 'smollm2'})"
  end = '  return config'
  path.write_text(path.read_text().replace(end, f'  {model}\n{end}'))
  result = call(folder, 'configs/toy.py:smoke', module='experiments.launching')
  assert result.stdout == 'launcher smollm2\n', result.stderr
  result = call(folder, 'configs/toy.py:x', module='experiments.launching')
  assert result.returncode == 2
  assert result.stderr.startswith('error: ')


def test_sweep_runs_each_row_in_its_own_workdir(folder):
  flags = ['--config=configs/toy.py:smoke', '--config.steps=3', '--workdir=out']
  result = call(folder, *flags, module='experiments.sweep')
  assert not result.returncode, result.stderr
  ran = [ln for ln in result.stdout.splitlines() if ln.startswith('ran')]
  assert ran == ['ran out/000 3 0.5 False', 'ran out/001 3 0.7 False']
  first = json.loads((folder / 'out/000/config.json').read_text())
  assert first['widths'] == [3]
  again = call(folder, *flags, module='experiments.sweep')
  assert 'ran out/001 3 0.7 True' in again.stdout


def test_sweep_refuses_an_unknown_key_before_the_first_run(folder):
  path = folder / 'configs/toy.py'
  path.write_text(path.read_text().replace("b1': 0.7", "b7': 0.7"))
  result = call(folder, '--config=configs/toy.py', module='experiments.sweep')
  assert result.returncode == 2
  assert 'b7' in result.stderr
  assert not (folder / 'runs').exists()


def test_sigterm_is_left_to_the_loop(folder):
  """`run` installs no handler: the loop decides what a signal does."""
  code = (
    'import signal, sys\n'
    'from experiments import launching\n'
    'def main(config, workdir):\n'
    '  assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL\n'
    'launching.run(main)\n'
  )
  (folder / 'plain.py').write_text(code)
  result = call(folder, '--config=configs/toy.py', module='plain')
  assert result.returncode == 0, result.stderr
