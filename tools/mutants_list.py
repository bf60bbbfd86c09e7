"""One-line faults, each with the tests that should notice it."""

from typing import NamedTuple


class Mutant(NamedTuple):
  """`old` is in `file` exactly once; `new` takes its place."""

  file: str
  old: str
  new: str
  tests: tuple[str, ...]
  says: str


LAUNCHING = ('tests/experiments/launching_test.py',)

MUTANTS = (
  Mutant(
    'experiments/launching.py',
    'numbers and a <= b',
    'numbers and a >= b',
    LAUNCHING,
    'a resumed run may ask for fewer steps, not for more',
  ),
  Mutant(
    'experiments/launching.py',
    'keywords - set(given), needed - set(given)',
    'keywords, needed - set(given)',
    LAUNCHING,
    'a config may set what the launcher supplies',
  ),
  Mutant(
    'experiments/launching.py',
    '_end(error, error.exit_code)',
    '_end(error, 1)',
    LAUNCHING,
    'every failure has the same exit code',
  ),
  Mutant(
    'rlpost/errors.py',
    'exit_code = 75',
    'exit_code = 0',
    LAUNCHING,
    'a run stopped by a signal looks finished',
  ),
)
