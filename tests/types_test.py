"""The nouns: what makes two tasks equal, what a verdict may be, JSON."""

import dataclasses
import itertools
import json
import subprocess
import sys

import numpy as np
import pytest

from rlpost import types

EXACT = {'name': 'exact', 'gold': 'Rome'}


def task(text='Capital of Italy?', domain='capitals', checker=None):
  message = types.Message.of('user', text)
  return types.Task(domain, (message,), checker or EXACT, 2.0)


def test_case_and_white_space_make_no_new_task():
  ids = {
    task(text).content_id
    for text in ('Capital of Italy?', ' capital OF\n\titaly?  ')
  }
  assert len(ids) == 1
  harder = dataclasses.replace(task(), difficulty=9.0)
  assert harder.content_id in ids


def test_whatever_else_differs_is_another_task():
  others = [
    task(),
    task('Capital of Ital y?'),
    task(domain='cities'),
    task(checker=EXACT | {'gold': 'rome'}),
    task(checker=EXACT | {'name': 'folded'}),
    dataclasses.replace(
      task(), messages=(types.Message.of('system', 'Hi.'), *task().messages)
    ),
  ]
  for a, b in itertools.combinations(others, 2):
    assert a.content_id != b.content_id, (a, b)


def test_a_content_id_is_the_same_in_another_process():
  code = (
    'from rlpost import types\n'
    "print(types.content_id('d', 'A  b', {'gold': '1', 'name': 'exact'}))"
  )
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=True
  )
  own = types.content_id('d', 'a b', {'name': 'exact', 'gold': '1'})
  assert done.stdout.strip() == own and len(own) == 20


def test_json_gives_back_what_it_was_given():
  verdict = types.Verdict('value', 0.5, -1, 2, {'format': 1.0}, 'half')
  for value in (task(), task().messages[0], verdict):
    data = json.loads(json.dumps(value.to_json()))
    assert type(value).from_json(data) == value


@pytest.mark.parametrize('value', [-0.1, 1.1, float('nan'), float('inf')])
def test_a_value_lies_in_its_range(value):
  with pytest.raises(ValueError, match='outside'):
    types.Verdict('value', value)
  assert types.Verdict('value', 1.1, high=2.0).valid


def test_only_values_are_valid():
  assert not types.Verdict('invalid').valid
  assert not types.Verdict('infra', reason='it died').valid
  with pytest.raises(ValueError, match='must be value, invalid or infra'):
    types.Verdict('wrong')
  with pytest.raises(ValueError, match='must be text, file or image'):
    types.Part(kind='video')


def test_sampled_tokens_are_those_of_sampled_spans():
  spans = (
    types.Span(0, 2, 'user', False), types.Span(2, 4, 'assistant', True),
    types.Span(4, 5, 'tool', False), types.Span(5, 6, 'assistant', True),
  )
  zeros = np.zeros(6, np.int32)
  trajectory = types.Trajectory(
    task(), 0, 0, zeros, spans, zeros.astype(np.float32), zeros, 1.0, 'stop'
  )
  assert trajectory.sampled.tolist() == [0, 0, 1, 1, 0, 1]
