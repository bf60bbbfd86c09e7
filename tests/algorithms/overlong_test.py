"""Truncated answers: out of statistics and loss, or paid less."""

import numpy as np
import pytest

from rlpost import errors
from rlpost.algorithms import advantages, overlong


def test_truncated_answers_leave_statistics_too():
  reasons = ['stop', 'length', 'stop', 'overlong', 'stop']
  valid = overlong.mask_truncated(reasons, [1, 1, 1, 1, 0])
  np.testing.assert_array_equal(valid, [1, 0, 1, 0, 0])
  got = advantages.group_centered(
      [1., 0., 0., 0., 0.], np.zeros(5, int), valid, num_groups=1
  )
  np.testing.assert_array_equal(got, [.5, 0, -.5, 0, 0])


def test_soft_punishment_has_the_published_corners():
  length = [0, 16384, 16385, 18432, 20480, 20481, 10**6]
  got = overlong.soft_punishment(
      length, np.ones(7, bool), max_tokens=20480, buffer_tokens=4096
  )
  want = [0, 0, -1 / 4096, -.5, -1, -1, -1]
  np.testing.assert_allclose(got, want, atol=1e-7)


def test_unread_answers_learn_nothing_from_their_length():
  length, answered = np.array([90, 100, 95, 20]), np.zeros(4, bool)
  shaped = overlong.soft_punishment(
      length, answered, max_tokens=100, buffer_tokens=20
  )
  got = advantages.group_normalized(
      shaped, np.zeros(4, int), np.ones(4, bool), num_groups=1
  )
  assert np.all(got == 0)


def test_a_buffer_outside_the_budget_is_refused():
  for buffer in (0, 101):
    with pytest.raises(errors.InputError, match='20, is usual'):
      overlong.soft_punishment(
          [1], [True], max_tokens=100, buffer_tokens=buffer
      )
