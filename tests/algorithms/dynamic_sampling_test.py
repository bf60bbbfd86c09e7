"""Groups that tell answers apart, and a bound on asking for more."""

import numpy as np
import pytest

from rlpost import errors
from rlpost.algorithms import dynamic_sampling as lib
from rlpost.algorithms import overlong


def test_informative_groups_differ_on_valid_members():
  reward = np.array([0, 1, 1, 1, 0, 0, 0, 1, np.nan, 0, .5])
  group = np.array([0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 4])
  valid = np.array([1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1], bool)
  got = lib.informative(reward, group, valid, num_groups=6)
  np.testing.assert_array_equal(got, [1, 0, 0, 0, 1, 0])


def test_the_raw_metric_decides_and_not_the_shaped_one():
  raw, group, valid = np.zeros(4), np.zeros(4, int), np.ones(4, bool)
  shaped = raw + overlong.soft_punishment(
      [10, 90, 100, 95], valid, max_tokens=100, buffer_tokens=20
  )
  assert lib.informative(shaped, group, valid, num_groups=1)[0]
  assert not lib.informative(raw, group, valid, num_groups=1)[0]


@pytest.mark.parametrize('rate', [0.0, 0.05, 0.5, 0.9, 1.0])
@pytest.mark.parametrize('factor', [1.0, 1.5, 3.0])
def test_drawing_ends_within_the_cap(rate, factor):
  rng, wanted, rounds = np.random.default_rng(4), 16, 0
  informative = np.zeros(0, bool)
  while more := lib.more_groups(
      int(informative.sum()), len(informative), wanted, max_factor=factor
  ):
    informative = np.append(informative, rng.random(more) < rate)
    rounds += 1
    assert rounds < 50
  assert len(informative) <= np.ceil(factor * wanted)
  groups, weight = lib.select(informative, wanted)
  assert weight == min(informative.sum(), wanted) / wanted
  assert len(informative) == np.ceil(factor * wanted) or weight == 1
  np.testing.assert_array_equal(
      groups, np.flatnonzero(informative)[: len(groups)]
  )


def test_asking_follows_the_rate_seen():
  assert lib.more_groups(0, 0, 8) == 8
  assert lib.more_groups(8, 9, 8) == 0
  assert lib.more_groups(4, 8, 8, max_factor=10) == 8
  assert lib.more_groups(6, 8, 8, max_factor=1.25) == 2
  assert lib.more_groups(0, 12, 8) == 0  # the cap, with nothing kept


def test_impossible_counts_are_refused():
  for arguments in ((3, 2, 8), (-1, 2, 8), (0, 0, 0)):
    with pytest.raises(errors.InputError, match='need'):
      lib.more_groups(*arguments)
  with pytest.raises(errors.InputError, match='max_factor'):
    lib.more_groups(0, 0, 8, max_factor=.5)


def test_a_short_batch_moves_the_policy_less():
  informative = np.array([0, 1, 0, 1, 1, 0], bool)
  assert lib.select(informative, 4) [1] == .75
  np.testing.assert_array_equal(lib.select(informative, 2).groups, [1, 3])
  assert lib.select(np.zeros(3, bool), 4).weight == 0
