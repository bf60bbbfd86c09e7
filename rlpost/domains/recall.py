"""Key-value recall: find a pair in a text of a wanted length, in few bytes.

  'ab1cd4ef2 ... ?cd:'       -> 'cd4'
  'ab1cd4ef2 ... ?cd,ab:'    -> 'cd4ab1'

The text is as long as asked; which keys are asked, and where they stand, is
drawn. Of the 676 keys a fifth, every fifth, appears in questions of the `new`
domains only (in texts it may stand anywhere). So a policy that has learned to
look up keys, not keys, answers both kinds alike.
"""

import functools
import string

import numpy as np

from rlpost.domains.domain import Domain, Item

_KEYS = tuple(a + b for a in string.ascii_lowercase
              for b in string.ascii_lowercase)
_NEW = frozenset(range(0, len(_KEYS), 5))
PAIR = 3  # bytes of a key and its value


def recall(
  rng: np.random.Generator, *, length: int, questions: int, new: bool
) -> Item:
  """A text and questions of `length` bytes together, end included."""
  room = length - len('?:\n') - questions * (PAIR + PAIR) + 1
  count = room // PAIR
  keys = rng.choice(len(_KEYS), count, replace=False)
  values = rng.integers(10, size=count)
  pairs = [f'{_KEYS[k]}{v}' for k, v in zip(keys, values, strict=True)]
  open_to = [i for i in range(count) if (int(keys[i]) in _NEW) == new]
  asked = rng.choice(open_to, questions, replace=False)
  question = ','.join(_KEYS[keys[i]] for i in asked)
  gold = ''.join(pairs[i] for i in asked)
  text = f'{"".join(pairs)}?{question}:'
  return Item(text, {'name': 'exact', 'gold': gold}, length)


def _domain(length: int, *, questions: int = 1, new: bool = False) -> Domain:
  suffix = '_many' if questions > 1 else '_new' if new else ''
  return Domain(
    f'recall_{length}{suffix}',
    'recall',
    functools.partial(recall, length=length, questions=questions, new=new),
    num_shots=0,
    form='bare',
    max_answer_tokens=PAIR * questions + 1,
  )


R64 = _domain(64)
R64_MANY = _domain(64, questions=4)
R64_NEW = _domain(64, new=True)
R256 = _domain(256)
R256_MANY = _domain(256, questions=8)
R256_NEW = _domain(256, new=True)
R512 = _domain(512)
R512_MANY = _domain(512, questions=8)
R512_NEW = _domain(512, new=True)
R1024 = _domain(1024)
R1024_MANY = _domain(1024, questions=8)
R1024_NEW = _domain(1024, new=True)
