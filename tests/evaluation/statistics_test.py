import itertools

import numpy as np
import pytest
from scipy import stats

from rlpost import errors
from rlpost.evaluation import statistics
from rlpost.types import Verdict


def verdicts(table, **fields):
  """Verdicts by task from rows of numbers; None is an infra failure."""
  return {
      f't{i}': [
          Verdict('infra') if x is None else Verdict('value', x, **fields)
          for x in map(lambda x: None if x is None else float(x), row)
      ]
      for i, row in enumerate(table)
  }


def test_one_sample_per_task_is_wilson():
  for n, c in ((64, 40), (10, 0), (10, 10), (7, 3)):
    got = statistics.summarise(verdicts([[i < c] for i in range(n)]))
    want = stats.binomtest(c, n).proportion_ci(method='wilson')
    assert got.mean == pytest.approx(c / n)
    assert (got.low, got.high) == pytest.approx((want.low, want.high))
    assert (got.n, got.tasks, got.coverage) == (n, n, 1.0)


def test_several_samples_use_the_effective_size():
  rng = np.random.default_rng(0)
  table = (rng.random((30, 8)) < rng.random((30, 1))).astype(float)
  got = statistics.summarise(verdicts(table), confidence=0.9)
  x = table.mean(1)
  m, se2, q = x.mean(), x.var(ddof=1) / 30, stats.t.ppf(0.95, 29)
  size = m * (1 - m) / se2
  # Wilson's interval is where (m - p)^2 = q^2 p (1 - p) / size.
  roots = np.roots([1 + q**2 / size, -2 * m - q**2 / size, m**2])
  assert (got.low, got.high) == pytest.approx(tuple(sorted(roots)), rel=1e-4)
  assert 30 < size < 240  # between tasks and samples


def test_repeating_samples_of_a_task_is_no_evidence():
  rng = np.random.default_rng(1)
  once = rng.random((40, 1)) < 0.6
  one = statistics.summarise(verdicts(once))
  many = statistics.summarise(verdicts(np.repeat(once, 16, 1)))
  assert many.mean == pytest.approx(one.mean)
  assert many.high - many.low == pytest.approx(one.high - one.low, rel=0.06)
  solved = statistics.summarise(verdicts(np.ones((40, 16))))
  assert 0.85 < solved.low < 0.95 and solved.high == 1.0


@pytest.mark.parametrize('shape', [(1, 1), (0.3, 0.3), (20, 20), (8, 1)])
@pytest.mark.parametrize('samples', [1, 8])
def test_intervals_cover_the_truth(shape, samples):
  rng = np.random.default_rng(2)
  truth, hits, trials = shape[0] / sum(shape), 0, 400
  for _ in range(trials):
    p = rng.beta(*shape, (40, 1))
    table = (rng.random((40, samples)) < p).astype(float)
    found = statistics._unit_interval(list(table), 0.95)
    hits += found[1] <= truth <= found[2]
  assert 0.92 <= hits / trials <= 0.985


def test_treating_samples_as_independent_would_not_cover():
  """The control of the test above: the naive interval fails it."""
  rng = np.random.default_rng(3)
  hits = 0
  for _ in range(300):
    table = rng.random((40, 8)) < rng.beta(0.3, 0.3, (40, 1))
    ci = stats.binomtest(int(table.sum()), 320).proportion_ci(method='wilson')
    hits += ci.low <= 0.5 <= ci.high
  assert hits / 300 < 0.8


def test_missing_is_not_wrong():
  full = statistics.summarise(verdicts([[1, 1], [0, 1], [1, 0]]))
  holes = statistics.summarise(
      verdicts([[1, None, 1], [0, 1, None], [None, 1, 0], [None, None, None]])
  )
  assert holes._replace(infra=0) == full
  assert holes.infra == 6 and holes.tasks == 3
  assert holes.coverage == pytest.approx(6 / 12)
  mixed = statistics.summarise({'t': [Verdict('invalid'), Verdict('infra')]})
  assert (mixed.mean, mixed.low, mixed.high) == (None, 0.0, 1.0)
  assert (mixed.invalid, mixed.infra, mixed.coverage) == (1, 1, 0.0)
  assert statistics.summarise({}).mean is None


