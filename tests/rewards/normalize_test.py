import json

import numpy as np
import pytest

from rlpost import errors
from rlpost.rewards import normalize

SCALES = 10.0 ** np.linspace(-3, 3, 300)


def groups(rng, kind, size, samples=8):
  """Centred rewards [size, samples] at unit scale, of three shapes."""
  if kind == 0:
    rewards = rng.normal(size=(size, samples))
  elif kind == 1:
    rewards = (rng.random((size, samples)) < 0.5).astype(float)
  else:  # rare successes
    rewards = (rng.random((size, samples)) < 0.15).astype(float)
    rewards[:, 0] = 1.0
  return rewards - rewards.mean(1, keepdims=True)


@pytest.mark.parametrize('power', [1, 2])
def test_300_domains_share_the_gradient_within_ten_percent(power):
  rng = np.random.default_rng(0)
  scale = normalize.RewardScale(power=power, clip=50.0)
  # With the standard deviation, equal shares of |advantage| ask for equal
  # shapes; with the mean absolute value they do not.
  kind = (lambda d: d % 3) if power == 1 else (lambda d: 0)
  share = np.zeros(300)
  for step in range(60):
    for d, unit in enumerate(SCALES):
      centred = unit * groups(rng, kind(d), 4)
      scale.update(f'd{d}', centred)
      if step >= 30:
        share[d] += np.abs(scale.advantage(f'd{d}', centred)).mean()
  share /= share.sum()
  assert np.abs(share * 300 - 1).max() < 0.1


def test_the_scale_is_the_decayed_moment():
  rng = np.random.default_rng(1)
  scale, values = normalize.RewardScale(decay=0.99), []
  for _ in range(50):
    block = rng.normal(size=rng.integers(1, 9)) * 3
    scale.update('a', block)
    values.append(block)
  age, moment, weight = 0, 0.0, 0.0
  for block in reversed(values):  # the newest block has age 0
    moment += 0.99**age * (block**2).sum()
    weight += 0.99**age * block.size
    age += block.size
  assert scale.scale('a') == pytest.approx(np.sqrt(moment / weight))


def test_advantages_do_not_depend_on_the_unit_of_reward():
  rng = np.random.default_rng(2)
  left, right = normalize.RewardScale(), normalize.RewardScale()
  for _ in range(20):
    centred = groups(rng, 1, 2)
    left.update('a', centred)
    right.update('a', 1e3 * centred)
  np.testing.assert_allclose(
      left.advantage('a', centred), right.advantage('a', 1e3 * centred), 1e-6
  )


def test_a_domain_ignores_the_others_and_unseen_is_one():
  scale = normalize.RewardScale()
  scale.update('a', [1.0, -1.0])
  before = scale.scale('a')
  scale.update('domain', [1e6, -1e6])
  assert scale.scale('a') == before == pytest.approx(1.0)
  assert scale.scale('b') == 1.0


def test_invalid_verdicts_never_enter():
  left, right = normalize.RewardScale(), normalize.RewardScale()
  valid = np.array([True, False, True, False])
  poisoned = np.array([0.5, np.nan, -0.5, 1e9])
  used = left.update('a', poisoned, valid)
  right.update('a', [0.5, -0.5])
  assert left.state() == right.state()
  assert used.tolist() == valid.tolist()
  got = left.advantage('a', poisoned, valid)
  np.testing.assert_array_equal(got, [1, 0, -1, 0])


def test_one_non_finite_reward_is_masked_and_counted():
  scale, clean = normalize.RewardScale(), normalize.RewardScale()
  centred = np.array([[0.5, np.inf], [np.nan, -0.5]])
  used = scale.update('a', centred)
  clean.update('a', [0.5, -0.5])
  assert used.tolist() == [[True, False], [False, True]]
  assert scale.report()['a'] == {'scale': 0.5, 'count': 2, 'nonfinite': 2}
  assert clean.scale('a') == scale.scale('a')
  np.testing.assert_array_equal(
      scale.advantage('a', centred), [[1, 0], [0, -1]]
  )


def test_no_spread_gives_zero_and_stays_finite():
  scale = normalize.RewardScale(floor=1e-3)
  scale.update('a', np.zeros(8))
  assert scale.scale('a') == 1e-3
  np.testing.assert_array_equal(scale.advantage('a', np.zeros(8)), np.zeros(8))


def test_clip_comes_after_the_scale():
  scale = normalize.RewardScale(clip=2.0)
  scale.update('a', np.full(100, 0.01))
  got = scale.advantage('a', [0.01, 0.015, 0.5, -9.0])
  np.testing.assert_allclose(got, [1, 1.5, 2, -2], rtol=1e-5)


def test_resume_is_exact():
  rng = np.random.default_rng(3)
  blocks = [(f'd{rng.integers(5)}', rng.normal(size=3)) for _ in range(60)]
  whole = normalize.RewardScale()
  for name, block in blocks:
    whole.update(name, block)
  for cut in (0, 1, 29, 60):
    first = normalize.RewardScale()
    for name, block in blocks[:cut]:
      first.update(name, block)
    second = normalize.RewardScale()
    second.set_state(json.loads(json.dumps(first.state())))
    for name, block in blocks[cut:]:
      second.update(name, block)
    assert second.state() == whole.state()
  fresh = normalize.RewardScale()  # the control: a lost state shows
  for name, block in blocks[29:]:
    fresh.update(name, block)
  assert fresh.state() != whole.state()


def test_settings_are_checked():
  for bad in ({'decay': 0}, {'floor': 0}, {'power': 3}, {'clip': 0}):
    with pytest.raises(errors.InputError):
      normalize.RewardScale(**bad)
  with pytest.raises(errors.InputError):
    normalize.RewardScale(power=1).set_state(normalize.RewardScale().state())
  with pytest.raises(ValueError):
    normalize.RewardScale().update('a', np.zeros(3), np.ones(2, bool))
