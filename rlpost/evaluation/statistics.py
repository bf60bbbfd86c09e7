"""Means, intervals and tests for held-out results.

The unit is the task: samples of one task are not independent, so everything
starts from task means x_1 .. x_n, each weighing the same. Intervals for a mean
of scores in [0, 1] are Wilson's (1927) at an effective sample size, as Korn and
Graubard (1998) do for clustered surveys:

  n_eff = m (1 - m) / (s^2 / n),   m, s^2: mean and variance of task means

  (m + q^2 / 2 n_eff +- q sqrt(m (1 - m) / n_eff + q^2 / 4 n_eff^2))
  / (1 + q^2 / n_eff)

with q a t quantile at n - 1 degrees. It stays inside the range, has width where
every task scored the same, and with one 0/1 sample per task it *is* Wilson's. A
normal interval does neither, and a bootstrap of equal scores has no width.

A verdict without a value is not a wrong answer: it is left out and counted, and
`coverage` says how much is left.
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rlpost import errors, types


class Estimate(NamedTuple):
  """A mean with its interval, in the unit of the scores.

  Attributes:
    mean: None where no verdict was a value.
    low, high: the interval; the whole range where there is no mean.
    n: verdicts with a value.
    tasks: tasks with at least one.
    invalid, infra: verdicts without a value, by status.
  """

  mean: float | None
  low: float
  high: float
  n: int = 0
  tasks: int = 0
  invalid: int = 0
  infra: int = 0

  @property
  def coverage(self) -> float:
    """Share of verdicts that are values."""
    total = self.n + self.invalid + self.infra
    return self.n / total if total else 0.0


class Comparison(NamedTuple):
  """A paired difference, after minus before.

  Attributes:
    mean, low, high: over tasks scored on both sides; None without any.
    p: two-sided, from sign flips.
    tasks: tasks scored on both sides.
    dropped: tasks scored on one side or on none.
  """

  mean: float | None
  low: float
  high: float
  p: float
  tasks: int
  dropped: int


def summarise(
    verdicts: Mapping[str, Sequence[types.Verdict]],
    *,
    confidence: float = 0.95,
) -> Estimate:
  """Mean score over tasks, with an interval clustered by task.

  Args:
    verdicts: by task, the verdicts of its samples.
    confidence: of the interval.

  Raises:
    errors.InputError: verdicts declare different ranges.
  """
  low, high = _range(verdicts)
  scores, missing = _scores(verdicts), _missing(verdicts)
  if not scores:
    return Estimate(None, low, high, **missing)
  unit = {k: (np.array(v) - low) / (high - low) for k, v in scores.items()}
  found = _unit_interval(list(unit.values()), confidence)
  mean, left, right = (low + (high - low) * x for x in found)
  n = sum(len(v) for v in scores.values())
  return Estimate(mean, left, right, n, len(scores), **missing)


def pass_at_k(
    verdicts: Mapping[str, Sequence[types.Verdict]],
    k: int,
    *,
    threshold: float = 1.0,
    confidence: float = 0.95,
) -> Estimate:
  """Chance that the best of k samples passes, averaged over tasks.

  Unbiased for each task with c passes among n values:
  1 - C(n - c, k) / C(n, k) (Chen et al., 2021, arXiv:2107.03374, eq. 1).
  A task with fewer than k values has no such estimate and is left out; `tasks`
  and `n` count the others.

  Args:
    verdicts: by task.
    k: at least 1.
    threshold: a value passes from here on.
    confidence: of the interval.
  """
  if k < 1:
    raise errors.InputError(f'{k=} must be at least 1.')
  missing = _missing(verdicts)
  chances, used = [], 0
  for values in _scores(verdicts).values():
    n, c = len(values), sum(v >= threshold for v in values)
    if n >= k:
      chances.append(1 - math.comb(n - c, k) / math.comb(n, k))
      used += n
  if not chances:
    return Estimate(None, 0.0, 1.0, **missing)
  found = _unit_interval([np.array([c]) for c in chances], confidence)
  return Estimate(*found, used, len(chances), **missing)


def compare(
    before: Mapping[str, Sequence[types.Verdict]],
    after: Mapping[str, Sequence[types.Verdict]],
    *,
    confidence: float = 0.95,
    draws: int = 20_000,
    seed: int = 0,
) -> Comparison:
  """Paired comparison on the tasks that both sides scored.

  The test flips signs of task differences (Fisher, 1935): exact under the null
  that a task's two scores are exchangeable, without normality; every pattern
  of signs where there are at most `draws`, else that many drawn from `seed`.
  The interval is a t interval after adding one task's worth of doubt, a
  difference of one sample up and one down at half weight each, which for one
  0/1 sample per task is Agresti and Min's (2005).
  """
  left, right = _scores(before), _scores(after)
  low, high = _range(before, after)
  shared = sorted(set(left) & set(right))
  dropped = len(set(before) | set(after)) - len(shared)
  if not shared:
    return Comparison(None, low - high, high - low, 1.0, 0, dropped)
  diff_N = np.array([np.mean(right[k]) - np.mean(left[k]) for k in shared])
  n = len(shared)
  one = (high - low) / np.mean(
      [min(len(left[k]), len(right[k])) for k in shared]
  )
  # n + 2 tasks: two more differences of +-one at weight 1/2, 0 at weight 1.
  centre = diff_N.sum() / (n + 2)
  square = (np.sum(diff_N**2) + one**2) / (n + 2) - centre**2
  half = _t_quantile(confidence, n + 1) * math.sqrt(square / (n + 2))
  return Comparison(
      float(diff_N.mean()),
      float(max(centre - half, low - high)),
      float(min(centre + half, high - low)),
      sign_flip(diff_N, draws=draws, seed=seed),
      n,
      dropped,
  )


def sign_flip(
    diff_N: np.ndarray, *, draws: int = 20_000, seed: int = 0
) -> float:
  """Two-sided p of a zero mean, from flipped signs of paired differences.

  With drawn signs it is (1 + hits) / (1 + draws), never 0, so that it is
  a valid p (Phipson and Smyth, 2010).
  """
  diff_N = np.asarray(diff_N, np.float64)
  size_N = np.abs(diff_N[diff_N != 0])  # a zero has no sign to flip
  n = len(size_N)
  if not n:
    return 1.0
  # Equal sums must stay equal in any order of summation.
  seen = abs(float(diff_N.sum())) - 1e-9 * float(size_N.sum())
  if 2**n <= draws:
    flips = np.array(list(itertools.product((-1.0, 1.0), repeat=n)))
    return float(np.mean(np.abs(flips @ size_N) >= seen))
  rng = np.random.Generator(np.random.Philox(seed))
  hits = done = 0
  while done < draws:
    block = min(draws - done, max(1, 2**21 // n))
    flips = rng.integers(0, 2, (block, n), np.int8)
    hits += int(np.sum(np.abs((2.0 * flips - 1) @ size_N) >= seen))
    done += block
  return (1 + hits) / (1 + draws)


def holm(p: Mapping[str, float]) -> dict[str, float]:
  """Holm's (1979) step-down adjustment: compare each with one level.

  adjusted_(i) = max_{j <= i} min(1, (m - j + 1) p_(j)), p sorted upwards.
  """
  adjusted, most = {}, 0.0
  for rank, name in enumerate(sorted(p, key=p.get)):
    most = max(most, min(1.0, (len(p) - rank) * p[name]))
    adjusted[name] = most
  return {name: adjusted[name] for name in p}


def macro_mean(parts: Iterable[Estimate | Comparison]) -> Estimate:
  """Mean over domains, each weighing the same, with an interval.

  The domains are the whole population, not a sample of one, so only the spread
  inside them counts: MOVER (Zou and Donner, 2008) recovers it from their own
  intervals,

    low = m - sqrt(sum_d (m_d - low_d)^2) / D,   high likewise.

  Domains without a mean are left out; `tasks` and `n` count the others'.
  """
  parts = list(parts)
  known = [p for p in parts if p.mean is not None]
  missing = {
      key: sum(getattr(p, key, 0) for p in parts)
      for key in ('invalid', 'infra')
  }
  if not known:
    low = min((p.low for p in parts), default=0.0)
    high = max((p.high for p in parts), default=1.0)
    return Estimate(None, low, high, **missing)
  mean = sum(p.mean for p in known) / len(known)
  below = math.sqrt(sum((p.mean - p.low) ** 2 for p in known)) / len(known)
  above = math.sqrt(sum((p.high - p.mean) ** 2 for p in known)) / len(known)
  n = sum(getattr(p, 'n', 0) for p in known)
  tasks = sum(p.tasks for p in known)
  return Estimate(mean, mean - below, mean + above, n, tasks, **missing)


def _scores(verdicts) -> dict[str, list[float]]:
  """Values by task, without the tasks that have none."""
  values = {
      task: [v.value for v in samples if v.valid]
      for task, samples in verdicts.items()
  }
  return {task: v for task, v in values.items() if v}


def _missing(verdicts) -> dict[str, int]:
  statuses = [v.status for samples in verdicts.values() for v in samples]
  return {key: statuses.count(key) for key in ('invalid', 'infra')}


def _range(*sides) -> tuple[float, float]:
  ranges = {
      (v.low, v.high)
      for verdicts in sides
      for samples in verdicts.values()
      for v in samples
      if v.valid
  }
  if len(ranges) > 1:
    raise errors.InputError(
        f'Verdicts of one domain declare different ranges: {sorted(ranges)}.'
    )
  low, high = ranges.pop() if ranges else (0.0, 1.0)
  if not low < high:
    raise errors.InputError(f'The range of scores [{low}, {high}] is empty.')
  return low, high


def _unit_interval(
    tasks: Sequence[np.ndarray], confidence: float
) -> tuple[float, float, float]:
  """Mean and interval of scores in [0, 1], clustered by task."""
  total = sum(len(values) for values in tasks)
  mean_N = np.array([np.mean(values) for values in tasks])
  n, mean = len(mean_N), float(mean_N.mean())
  if n == total and np.isin(mean_N, (0.0, 1.0)).all():
    z = statistics.NormalDist().inv_cdf(0.5 + confidence / 2)
    return mean, *_wilson(mean, n, z)
  # Task means closer together than independent scores would be are chance or
  # fine-grained scores: no more is claimed than for independent 0/1 scores.
  size = float(total)
  if n > 1 and 0 < mean < 1:
    variance = float(mean_N.var(ddof=1)) / n
    size = min(size, mean * (1 - mean) / max(variance, 1e-300))
  elif mean in (0.0, 1.0):
    size = float(n)  # the samples of a task may all repeat the first
  return mean, *_wilson(mean, size, _t_quantile(confidence, max(n - 1, 1)))


def _wilson(mean: float, size: float, q: float) -> tuple[float, float]:
  centre = mean + q * q / (2 * size)
  half = q * math.sqrt(mean * (1 - mean) / size + (q / (2 * size)) ** 2)
  scale = 1 + q * q / size
  # The ends of the range are reached exactly, not up to rounding.
  low = 0.0 if mean == 0 else max(0.0, (centre - half) / scale)
  high = 1.0 if mean == 1 else min(1.0, (centre + half) / scale)
  return low, high


def _t_quantile(confidence: float, degrees: int) -> float:
  """Two-sided quantile of Student's t, within 1%.

  Closed for 1 and 2 degrees, else the expansion of Abramowitz and Stegun
  (1964), 26.7.5.
  """
  p = 0.5 + confidence / 2
  if degrees == 1:
    return math.tan(math.pi * (p - 0.5))
  if degrees == 2:
    return (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
  z, v = statistics.NormalDist().inv_cdf(p), degrees
  return (
      z
      + (z**3 + z) / (4 * v)
      + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
      + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
      + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z)
      / (92160 * v**4)
  )
