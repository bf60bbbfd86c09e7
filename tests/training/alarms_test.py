"""Alarms: each trouble once, again when it comes again, none without one."""

from unittest import mock

import pytest

from rlpost.training import alarms


def row(step=1, *, length=0, **domain):
  healthy = {'groups': 2, 'answers': 16, 'reward': 0.5, 'infra': 0,
             'invalid': 0}
  return {'step': step, 'stop': 16 - length, 'length': length,
          'domains': {'add': healthy | domain, 'upper': healthy}}


@pytest.fixture
def watch():
  said = mock.Mock()
  watch = alarms.Alarms(lambda text: said(text))
  watch.said = lambda: [call.args[0] for call in said.call_args_list]
  return watch


def test_healthy_steps_are_silent(watch):
  for step in range(1, 9):
    watch.look(row(step, length=8, reward=0.01))
    # A domain whose turn it is not has no reward, and no trouble.
    watch.look(row(step, groups=0, answers=0, reward=None))
  assert not watch.said()


@pytest.mark.parametrize(
  ('domain', 'words'),
  [
    ({'reward': None, 'infra': 12, 'invalid': 4},
     'add: no answer could be scored (12 infra, 4 invalid).'),
    ({'infra': 3}, 'add: some answers have no score (3 infra).'),
    ({'length': 9}, '9 of 16 answers are cut off at rollout.max_new tokens '
     'and score 0; raise it.'),
  ],
)
def test_a_trouble_is_said_when_it_begins(watch, domain, words):
  for step in (1, 2):
    watch.look(row(step, **domain))
  assert watch.said() == [f'alarm at step 1: {words}']
  watch.look(row(3))
  watch.look(row(4, **domain))
  assert watch.said()[1:] == [f'alarm at step 4: {words}']


def test_a_domain_that_never_succeeds_is_named_after_64_answers(watch):
  for step in range(1, 8):
    watch.look(row(step, reward=0.0))
  assert watch.said() == [
    'alarm at step 4: add: no reward in 64 answers; it teaches nothing until '
    'one succeeds.'
  ]


def test_one_success_ends_the_count(watch):
  for step in range(1, 12):
    watch.look(row(step, reward=0.1 if step % 4 == 0 else 0.0))
  assert not watch.said()
