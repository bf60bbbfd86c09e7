"""Recall: the length that was asked for, the right value, keys kept back."""

import numpy as np
import pytest

from rlpost.data import tokenizer
from rlpost.domains import domain as domain_lib
from rlpost.domains import recall, table

_NAMES = [n.split('_') for n in table.DOMAINS if n.startswith('recall_')]
LENGTHS = {'_'.join(n): int(n[1]) for n in _NAMES if n[1].isdigit()}
ASKED = [n for n in LENGTHS if not n.endswith('_all')]


def draws(name, count=300):
  pool = domain_lib.pools(table.load(name), heldout_seed=0)
  environment = pool.environment()
  for i in range(count):
    task = pool.train_task(i, 0)
    state = environment.render(task)
    yield state.prefix + state.suffix, environment.solution(task)


@pytest.mark.parametrize('name', LENGTHS)
def test_a_document_has_the_length_of_its_name(name):
  encode = tokenizer.bytes_tokenizer().encode
  for question, answer in draws(name, 60):
    tokens = [*encode(question), *encode(answer)]
    assert len(tokens) == LENGTHS[name]


@pytest.mark.parametrize('name', ASKED)
def test_the_answer_is_the_digit_behind_the_key(name):
  places = []
  for question, answer in draws(name):
    text, key = question[:-2], question[-1]
    assert question[-2] == '?' and text.count(key) == 1
    assert answer == text[text.index(key) + 1] + '\n'
    assert sum(c.isalpha() for c in text) == recall.PAIRS
    places.append(text.index(key) / len(text))
  # Anywhere in the text, first and last pairs alike.
  assert np.histogram(places, 4, (0, 1))[0].min() > 45


@pytest.mark.parametrize('name', ['recall_64_all', 'recall_256_all'])
def test_every_key_is_asked_for_once(name):
  for question, answer in draws(name, 60):
    text, asked = (question + answer.rstrip()).split('?', 1)
    pairs = asked.split('?')
    assert len(pairs) == len(set(pairs)) == recall.PAIRS
    assert all(text.count(pair) == 1 for pair in pairs)
    assert sorted(text.replace('.', '')) == sorted(''.join(pairs))


@pytest.mark.parametrize('name', ['recall_repeat', 'recall_copy'])
def test_texts_over_and_over(name):
  for question, answer in draws(name, 60):
    times = len(answer) // len(question)
    assert question.count('!') == 1 and answer == question * times + '\n'
    assert recall.REPEATED - len(question) < times * len(question) <= 24


def test_new_keys_are_asked_for_in_new_domains_only():
  asked, seen = {}, {}
  for name in ('recall_64', 'recall_256', 'recall_256_new', 'recall_1024_new'):
    pairs = list(draws(name))
    asked[name] = {question[-1] for question, _ in pairs}
    seen[name] = {c for question, _ in pairs for c in question if c.isalpha()}
  assert asked['recall_64'] == asked['recall_256']
  assert asked['recall_256_new'] == asked['recall_1024_new'] == set('afkpuz')
  assert not asked['recall_256'] & asked['recall_256_new']
  assert seen['recall_256'] == asked['recall_256'] | asked['recall_256_new']
  for name in ('recall_repeat', 'recall_copy'):
    letters = {c for q, _ in draws(name) for c in q if c.isalpha()}
    assert letters == seen['recall_256']
