"""Recall: the length that was asked for, the right value, keys kept back."""

import numpy as np
import pytest

from rlpost.data import tokenizer
from rlpost.domains import domain as domain_lib
from rlpost.domains import recall, table

ASKED = {n: int(n.split('_')[1]) for n in table.DOMAINS
         if n.startswith('recall_') and n.split('_')[1].isdigit()}  # fmt: skip


def draws(name, count=300):
  pool = domain_lib.pools(table.load(name), heldout_seed=0)
  environment = pool.environment()
  for i in range(count):
    task = pool.train_task(i, 0)
    state = environment.render(task)
    yield state.prefix + state.suffix, environment.solution(task)


@pytest.mark.parametrize('name', [*ASKED, 'recall_sort'])
def test_a_document_has_the_length_of_its_name(name):
  encode = tokenizer.bytes_tokenizer().encode
  for question, answer in draws(name, 60):
    tokens = [*encode(question), *encode(answer)]
    assert len(tokens) == ASKED.get(name, 64)


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


def test_sorted_and_repeated_pairs():
  for question, answer in draws('recall_sort', 60):
    pairs = question.replace('.', '').removesuffix('#')
    pairs = [pairs[i : i + 2] for i in range(0, len(pairs), 2)]
    assert answer == ''.join(sorted(pairs)) + '\n'
  for question, answer in draws('recall_repeat', 60):
    times = len(answer) // len(question)
    assert answer == question * times + '\n'
    assert times >= 2 and recall.REPEATED - len(question) < len(answer) <= 49


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
  letters = {
      name: {c for q, a in draws(name) for c in q + a if c.isalpha()}
      for name in ('recall_sort', 'recall_repeat')
  }
  assert letters['recall_sort'] == asked['recall_64']
  assert letters['recall_repeat'] == seen['recall_256']
