"""Evaluation of a checkpoint: the run's own result again, and new tasks."""

import contextlib
import json
from unittest import mock

import pytest
from absl.testing import flagsaver

from experiments import evaluate, launching
from rlpost import errors, workers
from rlpost.evaluation import report
from rlpost.rewards import scoring
from rlpost.training import compilation, outcome
from rlpost.training.checkpoint import Checkpoints
from tests.experiments.conftest import CONFIG
from tests.training import runs

PLAIN = {'domains.names': ('upper', 'bigger'), 'domains.num_shots': 1}


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """A run of two steps whose embedding is frozen."""
  workdir = tmp_path_factory.mktemp('trained')
  changes = {'model.trainable': 'layers/.*', **PLAIN}
  launching.settle_config(runs.config(steps=2, **changes), str(workdir))
  runs.train(workdir, steps=2, **changes)
  return workdir


def call(workdir, **flags):
  """The command, in this process; returns the tasks that were attempted."""
  seen = {}
  heldout = outcome.heldout

  def kept(run, tasks, *args):
    seen.update(tasks=tasks, prompts={
      name: environment.prefix
      for name, environment in run.tasks.environments.items()
    })
    return heldout(run, tasks, *args)

  config = launching.load_config(str(workdir))
  assert config is not None
  with (
    flagsaver.flagsaver(**flags),
    runs.quick(config),
    mock.patch.object(workers, 'WorkerPool', contextlib.nullcontext),
    mock.patch.object(scoring, 'Scorer', lambda pool: runs.Parity()),
    mock.patch.object(compilation, 'use_cache'),
    mock.patch.object(outcome, 'heldout', kept),
  ):
    evaluate.main(config, str(workdir))
  return seen


def test_own_seed_gives_the_run_s_own_result(trained, capsys):
  path = trained / 'eval/2.json'
  before = path.read_text()
  call(trained)
  assert path.read_text() == before  # there already
  path.unlink()
  call(trained, step=2)
  assert path.read_text() == before
  out = capsys.readouterr().out
  assert 'step 2, held-out seed 0' in out and 'mean of domains' in out


def test_another_seed_gives_new_tasks_with_the_same_examples(trained):
  before = {p.name: p.read_bytes() for p in (trained / 'eval').iterdir()}
  own, new = call(trained), call(trained, heldout_seed=7)
  used = Checkpoints(trained, read_only=True).restore({'trained': 'json'})[1]
  for name in ('upper', 'bigger'):
    ids = [{t.content_id for t in part['tasks'][name]} for part in (own, new)]
    assert len(ids[1]) == 4 and ids[0] != ids[1]
    assert not ids[1] & set(used['trained'])
  assert own['prompts'] == new['prompts']
  assert 'Question' in new['prompts']['upper']
  path = trained / 'eval/2-seed7.json'
  result = json.loads(path.read_text())
  assert result['step'] == 2
  assert set(result['heldout']['domains']) == {'upper', 'bigger'}
  # Nothing that the run wrote has changed, nor what its table shows.
  assert before == {
    p.name: p.read_bytes() for p in (trained / 'eval').iterdir() if p != path
  }
  assert set(report.read_results(trained)) == {0, 2}


def test_tasks_that_the_run_trained_on_are_left_out(trained):
  """All tasks that the new seed would give were trained on, as it is told."""
  seen = call(trained, heldout_seed=8)
  ids = [t.content_id for tasks in seen['tasks'].values() for t in tasks]
  restore = Checkpoints.restore

  def with_these(self, targets, step=None):
    step, items = restore(self, targets, step)
    return step, items | ({'trained': ids} if 'trained' in items else {})

  with mock.patch.object(Checkpoints, 'restore', with_these):
    again = call(trained, heldout_seed=8)
  new = [t.content_id for tasks in again['tasks'].values() for t in tasks]
  assert len(new) == len(ids) and not set(new) & set(ids)


def test_a_step_that_is_not_there_is_named_with_those_that_are(trained):
  with pytest.raises(errors.InputError, match=r'no step 3; it has \[2\]'):
    call(trained, step=3)


def test_a_workdir_without_a_checkpoint_is_refused(tmp_path):
  config = runs.config(steps=2)
  with pytest.raises(errors.InputError, match='holds no run'):
    evaluate.main(config, str(tmp_path))
  launching.settle_config(config, str(tmp_path))
  with pytest.raises(errors.InputError, match='holds no checkpoint'):
    call(tmp_path)
  assert not (tmp_path / 'checkpoints').exists()


@pytest.mark.slow
def test_the_command(launch, finished):
  workdir, _ = finished
  flag = f'--workdir={workdir}'
  result = launch('experiments.evaluate', flag, '--heldout_seed=3')
  assert not result.returncode, result.stderr
  assert 'mean of domains' in result.stdout
  assert (workdir / 'eval/6-seed3.json').exists()
  (workdir / 'eval/6-seed3.json').unlink()
  result = launch('experiments.evaluate', CONFIG, flag, '--step=5')
  assert result.returncode == 2 and 'has no step 5; it has [' in result.stderr
