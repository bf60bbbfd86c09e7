"""Arithmetic, comparison, sorting, sequences and counting."""

import functools
import string

import numpy as np

from rlpost.domains import words
from rlpost.domains.domain import Domain, Item


def _number(question: str, gold: int, difficulty: float) -> Item:
  spec = {'name': 'number', 'gold': str(gold)}
  return Item(question, spec, difficulty)


def add(rng: np.random.Generator, *, high: int) -> Item:
  """Larger term first, so that a sum and its mirror are one item."""
  b, a = sorted(int(x) for x in rng.integers(2, high + 1, 2))
  return _number(f'{a} + {b} =', a + b, a + b)


def subtract(rng: np.random.Generator, *, high: int) -> Item:
  """'34 - 17 =' -> '17'; never below 0."""
  b, a = sorted(int(x) for x in rng.integers(1, high + 1, 2))
  return _number(f'{a} - {b} =', a - b, a)


def bigger(rng: np.random.Generator, *, high: int) -> Item:
  """'Which is bigger, 12 or 19?' -> '19'; closer is harder."""
  a, b = (int(x) for x in rng.choice(high, 2, replace=False) + 1)
  return _number(f'Which is bigger, {a} or {b}?', max(a, b), -abs(a - b))


def largest(rng: np.random.Generator, *, count: int, high: int) -> Item:
  """'Largest of: 5 15 62 70' -> '70'."""
  numbers = [int(x) for x in rng.choice(high, count, replace=False) + 1]
  listed = ' '.join(str(n) for n in numbers)
  return _number(f'Largest of: {listed}', max(numbers), count)


def sort_numbers(
  rng: np.random.Generator, *, count: int, high: int, descending: bool
) -> Item:
  """'Sort: 5 2 0' -> '0 2 5'."""
  numbers = [int(x) for x in rng.choice(high + 1, count, replace=False)]
  gold = ' '.join(str(n) for n in sorted(numbers, reverse=descending))
  ask = 'Sort down' if descending else 'Sort'
  listed = ' '.join(str(n) for n in numbers)
  return Item(f'{ask}: {listed}', {'name': 'sequence', 'gold': gold}, count)


def sort_letters(rng: np.random.Generator, *, count: int) -> Item:
  """'Sort: r w t' -> 'r t w'."""
  letters = [string.ascii_lowercase[i] for i in rng.choice(26, count, False)]
  gold = ' '.join(sorted(letters))
  question = f'Sort: {" ".join(letters)}'
  return Item(question, {'name': 'sequence', 'gold': gold}, count)


def next_number(
  rng: np.random.Generator, *, high: int, max_step: int, shown: int
) -> Item:
  """'Next: 3 5 7' -> '9'."""
  start = int(rng.integers(1, high + 1))
  step = int(rng.integers(1, max_step + 1))
  terms = [start + step * i for i in range(shown + 1)]
  listed = ' '.join(str(t) for t in terms[:-1])
  return _number(f'Next: {listed}', terms[-1], step)


def next_letter(rng: np.random.Generator, *, max_step: int) -> Item:
  """'Next: l o r' -> 'u'."""
  step = int(rng.integers(1, max_step + 1))
  start = int(rng.integers(26 - 3 * step))
  letters = string.ascii_lowercase[start::step][:4]
  gold = letters[-1]
  question = f'Next: {" ".join(letters[:-1])}'
  return Item(question, {'name': 'exact', 'gold': gold}, step)


def count_word(rng: np.random.Generator, *, length: int) -> Item:
  """How often a word occurs among copies of it and of one other word."""
  times = int(rng.integers(1, length + 1))
  word, other = (words.WORDS[i] for i in rng.choice(len(words.WORDS), 2, False))
  listed = [word] * times + [other] * (length - times)
  listed = ' '.join(listed[i] for i in rng.permutation(length))
  return _number(f'How many "{word}" in: {listed}', times, times)


def count_words(rng: np.random.Generator, *, low: int, high: int) -> Item:
  """'How many words: pig rock learn' -> '3'."""
  count = int(rng.integers(low, high + 1))
  chosen = rng.choice(len(words.WORDS), count, replace=False)
  listed = ' '.join(words.WORDS[i] for i in chosen)
  return _number(f'How many words: {listed}', count, count)


ADD = Domain('add', 'arithmetic', functools.partial(add, high=40))
SUBTRACT = Domain(
  'subtract', 'arithmetic', functools.partial(subtract, high=40)
)
BIGGER = Domain('bigger', 'comparison', functools.partial(bigger, high=99))
LARGEST = Domain(
  'largest', 'comparison', functools.partial(largest, count=4, high=99)
)
SORT_NUMBERS = Domain(
  'sort_numbers',
  'sorting',
  functools.partial(sort_numbers, count=3, high=9, descending=False),
)
SORT_LETTERS = Domain(
  'sort_letters', 'sorting', functools.partial(sort_letters, count=3)
)
NEXT_NUMBER = Domain(
  'next_number',
  'sequences',
  functools.partial(next_number, high=40, max_step=9, shown=3),
)
NEXT_LETTER = Domain(
  'next_letter', 'sequences', functools.partial(next_letter, max_step=3)
)
COUNT_WORD = Domain(
  'count_word', 'counting', functools.partial(count_word, length=4)
)
COUNT_WORDS = Domain(
  'count_words', 'counting', functools.partial(count_words, low=2, high=6)
)
