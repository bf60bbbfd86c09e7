"""Scoring: order, statuses, and one guilty answer among innocent ones."""


import pytest

from rlpost import errors, types, workers
from rlpost.rewards import scoring

SPEC = {'name': 'exact', 'gold': 'g'}


@pytest.fixture(scope='module')
def pool():
  with workers.WorkerPool(2) as pool:
    yield pool


@pytest.fixture(scope='module')
def scorer(pool):
  return scoring.Scorer(pool, batch_size=8)


@pytest.fixture(scope='module')
def faulty(pool):
  return scoring.Scorer(
    pool,
    batch_size=8,
    cpu_s=0.2,
    function='tests.rewards.faults:check_with_faults',
  )


def _task(question, gold, domain='d'):
  return types.Task(
    domain,
    (types.Message.of('user', question),),
    {'name': 'exact', 'gold': gold},
  )


def test_verdicts_keep_the_order_of_their_items(scorer):
  golds = [str(i % 5) for i in range(50)]
  items = [scoring.Item({'name': 'exact', 'gold': g}, '3') for g in golds]
  # Checkers that need imports travel apart and still come back in place.
  gym = {'name': 'reasoning_gym', 'dataset': 'gcd', 'gold': '3'}
  items[7:7] = [scoring.Item(gym, '3')]
  golds[7:7] = ['3']
  values = [v.value for v in scorer.score(items)]
  assert values == [float(g == '3') for g in golds]
  assert scorer.score([]) == []


def test_stop_reasons_and_missing_gold(scorer):
  verdicts = scorer.score(
    [
      scoring.Item(SPEC, 'g', 'stop'),
      scoring.Item(SPEC, 'g', 'length'),
      scoring.Item(SPEC, 'g', 'overlong'),
      scoring.Item({'name': 'exact'}, 'g', 'stop'),
      scoring.Item({'name': 'exact'}, 'g', 'length'),
      scoring.Item(SPEC, 'x' * (1 << 20), 'stop'),
    ]
  )
  assert [v.status for v in verdicts] == [
      'value', 'value', 'invalid', 'invalid', 'invalid', 'value',
  ]  # fmt: skip
  assert [v.value for v in verdicts] == [1, 0, 0, 0, 0, 0]
  assert verdicts[1].reason == 'cut off'
  assert 'overlong' in verdicts[2].reason
  with pytest.raises(ValueError, match='stop_reason'):
    scorer.score([scoring.Item(SPEC, 'g', 'eos')])
  with pytest.raises(errors.InputError, match='known ones'):
    scorer.score([scoring.Item({'name': 'fuzzy', 'gold': 'g'}, 'g')])


@pytest.mark.parametrize('fault', ['HANG', 'DIE', 'RAISE'])
def test_only_the_guilty_item_is_infra(pool, faulty, fault):
  items = [scoring.Item(SPEC, 'g' if i % 2 else 'x') for i in range(12)]
  items[3] = scoring.Item(SPEC, fault)
  verdicts = faulty.score(items)
  assert [i for i, v in enumerate(verdicts) if v.status == 'infra'] == [3]
  assert [v.value for v in verdicts if v.valid] == [
    float(i % 2) for i in range(12) if i != 3
  ]
  assert len(pool.pids) == pool.size


def test_submit_overlaps_and_may_be_asked_twice(scorer):
  first = scorer.submit([scoring.Item(SPEC, 'g')])
  second = scorer.submit([scoring.Item(SPEC, 'x')])
  assert [v.value for v in second.result()] == [0]
  assert [v.value for v in first.result()] == [1]
  assert first.done() and [v.value for v in first.result()] == [1]


def test_a_lost_pool_ends_the_run():
  with workers.WorkerPool(1) as pool:
    scorer = scoring.Scorer(pool)
    pool._lost = errors.LostWorkerError('gone')
    with pytest.raises(errors.LostWorkerError):
      scorer.score([scoring.Item(SPEC, 'g')])


def test_canary_names_the_domain_that_fails(scorer, pool):
  good = [_task(f'q{i}', str(i), 'fine') for i in range(4)]
  scoring.canary(scorer, good)
  bad = types.Task(
    'sick', good[0].messages, {'name': 'number', 'gold': 'three'}
  )
  with pytest.raises(errors.InputError, match=r'sick: 1 wrong.*infra') as info:
    scoring.canary(scorer, [*good, bad])
  assert 'fine:' not in str(info.value)
  generous = scoring.Scorer(
    pool, function='tests.rewards.scoring_test:reward_everything'
  )
  with pytest.raises(errors.InputError, match='the empty answer'):
    scoring.canary(generous, good)


def reward_everything(items):
  return [{'status': 'value', 'value': 1.0} for _ in items]


def test_best_constant_is_the_most_frequent_answer(scorer):
  golds = ['a'] * 3 + ['b'] * 5 + ['c'] * 2
  tasks = [_task(f'q{i}', gold) for i, gold in enumerate(golds)]
  assert scoring.best_constant(scorer, tasks) == ('b', 0.5)
  # An answer that no task has can be the best one: a stock answer finds it.
  spec = {'name': 'choice'}
  tasks = [
    types.Task('d', tasks[i].messages, {**spec, 'gold': gold})
    for i, gold in enumerate(['A', 'a', 'B'])
  ]
  answer, score = scoring.best_constant(scorer, tasks, candidates=0)
  assert answer == 'A' and score == pytest.approx(2 / 3)
