"""Sections of a config that are plain values, checked where they are made."""

import dataclasses

from rlpost import errors


def _at_least_1(section, values, *names):
  for name in names:
    if getattr(values, name) < 1:
      raise errors.InputError(
          f'{section}.{name}={getattr(values, name)} must be at least 1.'
      )


@dataclasses.dataclass(frozen=True)
class Rollout:
  """What a step samples.

  Attributes:
    prompts, samples: prompts per step, and completions of each.
    max_new: most tokens of a completion, its end included.
    temperature: of sampling, above 0.
    prefix_len, prompt_len: room for shared and own prompt tokens; 0 measures
      the longest of the held-out and validation tasks. A longer prompt is
      counted as 'overlong' and not attempted.
    slots, rows: prompt slots and rows of each; 0 for prompts and samples.
    prefixes: shared prefixes held at one time, at most.
    admit, refill, prefill_chunk, backend: see `rollouts.engine.EngineConfig`.
  """

  prompts: int
  samples: int
  max_new: int
  temperature: float = 1.0
  prefix_len: int = 0
  prompt_len: int = 0
  slots: int = 0
  rows: int = 0
  prefixes: int = 16
  admit: int = 0
  refill: int = 0
  prefill_chunk: int = 0
  backend: str = 'dense'

  def __post_init__(self):
    if self.temperature <= 0:
      raise errors.InputError(
          f'rollout.temperature={self.temperature} must be above 0: a greedy '
          'policy gives no gradient.'
      )
    _at_least_1('rollout', self, 'prompts', 'samples', 'max_new', 'prefixes')


@dataclasses.dataclass(frozen=True)
class Train:
  """How an update is computed; see `step.StepConfig`.

  Attributes:
    rows: rows (groups, or packed documents) of a micro-batch.
    groups: most groups of an update; 0 for all prompts of a step. Fewer than
      prompts leaves room for groups that tell nothing apart.
    updates: updates on each step's batch.
  """

  rows: int
  groups: int = 0
  updates: int = 1
  backend: str = 'dense'
  block: int = 256
  remat: str = 'none'
  chunk: int = 512
  clip_norm: float = 1.0
  offload: bool = False

  def __post_init__(self):
    _at_least_1('train', self, 'rows', 'updates', 'block', 'chunk')


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """Held-out attempts: one greedy, `samples` at `temperature` per task.

  Attributes:
    slots: prompts decoded at one time; 0 for the slots, rows and programs of
      the rollouts.
    admit, refill: see `rollouts.engine.EngineConfig`.
  """

  slots: int = 0
  samples: int = 3
  temperature: float = 1.0
  admit: int = 0
  refill: int = 0

  def __post_init__(self):
    _at_least_1('evaluation', self, 'samples')
    if not self.slots and (self.admit or self.refill):
      raise errors.InputError(
          'evaluation.admit and evaluation.refill need evaluation.slots: '
          "without them the rollouts' programs serve."
      )


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """Save every so many steps; keep so many of the latest, and the best."""

  every: int
  keep_latest: int = 2

  def __post_init__(self):
    _at_least_1('checkpoint', self, 'every', 'keep_latest')
