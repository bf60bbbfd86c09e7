"""Key-value recall: find a pair in a text of a wanted length, in few bytes.

  '...c7.....a1...?a'     -> '1'            recall: dots up to the wanted length
  '...c7.....a1...?a'     -> '1?c7'         all: one question after the other
  'c7a1!'                 -> 'c7a1!c7a1!'   repeat: pairs over and over
  'x0k!'                  -> 'x0k!x0k!'     copy: letters and digits likewise

A decoder that starts from random numbers gets one trained token per text from
the first and learns nothing for thousands of updates. Copying teaches it within
some hundred to look for what stood before and take what followed; recall is
then a matter of a hundred more.

Keys are letters, values digits. Every fifth letter is asked for in the `new`
domains only: in training such pairs stand beside the one that is asked for and
are repeated, but no question names them. Difficulty is the length in bytes.
"""

import functools
import string

import numpy as np

from rlpost.domains.domain import Domain, Item

_NEW = string.ascii_lowercase[::5]
_KEYS = ''.join(k for k in string.ascii_lowercase if k not in _NEW)
PAIRS = 6
REPEATED = 24  # bytes of an answer over and over, at most


def _draw(rng, keys, count):
  """`count` pairs of distinct keys."""
  values = rng.integers(10, size=count)
  chosen = rng.choice(list(keys), count, replace=False)
  return [f'{k}{v}' for k, v in zip(chosen, values, strict=True)]


def _scatter(rng, pairs, length):
  """The pairs in this order in a text of `length` bytes."""
  dots = length - sum(map(len, pairs))
  ends = np.sort(rng.integers(dots + 1, size=len(pairs)))
  gaps = np.diff(ends, prepend=0)
  text = ''.join('.' * g + p for g, p in zip(gaps, pairs, strict=True))
  return text.ljust(length, '.')


def _item(question, gold):
  return Item(question, {'name': 'exact', 'gold': gold}, len(question))


def ask(rng: np.random.Generator, *, length: int, new: bool) -> Item:
  """The value of one key; question, answer and its end take `length` bytes."""
  asked = _draw(rng, _NEW if new else _KEYS, 1)[0]
  others = (_KEYS + _NEW).replace(asked[0], '')
  pairs = [asked, *_draw(rng, others, PAIRS - 1)]
  pairs = [pairs[i] for i in rng.permutation(PAIRS)]
  text = _scatter(rng, pairs, length - len('?a1\n'))
  return _item(f'{text}?{asked[0]}', asked[1])


def ask_all(rng: np.random.Generator, *, length: int) -> Item:
  """All values; question, answer and its end take `length` bytes.

  To train on: the order of the questions is not to be known, so as an answer it
  is never right.
  """
  pairs = _draw(rng, _KEYS, PAIRS)
  first, *rest = (pairs[i] for i in rng.permutation(PAIRS))
  gold = first[1] + ''.join(f'?{pair}' for pair in rest)
  text = _scatter(rng, pairs, length - len(f'?a{gold}\n'))
  return _item(f'{text}?{first[0]}', gold)


def _over_and_over(text):
  return _item(text, text * (REPEATED // len(text)))


def repeat(rng: np.random.Generator) -> Item:
  """Pairs in their order, as often as they fit."""
  count = int(rng.integers(3, 7))
  return _over_and_over(''.join(_draw(rng, _KEYS + _NEW, count)) + '!')


def copy(rng: np.random.Generator) -> Item:
  """Letters and digits in their order, as often as they fit."""
  count = int(rng.integers(4, 13))
  signs = rng.choice(list(string.ascii_lowercase + string.digits), count)
  return _over_and_over(''.join(signs) + '!')


def _domain(name, generate, answer):
  return Domain(
    f'recall_{name}',
    'recall',
    generate,
    num_shots=0,
    form='bare',
    max_answer_tokens=answer + 1,
  )


def _ask(length, new=False):
  name = f'{length}_new' if new else str(length)
  return _domain(name, functools.partial(ask, length=length, new=new), 1)


def _ask_all(length):
  generate = functools.partial(ask_all, length=length)
  return _domain(f'{length}_all', generate, 3 * PAIRS - 2)


R64 = _ask(64)
R64_ALL = _ask_all(64)
R256 = _ask(256)
R256_ALL = _ask_all(256)
R256_NEW = _ask(256, new=True)
R512 = _ask(512)
R1024 = _ask(1024)
R1024_NEW = _ask(1024, new=True)
REPEAT = _domain('repeat', repeat, REPEATED)
COPY = _domain('copy', copy, REPEATED)
