"""Changes between two evaluations of the same tasks."""

import numpy as np

from rlpost.evaluation import report


def result(tasks):
  values = [v for found in tasks.values() for vs in found.values() for v in vs]
  numbers = [v for v in values if not isinstance(v, str)]
  mean = float(np.mean(numbers))
  one = {'mean': mean, 'low': 0.0, 'high': 1.0, 'n': len(numbers),
         'invalid': 0, 'infra': 0}
  return {
      report.SAMPLED: {
          'domains': dict.fromkeys(tasks, one), 'mean': one, 'tasks': tasks,
      }
  }


def tasks(mean, count=24, seed=0):
  rng = np.random.default_rng(seed)
  return {str(i): (rng.random(4) < mean).astype(float).tolist()
          for i in range(count)}


def test_change_is_after_minus_before_on_shared_tasks():
  before, after = tasks(0.3), tasks(0.8, seed=1)
  after['0'] = ['infra'] * 4  # a task without a value on one side is left out
  found = report.paired(result({'a': before}), result({'a': after}))['a']
  shared = [k for k in before if k != '0']
  oracle = np.mean([np.mean(after[k]) - np.mean(before[k]) for k in shared])
  assert abs(found['mean'] - oracle) < 1e-12
  assert found['tasks'] == 23
  assert found['p_holm'] < 0.01


def test_no_change_has_no_star_and_a_drop_has_a_sign():
  same, high, low = tasks(0.5), tasks(0.9, seed=2), tasks(0.2, seed=3)
  before = result({'same': same, 'worse': high})
  after = result({'same': same, 'worse': low})
  found = report.paired(before, after)
  assert found['same']['mean'] == 0 and found['same']['p'] == 1
  assert found['worse']['mean'] < 0
  # Holm over two domains: the smaller p counts twice.
  assert np.isclose(found['worse']['p_holm'], min(2 * found['worse']['p'], 1))
  lines = report.heldout_table(before, after).splitlines()
  assert '*' not in next(x for x in lines if x.startswith('same'))
  worse = next(x for x in lines if x.startswith('worse'))
  assert f"{found['worse']['mean']:+.2f}*" in worse


def test_a_result_without_tasks_has_no_change():
  plain = result({'a': tasks(0.5)})
  del plain[report.SAMPLED]['tasks']
  assert report.paired(plain, plain) == {}
  assert 'change' not in report.heldout_table(plain, plain)
