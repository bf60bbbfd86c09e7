"""From scored groups to what trains, and with which advantage. Host only."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rlpost import types
from rlpost.algorithms import (
  advantages,
  dynamic_sampling,
  overlong,
  recipes,
)
from rlpost.data import packing
from rlpost.rewards.normalize import RewardScale


class Credit(NamedTuple):
  """What an update trains on.

  Attributes:
    groups: those that train, in the plan's order.
    advantages: per group, one number per trajectory.
    trained: per group, whether each trajectory trains.
    weight: scale of the objective: kept groups over wanted ones where further
      groups were to be drawn, else 1.
  """

  groups: tuple[types.Group, ...]
  advantages: tuple[np.ndarray, ...]
  trained: tuple[np.ndarray, ...]
  weight: float


def rewards(groups: Sequence[types.Group]):
  """Flat (reward, group index, usable) over all trajectories of `groups`."""
  members = [(g, t) for g, group in enumerate(groups)
             for t in group.trajectories]
  usable = np.array([packing.trains(t) for _, t in members], bool)
  reward = np.array(
      [t.verdict.value if t.verdict.valid else 0.0 for _, t in members],
      np.float64,
  )
  usable, _ = advantages.usable(reward, usable)
  return reward, np.array([g for g, _ in members], int), usable


def informative(groups: Sequence[types.Group]) -> np.ndarray:
  """Boolean per group: members differ in the task's own metric."""
  reward, group, usable = rewards(groups)
  return dynamic_sampling.informative(
      reward, group, usable, num_groups=len(groups)
  )


def assign(
    groups: Sequence[types.Group], recipe: recipes.Recipe,
    scale: RewardScale, *, wanted: int, max_tokens: int,
    penalty: Mapping[tuple[int, int], float] | None = None,
) -> Credit:
  """Advantages of a step's groups: centred per prompt, scaled per domain.

  Args:
    groups: scored groups in the plan's order.
    recipe: the choices.
    scale: running reward scales, updated with the groups that train.
    wanted: groups in a full batch.
    max_tokens: the generation budget.
    penalty: by (group id, sample), added to the reward: KL in the reward.

  Returns:
    `Credit` of at most `wanted` groups.
  """
  weight = 1.0
  if recipe.drop_uninformative:
    keep, weight = dynamic_sampling.select(informative(groups), wanted)
    groups = [groups[i] for i in keep]
    weight = weight if recipe.dynamic_sampling else 1.0
  groups = list(groups)[:wanted]
  if not groups:
    return Credit((), (), (), 0.0)
  reward, index, usable = rewards(groups)
  members = [t for group in groups for t in group.trajectories]
  if recipe.overlong == 'mask':
    usable = overlong.mask_truncated([t.stop_reason for t in members], usable)
  elif recipe.overlong == 'soft':
    reward = reward + overlong.soft_punishment(
        [int(t.sampled.sum()) for t in members], usable & (reward > 0),
        max_tokens=max_tokens,
        buffer_tokens=max(round(recipe.overlong_buffer * max_tokens), 1),
    )
  if penalty:
    reward = reward + [penalty.get((t.group, t.sample), 0.0) for t in members]
  estimate = advantages.ADVANTAGES[recipe.advantage]
  centred = estimate(reward, index, usable, num_groups=len(groups))
  names = np.array([t.task.domain for t in members])
  advantage = np.zeros(len(members), np.float32)
  for name in dict.fromkeys(names.tolist()):
    own = names == name
    scale.update(name, centred[own], usable[own])
    advantage[own] = scale.advantage(name, centred[own], usable[own])
  return Credit(
      tuple(groups),
      tuple(advantage[index == g] for g in range(len(groups))),
      tuple(usable[index == g] for g in range(len(groups))),
      weight,
  )
