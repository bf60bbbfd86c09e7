"""Answers that ran into the token budget. Host side, NumPy only.

Three choices, `OVERLONG`: 'keep' scores them like others, 'mask' takes them
out of statistics and loss alike, 'soft' pays less as the budget comes near.
"""

from collections.abc import Sequence

import numpy as np

from rlpost import errors

OVERLONG = ('keep', 'mask', 'soft')


def mask_truncated(stop_reasons: Sequence[str], valid_B) -> np.ndarray:
  """bool [B]: valid answers that ended by themselves.

  Yu et al., 2025 (DAPO), arXiv:2503.14476, section 3.4 (overlong filtering).
  Use the result as `valid_B` of the advantages *and* to choose what trains: a
  sibling that does not train must not move its group's baseline either.

  Args:
    stop_reasons: one of Trajectory.stop_reason per answer.
    valid_B: bool, the verdict is a value.
  """
  ended_B = np.array([reason == 'stop' for reason in stop_reasons], bool)
  return np.asarray(valid_B, bool) & ended_B


def soft_punishment(
    length_B, valid_B, *, max_tokens: int, buffer_tokens: int
) -> np.ndarray:
  """What to add to the reward of an answer of `length` tokens.

  0                              if length <= max - buffer
  (max - buffer - length)/buffer if max - buffer < length <= max
  -1                             if length > max

  Yu et al., 2025 (DAPO), arXiv:2503.14476, eq. 13. Added after
  `dynamic_sampling.informative` has looked at the task's own metric.

  Args:
    length_B: sampled tokens.
    valid_B: bool, the answer earned its primary reward: the verdict is a value
      and the answer could be read. Others get 0, so that a group in which
      nobody answered learns nothing from length alone.
    max_tokens: the generation budget.
    buffer_tokens: how much of it is punished; DAPO has 4,096 of 20,480.

  Returns:
    fp32 [B] in [-1, 0], in units of a correct answer's reward.

  Raises:
    InputError: the buffer is not in (0, max_tokens].
  """
  if not 0 < buffer_tokens <= max_tokens:
    raise errors.InputError(
        f'{buffer_tokens=} must be in [1, {max_tokens=}]; a fifth of the '
        f'budget, {max(max_tokens // 5, 1)}, is usual.'
    )
  over_B = np.asarray(length_B, np.float64) - (max_tokens - buffer_tokens)
  punishment_B = -np.clip(over_B / buffer_tokens, 0.0, 1.0)
  return np.where(valid_B, punishment_B, 0.0).astype(np.float32)
