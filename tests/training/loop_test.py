"""The loop: exact continuation, bad numbers, bad answers, one of each fault."""

import dataclasses
import errno
import json
import shutil
from unittest import mock

import jax
import numpy as np
import pytest

from rlpost import errors, workers
from rlpost.domains import table
from rlpost.training import alarms, credit, metrics
from rlpost.training.checkpoint import Checkpoints
from tests.training import runs


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """A run of 4 steps that nothing interrupted, saved at 2 and 4."""
  workdir = tmp_path_factory.mktemp('whole')
  with runs.started(workdir) as story:
    story.train()
  return workdir, story.text.getvalue()


@pytest.fixture
def half(whole, tmp_path):
  """The same run as it was after step 2."""
  workdir = tmp_path / 'half'
  shutil.copytree(whole[0], workdir)
  shutil.rmtree(workdir / 'checkpoints/4')
  (workdir / 'summary.json').unlink()
  (workdir / 'eval/4.json').unlink()
  return workdir


def test_run_learns_and_writes_what_it_promises(whole):
  workdir, text = whole
  rows = runs.results(workdir)['metrics']
  assert [row['step'] for row in rows] == [1, 2, 3, 4]
  fixed = {'reward', 'entropy', 'tokens', 'logp_gap_max', 'domains'}
  for row in rows:
    assert fixed <= row.keys()
    assert 0 < row['reward'] < 1 and row['trained_groups'] > 0
    assert row['logp_gap_max'] <= 1e-4
    assert set(row['domains']) == {'tiny_first', 'tiny_sort'}
  seconds = [json.loads(line)['cpu_s']
             for line in (workdir / 'metrics.jsonl').open()]
  assert seconds == sorted(seconds) and seconds[0] > 0
  summary = json.loads((workdir / 'summary.json').read_text())
  assert summary['steps'] == 4 and summary['nondeterministic_events'] == 0
  assert 0 < summary['first_reward_cpu_s'] < summary['cpu_s']
  assert summary['peak_rss_bytes'] > 2**26
  mean = summary['heldout']['mean']
  assert set(mean) == {'before', 'after'}
  for words in ('loading the model', 'step 4 of 4  reward', 'saving step 2',
                'held-out tasks after training', 'mean of domains'):
    assert words in text
  assert (workdir / 'curves.png').stat().st_size > 10_000


def test_steps_asked_for_later_give_what_they_give_at_once(whole, tmp_path):
  runs.train(tmp_path, steps=2)
  assert json.loads((tmp_path / 'summary.json').read_text())['steps'] == 2
  _, text = runs.train(tmp_path)
  assert 'going on after step 2 of 4' in text
  (tmp_path / 'eval/2.json').unlink()  # of the end that was not the last
  runs.same(runs.results(tmp_path), runs.results(whole[0]))


def test_lines_after_the_checkpoint_are_written_anew(whole, half):
  """The copy has the metrics of steps 3 and 4, as a killed run would."""
  with (half / 'metrics.jsonl').open('a') as file:
    file.write('{"step": 5, "cpu_s": 1e6}\n{"step": 6, "cpu_s": 99')  # torn
  runs.train(half)
  runs.same(runs.results(half), runs.results(whole[0]))
  after = json.loads((half / 'metrics.jsonl').open().readlines()[2])['cpu_s']
  assert after > 1e6  # what the killed process used is not forgotten


def _continued(workdir, name=None, value=None):
  """Items after going on from step 2, with one saved item replaced."""
  restore = Checkpoints.restore

  def replaced(self, targets, step=None):
    step, found = restore(self, targets, step)
    return step, found | ({name: value} if name else {})

  with (
      runs.started(workdir) as story,
      mock.patch.object(Checkpoints, 'restore', replaced),
  ):
    story.restore()
    runs.go(story, 2)
    return runs.items(story)


@pytest.fixture(scope='module')
def initial(tmp_path_factory):
  """The items of a run that has not begun."""
  with runs.started(tmp_path_factory.mktemp('initial')) as story:
    story.restore()
    items = runs.items(story)
    return items | {
      k: jax.tree.map(np.array, items[k]) for k in ('trainable', 'opt')
    }


