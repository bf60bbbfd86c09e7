"""What a domain is, and how its tasks are split and drawn.

A `Domain` makes items from a random generator. `pools` splits them: held-out
items are drawn first, then a validation pool (for choosing the best
checkpoint), then the few-shot examples; every later pool, and every training
task, refuses the content ids of the earlier ones. A domain with few distinct
items is split by item, the same way for every seed, because a second disjoint
held-out set would not exist.

Training tasks have random access: `Pools.train_task(index, seed)` depends on
its arguments alone (Philox keyed by domain and seed, with the index as its
counter), never on what was drawn before.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlpost import errors, types
from rlpost.environments import single_turn
from rlpost.rewards import scoring

FEW_ITEMS = 200  # below this many distinct items, split by item
_PROBE_DRAWS = 2000  # of 199 even items, 1 % of probes miss one
_MAX_TRIES = 200


class Item(NamedTuple):
  """A question, the checker's spec, and how hard it is."""

  question: str
  checker: Mapping[str, Any]
  difficulty: float = 0.0


@dataclasses.dataclass(frozen=True)
class Domain:
  """A source of tasks of one kind.

  Attributes:
    name: key of statistics and checkpoints.
    family: kind of skill; mixtures limit the domains of one family.
    generate: makes one item from a NumPy generator, and from nothing else.
    num_shots: few-shot examples of the plain form.
    form: 'plain', or 'bare' for tiny models.
    instruction: system message of the chat form.
    max_answer_tokens: room for an answer and its end.
  """

  name: str
  family: str
  generate: Callable[[np.random.Generator], Item]
  num_shots: int = 3
  form: str = 'plain'
  instruction: str = 'Give only the answer.'
  max_answer_tokens: int = 8

  def task(self, rng: np.random.Generator) -> types.Task:
    item = self.generate(rng)
    return types.Task(
      domain=self.name,
      messages=(types.Message.of('user', item.question),),
      checker=item.checker,
      difficulty=float(item.difficulty),
    )


@dataclasses.dataclass(frozen=True)
class Pools:
  """Disjoint sets of a domain's tasks.

  Attributes:
    heldout: for the reported result only.
    validation: for choosing among checkpoints.
    shots: solved examples with distinct answers.
    train_items: every training task of a domain with few items; None where
      they are drawn.
  """

  domain: Domain
  heldout: tuple[types.Task, ...]
  validation: tuple[types.Task, ...]
  shots: tuple[types.Task, ...]
  train_items: tuple[types.Task, ...] | None
  refused: frozenset[str]

  def train_task(self, index: int, seed: int) -> types.Task:
    """Training task number `index` of the stream `seed`.

    Raises:
      errors.InputError: every try gave a task of another pool.
    """
    if self.train_items is not None:
      rng = _rng(self.domain.name, 'train', seed, index)
      return self.train_items[int(rng.integers(len(self.train_items)))]
    for attempt in range(_MAX_TRIES):
      rng = _rng(self.domain.name, 'train', seed, index, attempt)
      task = self.domain.task(rng)
      if task.content_id not in self.refused:
        return task
    raise errors.InputError(
      f'{self.domain.name}: {_MAX_TRIES} tries gave no training task outside '
      f'the {len(self.refused)} refused ones; widen its generator.'
    )

  def environment(
    self,
    *,
    form: str | None = None,
    scorer: scoring.Scorer | None = None,
  ) -> single_turn.SingleTurn:
    """The domain's environment, in its own form unless another is named."""
    form = form or self.domain.form
    return single_turn.SingleTurn(
      shots=self.shots if form == 'plain' else (),
      form=form,
      instruction=self.domain.instruction,
      scorer=scorer,
    )


