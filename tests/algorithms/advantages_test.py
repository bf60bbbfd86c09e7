"""Advantages against plain loops, golden numbers and identities."""

import numpy as np
import pytest

from rlpost import errors
from rlpost.algorithms import advantages as lib

# Ragged, interleaved, ids out of order; group 3 has one member, 4 has none.
REWARD = np.array([1, 0, .5, 1, 0, 0, 2, 1, .25, 0, 1], np.float32)
GROUP = np.array([2, 0, 2, 0, 1, 0, 3, 1, 2, 1, 1])
VALID = np.array([1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 1], bool)


def oracle(name, reward, group, valid):
  """The definitions, one answer at a time."""
  out = []
  for i in range(len(reward)):
    mine = [float(reward[j]) for j in range(len(reward))
            if valid[j] and (group[j] == group[i] or name == 'reinforce_pp')]
    if not valid[i]:
      out.append(0.0)
      continue
    r, n, mean = float(reward[i]), len(mine), np.mean(mine)
    if name == 'none':
      out.append(r)
    elif n < 2:
      out.append(0.0)
    elif name == 'group_centered':
      out.append(r - mean)
    elif name == 'leave_one_out':
      out.append(r - (sum(mine) - r) / (n - 1))
    elif name in ('group_normalized', 'reinforce_pp'):
      variance = sum((x - mean) ** 2 for x in mine) / n
      out.append((r - mean) / variance**0.5)
    elif name == 'maxrl':
      out.append((r - mean) / mean)
  return np.array(out)


def compute(name, reward=REWARD, group=GROUP, valid=VALID, num_groups=5):
  return lib.ADVANTAGES[name](reward, group, valid, num_groups=num_groups)


@pytest.mark.parametrize('name', lib.ADVANTAGES)
class TestEveryEstimator:

  def test_equals_plain_loops(self, name):
    got = compute(name)
    assert got.dtype == np.float32
    np.testing.assert_allclose(
        got, oracle(name, REWARD, GROUP, VALID), rtol=1e-6, atol=1e-7
    )

  @pytest.mark.parametrize('poison', [1e9, -1e9, np.nan, np.inf])
  def test_invalid_members_change_nothing_and_get_zero(self, name, poison):
    reward = np.where(VALID, REWARD, poison)
    np.testing.assert_array_equal(compute(name, reward), compute(name))
    kept = compute(name, REWARD[VALID], GROUP[VALID], VALID[VALID])
    np.testing.assert_array_equal(compute(name)[VALID], kept)
    assert np.all(compute(name)[~VALID] == 0)

  @pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
  def test_a_non_finite_reward_is_masked_and_counted(self, name, bad):
    reward = REWARD.copy()
    reward[3] = bad
    without = VALID.copy()
    without[3] = False
    np.testing.assert_array_equal(
        compute(name, reward), compute(name, REWARD, valid=without)
    )
    usable, count = lib.usable(reward, VALID)
    assert count == 1
    np.testing.assert_array_equal(usable, without)

  def test_order_and_labels_do_not_matter(self, name):
    order = np.random.default_rng(0).permutation(len(REWARD))
    labels = np.array([7, 3, 9, 0, 1])
    got = compute(name, REWARD[order], labels[GROUP[order]], VALID[order], 10)
    np.testing.assert_allclose(got, compute(name)[order], atol=1e-7)

  def test_no_answers_give_no_advantages(self, name):
    assert compute(name, [], [], []).shape == (0,)
    everything_failed = np.zeros_like(VALID)
    assert np.all(compute(name, valid=everything_failed) == 0)

  def test_bad_ids_and_shapes_are_refused(self, name):
    with pytest.raises(errors.InputError, match='num_groups'):
      compute(name, num_groups=3)
    with pytest.raises(errors.InputError, match='num_groups'):
      compute(name, group=GROUP - 1)
    with pytest.raises(errors.InputError, match='shapes'):
      compute(name, reward=REWARD[1:])


BASELINES = [name for name in lib.ADVANTAGES if name != 'none']