def test_going_on_from_all_items_is_exact(whole, half):
  found = runs.digests(_continued(half))
  path = whole[0] / 'checkpoints/4/digest/metadata'
  assert found == json.loads(path.read_text())['body']['items']


ITEMS = ('trainable', 'opt', 'plan', 'curriculum', 'scale', 'counters')


@pytest.mark.parametrize('name', (*ITEMS, 'trained'))
def test_going_on_needs_every_item(half, initial, name):
  wanted = runs.digests(_continued(half))
  value = initial[name]
  if name == 'counters':
    value = value | {'step': 2}
  found = runs.digests(_continued(half, name, value))
  changed = {k for k in wanted if found[k] != wanted[k]}
  assert name in changed
  # More than the item itself: it decides what comes next.
  decides = {'trained': 'trained', 'trainable': 'opt', 'curriculum': 'plan'}
  assert decides.get(name, 'trainable') in changed


@pytest.mark.parametrize(
  ('name', 'value', 'error', 'words'),
  [
    ('rng', {'seed': 1}, errors.DamagedStateError, "'seed': 1"),
    ('fingerprints', {'model': 'x', 'domains': {}}, errors.InputError,
     'was trained from x'),
    ('fingerprints', {'model': 'scratch:test:0', 'domains': {'tiny_sort': '0'}},
     errors.InputError, "domain 'tiny_sort' changed"),
  ],
)
def test_state_of_another_run_is_refused(half, name, value, error, words):
  with pytest.raises(error, match=words):
    _continued(half, name, value)


def test_every_saved_item_is_in_these_tests(initial):
  tested = {*ITEMS, 'trained', 'rng', 'fingerprints', 'timing'}
  tested |= {'lengths'}  # in `lengths_test`
  assert set(initial) == tested


def test_next_update_is_the_same_on_another_mesh(half):
  found = {}
  with runs.started(half) as story:
    story.restore()
    groups = story.rollouts()
    story.update(groups)
    found[1] = jax.device_get(story.run.state.trainable)
  with runs.started(half, **{'mesh.data': 2, 'mesh.fsdp': 2}) as story:
    story.restore()
    table = story.run.state.trainable['layers/0/mlp/down']
    assert len(table.sharding.device_set) == 4
    assert not table.sharding.is_fully_replicated
    story.update(groups)
    found[4] = jax.device_get(story.run.state.trainable)
  for name, value in found[1].items():
    np.testing.assert_allclose(found[4][name], value, rtol=0, atol=1e-5)