def pools(
  domain: Domain,
  *,
  heldout_seed: int,
  heldout: int = 64,
  validation: int = 32,
  shots: Sequence[types.Task] | None = None,
  trained: Collection[str] = (),
) -> Pools:
  """Splits a domain.

  Args:
    domain: the domain.
    heldout_seed: draws the held-out and validation tasks.
    heldout: held-out tasks, at most 30 % of a domain with few items.
    validation: validation tasks, at most 15 % of such a domain.
    shots: the examples of an earlier run, kept so that its prompts stay the
      same; by default they are drawn from a stream without a seed.
    trained: content ids that held-out and validation tasks refuse as well,
      for a new held-out set after a run.

  Raises:
    errors.InputError: the domain has too few items for these sizes.
  """
  kept = () if shots is None else tuple(shots)
  refused = {shot.content_id for shot in kept} | set(trained)
  few = _few_items(domain)
  if few is None:
    heldout_tasks = _draw(domain, 'heldout', heldout_seed, heldout, refused)
    refused |= {task.content_id for task in heldout_tasks}
    validation_tasks = _draw(
      domain, 'validation', heldout_seed, validation, refused
    )
    refused |= {task.content_id for task in validation_tasks}
    train = None
  else:
    sizes = (
      min(heldout, len(few) * 30 // 100),
      min(validation, len(few) * 15 // 100),
    )
    ends = (sizes[0], sum(sizes))
    heldout_tasks = [t for t in few[: ends[0]] if t.content_id not in refused]
    validation_tasks = [
      t for t in few[ends[0] : ends[1]] if t.content_id not in refused
    ]
    refused |= {t.content_id for t in few[: ends[1]]}
    train = few[ends[1] :]
  if shots is None:
    kept = _shots(domain, refused)
    refused |= {shot.content_id for shot in kept}
  if train is not None:
    # `trained` bars evaluation, not training: these were training tasks.
    shown = {shot.content_id for shot in kept}
    train = tuple(t for t in train if t.content_id not in shown)
    if not train or (heldout and not heldout_tasks):
      raise errors.InputError(
        f'{domain.name}: {len(few)} distinct items are too few for '
        f'{len(heldout_tasks)} held-out and {len(kept)} shown ones; widen '
        'its generator.'
      )
  return Pools(
    domain=domain,
    heldout=tuple(heldout_tasks),
    validation=tuple(validation_tasks),
    shots=kept,
    train_items=train,
    refused=frozenset(refused - set(trained)),
  )


def _draw(
  domain: Domain,
  purpose: str,
  seed: int,
  count: int,
  refused: Collection[str],
) -> list[types.Task]:
  """`count` distinct tasks outside `refused`."""
  tasks, seen = [], set(refused)
  limit = _MAX_TRIES + 20 * count
  for index in range(limit):
    if len(tasks) == count:
      return tasks
    task = domain.task(_rng(domain.name, purpose, seed, index))
    if task.content_id not in seen:
      seen.add(task.content_id)
      tasks.append(task)
  raise errors.InputError(
    f'{domain.name}: {limit} draws gave {len(tasks)} of {count} {purpose} '
    'tasks; ask for fewer or widen its generator.'
  )


def _shots(domain: Domain, refused: Collection[str]) -> tuple[types.Task, ...]:
  """Examples with distinct answers from a stream that no seed moves."""
  shots, answers = [], set()
  for index in range(_PROBE_DRAWS):
    if len(shots) == domain.num_shots:
      return tuple(shots)
    task = domain.task(_rng(domain.name, 'shots', 0, index))
    answer = task.checker['gold']
    if task.content_id not in refused and answer not in answers:
      answers.add(answer)
      shots.append(task)
  raise errors.InputError(
    f'{domain.name}: {len(shots)} examples with distinct answers, '
    f'{domain.num_shots} wanted; lower num_shots.'
  )


def _few_items(domain: Domain) -> tuple[types.Task, ...] | None:
  """Every item of a domain that has few, in an order by digest, else None."""
  found = {}
  for index in range(_PROBE_DRAWS):
    task = domain.task(_rng(domain.name, 'probe', 0, index))
    found[task.content_id] = task
    if len(found) >= FEW_ITEMS:
      return None
  return tuple(found[key] for key in sorted(found))


def _rng(
  name: str, purpose: str, seed: int, index: int = 0, attempt: int = 0
) -> np.random.Generator:
  """A generator that is a function of its arguments alone."""
  text = f'{name}\n{purpose}\n{seed}'.encode()
  key = np.frombuffer(hashlib.sha256(text).digest()[:16], '<u8')
  counter = np.array([0, attempt, index, 0], np.uint64)
  return np.random.Generator(np.random.Philox(key=key, counter=counter))