@pytest.mark.parametrize('name', BASELINES)
@pytest.mark.parametrize('level', [0.0, 1e-3, 0.7, 1e3])
def test_equal_rewards_give_exactly_zero(name, level):
  group, valid = np.zeros(8, int), np.ones(8, bool)
  reward = np.full(8, level, np.float32)
  assert np.all(compute(name, reward, group, valid, 1) == 0)
  reward[::2] = np.nextafter(reward[::2], np.float32(2e3))  # up to one ulp
  assert np.any(reward != level)
  assert np.all(compute(name, reward, group, valid, 1) == 0)


@pytest.mark.parametrize('name', BASELINES)
def test_rounding_around_zero_is_no_difference(name):
  reward = np.array([0.0, 0.1 + 0.2 - 0.3, 0.0])
  assert reward[1] != 0
  got = compute(name, reward, np.zeros(3, int), np.ones(3, bool), 1)
  assert np.all(got == 0)


@pytest.mark.parametrize('name', BASELINES)
def test_a_real_spread_on_any_scale_is_not_flat(name):
  for scale in (1e-6, 1e-3, 1e3, 1e6):
    reward = scale * np.array([1, 1, 1, 0])
    got = compute(name, reward, np.zeros(4, int), np.ones(4, bool), 1)
    assert got[3] < 0 < got[0]


@pytest.mark.parametrize('name', lib.GROUP_ADVANTAGES)
def test_a_group_of_one_gets_zero(name):
  assert compute(name)[6] == 0
  failed = np.array([True, False, False])  # its siblings could not be scored
  assert np.all(compute(name, [3., 0., 0.], [0, 0, 0], failed, 1) == 0)


def test_failures_leave_the_baseline():
  reward = np.array([1, 0, 0, 0, 0, 0, 0, 0.])
  valid = np.array([1, 1, 0, 0, 0, 0, 0, 0], bool)
  got = compute('group_centered', reward, np.zeros(8, int), valid, 1)
  np.testing.assert_array_equal(got, [.5, -.5, 0, 0, 0, 0, 0, 0])


def test_the_unscorable_gain_nothing_in_a_negative_group():
  reward, valid = np.array([-1., -2., 0.]), np.array([1, 1, 0], bool)
  for name in ('group_centered', 'leave_one_out', 'group_normalized'):
    assert compute(name, reward, [0, 0, 0], valid, 1)[2] == 0


@pytest.mark.parametrize('name,want', [
    ('group_centered', (.0392, .18, .5)),
    ('group_normalized', (.28, .6, 1.)),
    ('maxrl', (1.96, 1.8, 1.)),
    ('leave_one_out', (.04, .18 * 50 / 49, .5 * 50 / 49)),
])
def test_mean_size_per_pass_rate(name, want):
  for passed, size in zip((1, 5, 25), want, strict=True):
    reward = np.arange(50) < passed
    got = compute(name, reward, np.zeros(50, int), np.ones(50, bool), 1)
    assert np.mean(np.abs(got)) == pytest.approx(size, abs=1e-6)


def test_leave_one_out_is_a_scaled_centring():
  count = np.bincount(GROUP[VALID], minlength=5)
  factor = (count / np.maximum(count - 1, 1))[GROUP]
  np.testing.assert_allclose(
      compute('leave_one_out'), factor * compute('group_centered'), atol=1e-7
  )


def test_normalised_groups_have_unit_spread_whatever_their_scale():
  reward = REWARD * np.array([1e-3, 1e3, 5, 1, 1])[GROUP]
  got = compute('group_normalized', reward)
  np.testing.assert_allclose(got, compute('group_normalized'), rtol=1e-5)
  for g in range(3):
    assert np.std(got[VALID & (GROUP == g)]) == pytest.approx(1, abs=1e-6)


def test_whitening_is_over_the_batch_and_not_over_groups():
  got = compute('reinforce_pp')
  assert np.mean(got[VALID]) == pytest.approx(0, abs=1e-6)
  assert np.std(got[VALID]) == pytest.approx(1, abs=1e-6)
  means = [np.mean(got[VALID & (GROUP == g)]) for g in range(4)]
  assert np.max(np.abs(means)) > 0.1


