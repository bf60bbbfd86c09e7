"""Answer checkers: a literal table of functions, run inside workers.

A checker is `checker(answer, gold, **options)`; `answer` is what the policy
wrote (hostile text), `gold` is a reference answer as text that itself scores 1.
It returns a number in [0, 1], or a dict of such numbers whose 'value' is the
score and whose other entries are components. Nothing is ever evaluated.

A spec is JSON: `{'name': 'exact', 'gold': 'river', ...options}`. `check` turns
a spec and an answer into a verdict as JSON, and keeps the three cases apart: a
badly written answer is the value 0, a spec without a gold answer is invalid,
and a checker that cannot even score its own gold answer is infra.
"""

import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from rlpost import errors

MAX_ANSWER_CHARS = 4096
_NUMBER = re.compile(
  r'[+-]?(\d{1,40}|\d{1,3}(,\d{3}){1,12})(\.\d{1,40})?', re.ASCII
)
_SPLIT = re.compile(r'[,\s]+')
_OPTION = re.compile(r'\(?([A-Za-z])[).:]?', re.ASCII)


def exact(answer: str, gold: str) -> float:
  """Equal but for white space at the ends."""
  return float(answer.strip() == gold.strip())


def folded(answer: str, gold: str) -> float:
  """Equal but for letter case, runs of white space and a final full stop."""
  return float(_fold(answer) == _fold(gold))


def number(answer: str, gold: str, tolerance: float = 0.0) -> float:
  """One plain decimal number within `tolerance`; no words, no exponents."""
  difference = abs(_parse_number(answer) - _parse_number(gold))
  return float(difference <= Fraction(tolerance))


def choice(answer: str, gold: str) -> float:
  """The letter of one option: 'B', 'b', '(B)' or 'B.'; two letters score 0."""
  match = _OPTION.fullmatch(answer.strip())
  return float(match is not None and match[1].upper() == gold.strip().upper())


def contains(answer: str, gold: str, max_words: int = 8) -> float:
  """`gold` as whole words of an answer of at most `max_words` words.

  The cap keeps a policy from reciting the whole prompt.
  """
  words, wanted = _fold(answer).split(), _fold(gold).split()
  if not wanted or len(words) > max_words:
    return 0.0
  starts = range(len(words) - len(wanted) + 1)
  return float(any(words[i : i + len(wanted)] == wanted for i in starts))


def sequence(answer: str, gold: str, partial: bool = False) -> dict[str, float]:
  """The same items in the same order, split at commas and white space.

  Items that are numbers compare as numbers. With `partial` the value is the
  share of positions that agree, over the longer of the two lists.
  """
  items, wanted = _items(answer), _items(gold)
  same = sum(a == b for a, b in zip(items, wanted))
  share = same / max(len(items), len(wanted), 1)
  return {
    'value': share if partial else float(items == wanted),
    'positions': share,
    'same_items': float(sorted(map(str, items)) == sorted(map(str, wanted))),
  }


def json_fields(answer: str, gold: str) -> dict[str, float]:
  """A JSON object with the same keys and values as `gold`, and no others.

  Types count: 5 is not '5', and 1 is not true.
  """
  try:
    data = json.loads(answer, parse_constant=_refuse, object_pairs_hook=_pairs)
  except (ValueError, RecursionError):
    return {'value': 0.0, 'parses': 0.0, 'fields': 0.0}
  wanted = json.loads(gold)
  if not isinstance(data, dict):
    return {'value': 0.0, 'parses': 1.0, 'fields': 0.0}
  same = sum(k in data and _same(data[k], v) for k, v in wanted.items())
  return {
    'value': float(same == len(wanted) == len(data)),
    'parses': 1.0,
    'fields': same / max(len(wanted), len(data), 1),
  }


# Data sets whose `score_answer` was read and found to compare the answer, as
# text or as a decimal, with the gold one and with nothing else. Several others
# hand it to `eval`, or to sympy, which evaluates it too.
REASONING_GYM = (
  'basic_arithmetic',
  'caesar_cipher',
  'chain_sum',
  'count_bits',
  'count_primes',
  'gcd',
  'lcm',
  'leg_counting',
  'letter_counting',
  'number_filtering',
  'number_sequence',
  'products',
  'simple_equations',
  'spell_backward',
  'word_sequence_reversal',
)


