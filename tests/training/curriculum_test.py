import json

import numpy as np
import pytest
from scipy import stats

from rlpost import errors
from rlpost.data import plan
from rlpost.training import curriculum

RATES = {'half': 0.5, 'solved': 0.99, 'hopeless': 0.01}


def feed(c, rng, steps, rates=RATES, samples=16):
  for _ in range(steps):
    c.update({n: rng.random(samples) < p for n, p in rates.items()})


def expected_worth(a, b):
  """E[p (1 - p)] under Beta(a, b), by quadrature."""
  return stats.beta(a, b).expect(lambda p: p * (1 - p))


def test_weights_are_the_posterior_mean_of_p_times_one_minus_p():
  c = curriculum.Curriculum(RATES, decay=1.0, explore=0.1, retire_at=2.0)
  seen = {'half': [1, 0, 1, 0.5], 'solved': [1] * 30, 'hopeless': [0] * 9}
  c.update(seen)
  worth = {
      n: expected_worth(1 + sum(v), 1 + len(v) - sum(v))
      for n, v in seen.items()
  }
  total = sum(worth.values())
  assert c.weights() == pytest.approx(
      {n: 0.1 / 3 + 0.9 * u / total for n, u in worth.items()}
  )


@pytest.mark.parametrize('retire_at', [0.9, 2.0])
def test_domains_reach_the_computed_shares(retire_at):
  """The loop of plan, outcome and posterior settles where the maths says."""
  rng = np.random.default_rng(0)
  c = curriculum.Curriculum(RATES, retire_at=retire_at, decay=0.98)
  p = plan.Plan(
      {n: plan.Source() for n in RATES}, prompts=12, seed=0, floor=0.05
  )
  drawn, wanted = dict.fromkeys(RATES, 0), dict.fromkeys(RATES, 0.0)
  for step in range(400):
    tasks = p.next(c.weights())
    outcomes = {}
    for name, _ in tasks:
      outcomes.setdefault(name, []).extend(rng.random(16) < RATES[name])
      drawn[name] += step >= 200
    for name, share in c.weights().items():
      wanted[name] += share * 12 * (step >= 200)
    c.update(outcomes)
  for name in RATES:
    assert abs(drawn[name] - wanted[name]) < 3
  # The limit of the posterior is the truth, up to its memory of 50 steps.
  worth = {n: q * (1 - q) for n, q in RATES.items()}
  if retire_at < 1:
    worth['solved'] = 0.0
  total = sum(worth.values())
  for name in RATES:
    share = 0.1 / 3 + 0.9 * worth[name] / total
    assert drawn[name] / 2400 == pytest.approx(share, abs=0.02)


def test_no_domain_falls_below_its_share_of_exploration():
  rng = np.random.default_rng(1)
  rates = {f'd{i}': i / 299 for i in range(300)}
  c = curriculum.Curriculum(rates, explore=0.05)
  feed(c, rng, 20, rates, samples=4)
  weights = c.weights()
  assert sum(weights.values()) == pytest.approx(1)
  assert min(weights.values()) >= 0.05 / 300
  ranked = sorted(weights, key=weights.get)
  assert np.mean([abs(rates[n] - 0.5) for n in ranked[-100:]]) < 0.2


def test_the_posterior_follows_a_domain_that_learns_and_forgets():
  rng = np.random.default_rng(2)
  c = curriculum.Curriculum(['a', 'b'])
  feed(c, rng, 60, {'a': 0.95, 'b': 0.5})
  assert c.report()['domains']['a']['retired']
  assert c.weights()['a'] == pytest.approx(0.05)
  feed(c, rng, 150, {'a': 0.4, 'b': 0.5})
  assert c.report()['domains']['a']['p'] == pytest.approx(0.4, abs=0.06)
  assert c.weights()['a'] > 0.4


def test_a_domain_not_sampled_returns_to_its_prior():
  rng = np.random.default_rng(3)
  c = curriculum.Curriculum(['a', 'b'], decay=0.9)
  feed(c, rng, 20, {'a': 1.0, 'b': 0.5})
  assert c.report()['domains']['a']['retired']
  feed(c, rng, 100, {'b': 0.5})
  assert not c.report()['domains']['a']['retired']
  assert c.report()['domains']['a']['p'] == pytest.approx(0.5, abs=1e-2)


def test_reports_do_not_inherit_the_bias_of_sampling():
  rng = np.random.default_rng(4)
  c = curriculum.Curriculum(RATES)
  counts = {'half': 90, 'solved': 5, 'hopeless': 5}
  for _ in range(200):
    c.update({n: rng.random(counts[n]) < p for n, p in RATES.items()})
  report = c.report()
  assert report['p_uniform'] == pytest.approx(0.5, abs=0.02)
  assert report['domains']['half']['effective_share'] == pytest.approx(0.9)
  rates = {'a': 0.5, 'b': 0.95}
  skewed = curriculum.Curriculum(rates)
  for _ in range(200):
    skewed.update({'a': rng.random(90) < 0.5, 'b': rng.random(10) < 0.95})
  assert skewed.report()['p_uniform'] == pytest.approx(0.725, abs=0.03)
  assert skewed.report()['p_sampled'] == pytest.approx(0.545, abs=0.03)


def test_resume_is_exact_and_a_domain_may_join():
  rng = np.random.default_rng(5)
  steps = [
      {n: (rng.random(rng.integers(0, 5)) < p) for n, p in RATES.items()}
      for _ in range(30)
  ]
  whole = curriculum.Curriculum(RATES)
  for step in steps:
    whole.update(step)
  for cut in (0, 7, 30):
    first, second = curriculum.Curriculum(RATES), curriculum.Curriculum(RATES)
    for step in steps[:cut]:
      first.update(step)
    second.set_state(json.loads(json.dumps(first.state())))
    for step in steps[cut:]:
      second.update(step)
    assert second.state() == whole.state()
    assert second.weights() == whole.weights()
  joined = curriculum.Curriculum([*RATES, 'new'])
  joined.set_state(whole.state())
  assert joined.report()['domains']['new']['p'] == 0.5
  assert joined.report()['domains']['half'] | {'share': 0} == (
      whole.report()['domains']['half'] | {'share': 0}
  )


def test_everything_retired_is_uniform():
  c = curriculum.Curriculum(['a', 'b'])
  c.update({'a': [1] * 100, 'b': [1] * 50})
  assert c.weights() == {'a': 0.5, 'b': 0.5}


def test_bad_outcomes_change_nothing():
  c = curriculum.Curriculum(['a', 'b'])
  before = c.state()
  for bad in ({'x': [1]}, {'a': [2.0]}, {'a': [0.5], 'b': [float('nan')]}):
    with pytest.raises(errors.InputError):
      c.update(bad)
  assert c.state() == before


def test_settings_are_checked():
  for bad in ({'decay': 2}, {'explore': 0}, {'prior': (0, 1)}):
    with pytest.raises(errors.InputError):
      curriculum.Curriculum(['a'], **bad)
  with pytest.raises(errors.InputError):
    curriculum.Curriculum([])
