"""Advantages: how much better an answer was than what it is compared with.

Host side and NumPy only: the loop calls these on a few numbers between two
programs, so nothing is compiled. Sums run in float64, results are float32.

A group estimator takes a flat batch, `f(reward_B, group_B, valid_B, *,
num_groups, threshold=1e-6) -> adv_B`, with explicit group ids and ragged
groups. Everywhere in this file:

* only members that are valid and whose reward is finite enter a statistic; the
  others get exactly 0. `usable` counts what was masked for not being finite;
* a spread (largest minus smallest reward) of at most `threshold` times the
  largest magnitude (or times 1e-6, for sums that should have been 0) gives
  exactly 0. An epsilon under the division would not: eight rewards that differ
  by one ulp reach an advantage of 1.3 at eps=1e-9;
* a group of one has nothing to be compared with and gets exactly 0.
"""

from typing import NamedTuple

import numpy as np

from rlpost import errors

# Rewards below this magnitude count as rounding noise around 0: 0.1 + 0.2 - 0.3
# is 6e-17, and its spread from 0 is not a difference between answers.
MIN_SCALE = 1e-6


def usable(reward_B, valid_B) -> tuple[np.ndarray, int]:
  """Members that may enter statistics and training.

  Args:
    reward_B: rewards; anything where `valid_B` is False.
    valid_B: bool, the verdict is a value.

  Returns:
    (bool [B] valid and finite, number of valid rewards that were not finite).
  """
  valid_B = np.asarray(valid_B, bool)
  finite_B = np.isfinite(np.asarray(reward_B, np.float64))
  return valid_B & finite_B, int(np.sum(valid_B & ~finite_B))


class GroupStatistics(NamedTuple):
  """Over the usable members of each group; 0 where a group has none.

  `flat_G` is True where the spread is too small to tell members apart, which
  includes groups of none and of one. `std_G` is the population one (ddof 0).
  """

  count_G: np.ndarray
  mean_G: np.ndarray
  std_G: np.ndarray
  low_G: np.ndarray
  high_G: np.ndarray
  flat_G: np.ndarray


def _flat(low, high, threshold):
  scale = np.maximum(np.maximum(np.abs(low), np.abs(high)), MIN_SCALE)
  return high - low <= threshold * scale


def _checked(reward_B, group_B, valid_B, num_groups):
  """Clean float64 rewards (0 where not usable), ids, and the usable mask."""
  group_B = np.asarray(group_B, np.int64)
  shapes = np.shape(reward_B), group_B.shape, np.shape(valid_B)
  if len(set(shapes)) != 1 or group_B.ndim != 1:
    raise errors.InputError(
        f'reward, group and valid have shapes {shapes}; all must be [B].'
    )
  if group_B.size and not 0 <= group_B.min() <= group_B.max() < num_groups:
    raise errors.InputError(
        f'group ids reach from {group_B.min()} to {group_B.max()}, outside '
        f'[0, {num_groups}); renumber them from 0 or raise num_groups.'
    )
  usable_B, _ = usable(reward_B, valid_B)
  clean_B = np.where(usable_B, np.asarray(reward_B, np.float64), 0.0)
  return clean_B, group_B, usable_B


def statistics(
    reward_B, group_B, valid_B, *, num_groups, threshold=1e-6
) -> GroupStatistics:
  """Segment sums over the usable members of each group id.

  Args:
    reward_B: rewards, in the task's unit.
    group_B: int, the group id of each answer, in [0, num_groups).
    valid_B: bool, the verdict is a value.
    num_groups: G; ids without a member are fine.
    threshold: spread, relative to the largest magnitude, that counts as none.

  Raises:
    InputError: shapes differ, or an id is out of range.
  """
  reward_B, group_B, usable_B = _checked(
      reward_B, group_B, valid_B, num_groups
  )
  reward_B, group_B = reward_B[usable_B], group_B[usable_B]

  def total(values_B):
    return np.bincount(group_B, values_B, minlength=num_groups)

  count_G = np.bincount(group_B, minlength=num_groups)
  mean_G = total(reward_B) / np.maximum(count_G, 1)
  square_B = np.square(reward_B - mean_G[group_B])
  std_G = np.sqrt(total(square_B) / np.maximum(count_G, 1))
  low_G = np.full(num_groups, np.inf)
  high_G = np.full(num_groups, -np.inf)
  np.minimum.at(low_G, group_B, reward_B)
  np.maximum.at(high_G, group_B, reward_B)
  low_G = np.where(count_G > 0, low_G, 0.0)
  high_G = np.where(count_G > 0, high_G, 0.0)
  # Groups of none and of one are flat as well: their spread is 0.
  flat_G = _flat(low_G, high_G, threshold)
  return GroupStatistics(count_G, mean_G, std_G, low_G, high_G, flat_G)


