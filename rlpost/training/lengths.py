"""A curriculum of lengths: longer tasks by stages, hard ones once more.

From the step of a stage on, the plan draws from the domains of which no task is
harder than the stage's limit; where difficulty is a length, from those that are
no longer. A task whose mean reward was below `below` waits, first in, first
out, until a later stage has begun. In each step of that stage a part `carry` of
the prompts are tasks that waited, in the place of new ones; rounding is owed,
as in `data.plan`. A task that fails again waits for the stage after.
"""

import collections
from collections.abc import Mapping, Sequence

from rlpost import errors

VERSION = 1
Pick = tuple[str, int]  # a domain and the index of a task


class Lengths:
  """Which domains are open, and which tasks come again; its state is JSON."""

  def __init__(
      self,
      hardest: Mapping[str, float],
      *,
      stages: Sequence[tuple[int, float]] = (),
      carry: float = 0.0,
      below: float = 0.5,
      keep: int = 256,
  ):
    """No task waits.

    Args:
      hardest: by domain, the largest `Task.difficulty` in it.
      stages: (first step, limit of the difficulty) of each, both rising, the
        first at step 0; without any, all domains are open.
      carry: part of the prompts, in [0, 1], that are tasks which waited.
      below: mean reward under which a task has failed.
      keep: tasks that wait at most; the oldest give way.
    """
    if not 0 <= carry <= 1:
      raise errors.InputError(f'lengths.{carry=} must be in [0, 1].')
    if keep < 1:
      raise errors.InputError(f'lengths.{keep=} must be at least 1.')
    if carry and len(stages) < 2:
      raise errors.InputError(
          f'lengths.{carry=} takes tasks from earlier stages into later ones; '
          f'{stages=} has no later one. Add a stage, or take carry = 0.'
      )
    steps, limits = [s for s, _ in stages], [h for _, h in stages]
    if stages and (
        steps[0] or steps != sorted(set(steps))
        or limits != sorted(set(limits))
    ):
      raise errors.InputError(
          f'lengths.{stages=} must begin at step 0, with steps and limits that '
          'rise.'
      )
    if stages and min(hardest.values()) > limits[0]:
      raise errors.InputError(
          f'lengths.{stages=} opens no domain at step 0: their hardest tasks '
          f'are {dict(hardest)}; raise the first limit.'
      )
    never = {n: h for n, h in hardest.items() if stages and h > limits[-1]}
    if never:
      raise errors.InputError(
          f'lengths.{stages=} never opens {never}; raise the last limit, or '
          'drop these domains.'
      )
    self._hardest = dict(hardest)
    self._stages, self._carry = tuple(stages), carry
    self._below, self._keep = below, keep
    self._owed = 0.0
    self._failed = []  # [domain, index, stage], the oldest first

  def stage(self, step: int) -> int:
    """The number of the stage that `step` is in, from 0."""
    return max(0, sum(first <= step for first, _ in self._stages) - 1)

  def open(self, step: int) -> tuple[str, ...]:
    """The domains that may be drawn from at `step`."""
    if not self._stages:
      return tuple(sorted(self._hardest))
    limit = self._stages[self.stage(step)][1]
    return tuple(sorted(n for n, h in self._hardest.items() if h <= limit))

  def again(self, picks: Sequence[Pick], step: int) -> list[Pick]:
    """`picks`, some of them replaced by tasks that failed in earlier stages."""
    stage = self.stage(step)
    ready = [entry for entry in self._failed if entry[2] < stage]
    if not ready:
      return list(picks)
    self._owed += self._carry * len(picks)
    due = int(self._owed + 1e-9)  # a sum of tenths may end below its integer
    self._owed = max(0.0, self._owed - due)
    taken = ready[:due]
    self._failed = [entry for entry in self._failed if entry not in taken]
    old = [(name, index) for name, index, _ in taken]
    return old + list(picks[len(old) :])

  def note(
      self, picks: Sequence[Pick], scores: Sequence[float | None], step: int
  ) -> None:
    """Keeps the tasks that failed at `step`.

    Args:
      picks: what was attempted.
      scores: the mean reward of each; None where nothing could be scored.
      step: at which they were drawn.
    """
    if not self._carry:
      return
    stage = self.stage(step)
    self._failed += [
        [name, index, stage]
        for (name, index), score in zip(picks, scores, strict=True)
        if score is not None and score < self._below
    ]
    self._failed = self._failed[-self._keep :]

  def report(self) -> dict:
    """Tasks that wait, by domain."""
    return dict(collections.Counter(name for name, _, _ in self._failed))

  def state(self) -> dict:
    """All that decides which tasks come again, as JSON."""
    return {
        'version': VERSION,
        'owed': self._owed,
        'failed': [list(entry) for entry in self._failed],
    }

  def set_state(self, state: Mapping) -> None:
    """Continues from `state`; tasks of domains that left are dropped."""
    if state['version'] != VERSION:
      raise errors.InputError(
          f'The lengths have version {state["version"]}, this code reads '
          f'{VERSION}.'
      )
    self._owed = state['owed']
    self._failed = [
        list(entry) for entry in state['failed'] if entry[0] in self._hardest
    ]