def test_damaged_newest_checkpoint_is_named_and_not_used(whole, tmp_path):
  workdir = tmp_path / 'run'
  shutil.copytree(whole[0], workdir)
  for path in (workdir / 'checkpoints/4/trainable').rglob('*'):
    if path.is_file() and path.stat().st_size > 4096:
      data = bytearray(path.read_bytes())
      data[len(data) // 2] ^= 255
      path.write_bytes(data)
  _, text = runs.train(workdir)
  assert 'checkpoint 4' in text and 'is damaged' in text
  assert 'going on after step 2 of 4' in text
  shutil.rmtree(workdir / 'checkpoints/damaged-4')
  runs.same(runs.results(workdir), runs.results(whole[0]))


# SIGTERM.


@pytest.mark.parametrize('when', ['before', 'step 3', 'after'])
def test_sigterm_saves_and_the_same_command_goes_on(whole, tmp_path, when):
  def asked():
    text = story.text.getvalue()
    return {
      'before': 'held-out tasks before' in text,
      'step 3': 'step 3 of' in text,
      'after': 'held-out tasks after' in text,
    }[when]

  with runs.started(tmp_path, stop_asked=asked) as story:
    with pytest.raises(errors.SavedAfterSignal, match='goes on') as caught:
      story.train()
  step = {'before': 0, 'step 3': 3, 'after': 4}[when]
  assert story.text.getvalue().count('validation tasks ...') == step // 2
  assert caught.value.exit_code == 75
  assert f'saved step {step} ' in str(caught.value)
  assert (tmp_path / f'checkpoints/{step}').exists()
  runs.train(tmp_path)
  found, wanted = runs.results(tmp_path), runs.results(whole[0])
  for name in wanted:
    if not name.startswith('checkpoint 2'):  # one more save, fewer kept
      assert found[name] == wanted[name], name


# Numbers that are not finite.


def test_broken_policy_ends_the_run_and_keeps_its_answers(half):
  with runs.started(half) as story:
    restore = story.restore

    def poisoned():
      restore()
      name = 'layers/1/mlp/down'
      params = story.run.state.trainable
      params[name] = params[name].at[0, 0].set(np.nan)

    with (
        mock.patch.object(story, 'restore', poisoned),
        pytest.raises(errors.NonFiniteError, match='step 3: .*tiny_') as caught,
    ):
      story.train()
  assert caught.value.exit_code == 4
  saved = np.load(half / 'nonfinite/3.npz')
  assert np.isnan(saved['logp_0']).any() and len(saved['tokens_0'])
  runs.train(half)  # nothing that was saved has changed


def test_infinite_loss_ends_the_run_and_keeps_its_batch(whole, half):
  assign = credit.assign

  def exploded(groups, *args, **keywords):
    chosen = assign(groups, *args, **keywords)
    huge = tuple(3e38 * np.sign(a) for a in chosen.advantages)
    return chosen._replace(advantages=huge)

  with (
      runs.started(half) as story,
      mock.patch.object(credit, 'assign', exploded),
      pytest.raises(errors.NonFiniteError, match='step 3: .* in domain tiny_'),
  ):
    story.train()
  saved = np.load(half / 'nonfinite/3.npz')
  assert saved['mask'].sum() > 0 and saved['bad_MB'].any()
  assert saved['advantage'].max() > 1e38
  runs.train(half)
  runs.same(runs.results(half), runs.results(whole[0]))


def test_parameters_that_are_not_finite_are_never_saved(half):
  with runs.started(half) as story:
    story.restore()
    params = story.run.state.trainable
    params['norm/scale'] = params['norm/scale'].at[0].set(np.inf)
    story.progress.step += 1
    with pytest.raises(errors.NonFiniteError, match='such as norm/scale'):
      story.save()
  assert not (half / 'checkpoints/3').exists()


# Answers and prompts.


def test_overlong_prompts_are_counted_and_never_cut(tmp_path):
  """Prompts of up to 21 tokens, and room for 16."""
  long = {'tiny_first': 'tests.training.runs:LONG'}
  with mock.patch.dict(table.DOMAINS, long):
    _, text = runs.train(tmp_path, steps=2, **{'rollout.prompt_len': 16})
  rows = runs.results(tmp_path)['metrics']
  assert 0 < sum(row['overlong'] for row in rows) < 16
  for row in rows:
    total = row['stop'] + row['length'] + row['overlong']
    assert total == 16 and row['invalid'] == row['overlong']
  assert 'tiny_first: some answers have no score' in text
  held = json.loads((tmp_path / 'summary.json').read_text())['heldout']
  for side in ('before', 'after'):
    counts = held['domains']['tiny_first'][side]
    assert counts['invalid'] > 0 and counts['n'] + counts['invalid'] == 4
    assert not held['domains']['tiny_sort'][side]['invalid']


def test_run_of_overlong_prompts_alone_goes_to_its_end(tmp_path):
  summary, text = runs.train(tmp_path, steps=2, **{'rollout.prompt_len': 2})
  assert summary['heldout']['mean']['after']['mean'] is None
  assert 'tiny_sort: no answer could be scored (8 invalid)' in text
  row = runs.results(tmp_path)['metrics'][-1]
  assert row['overlong'] == 16 and row['reward'] is None and not row['tokens']


def test_domain_without_success_is_named_and_the_run_goes_on(tmp_path):
  with mock.patch.object(alarms, 'SILENT_ANSWERS', 16):
    _, text = runs.train(tmp_path, scorer=runs.Never())
  rows = runs.results(tmp_path)['metrics']
  assert [row['domains']['tiny_first']['reward'] for row in rows] == [0.0] * 4
  assert sum(row['domains']['tiny_sort']['trained_groups'] for row in rows) > 0
  assert not sum(row['domains']['tiny_first']['trained_groups'] for row in rows)
  assert text.count('tiny_first: no reward in ') == 1


def test_verdicts_that_are_our_fault_never_train(tmp_path):
  _, text = runs.train(tmp_path, steps=2, scorer=runs.Broken())
  for row in runs.results(tmp_path)['metrics']:
    first = row['domains']['tiny_first']
    assert first['reward'] is None and not first['trained_groups']
    assert first['infra'] == first['answers'] > 0
    assert first['belief'] == 0.5  # the prior: nothing was seen
    assert row['trained_groups'] > 0
  assert 'tiny_first: no answer could be scored' in text


def test_checkers_that_hang_or_die_cost_their_own_answers_only(tmp_path):
  with workers.WorkerPool(2) as pool:
    scorer = runs.Faulty(pool)
    with runs.started(tmp_path, scorer=scorer) as story:
      story.restore()
      groups = story.rollouts()
      row = story.update(groups)
    counts, size = pool.counts, len(pool.pids)
  assert counts['timeouts'] and counts['deaths'] and size == 2
  verdicts = [t.verdict for g in groups for t in g.trajectories]
  found = [v.status for v in verdicts]
  assert found.count('infra') == scorer.guilty == row['infra'] > 0
  assert found.count('value') == scorer.innocent > scorer.guilty
  reasons = {v.reason.split(':')[0] for v in verdicts if not v.valid}
  assert reasons == {'DeadlineError', 'DiedError'}


# A full disk.


@pytest.mark.parametrize('place', ['metrics', 'checkpoint'])
def test_full_disk_ends_the_run_and_the_same_command_goes_on(
  whole, half, place
):
  full = OSError(errno.ENOSPC, 'No space left on device')
  target, name, effect = {
    'metrics': (metrics.MetricsWriter, '_append', full),
    'checkpoint': (Checkpoints, '_free_bytes', None),
  }[place]
  with runs.started(half) as story:
    with mock.patch.object(
      target, name, side_effect=effect, return_value=1 << 20
    ):
      expected = OSError if effect else errors.DoesNotFitError
      with pytest.raises(expected, match='space|free'):
        story.train()
  runs.train(half)
  runs.same(runs.results(half), runs.results(whole[0]))


REFERENCE = {
  'recipe.kl': 'k1', 'recipe.kl_place': 'reward',
  'recipe.kl_coefficient': 0.5, 'recipe.anchor': 'old', 'train.updates': 2,
  'optimizer.learning_rate': 1e-2,
}


def test_reference_old_anchor_and_further_updates_together(tmp_path):
  with runs.started(tmp_path, **REFERENCE) as story:
    story.restore()
    first = jax.device_get(story.run.state.trainable)
    groups = story.rollouts()
    penalty = story._kl_penalty(groups)
    np.testing.assert_allclose(list(penalty.values()), 0, atol=1e-4)
    row = story.update(groups)
    assert story.progress.updates == 2 and row['ratio_max'] > 1.001
    # The policy has moved, and what it is compared with has not.
    for name, value in jax.device_get(story.run.reference).items():
      np.testing.assert_array_equal(value, first[name])
    penalty = story._kl_penalty(story.rollouts())
    assert len(penalty) == 16 and np.mean(list(penalty.values())) < -1e-3


def test_kl_in_the_reward_costs_each_answer_its_own_log_ratio(tmp_path):
  """Minus coefficient x sum over the answer of log p - log p_reference."""
  with runs.started(tmp_path, **REFERENCE) as story:
    story.restore()
    groups = story.rollouts()
    own = story._kl_penalty(groups)  # the policy still is the reference
    gaps, moved = {}, []
    for group in groups:
      more = [0.1 * (1 + t.sample) * t.sampled for t in group.trajectories]
      gaps |= {
        (t.group, t.sample): gap.sum()
        for t, gap in zip(group.trajectories, more, strict=True)
      }
      moved.append(dataclasses.replace(group, trajectories=tuple(
        dataclasses.replace(t, logp=(t.logp + gap).astype(np.float32))
        for t, gap in zip(group.trajectories, more, strict=True)
      )))
    found = story._kl_penalty(moved)
  assert found.keys() == own.keys() == gaps.keys() and len(gaps) == 16
  np.testing.assert_allclose(list(own.values()), 0, atol=1e-4)
  for key, gap in gaps.items():
    np.testing.assert_allclose(found[key], -0.5 * gap, atol=1e-4)
