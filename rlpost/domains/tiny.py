"""The easiest tasks, in few bytes: for byte-level models of a few million
parameters that start from nothing. `size` is the longest operand."""

import functools

import numpy as np

from rlpost.domains.domain import Domain, Item

_LETTERS = 'abcdefghij'


def _text(rng: np.random.Generator, size: int) -> str:
  length = int(rng.integers(2, size + 1))
  return ''.join(_LETTERS[i] for i in rng.integers(len(_LETTERS), size=length))


def _item(question: str, gold: str) -> Item:
  return Item(question, {'name': 'exact', 'gold': gold}, len(gold))


def copy(rng: np.random.Generator, *, size: int) -> Item:
  """'copy abc=' -> 'abc'."""
  text = _text(rng, size)
  return _item(f'copy {text}=', text)


def first(rng: np.random.Generator, *, size: int) -> Item:
  """'first abc=' -> 'a'."""
  text = _text(rng, size)
  return _item(f'first {text}=', text[0])


def reverse(rng: np.random.Generator, *, size: int) -> Item:
  """'rev abc=' -> 'cba'."""
  text = _text(rng, size)
  return _item(f'rev {text}=', text[::-1])


def add(rng: np.random.Generator, *, high: int) -> Item:
  """'12+5=' -> '17'."""
  a, b = int(rng.integers(high + 1)), int(rng.integers(10))
  return _item(f'{a}+{b}=', str(a + b))


def sort(rng: np.random.Generator, *, size: int) -> Item:
  """'sort 312=' -> '123'."""
  text = ''.join(str(i) for i in rng.choice(10, size, replace=False))
  return _item(f'sort {text}=', ''.join(sorted(text)))


def _tiny(name: str, family: str, generate) -> Domain:
  return Domain(
    f'tiny_{name}',
    family,
    generate,
    num_shots=0,
    form='bare',
    max_answer_tokens=6,
  )


COPY = _tiny('copy', 'copying', functools.partial(copy, size=4))
FIRST = _tiny('first', 'letters', functools.partial(first, size=4))
REVERSE = _tiny('reverse', 'letters', functools.partial(reverse, size=3))
ADD = _tiny('add', 'arithmetic', functools.partial(add, high=29))
SORT = _tiny('sort', 'sorting', functools.partial(sort, size=3))