def test_maxrl_refuses_negative_rewards():
  with pytest.raises(errors.InputError, match='is -2'):
    compute('maxrl', -REWARD, GROUP, VALID)
  reward = np.where(VALID, REWARD, -1)
  compute('maxrl', reward)  # an invalid one does not count


def test_whiten_ignores_padding_and_layout():
  rng = np.random.default_rng(1)
  x, mask = rng.normal(size=(6, 9)), rng.random((6, 9)) < .5
  want = np.zeros_like(x)
  want[mask] = (x[mask] - x[mask].mean()) / x[mask].std()
  for poison in (1e9, np.nan):
    got = lib.whiten(np.where(mask, x, poison), mask)
    np.testing.assert_allclose(got, want, atol=1e-6)
  split = lib.whiten(x.reshape(2, 3, 9), mask.reshape(2, 3, 9))
  np.testing.assert_allclose(split.reshape(6, 9), want, atol=1e-6)
  with pytest.raises(errors.NonFiniteError, match='1 of'):
    lib.whiten([1., np.nan, 2.], [1, 1, 0])


def textbook_gae(values, rewards, gamma, lam):
  out = np.zeros(len(values))
  for t in range(len(values)):
    for k in range(t, len(values)):
      after = values[k + 1] if k + 1 < len(values) else 0.0
      delta = rewards[k] + gamma * after - values[k]
      out[t] += (gamma * lam) ** (k - t) * delta
  return out


@pytest.mark.parametrize('gamma,lam', [(1., 1.), (1., .95), (.9, .8), (.9, 0)])
def test_gae_equals_gae_without_the_observations(gamma, lam):
  rng = np.random.default_rng(2)
  values, rewards = rng.normal(size=(2, 5, 12))
  mask = rng.random((5, 12)) < .5
  mask[0], mask[1, -3:], mask[2] = True, False, False
  got = lib.gae(np.where(mask, values, np.nan), rewards, mask, gamma, lam)
  for b in range(5):
    kept = np.flatnonzero(mask[b])
    # A reward on an observation was earned by the action before it.
    bounds = [*kept, 12]
    earned = [rewards[b, i:j].sum() for i, j in zip(bounds, bounds[1:],
                                                    strict=False)]
    want = np.zeros(12)
    want[kept] = textbook_gae(values[b, kept], earned, gamma, lam)
    np.testing.assert_allclose(got[b], want, atol=1e-6)


def test_credit_crosses_a_tool_span_unchanged():
  mask = np.array([1, 1, 0, 0, 0, 1, 0])
  rewards = np.array([0, 0, 0, 0, 0, 0, 1.])  # lands on masked text
  got = lib.gae(np.zeros(7), rewards, mask, gamma=.5, lam=1.)
  np.testing.assert_allclose(got, [.25, .5, 0, 0, 0, 1, 0])


def test_gae_without_decay_is_the_return_minus_the_value():
  rng = np.random.default_rng(3)
  values, rewards = rng.normal(size=(2, 8))
  got = lib.gae(values, rewards, np.ones(8), 1., 1.)
  np.testing.assert_allclose(
      got + values, np.cumsum(rewards[::-1])[::-1], atol=1e-6
  )


def test_gae_refuses_what_is_not_finite():
  with pytest.raises(errors.NonFiniteError, match='rewards'):
    lib.gae(np.zeros(3), [0, np.nan, 0], np.ones(3))
  with pytest.raises(errors.NonFiniteError, match='values'):
    lib.gae([0, np.inf, 0], np.zeros(3), np.ones(3))
  with pytest.raises(errors.InputError, match='shape'):
    lib.gae(np.zeros(3), np.zeros(4), np.ones(3))


def test_kl_in_the_reward_charges_sampled_tokens_alone():
  behavior, ref = np.array([-1., -2., np.nan]), np.array([-3., -1.5, 1e9])
  got = lib.kl_penalty(behavior, ref, [1, 1, 0], coefficient=.1)
  np.testing.assert_allclose(got, [-.2, .05, 0], atol=1e-7)
