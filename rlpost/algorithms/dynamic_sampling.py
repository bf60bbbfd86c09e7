"""Groups worth training on, and how many more to ask for. Host side, NumPy.

DAPO's dynamic sampling (Yu et al., 2025, arXiv:2503.14476, section 3.2) draws
prompts until the batch is full of groups that are neither all right nor all
wrong. Unbounded, that never ends on a task too hard or too easy. Here it is
bounded: at most `max_factor` times the wanted groups are drawn, and at the cap
the update runs on those there are, with its objective scaled by `kept /
wanted`. A short batch then moves the policy less, instead of letting a few
groups speak for all; no batch is repeated or padded to look full.
"""

import math
from typing import NamedTuple

import numpy as np

from rlpost import errors
from rlpost.algorithms import advantages


def informative(
    reward_B, group_B, valid_B, *, num_groups, threshold=1e-6
) -> np.ndarray:
  """bool [G]: groups whose usable members differ in reward.

  Give it the task's own metric, before length terms, KL or scaling: shaped
  rewards differ even where every answer is wrong. A group that is left out
  leaves numerators and denominators; one that stays with advantage 0 is still
  pulled by a KL or entropy term and counted.

  Args:
    reward_B, group_B, valid_B, num_groups, threshold: as
      `advantages.statistics`.
  """
  return ~advantages.statistics(
      reward_B, group_B, valid_B, num_groups=num_groups, threshold=threshold
  ).flat_G


def more_groups(
    kept: int, drawn: int, wanted: int, *, max_factor: float = 1.5
) -> int:
  """How many more groups to draw: 0 when the batch is full or at the cap.

  Asks for what the share seen so far suggests, as 1 round of decoding costs as
  much as its longest answer.

  Args:
    kept: informative groups so far.
    drawn: groups drawn so far.
    wanted: groups in a full batch.
    max_factor: at most ceil(max_factor * wanted) groups are drawn in all.
  """
  if not 0 <= kept <= drawn or wanted < 1 or max_factor < 1:
    raise errors.InputError(
        f'{kept=} of {drawn=} groups, {wanted=}, {max_factor=}: need 0 <= kept '
        f'<= drawn, wanted >= 1 and max_factor >= 1.'
    )
  room = math.ceil(max_factor * wanted) - drawn
  missing = wanted - kept
  if missing <= 0 or room <= 0:
    return 0
  if not drawn:
    return wanted
  rate = max(kept, 1) / drawn
  return min(math.ceil(missing / rate), room)


class Selection(NamedTuple):
  """Groups to train on, in draw order, and the weight of the update."""

  groups: np.ndarray
  weight: float


def select(informative_G, wanted: int) -> Selection:
  """The first `wanted` informative groups, and kept / wanted.

  In the order of the plan, never of completion, which would prefer groups with
  short answers. Without a group the weight is 0 and the step is skipped.
  """
  groups = np.flatnonzero(informative_G)[:wanted]
  return Selection(groups, len(groups) / wanted)
