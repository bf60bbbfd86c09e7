"""Scoring: answers in, verdicts out, through killable workers.

`Scorer` is the one interface for rule checkers. Answers travel in batches;
when a batch meets its deadline or its worker dies, its items are tried again
one by one, so that only the guilty one is lost (status infra) and its siblings
keep their verdicts.

Before training, `canary` shows that the checkers work (gold answers score 1,
empty ones 0) and `best_constant` says what an answer that never reads the
question is worth.
"""

import collections
import concurrent.futures
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlpost import errors, types, workers
from rlpost.rewards import checkers

CHECK_MANY = 'rlpost.rewards.checkers:check_many'
_FAILURES = (workers.CallError, workers.DeadlineError, workers.DiedError)
# Constants that have cheated graders elsewhere.
STOCK_ANSWERS = ('0', '1', '2', 'A', 'B', 'yes', 'no', 'True', 'False', ':',
                 '.', 'Answer', 'the', '{}', '[]', '""')  # fmt: skip


class Item(NamedTuple):
  """One answer to score.

  Attributes:
    checker: the task's spec.
    text: the policy's answer, without the stop.
    stop_reason: 'stop', 'length' (cut off) or 'overlong' (never asked).
  """

  checker: Mapping[str, Any]
  text: str
  stop_reason: str = 'stop'


class Pending:
  """Verdicts under way; `result` waits for them, in the items' order."""

  def __init__(self, scorer: 'Scorer', items: Sequence[Item]):
    self._scorer = scorer
    self._items = items = list(items)
    self._verdicts: list[types.Verdict | None] = [_early(i) for i in items]
    waiting = [i for i, verdict in enumerate(self._verdicts) if verdict is None]
    self._calls = [
      (part, scorer._call([items[i] for i in part], retries=0))
      for part in scorer._parts(items, waiting)
    ]

  def done(self) -> bool:
    return all(future.done() for _, future in self._calls)

  def result(self) -> list[types.Verdict]:
    """Raises `LostWorkerError` when the pool is gone."""
    singles = []
    for part, future in self._calls:
      try:
        self._keep(part, future.result())
      except _FAILURES:
        singles += [
          (i, self._scorer._call([self._items[i]], retries=1)) for i in part
        ]
    self._calls = []
    for i, future in singles:
      try:
        self._keep([i], future.result())
      except _FAILURES as error:
        reason = f'{type(error).__name__}: {str(error)[-400:]}'
        self._verdicts[i] = types.Verdict('infra', reason=reason)
    return list(self._verdicts)

  def _keep(self, part: Sequence[int], verdicts: Sequence[Mapping]) -> None:
    for i, verdict in zip(part, verdicts, strict=True):
      self._verdicts[i] = types.Verdict.from_json(verdict)


class Scorer:
  """Scores batches of answers in a worker pool.

  Args:
    pool: the workers.
    batch_size: answers in one call to a worker.
    cpu_s: deadline of one call, a batch or a single, in CPU seconds.
    function: 'module:function' of the worker, as `checkers.check_many`.
  """

  def __init__(
    self,
    pool: workers.WorkerPool,
    *,
    batch_size: int = 32,
    cpu_s: float = 5.0,
    function: str = CHECK_MANY,
  ):
    if batch_size < 1:
      raise errors.InputError(f'{batch_size=} must be at least 1.')
    self._pool = pool
    self._batch_size = batch_size
    self._cpu_s = cpu_s
    self._function = function

  def submit(self, items: Sequence[Item]) -> Pending:
    """Starts scoring, so that decoding can go on meanwhile.

    Raises:
      errors.InputError: a spec names a checker that does not exist.
    """
    return Pending(self, items)

  def score(self, items: Sequence[Item]) -> list[types.Verdict]:
    return self.submit(items).result()

  def _parts(
    self, items: Sequence[Item], waiting: Sequence[int]
  ) -> list[list[int]]:
    """Indices in batches; each batch needs one set of imports."""
    by_imports = collections.defaultdict(list)
    for i in waiting:
      by_imports[_imports(items[i])].append(i)
    size = self._batch_size
    return [
      group[k : k + size]
      for group in by_imports.values()
      for k in range(0, len(group), size)
    ]

  def _call(
    self, items: Sequence[Item], retries: int
  ) -> concurrent.futures.Future:
    return self._pool.submit(
      self._function,
      [(dict(item.checker), item.text) for item in items],
      cpu_s=self._cpu_s,
      retries=retries,
      imports=_imports(items[0]),
    )


