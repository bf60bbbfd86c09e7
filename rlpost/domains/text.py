"""Copying, letters, case, format, extraction and choice: domains of words."""

import functools
import json
import string

import numpy as np

from rlpost.domains import words
from rlpost.domains.domain import Domain, Item


def _pick(rng: np.random.Generator, pool, count: int) -> list[str]:
  """`count` distinct entries, as plain strings."""
  return [pool[i] for i in rng.choice(len(pool), count, replace=False)]


def _exact(question: str, gold: str, difficulty: float) -> Item:
  return Item(question, {'name': 'exact', 'gold': gold}, difficulty)


def copy_words(rng: np.random.Generator, *, low: int, high: int) -> Item:
  """'Copy: young ear parrot' -> 'young ear parrot'."""
  count = int(rng.integers(low, high + 1))
  text = ' '.join(_pick(rng, words.WORDS, count))
  return _exact(f'Copy: {text}', text, count)


def last_word(rng: np.random.Generator, *, low: int, high: int) -> Item:
  """'Last word of: bed screen lose' -> 'lose'."""
  count = int(rng.integers(low, high + 1))
  chosen = _pick(rng, words.WORDS, count)
  return _exact(f'Last word of: {" ".join(chosen)}', chosen[-1], count)


def first_letter(rng: np.random.Generator) -> Item:
  """'First letter of: soft' -> 's'."""
  (word,) = _pick(rng, words.WORDS, 1)
  return _exact(f'First letter of: {word}', word[0], len(word))


def upper(rng: np.random.Generator) -> Item:
  """'Upper case: help' -> 'HELP'."""
  (word,) = _pick(rng, words.WORDS, 1)
  return _exact(f'Upper case: {word}', word.upper(), len(word))


def capitalize(rng: np.random.Generator) -> Item:
  """'Capitalize: penguin kind' -> 'Penguin Kind'."""
  text = ' '.join(_pick(rng, words.WORDS, 2))
  return _exact(f'Capitalize: {text}', text.title(), 2)


def quote(rng: np.random.Generator) -> Item:
  """'Put in quotes: strong soap' -> '"strong soap"'."""
  text = ' '.join(_pick(rng, words.WORDS, 2))
  return _exact(f'Put in quotes: {text}', f'"{text}"', 2)


def json_object(rng: np.random.Generator) -> Item:
  """'JSON of market = 35' -> '{"market": 35}'."""
  (key,) = _pick(rng, words.WORDS, 1)
  value = int(rng.integers(1, 100))
  spec = {'name': 'json_fields', 'gold': json.dumps({key: value})}
  return Item(f'JSON of {key} = {value}', spec, 1)


def color_of(rng: np.random.Generator) -> Item:
  """Two coloured things, one asked for."""
  pool = words.CLOTHES + words.VEHICLES + words.FURNITURE
  things, colors = _pick(rng, pool, 2), _pick(rng, words.COLORS, 2)
  asked = int(rng.integers(2))
  facts = ', '.join(f'{c} {t}' for c, t in zip(colors, things))
  return _exact(f'{facts}. Color of the {things[asked]}?', colors[asked], 2)


def needle(rng: np.random.Generator, *, filler: int) -> Item:
  """Who has what, among sentences that do not matter."""
  names, things = _pick(rng, words.NAMES, 2), _pick(rng, words.THINGS, 2)
  sentences = [f'{n} has the {t}.' for n, t in zip(names, things)]
  for _ in range(filler):
    (animal,) = _pick(rng, words.ANIMALS, 1)
    (place,) = _pick(rng, words.PLACES, 1)
    sentences.append(f'The {animal} ran to the {place}.')
  asked = int(rng.integers(2))
  text = ' '.join(_pick(rng, sentences, len(sentences)))
  question = f'{text} What does {names[asked]} have?'
  return _exact(question, things[asked], len(sentences))


def _options(
  rng: np.random.Generator, right: str, wrong: list[str], ask: str
) -> Item:
  """Lettered options; the right one's place is uniform."""
  options = list(wrong)
  place = int(rng.integers(len(wrong) + 1))
  options.insert(place, right)
  letters = string.ascii_uppercase
  listed = ' '.join(f'{letter}) {o}' for letter, o in zip(letters, options))
  spec = {'name': 'choice', 'gold': letters[place]}
  return Item(f'{ask} {listed}', spec, len(options))


def _two_kinds(rng: np.random.Generator) -> tuple[str, str]:
  """Two kinds of thing; animals and food overlap, so never both."""
  while True:
    kind, other = _pick(rng, tuple(words.KINDS), 2)
    if {kind, other} != {'animal', 'food'}:
      return kind, other


def choice(rng: np.random.Generator) -> Item:
  """'Which is a job? A) taxi B) train C) lawyer D) bus' -> 'C'."""
  kind, other = _two_kinds(rng)
  (right,) = _pick(rng, words.KINDS[kind], 1)
  wrong = _pick(rng, words.KINDS[other], 3)
  article = 'an' if kind[0] in 'aeiou' else 'a'
  return _options(rng, right, wrong, f'Which is {article} {kind}?')


def odd_one_out(rng: np.random.Generator) -> Item:
  """'Odd one out? A) baker B) ship C) car D) plane' -> 'A'."""
  kind, other = _two_kinds(rng)
  (right,) = _pick(rng, words.KINDS[kind], 1)
  wrong = _pick(rng, words.KINDS[other], 3)
  return _options(rng, right, wrong, 'Odd one out?')


COPY_WORDS = Domain(
  'copy_words', 'copying', functools.partial(copy_words, low=2, high=4)
)
LAST_WORD = Domain(
  'last_word', 'copying', functools.partial(last_word, low=3, high=5)
)
FIRST_LETTER = Domain('first_letter', 'letters', first_letter)
UPPER = Domain('upper', 'case', upper)
CAPITALIZE = Domain('capitalize', 'case', capitalize)
QUOTE = Domain('quote', 'format', quote)
JSON_OBJECT = Domain('json_object', 'format', json_object, max_answer_tokens=10)
COLOR_OF = Domain('color_of', 'extraction', color_of)
NEEDLE = Domain(
  'needle', 'extraction', functools.partial(needle, filler=1), num_shots=2
)
CHOICE = Domain('choice', 'choice', choice, num_shots=2)
ODD_ONE_OUT = Domain('odd_one_out', 'choice', odd_one_out)
