"""SIGKILL anywhere: the same command ends with the same bits.

Points are aimed at from inside the process (`killed`), never by a clock where
that can be helped; those of a save in the background need one.
"""

import shutil

import pytest

from tests.experiments.conftest import CONFIG
from tests.training import runs

# With how often a run comes there before it is killed.
POINTS = {
  'warm-up': 5,
  'before': 1,
  'rollout': 2,
  'checking': 4,
  'update': 5,
  'metrics': 9,
  'validation': 2,
  'save': 2,
  'save+10ms': 2,
  'save+40ms': 1,
  'save+160ms': 3,
  'after': 1,
  'result': 2,
  'summary': 1,
  'table': 1,
}
KILLED = -9


def run(launch, workdir, point=None, count=0, **environment):
  flags = CONFIG, f'--workdir={workdir}'
  if point is None:
    return launch('experiments.train', *flags, **environment)
  return launch('tests.experiments.killed', point, count, *flags, **environment)


def finish(launch, workdir, **environment):
  result = run(launch, workdir, **environment)
  assert not result.returncode, result.stdout + result.stderr
  return result.stdout


def test_terminated_and_then_killed_in_a_save(launch, finished, tmp_path):
  result = run(launch, tmp_path, 'sigterm', 3)
  assert result.returncode == 75, result.stdout + result.stderr
  assert 'stopped: SIGTERM: saved step 3 in ' in result.stderr
  result = run(launch, tmp_path, 'save', 1)
  assert result.returncode == KILLED, result.stderr
  assert 'going on after step 3 of 6' in result.stdout
  assert 'going on after step 3 of 6' in finish(launch, tmp_path)
  found, wanted = runs.results(tmp_path), runs.results(finished[0])
  runs.same(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize('point', POINTS)
def test_killed_run_goes_on_to_the_same_bits(launch, finished, tmp_path, point):
  result = run(launch, tmp_path, point, POINTS[point])
  assert result.returncode == KILLED, result.stdout + result.stderr
  finish(launch, tmp_path)
  runs.same(runs.results(tmp_path), runs.results(finished[0]))


@pytest.mark.slow
def test_killed_in_compilation_with_an_empty_cache(launch, finished, tmp_path):
  """The first program of updates is the warm-up's."""
  cache = {'RLPOST_CACHE': str(tmp_path / 'cache')}
  result = run(launch, tmp_path / 'run', 'compilation', 2, **cache)
  assert result.returncode == KILLED, result.stdout + result.stderr
  assert 'compiling train ...' in result.stdout.splitlines()[-1]
  finish(launch, tmp_path / 'run', **cache)
  runs.same(runs.results(tmp_path / 'run'), runs.results(finished[0]))


@pytest.mark.slow
def test_torn_entries_of_the_cache_cost_a_compilation_only(
  launch, finished, tmp_path
):
  cache = tmp_path / 'cache'
  finish(launch, tmp_path / 'a', RLPOST_CACHE=str(cache))
  for path in (cache / 'jax').iterdir():
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
  finish(launch, tmp_path / 'b', RLPOST_CACHE=str(cache))
  runs.same(runs.results(tmp_path / 'b'), runs.results(finished[0]))


@pytest.mark.slow
def test_killed_at_every_step(launch, finished, tmp_path):
  """A machine that never gets further than one step at a time."""
  for step in range(1, 7):
    result = run(launch, tmp_path, 'sigterm', 1)
    assert result.returncode in (0, 75), result.stderr
    result = run(launch, tmp_path, 'update', 1)
    assert result.returncode == (0 if step == 6 else KILLED), result.stderr
  runs.same(runs.results(tmp_path), runs.results(finished[0]))


def test_every_item_is_in_the_digest(finished):
  """What the equality above rests on."""
  step = runs.results(finished[0])['checkpoint 6']
  assert {'trainable', 'opt', 'plan', 'curriculum', 'scale', 'lengths', 'rng',
          'counters', 'trained', 'fingerprints'} == set(step[1])


def test_another_seed_is_told_apart(launch, finished, tmp_path):
  """The comparison can fail."""
  shutil.copytree(finished[0], tmp_path / 'run')
  path = tmp_path / 'run/metrics.jsonl'
  path.write_text(path.read_text().replace('"reward": 0', '"reward": 1', 1))
  with pytest.raises(AssertionError, match='metrics, line 0'):
    runs.same(runs.results(tmp_path / 'run'), runs.results(finished[0]))
