"""Checkers: right answers, wrong ones, and hostile text."""

import json

import pytest

from rlpost import errors, types
from rlpost.rewards import checkers

# name, options, gold, answers that score 1, answers that score 0.
CASES = [
    ('exact', {}, 'red cat', ['red cat', ' red cat '], ['Red cat', 'red  cat']),
    ('folded', {}, 'Paris', ['paris', 'PARIS.', ' Paris '], ['Pari', 'Paris!']),
    ('number', {}, '1200', ['1200', '1,200', '+1200.0', '01200'],
     ['12 00', '1200 apples', '1.2e3', '1,20,0', '0x4b0', '1_200', '-1200']),
    ('number', {'tolerance': 0.01}, '0.5', ['0.505', '0.49'],
     ['0.52', 'nan', 'inf']),
    ('choice', {}, 'B', ['B', 'b', '(B)', 'B.', 'B)'],
     ['A', 'AB', 'A B C D', 'B or C', 'bread', '']),
    ('contains', {}, 'red hat', ['the red hat.', 'Red hat'],
     ['red', 'hat red', 'redhat', ' '.join(['red hat'] * 5)]),
    ('sequence', {}, '3 7 9', ['3 7 9', '3, 7, 9', '3,7,9.0'],
     ['3 9 7', '3 7', '3 7 9 9', '379']),
    ('json_fields', {}, '{"a": 5}', ['{"a": 5}', ' {"a":5} '],
     ['{"a": "5"}', '{"a": 5, "b": 1}', '{}', '[5]', '{"a": 5', '{"a": true}',
      '{"a": 1, "a": 5}', '{"a": NaN}', "{'a': 5}"]),
    # Equal in Python, and not in JSON.
    ('json_fields', {}, '{"a": 1}', ['{"a":1}'], ['{"a": true}', '{"a": 1.0}']),
    ('reasoning_gym', {'dataset': 'gcd'}, '12', ['12', ' 12'],
     ['6', 'the answer is 12', '12 12']),
    ('reasoning_gym', {'dataset': 'chain_sum'}, '-12', ['-12', '-12.0'],
     ['12', '-12 or 12', 'NaN', 'Infinity']),
]  # fmt: skip
HOSTILE = [
    'nan', 'NaN', '-inf', 'Infinity', '1e999999999', '9' * 4000, '0' * 4096,
    '\u0663\u0664', '\u00b2', '\uff11\uff12', '[' * 4000, '{"a":' * 600,
    '[' * 2000 + ']' * 2000, 'x' * (1 << 20), '\x00', '\ud800', '\u202e12',
    '{"__class__": "x"}', '__import__("os").system("true")', '1' * 9 + '/0',
    '9**9**9', '{"a": 1e400}', '-' * 4000, ',' * 4000, '(' * 4000, '%s%n',
]  # fmt: skip


@pytest.mark.parametrize('name,options,gold,right,wrong', CASES)
def test_right_and_wrong_answers(name, options, gold, right, wrong):
  spec = {'name': name, 'gold': gold, **options}
  for answer in [gold, *right]:
    assert checkers.check(spec, answer)['value'] == 1, answer
  for answer in wrong:
    verdict = checkers.check(spec, answer)
    assert verdict['status'] == 'value' and verdict['value'] == 0, answer


@pytest.mark.parametrize('name,options,gold,right,wrong', CASES)
def test_hostile_answers_are_zero_and_never_raise(
  name, options, gold, right, wrong
):
  del right, wrong
  spec = {'name': name, 'gold': gold, **options}
  for answer in HOSTILE:
    verdict = types.Verdict.from_json(checkers.check(spec, answer))
    assert verdict.valid and verdict.value == 0, answer[:40]


def test_unicode_digits_are_not_their_ascii_twins():
  for spec in (
    {'name': 'number', 'gold': '34'},
    {'name': 'sequence', 'gold': '34'},
    {'name': 'reasoning_gym', 'dataset': 'chain_sum', 'gold': '34'},
  ):
    assert checkers.check(spec, '\u0663\u0664')['value'] == 0
    assert checkers.check(spec, '34')['value'] == 1


def test_partial_credit_is_an_option():
  spec = {'name': 'reasoning_gym', 'dataset': 'spell_backward', 'gold': 'tac'}
  assert checkers.check(spec, 'tab')['value'] == 0
  spec['partial'] = True
  assert checkers.check(spec, 'tab')['value'] == pytest.approx(2 / 3)
  spec = {'name': 'sequence', 'gold': '1 2 3 4', 'partial': True}
  verdict = checkers.check(spec, '1 2 4 3')
  assert verdict['value'] == 0.5
  assert verdict['components'] == {'positions': 0.5, 'same_items': 1.0}


def test_no_gold_is_invalid_whatever_the_answer():
  for spec in ({}, {'gold': None}, {'gold': ' '}, {'gold': 3}):
    verdict = checkers.check({'name': 'exact', **spec}, 'x')
    assert verdict['status'] == 'invalid'


def test_a_raise_is_the_answers_fault_only_if_gold_still_passes(monkeypatch):
  def picky(answer, gold):
    return 1 / (answer == gold)  # raises for every wrong answer

  def broken(answer, gold):
    raise OSError('no grader here')

  def wild(answer, gold):
    return float('nan') if answer == 'x' else 1.0

  def mad(answer, gold):
    return 7.0

  table = {'picky': picky, 'broken': broken, 'wild': wild, 'mad': mad}
  monkeypatch.setattr(checkers, 'CHECKERS', table)
  status = {
    name: checkers.check({'name': name, 'gold': 'g'}, 'x')['status']
    for name in table
  }
  assert status == {
      'picky': 'value', 'broken': 'infra', 'wild': 'value', 'mad': 'infra',
  }  # fmt: skip
  assert checkers.check({'name': 'picky', 'gold': 'g'}, 'x')['value'] == 0


def test_unknown_names_list_the_known_ones():
  with pytest.raises(errors.InputError, match='choice, contains'):
    checkers.check({'name': 'fuzzy', 'gold': 'g'}, 'x')


def test_data_sets_that_evaluate_answers_are_refused():
  for dataset in ('puzzle24', 'simple_integration', 'n_queens'):
    spec = {'name': 'reasoning_gym', 'dataset': dataset, 'gold': '1'}
    assert checkers.check(spec, '1')['status'] == 'infra'


def test_verdicts_are_json():
  for name, options, gold, _, _ in CASES:
    verdict = checkers.check({'name': name, 'gold': gold, **options}, gold)
    assert json.loads(json.dumps(verdict)) == verdict