def _centered(reward_B, group_B, valid_B, num_groups, threshold):
  """(reward minus group mean, 0 where unusable or flat; statistics; ids)."""
  stats = statistics(
      reward_B, group_B, valid_B, num_groups=num_groups, threshold=threshold
  )
  reward_B, group_B, usable_B = _checked(
      reward_B, group_B, valid_B, num_groups
  )
  keep_B = usable_B & ~stats.flat_G[group_B]
  centered_B = np.where(keep_B, reward_B - stats.mean_G[group_B], 0.0)
  return centered_B, stats, group_B


def group_centered(
    reward_B, group_B, valid_B, *, num_groups, threshold=1e-6
) -> np.ndarray:
  """A_i = r_i - mean(r): GRPO without the division by the spread.

  Liu et al., 2025 (Dr. GRPO), arXiv:2503.20783. Arguments as `statistics`.

  Returns:
    fp32 [B], in the rewards' unit.
  """
  centered_B, *_ = _centered(
      reward_B, group_B, valid_B, num_groups, threshold
  )
  return centered_B.astype(np.float32)


def leave_one_out(
    reward_B, group_B, valid_B, *, num_groups, threshold=1e-6
) -> np.ndarray:
  """A_i = r_i - mean of the others = n / (n - 1) (r_i - mean(r)): RLOO.

  Kool et al., 2019; Ahmadian et al., 2024, arXiv:2402.14740. Arguments as
  `statistics`.

  Returns:
    fp32 [B], in the rewards' unit.
  """
  centered_B, stats, group_B = _centered(
      reward_B, group_B, valid_B, num_groups, threshold
  )
  factor_G = stats.count_G / np.maximum(stats.count_G - 1, 1)
  return (centered_B * factor_G[group_B]).astype(np.float32)


def group_normalized(
    reward_B, group_B, valid_B, *, num_groups, threshold=1e-6
) -> np.ndarray:
  """A_i = (r_i - mean(r)) / std(r), population std: GRPO.

  Shao et al., 2024 (DeepSeekMath), arXiv:2402.03300, section 4.1.2. Gives hard
  and easy prompts the same weight as middling ones. Arguments as `statistics`.

  Returns:
    fp32 [B], without unit.
  """
  centered_B, stats, group_B = _centered(
      reward_B, group_B, valid_B, num_groups, threshold
  )
  std_G = np.where(stats.flat_G, 1.0, stats.std_G)
  return (centered_B / std_G[group_B]).astype(np.float32)


def maxrl(
    reward_B, group_B, valid_B, *, num_groups, threshold=1e-6
) -> np.ndarray:
  """A_i = (r_i - mean(r)) / mean(r): towards the gradient of log p(success).

  Tajwar et al., 2026 (MaxRL), arXiv:2602.02710. A group without a success
  gives 0. Arguments as `statistics`; rewards must not be negative, as they
  stand for a rate of success.

  Returns:
    fp32 [B], without unit.

  Raises:
    InputError: a usable reward is negative.
  """
  centered_B, stats, group_B = _centered(
      reward_B, group_B, valid_B, num_groups, threshold
  )
  if stats.low_G.size and stats.low_G.min() < 0:
    raise errors.InputError(
        f'maxrl divides by the mean reward, and the smallest reward is '
        f'{stats.low_G.min():g}; shift rewards to be >= 0 or use '
        f'group_centered.'
    )
  mean_G = np.where(stats.flat_G, 1.0, stats.mean_G)
  return (centered_B / mean_G[group_B]).astype(np.float32)


def reinforce_pp(
    reward_B, group_B, valid_B, *, num_groups, threshold=1e-6
) -> np.ndarray:
  """A_i = (r_i - mean) / std over the whole batch, whatever the group.

  Hu, 2025 (REINFORCE++), arXiv:2501.03262. Groups may have one member.
  Arguments as `statistics`; the flatness rule applies to the batch.

  Returns:
    fp32 [B], without unit.
  """
  reward_B, _, usable_B = _checked(reward_B, group_B, valid_B, num_groups)
  return whiten(reward_B, usable_B, threshold=threshold)


def none(
    reward_B, group_B, valid_B, *, num_groups, threshold=1e-6
) -> np.ndarray:
  """A_i = r_i: no baseline (Williams, 1992). Unusable members get 0."""
  del threshold
  return _checked(reward_B, group_B, valid_B, num_groups)[0].astype(np.float32)


ADVANTAGES = {
    'group_centered': group_centered,
    'leave_one_out': leave_one_out,
    'group_normalized': group_normalized,
    'maxrl': maxrl,
    'reinforce_pp': reinforce_pp,
    'none': none,
}

