"""The curriculum of lengths: what is open, what comes again, and resume."""

import json

import numpy as np
import pytest

from rlpost import errors
from rlpost.data import plan
from rlpost.training.lengths import Lengths
from tests.training import runs

HARDEST = {'long': 1000.0, 'middle': 500.0, 'short': 250.0}
STAGES = ((0, 256), (10, 512), (20, 1024))


def lengths(**fields):
  return Lengths(HARDEST, **{'stages': STAGES, 'carry': 0.25} | fields)


def prompts(size=8, of='x'):
  return [(of, i) for i in range(size)]


def test_domains_open_at_the_step_of_their_stage():
  found = lengths()
  assert [found.open(s) for s in (0, 9)] == [('short',)] * 2
  assert [found.open(s) for s in (10, 19)] == [('middle', 'short')] * 2
  assert found.open(20) == found.open(999) == ('long', 'middle', 'short')
  assert Lengths(HARDEST).open(0) == ('long', 'middle', 'short')


def test_only_failures_of_earlier_stages_come_again_oldest_first():
  found, new = lengths(), prompts()
  found.note([('short', i) for i in range(6)], [0, 0.5, 0.49, None, 0.2, 1], 3)
  assert found.again(new, 9) == new  # their own stage is not over
  first = found.again(new, 10)
  assert first == [('short', 0), ('short', 2), *new[2:]]
  assert found.again(new, 11) == [('short', 4), *new[1:]]
  assert found.again(new, 12) == new
  found.note([('short', 4)], [0.0], 11)  # failed once more, a stage later
  assert found.again(new, 19) == new
  assert found.again(new, 20) == [('short', 4), *new[1:]]


@pytest.mark.parametrize(('carry', 'size'), [(0.1, 7), (0.25, 8), (0.3, 1)])
def test_the_part_that_comes_again_is_the_one_asked_for(carry, size):
  found = lengths(carry=carry, keep=10_000)
  found.note([('short', i) for i in range(3000)], [0.0] * 3000, 0)
  again = []
  for step in range(1, 101):
    drawn = found.again(prompts(size), 10)
    assert len(drawn) == size
    again += [p for p in drawn if p[0] == 'short']
    assert abs(len(again) - carry * size * step) < 1
  assert again == [('short', i) for i in range(len(again))]


def test_what_no_task_could_fill_is_not_owed_later():
  found, new = lengths(), prompts()
  for _ in range(50):
    assert found.again(new, 10) == new
  found.note([('middle', i) for i in range(9)], [0.0] * 9, 10)
  assert len({*found.again(new, 20)} - {*new}) == 2


def test_the_oldest_give_way():
  found = lengths(keep=3, carry=1.0)
  found.note([('short', i) for i in range(5)], [0.0] * 5, 0)
  assert found.again(prompts(3), 10) == [('short', i) for i in (2, 3, 4)]
  assert not found.report()


def test_a_plan_draws_from_open_domains_and_owes_the_closed_ones_nothing():
  found = lengths()
  p = plan.Plan(
      {n: plan.Source() for n in HARDEST}, prompts=6, seed=0, floor=1.0
  )
  for step in range(30):
    drawn = [name for name, _ in p.next(only=found.open(step))]
    opened = found.open(step)
    assert {n: drawn.count(n) for n in opened} == dict.fromkeys(
        opened, 6 // len(opened)
    )
  assert all(abs(d['carry']) < 1e-9 for d in p.state()['domains'].values())


def rest(found, first):
  """Picks of steps `first` to 29, with scores that are a matter of the step."""
  out = []
  for step in range(first, 30):
    picks = found.again(prompts(5, 'short'), step)
    scores = np.random.default_rng(step).random(5).tolist()
    found.note(picks, scores, step)
    out.append((picks, found.state()))
  return out


def test_resume_is_exact_at_every_step():
  want = rest(lengths(), 0)
  assert any(picks != prompts(5, 'short') for picks, _ in want)
  for cut in range(1, 30):
    later = lengths()
    later.set_state(json.loads(json.dumps(want[cut - 1][1])))
    assert rest(later, cut) == want[cut:]
  forgetful = lengths()
  assert rest(forgetful, 10) != want[10:]


LOOP = {
  'lengths': {'stages': ((0, 1), (2, 3)), 'carry': 0.5, 'below': 1.0},
}


@pytest.fixture(scope='module')
def half(tmp_path_factory):
  """A run of 4 steps, its numbers, and its folder as it was after step 2."""
  workdir = tmp_path_factory.mktemp('half')
  with runs.started(workdir, **LOOP) as story:
    story.restore()
    drawn = []
    for step in range(4):
      groups = story.rollouts()
      drawn.append([g.task.content_id for g in groups])
      domains = {g.task.domain for g in groups}
      assert domains == {'tiny_first'} or step >= 2
      row = story.update(groups)
      assert (row['domains']['tiny_sort']['share'] > 0) == (step >= 2)
      story.progress.step += 1
      if step == 1:
        story.save(wait=True)
    again = {*drawn[0], *drawn[1]} & {*drawn[2], *drawn[3]}
    assert len(again) >= 2  # hard ones of the first stage
    return workdir, runs.digests(runs.items(story))


@pytest.mark.parametrize('forget', [False, True])
def test_a_run_goes_on_with_the_tasks_that_failed(half, forget):
  workdir, want = half
  with runs.started(workdir, **LOOP) as story:
    story.restore()
    assert story.progress.step == 2
    if forget:
      story.run.lengths.set_state(story.run.lengths.state() | {'failed': []})
    runs.go(story, 2)
    found = runs.digests(runs.items(story))
  assert (found['trainable'] == want['trainable']) != forget
  assert (found['lengths'] == want['lengths']) != forget


@pytest.mark.parametrize(
  ('fields', 'words'),
  [
    ({'carry': 1.5}, 'must be in'),
    ({'keep': 0}, 'at least 1'),
    ({'stages': ()}, 'has no later one'),
    ({'stages': ((0, 2000),)}, 'has no later one'),
    ({'stages': ((5, 256), (9, 2000))}, 'begin at step 0'),
    ({'stages': ((0, 256), (0, 2000))}, 'rise'),
    ({'stages': ((0, 512), (9, 256))}, 'rise'),
    ({'stages': ((0, 9), (9, 2000))}, 'opens no domain at step 0'),
    ({'stages': ((0, 256), (9, 999))}, "never opens .'long': 1000"),
  ],
)
def test_settings_are_checked(fields, words):
  with pytest.raises(errors.InputError, match=words):
    lengths(**fields)
