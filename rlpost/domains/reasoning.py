"""The adapter to reasoning-gym: its tasks in short words of ours.

Its own instructions are long for a small model, so each row of `_QUESTIONS`
says how to ask; the answer and the score are the library's. Items are drawn by
index from one virtual data set, so an item is a function of our generator.
"""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlpost import errors
from rlpost.domains.domain import Domain, Item

_VIRTUAL_SIZE = 2**31 - 1
_MAX_TRIES = 200


def _listed(meta: Mapping[str, Any]) -> str:
  return ' and '.join(str(n) for n in meta['numbers'])


# Data set -> question from the entry's metadata.
_QUESTIONS = {
  'chain_sum': lambda meta: f'{meta["expression"]} =',
  'count_bits': lambda meta: f'How many ones in {meta["binary"]}?',
  'gcd': lambda meta: f'Greatest common divisor of {_listed(meta)}?',
  'lcm': lambda meta: f'Least common multiple of {_listed(meta)}?',
  'letter_counting': lambda meta: (
    f'How many "{meta["target_letter"]}" in: {" ".join(meta["span"])}'
  ),
  'number_sequence': lambda meta: (
    f'Next: {" ".join(str(n) for n in meta["sequence"][:-1])}'
  ),
  'products': lambda meta: f'{meta["expression"]} =',
  'simple_equations': lambda meta: (
    f'{meta["equation"].replace(" ", "")}. {meta["variable"]} ='
  ),
  'spell_backward': lambda meta: f'Spell backward: {meta["word"]}',
}


@functools.cache
def _dataset(name: str, config: tuple[tuple[str, Any], ...]):
  try:
    import reasoning_gym as gym  # a second to import: only when asked for
  except ImportError as error:
    raise errors.InputError(
      f'The domain of {name!r} needs the package reasoning-gym: {error}.'
    ) from error
  return gym.create_dataset(name, seed=0, size=_VIRTUAL_SIZE, **dict(config))


def generate(
  rng: np.random.Generator,
  *,
  dataset: str,
  config: tuple[tuple[str, Any], ...],
  keep: tuple[tuple[str, float], ...] = (),
  partial: bool = False,
  lower: bool = False,
) -> Item:
  """One item of a data set.

  Args:
    rng: chooses the index.
    dataset: its name in reasoning-gym.
    config: its arguments.
    keep: share of the items to keep for an answer that is too common.
    partial: train on the library's partial credit.
    lower: write the question and the answer in lower case, where the library
      has an item in both cases.
  """
  source = _dataset(dataset, config)
  shares = dict(keep)
  for _ in range(_MAX_TRIES):
    entry = source[int(rng.integers(_VIRTUAL_SIZE))]
    if rng.random() < shares.get(entry['answer'], 1.0):
      break
  question, gold = _QUESTIONS[dataset](entry['metadata']), entry['answer']
  if lower:
    question, gold = question.lower(), gold.lower()
  spec = {'name': 'reasoning_gym', 'dataset': dataset, 'gold': gold}
  if partial:
    spec['partial'] = True
  return Item(question, spec, len(question))


def _domain(
  dataset: str,
  family: str,
  *,
  keep: tuple[tuple[str, float], ...] = (),
  partial: bool = False,
  lower: bool = False,
  num_shots: int = 3,
  **config,
) -> Domain:
  return Domain(
    f'rg_{dataset}',
    family,
    functools.partial(
      generate,
      dataset=dataset,
      config=tuple(sorted(config.items())),
      keep=keep,
      partial=partial,
      lower=lower,
    ),
    num_shots=num_shots,
  )


CHAIN_SUM = _domain(
  'chain_sum', 'arithmetic', min_terms=3, max_terms=3, max_digits=1
)
COUNT_BITS = _domain('count_bits', 'bits', min_n=32, max_n=511)
GCD = _domain(
  'gcd',
  'number_theory',
  min_value=2,
  max_value=30,
  keep=(('1', 0.5), ('2', 0.5)),
)
LCM = _domain('lcm', 'number_theory', min_value=2, max_value=12)
LETTER_COUNTING = _domain(
  'letter_counting',
  'counting',
  min_words=3,
  max_words=5,
  keep=(('1', 0.25), ('2', 0.45)),
)
NUMBER_SEQUENCE = _domain(
  'number_sequence',
  'sequences',
  min_terms=4,
  max_terms=4,
  min_value=0,
  max_value=20,
  max_complexity=1,
)
PRODUCTS = _domain('products', 'arithmetic', max_digits=1)
SIMPLE_EQUATIONS = _domain(
  'simple_equations', 'algebra', max_terms=2, max_value=12
)
SPELL_BACKWARD = _domain(
  'spell_backward',
  'letters',
  min_word_len=3,
  max_word_len=4,
  partial=True,
  lower=True,
)