def canary(scorer: Scorer, tasks: Sequence[types.Task]) -> None:
  """Refuses to train on a checker that does not work.

  Raises:
    errors.InputError: a gold answer scores below 1 or an empty one above 0;
      the message names domains, counts and an example.
  """
  wrong = collections.defaultdict(list)
  for text_of, wanted, what in (
    (lambda task: task.checker.get('gold', ''), 1.0, 'gold'),
    (lambda task: '', 0.0, 'empty'),
  ):
    items = [Item(task.checker, text_of(task)) for task in tasks]
    for task, verdict in zip(tasks, scorer.score(items), strict=True):
      if not verdict.valid or verdict.value != wanted:
        found = verdict.value if verdict.valid else verdict.status
        wrong[task.domain].append(
          f'the {what} answer to {task.messages[-1].text!r} got {found}, '
          f'not {wanted:g} {verdict.reason}'.rstrip()
        )
  if wrong:
    lines = [f'{d}: {len(w)} wrong, e.g. {w[0]}' for d, w in wrong.items()]
    raise errors.InputError(
      'Checkers fail their canary; mend or leave out these domains.\n'
      + '\n'.join(lines)
    )


def best_constant(
  scorer: Scorer, tasks: Sequence[types.Task], candidates: int = 8
) -> tuple[str, float]:
  """The fixed answer with the highest mean score over `tasks`, and that mean.

  Tries the `candidates` most frequent gold answers and `STOCK_ANSWERS`. The
  mean is over valid verdicts.
  """
  golds = collections.Counter(task.checker.get('gold', '') for task in tasks)
  answers = [answer for answer, _ in golds.most_common(candidates)]
  answers = list(dict.fromkeys([*answers, *STOCK_ANSWERS]))
  items = [Item(task.checker, answer) for answer in answers for task in tasks]
  verdicts = scorer.score(items)
  best = ('', 0.0)
  for k, answer in enumerate(answers):
    part = verdicts[k * len(tasks) : (k + 1) * len(tasks)]
    values = [verdict.value for verdict in part if verdict.valid]
    mean = sum(values) / max(len(values), 1)
    if mean > best[1]:
      best = (answer, mean)
  return best


def _imports(item: Item) -> tuple[str, ...]:
  return checkers.IMPORTS.get(item.checker.get('name'), ())


def _early(item: Item) -> types.Verdict | None:
  """Verdicts that need no checker; long texts never travel to a worker."""
  if item.checker.get('name') not in checkers.CHECKERS:
    known = ', '.join(sorted(checkers.CHECKERS))
    raise errors.InputError(
      f'No checker {item.checker.get("name")!r}; known ones: {known}.'
    )
  if item.stop_reason == 'overlong':
    return types.Verdict('invalid', reason='overlong prompt, nothing sampled')
  if not checkers.has_gold(item.checker):
    return types.Verdict('invalid', reason='no gold answer')
  if item.stop_reason == 'length':
    return types.Verdict('value', 0.0, reason='cut off')
  if item.stop_reason != 'stop':
    raise ValueError(f'{item.stop_reason=} must be stop, length or overlong.')
  if len(item.text) > checkers.MAX_ANSWER_CHARS:
    return types.Verdict('value', 0.0, reason='too long')
  return None
