"""The training command: what a user sees when it ends, well or badly."""

import json
import re
import shutil
import time

import pytest

from tests.experiments.conftest import CONFIG

# Exit code 2 and these words, before any model is loaded.
BAD = {
  'steps that went by': (['--config.steps=3'], r'  steps: 6 -> 3\n'),
  'another seed': (['--config.seed=1'], r'  seed: 0 -> 1\n'),
}
ALONE = {
  'an unknown key': (
    ['--config.optimizer.learning_rte=1'], r'mean optimizer\.learning_rate\?'
  ),
  'rows that do not divide': (
    ['--config.mesh.data=2', '--config.train.rows=3'],
    r'rows=3 must divide over 2 devices .*try 2\.',
  ),
  'a model that is not there': (
    ['--config.model.source=/nowhere/model.gguf'], r'/nowhere/model\.gguf'
  ),
  'more devices than there are': (
    ['--config.mesh.data=16'], r'needs 16 devices; there are 8'
  ),
}
EIGHT = {'XLA_FLAGS': '--xla_force_host_platform_device_count=8'}


def test_a_run_prints_what_it_does_and_leaves_what_it_promises(finished):
  workdir, text = finished
  for words in (
    'loading the model', 'compiling train', 'held-out tasks before training',
    'step 6 of 6  reward 0.', 'entropy', 'tokens/s', 'left', 'saving step 4',
    'mean of domains', 'curves: ',
  ):
    assert words in text
  assert 'alarm' not in text and 'WARNING' not in text
  for name in ('config.json', 'metrics.jsonl', 'samples.jsonl', 'curves.png',
               'summary.json', 'eval/0.json', 'eval/6.json'):
    assert (workdir / name).stat().st_size > 100
  assert not list(workdir.rglob('*.tmp'))
  rows = [json.loads(line) for line in (workdir / 'metrics.jsonl').open()]
  for row in rows:
    keys = ['step', 'cpu_s', 'reward', 'entropy', 'tokens', 'logp_gap_max']
    assert list(row)[:6] == keys
    assert row['logp_gap_max'] <= 1e-4
    for domain in row['domains'].values():
      assert {'reward', 'share', 'belief', 'invalid', 'infra'} <= domain.keys()
  assert sum(row['trained_groups'] for row in rows) > 3
  summary = json.loads((workdir / 'summary.json').read_text())
  assert summary['steps'] == 6 and summary['nondeterministic_events'] == 0
  assert 0 < summary['first_reward_cpu_s'] < summary['cpu_s']
  assert summary['cpu_s'] >= rows[-1]['cpu_s']
  assert 1e8 < summary['peak_rss_bytes'] < 3e9
  for side in ('before', 'after'):
    for domain in summary['heldout']['domains'].values():
      assert set(domain[side]) == {
        'mean', 'low', 'high', 'n', 'invalid', 'infra'
      }
    assert set(summary['heldout']['mean'][side]) == {'mean', 'low', 'high'}
  assert re.fullmatch('[0-9a-f]{64}', summary['state_sha256'])


def test_a_finished_run_prints_its_table_again(launch, finished):
  workdir, text = finished
  before = {p: p.read_bytes() for p in workdir.glob('*.json*')}
  start = time.monotonic()
  result = launch('experiments.train', CONFIG, f'--workdir={workdir}')
  assert result.returncode == 0, result.stderr
  table = text[text.index('held-out  '):].splitlines()[:6]
  assert '\n'.join(table) in result.stdout
  assert 'step ' not in result.stdout and time.monotonic() - start < 60
  assert before == {p: p.read_bytes() for p in workdir.glob('*.json*')}


def check_bad(result, words):
  assert result.returncode == 2, result.stdout + result.stderr
  assert re.search(words, result.stderr) and 'Traceback' not in result.stderr


def test_a_changed_config_is_refused_with_the_difference(launch, finished):
  flags, words = BAD['another seed']
  result = launch(
    'experiments.train', CONFIG, f'--workdir={finished[0]}', *flags
  )
  check_bad(result, words)


@pytest.mark.slow
def test_steps_that_went_by_are_refused(launch, finished):
  flags, words = BAD['steps that went by']
  result = launch(
    'experiments.train', CONFIG, f'--workdir={finished[0]}', *flags
  )
  check_bad(result, words)


@pytest.mark.slow
@pytest.mark.parametrize('case', ALONE)
def test_bad_input_leaves_the_workdir_free(launch, tmp_path, case):
  """The same workdir takes the command once it is right."""
  flags, words = ALONE[case]
  workdir = tmp_path / 'run'
  result = launch(
    'experiments.train', CONFIG, f'--workdir={workdir}', *flags, **EIGHT
  )
  check_bad(result, words)
  assert not (workdir / 'config.json').exists()


@pytest.mark.slow
def test_numbers_that_are_not_finite_are_exit_4(launch, tmp_path):
  result = launch(
    'experiments.train', CONFIG, f'--workdir={tmp_path}',
    '--config.optimizer.learning_rate=inf', '--config.optimizer.warmup_steps=0'
  )
  assert result.returncode == 4, result.stdout + result.stderr
  assert re.search(r'error: step \d: .*not finite|NaN', result.stderr)
  assert not list(tmp_path.glob('checkpoints/6'))


@pytest.mark.slow
def test_more_steps_may_be_asked_for_and_another_mesh(
  launch, finished, tmp_path
):
  workdir = tmp_path / 'run'
  shutil.copytree(finished[0], workdir)
  result = launch(
    'experiments.train', CONFIG, f'--workdir={workdir}', '--config.steps=8',
    '--config.mesh.data=2', '--config.mesh.fsdp=2', **EIGHT
  )
  assert result.returncode == 0, result.stdout + result.stderr
  assert 'going on after step 6 of 8' in result.stdout
  stored = json.loads((workdir / 'config.json').read_text())
  assert stored['mesh']['fsdp'] == 2 and stored['steps'] == 8
  rows = [json.loads(line) for line in (workdir / 'metrics.jsonl').open()]
  assert [row['step'] for row in rows] == list(range(1, 9))
  assert max(row['logp_gap_max'] for row in rows) <= 1e-4
  # And back to one device.
  result = launch(
    'experiments.train', CONFIG, f'--workdir={workdir}', '--config.steps=9'
  )
  assert result.returncode == 0, result.stdout + result.stderr