def reasoning_gym(
  answer: str,
  gold: str,
  dataset: str,
  threshold: float = 0.99,
  partial: bool = False,
) -> dict[str, float]:
  """Score of a reasoning-gym data set, by default 1 from `threshold` on.

  Many of its checkers give small sums for any text, so raw scores below the
  threshold count only with `partial`. An answer outside ASCII cannot equal an
  ASCII gold answer, whatever a number parser makes of its digits.
  """
  if dataset not in REASONING_GYM:
    raise errors.InputError(
      f'{dataset=} is not among the reviewed data sets: '
      f'{", ".join(REASONING_GYM)}.'
    )
  if gold.isascii() and not answer.isascii():
    return {'value': 0.0, 'raw': 0.0}
  entry = {'question': '', 'answer': gold, 'metadata': {}}
  raw = _gym_dataset(dataset).score_answer(answer.strip(), entry)
  raw = min(max(float(raw), 0.0), 1.0)
  return {'value': raw if partial else float(raw >= threshold), 'raw': raw}


CHECKERS = {
  'choice': choice,
  'contains': contains,
  'exact': exact,
  'folded': folded,
  'json_fields': json_fields,
  'number': number,
  'reasoning_gym': reasoning_gym,
  'sequence': sequence,
}

# Modules that a checker needs, imported outside its deadline.
IMPORTS = {'reasoning_gym': ('reasoning_gym',)}


def has_gold(spec: Mapping[str, Any]) -> bool:
  """Whether a spec has a reference answer, so that it can be scored."""
  gold = spec.get('gold')
  return isinstance(gold, str) and bool(gold.strip())


def check(spec: Mapping[str, Any], answer: str) -> dict:
  """Scores one answer; returns the fields of a `Verdict` as JSON.

  Raises:
    errors.InputError: no checker has this name.
    MemoryError: left to the worker, which is then replaced.
  """
  options = dict(spec)
  name = options.pop('name', None)
  if name not in CHECKERS:
    known = ', '.join(sorted(CHECKERS))
    raise errors.InputError(f'No checker {name!r}; known ones: {known}.')
  if not has_gold(spec):
    return {'status': 'invalid', 'reason': 'no gold answer'}
  if len(answer) > MAX_ANSWER_CHARS:
    return _zero(f'longer than {MAX_ANSWER_CHARS} characters')
  if not answer.strip():
    return _zero('empty')
  checker = functools.partial(CHECKERS[name], **options)
  try:
    return _verdict(checker(answer))
  except MemoryError:
    raise
  except Exception as error:  # whose fault? ask with an answer that is right
    reason = f'{type(error).__name__}: {str(error)[:200]}'
    try:
      fine = _verdict(checker(spec['gold']))['value'] == 1
    except Exception:
      fine = False
    if fine:
      return _zero(reason)
    return {'status': 'infra', 'reason': f'the checker is broken: {reason}'}


def check_many(items: Sequence[tuple[Mapping[str, Any], str]]) -> list[dict]:
  """`check` over pairs (spec, answer): what a worker is asked to run."""
  return [check(spec, answer) for spec, answer in items]


def _verdict(result: float | Mapping[str, float]) -> dict:
  parts = dict(result) if isinstance(result, Mapping) else {'value': result}
  for key, part in parts.items():
    if not math.isfinite(part) or not 0 <= part <= 1:
      raise ValueError(f'{key}={part} is outside [0, 1].')
  value = float(parts.pop('value'))
  return {'status': 'value', 'value': value, 'components': parts}


def _zero(reason: str) -> dict:
  return {'status': 'value', 'value': 0.0, 'reason': reason}


def _fold(text: str) -> str:
  return ' '.join(text.casefold().split()).removesuffix('.')


def _parse_number(text: str) -> Fraction:
  text = text.strip()
  if not _NUMBER.fullmatch(text):
    raise ValueError(f'{text[:40]!r} is not a plain number')
  return Fraction(text.replace(',', ''))


def _items(text: str) -> list[str | Fraction]:
  def item(word):
    return _parse_number(word) if _NUMBER.fullmatch(word) else word

  return [item(word) for word in _SPLIT.split(text.strip()) if word]


def _refuse(constant: str):
  raise ValueError(f'{constant} is not JSON')


def _pairs(pairs: list[tuple[str, Any]]) -> dict:
  if len({key for key, _ in pairs}) < len(pairs):
    raise ValueError('a key appears twice')
  return dict(pairs)


def _same(a: Any, b: Any) -> bool:
  """Equality of JSON values that tells 1 from true and from 1.0."""
  return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


@functools.lru_cache(maxsize=64)
def _gym_dataset(name: str):
  import reasoning_gym as gym  # 1 s to import, and only some domains use it

  # Scores of the reviewed data sets depend on the gold answer alone.
  return gym.create_dataset(name, seed=0, size=1)