def test_scores_keep_their_own_range():
  table = [[0.5], [1.0], [0.25], [0.0]]
  unit = statistics.summarise(verdicts(table))
  wide = statistics.summarise(
      verdicts([[20 * x - 10 for x in row] for row in table], low=-10, high=10)
  )
  for name in ('mean', 'low', 'high'):
    want = 20 * getattr(unit, name) - 10
    assert getattr(wide, name) == pytest.approx(want)
  mixed = verdicts([[1.0]]) | {'other': [Verdict('value', 1.0, 0.0, 5.0)]}
  with pytest.raises(errors.InputError, match='different ranges'):
    statistics.summarise(mixed)


def test_pass_at_k_is_the_chance_over_all_subsets():
  table = [[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 0], [0, 0, 0, 1, 0]]
  for k in range(1, 6):
    want = np.mean([
        np.mean([max(s) for s in itertools.combinations(row, k)])
        for row in table
    ])
    got = statistics.pass_at_k(verdicts(table), k)
    assert got.mean == pytest.approx(want)
    assert 0 <= got.low <= got.mean <= got.high <= 1
  one = statistics.pass_at_k(verdicts(table), 1)
  assert one.mean == pytest.approx(
      statistics.summarise(verdicts(table)).mean
  )


def test_pass_at_k_leaves_out_tasks_with_too_few_values():
  table = [[1, 0, None], [1, None, None], [0, 0, 0]]
  got = statistics.pass_at_k(verdicts(table), 2)
  assert (got.tasks, got.n, got.infra) == (2, 5, 3)
  assert got.mean == pytest.approx((1 + 0) / 2)
  assert statistics.pass_at_k(verdicts(table), 4).mean is None
  with pytest.raises(errors.InputError):
    statistics.pass_at_k(verdicts(table), 0)


def test_pass_at_k_is_unbiased_where_plugging_in_is_not():
  rng = np.random.default_rng(4)
  p, k, n = 0.2, 4, 6
  table = (rng.random((4000, n)) < p).astype(float)
  truth = 1 - (1 - p) ** k
  got = statistics.pass_at_k(verdicts(table), k)
  assert got.mean == pytest.approx(truth, abs=0.015)
  plugged = np.mean(1 - (1 - table.mean(1)) ** k)
  assert abs(plugged - truth) > 0.03


def test_sign_flips_are_exact_for_few_tasks():
  diff = np.array([0.5, -0.25, 1.0, 0.0, 0.25])
  sums = [
      abs(np.dot(signs, diff)) for signs in itertools.product((-1, 1), repeat=5)
  ]
  want = np.mean(np.array(sums) >= abs(diff.sum()) - 1e-12)
  assert statistics.sign_flip(diff) == pytest.approx(want)
  assert statistics.sign_flip(np.full(10, 0.1)) == pytest.approx(2 / 2**10)
  assert statistics.sign_flip(np.zeros(9)) == 1.0


def test_drawn_sign_flips_agree_with_the_t_test_and_repeat():
  rng = np.random.default_rng(5)
  diff = rng.normal(0.25, 1, 80)
  got = statistics.sign_flip(diff)
  assert got == pytest.approx(stats.ttest_1samp(diff, 0).pvalue, abs=0.01)
  assert got == statistics.sign_flip(diff) == statistics.sign_flip(-diff)
  assert statistics.sign_flip(np.ones(200)) == 1 / 20_001


def test_sign_flips_keep_their_level():
  rng = np.random.default_rng(6)
  p = [
      statistics.sign_flip(rng.standard_t(2, 20), draws=400, seed=i)
      for i in range(600)
  ]
  assert np.mean(np.array(p) <= 0.05) < 0.075
  assert np.mean(np.array(p) <= 0.2) == pytest.approx(0.2, abs=0.05)