# Those that compare members of a group: samples of one prompt, at least two.
GROUP_ADVANTAGES = (
    'group_centered', 'leave_one_out', 'group_normalized', 'maxrl'
)


def whiten(values, mask, *, threshold=1e-6) -> np.ndarray:
  """(x - mean) / std over every masked entry of an array of any shape.

  Give it the whole update's values, not a host's or a micro-batch's share.
  Fewer than two entries, or a spread within `threshold` of the magnitude,
  give 0.

  Args:
    values: numbers; anything where `mask` is False.
    mask: bool (or 0/1), the same shape.
    threshold: spread, relative to the largest magnitude, that counts as none.

  Returns:
    fp32, the same shape, 0 outside the mask.

  Raises:
    NonFiniteError: a masked-in value is NaN or infinite.
  """
  values, mask = np.asarray(values, np.float64), np.asarray(mask) > 0
  kept = values[mask]
  _refuse_non_finite('values to whiten', kept)
  out = np.zeros(values.shape, np.float32)
  if kept.size < 2 or _flat(kept.min(), kept.max(), threshold):
    return out
  out[mask] = (kept - kept.mean()) / kept.std()
  return out


def kl_penalty(behavior_logp, ref_logp, mask, *, coefficient) -> np.ndarray:
  """KL in the reward: -coefficient (log p_behavior - log p_ref) per token.

  The k1 estimate, unbiased as a reward (Ziegler et al., 2019,
  arXiv:1909.08593, eq. 2). Sum it over a sequence for a group estimator, or
  add it per token before `gae`. 0 outside the mask: text that the policy did
  not write costs it nothing.

  Args:
    behavior_logp, ref_logp: nats per token, any shape.
    mask: 1 where the policy sampled the token.
    coefficient: reward per nat.

  Returns:
    fp32, the same shape.
  """
  mask = np.asarray(mask) > 0
  behavior_logp = np.where(mask, behavior_logp, 0.0)
  ref_logp = np.where(mask, ref_logp, 0.0)
  return (-coefficient * (behavior_logp - ref_logp)).astype(np.float32)


def gae(values, rewards, mask, gamma=1.0, lam=0.95) -> np.ndarray:
  """Generalised advantage estimation along the policy's own tokens.

  delta_t = r_t + gamma V_t+1 - V_t;  A_t = delta_t + gamma lam A_t+1, where
  t + 1 is the next *sampled* token and V after the last one is 0. Tool output
  between two turns passes credit on unchanged: no decay and no bootstrap from
  its value, and a reward that lands on it belongs to the sampled token before
  it. The same as the textbook recursion on the sequence with observations cut
  out. With `values` 0 and `lam` 1 it is the discounted return to go.

  Schulman et al., 2016, arXiv:1506.02438, eqs. 11-16.

  Args:
    values: [..., T] the critic's value before each token; anything where
      `mask` is 0.
    rewards: [..., T]; 0 where nothing was paid, padding included. A reward
      before the first sampled token has no cause and is ignored.
    mask: [..., T], 1 where the policy sampled the token.
    gamma, lam: discount and trace decay per sampled token.

  Returns:
    fp32 [..., T], 0 where `mask` is 0. Value targets are this plus `values`.

  Raises:
    NonFiniteError: a reward, or a value under the mask, is not finite.
  """
  mask = np.asarray(mask) > 0
  values = np.where(mask, np.asarray(values, np.float64), 0.0)
  rewards = np.asarray(rewards, np.float64)
  if not values.shape == rewards.shape == mask.shape:
    raise errors.InputError(
        f'{values.shape=}, {rewards.shape=} and {mask.shape=} must be equal.'
    )
  _refuse_non_finite('values', values)
  _refuse_non_finite('rewards', rewards)
  out = np.zeros(mask.shape, np.float32)
  advantage, next_value, unpaid = np.zeros((3,) + mask.shape[:-1])
  for t in reversed(range(mask.shape[-1])):
    sampled, value = mask[..., t], values[..., t]
    unpaid = unpaid + rewards[..., t]
    delta = unpaid + gamma * next_value - value
    advantage = np.where(sampled, delta + gamma * lam * advantage, advantage)
    next_value = np.where(sampled, value, next_value)
    unpaid = np.where(sampled, 0.0, unpaid)
    out[..., t] = np.where(sampled, advantage, 0.0)
  return out


def _refuse_non_finite(name, values):
  bad = int(np.sum(~np.isfinite(values)))
  if bad:
    raise errors.NonFiniteError(
        f'{bad} of {values.size} {name} are NaN or infinite; look at the '
        f'checker or the critic that made them.'
    )