def test_compare_pairs_by_task():
  rng = np.random.default_rng(7)
  hard = rng.random((50, 1))
  before = verdicts(rng.random((50, 4)) < hard * 0.6)
  after = verdicts(rng.random((50, 4)) < hard * 0.6 + 0.3)
  got = statistics.compare(before, after)
  means = [
      [np.mean([v.value for v in side[k]]) for k in before]
      for side in (before, after)
  ]
  assert got.mean == pytest.approx(np.mean(means[1]) - np.mean(means[0]))
  assert got.low < 0.3 < got.high and got.low > 0 and got.p < 1e-3
  back = statistics.compare(after, before)
  assert (back.mean, back.p) == pytest.approx((-got.mean, got.p))
  assert (back.low, back.high) == pytest.approx((-got.high, -got.low))
  # A gap that only pairing can see.
  shift = statistics.compare(
      verdicts(hard), verdicts(np.minimum(hard + 0.02, 1.0))
  )
  assert shift.p < 1e-3


def test_compare_uses_tasks_scored_on_both_sides():
  before = verdicts([[1], [0], [None], [1]])
  after = verdicts([[1], [1], [1], [None]]) | {'new': [Verdict('value', 1.0)]}
  got = statistics.compare(before, after)
  assert (got.mean, got.tasks, got.dropped) == (0.5, 2, 3)
  none = statistics.compare({}, after)
  assert (none.mean, none.low, none.high, none.p) == (None, -1, 1, 1.0)
  with pytest.raises(errors.InputError):
    statistics.compare(verdicts([[2.0]], high=2.0), verdicts([[1.0]]))


def test_compare_is_agresti_and_min_for_single_samples():
  before = verdicts([[1]] * 5 + [[0]] * 9 + [[1]] * 20 + [[0]] * 6)
  after = verdicts([[0]] * 5 + [[1]] * 9 + [[1]] * 20 + [[0]] * 6)
  n, b, c = 42, 9.5, 5.5  # half added to every cell of the 2 x 2 table
  centre = (b - c) / n
  half = stats.t.ppf(0.975, 41) * np.sqrt((b + c - (b - c) ** 2 / n) / n**2)
  got = statistics.compare(before, after)
  assert (got.low, got.high) == pytest.approx(
      (centre - half, centre + half), rel=1e-4
  )
  same = statistics.compare(before, before)
  assert same.mean == 0 and same.p == 1 and same.low < 0 < same.high


def test_holm_steps_down():
  p = {'a': 0.01, 'b': 0.04, 'c': 0.03, 'd': 0.005}
  got = statistics.holm(p)
  assert got == pytest.approx({'d': 0.02, 'a': 0.03, 'c': 0.06, 'b': 0.06})
  assert list(got) == list(p)
  assert statistics.holm({'a': 0.9, 'b': 0.8}) == {'a': 1.0, 'b': 1.0}
  rng = np.random.default_rng(8)
  false = sum(
      min(statistics.holm(dict(enumerate(rng.random(20)))).values()) < 0.05
      for _ in range(1000)
  )
  assert false / 1000 < 0.07


def test_macro_mean_weighs_domains_and_covers():
  rng = np.random.default_rng(9)
  rates, sizes = [0.1, 0.5, 0.95, 0.7], [20, 200, 40, 64]
  hits = 0
  for _ in range(150):
    parts = [
        statistics.summarise(verdicts(rng.random((n, 1)) < p))
        for p, n in zip(rates, sizes, strict=True)
    ]
    got = statistics.macro_mean(parts)
    assert got.mean == pytest.approx(np.mean([p.mean for p in parts]))
    hits += got.low <= np.mean(rates) <= got.high
  assert 0.92 <= hits / 150 <= 0.99
  assert statistics.macro_mean(parts[:1])[:3] == pytest.approx(parts[0][:3])
  empty = statistics.summarise({'t': [Verdict('infra')]})
  held = statistics.macro_mean([*parts, empty])
  assert held.mean == got.mean and held.infra == 1
  assert statistics.macro_mean([]).mean is None


@pytest.mark.parametrize('degrees', [1, 2, 3, 5, 12, 60])
def test_t_quantiles(degrees):
  for confidence in (0.8, 0.95, 0.99):
    want = stats.t.ppf(0.5 + confidence / 2, degrees)
    assert statistics._t_quantile(confidence, degrees) == pytest.approx(
        want, rel=0.01
    )
