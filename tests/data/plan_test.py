import collections
import json

import numpy as np
import pytest

from rlpost import errors
from rlpost.data import plan

SHARES = {'a': 0.5, 'b': 0.3, 'c': 0.17, 'd': 0.03}


def make(weights=SHARES, *, prompts=7, seed=3, floor=0.0, **fields):
  sources = {k: plan.Source(weight=w, **fields) for k, w in weights.items()}
  return plan.Plan(sources, prompts=prompts, seed=seed, floor=floor)


def count(drawn):
  return collections.Counter(name for name, _ in drawn)


def many(size=300):
  rng = np.random.default_rng(0)
  return {f'd{i:03}': float(w) for i, w in enumerate(rng.gamma(1, size=size))}


def test_remainders_are_carried_and_not_given_to_one_domain():
  p, total = make(), collections.Counter()
  for step in range(1, 401):
    total += count(p.next())
    for name, share in SHARES.items():
      assert abs(total[name] - 7 * step * share) < 1 + 1 / 2 + 1 / 3 + 1 / 4
  assert sum(total.values()) == 2800
  assert {n: total[n] for n in SHARES} == pytest.approx(
      {n: 2800 * s for n, s in SHARES.items()}, abs=1
  )


def test_300_domains_with_few_prompts_a_step():
  weights = many()
  p = make(weights, prompts=8, floor=0.25)
  share = p.shares()
  assert min(share.values()) == pytest.approx(0.25 / 300)
  total = collections.Counter()
  for _ in range(1500):
    drawn = p.next()
    assert len(drawn) == 8
    total += count(drawn)
  worst = max(abs(total[n] - 12000 * share[n]) for n in weights)
  assert worst < 2  # the harmonic bound is 6.3
  assert set(total) == set(weights)


def test_every_step_has_its_own_ties_and_order():
  p = make(dict.fromkeys('abc', 1.0), prompts=3)
  orders = {tuple(name for name, _ in p.next()) for _ in range(60)}
  assert len(orders) == 6
  p = make(dict.fromkeys('abcd', 1.0), prompts=1)
  rounds = {tuple(p.next()[0][0] for _ in range(4)) for _ in range(60)}
  assert len(rounds) > 16 and all(len(set(r)) == 4 for r in rounds)


@pytest.mark.parametrize('floor', [0.0, 0.3, 0.9, 1.0])
def test_shares_solve_their_equation(floor):
  rng = np.random.default_rng(1)
  weights = np.concatenate([rng.exponential(size=19) ** 3, [0.0]])
  share = plan.shares(weights, floor)
  low, high = 0.0, 1e6
  for _ in range(200):  # bisection on c in sum(max(floor / D, c w)) = 1
    mid = (low + high) / 2
    over = np.maximum(floor / 20, mid * weights).sum() > 1
    low, high = (low, mid) if over else (mid, high)
  np.testing.assert_allclose(
      share, np.maximum(floor / 20, low * weights), atol=1e-12
  )
  assert share.sum() == pytest.approx(1)


def test_changing_weights_move_the_shares_at_once_and_exactly():
  p = make({'a': 1, 'b': 1}, prompts=10)
  assert count(p.next()) == {'a': 5, 'b': 5}
  assert count(p.next({'a': 9, 'b': 1})) == {'a': 9, 'b': 1}
  assert count(p.next()) == {'a': 9, 'b': 1}
  assert count(p.next({'a': 0, 'b': 1})) == {'b': 10}


def test_resume_is_exact_at_every_step_with_changing_weights():
  weights = many(40)
  rng = np.random.default_rng(5)
  steps = [
      {n: float(w) for n, w in zip(weights, row, strict=True)}
      for row in rng.gamma(0.3, size=(24, 40))
  ]
  whole = make(weights, size=5, floor=0.1)
  wanted = [whole.next(w) for w in steps]
  for cut in range(0, 25, 3):
    first = make(weights, size=5, floor=0.1)
    got = [first.next(w) for w in steps[:cut]]
    saved = json.loads(json.dumps(first.state()))
    second = make(weights, size=5, floor=0.1)
    second.set_state(saved)
    got += [second.next(w) for w in steps[cut:]]
    assert got == wanted
    assert second.state() == whole.state()


def test_the_order_of_the_domains_does_not_matter():
  backwards = dict(reversed(SHARES.items()))
  left, right = make(), make(backwards)
  assert [left.next() for _ in range(20)] == [right.next() for _ in range(20)]
  assert make(seed=4).next() != make(seed=3).next()


def test_ranks_take_disjoint_slices_of_one_plan():
  wanted = make(prompts=12).next()
  for ranks in (1, 2, 3, 4):
    parts = [make(prompts=12).next()[r::ranks] for r in range(ranks)]
    merged = [parts[i % ranks][i // ranks] for i in range(12)]
    assert merged == wanted


def test_cursors_count_what_was_drawn_and_nothing_else():
  p = make(prompts=9)
  seen = collections.defaultdict(list)
  for step in range(30):
    drawn = p.next(prompts=9 if step % 2 else 4)
    refused = drawn[: step % 3]
    for name, index in drawn + [p.redraw(name) for name, _ in refused]:
      seen[name].append(index)
  for name, indices in seen.items():
    assert sorted(indices) == list(range(len(indices)))
    assert p.state()['domains'][name]['cursor'] == len(indices)
  assert p.step == 30


def test_redraw_leaves_the_shares_alone():
  left, right = make(), make()
  for _ in range(60):
    drawn = left.next()
    assert count(drawn) == count(right.next())
    left.redraw(drawn[0][0])


def test_finite_domains_visit_every_task_once_an_epoch_in_new_orders():
  q = make({'a': 1, 'b': 2}, size=10)
  drawn = [q.redraw('b')[1] for _ in range(40)]
  epochs = [tuple(drawn[i : i + 10]) for i in range(0, 40, 10)]
  assert all(sorted(e) == list(range(10)) for e in epochs)
  assert len(set(epochs)) == 4
  assert [q.redraw('a')[1] for _ in range(10)] != list(epochs[0])


def test_domains_join_and_leave_on_resume():
  p = make({'a': 1, 'b': 1})
  for _ in range(9):
    p.next()
  state = json.loads(json.dumps(p.state()))
  cursor = state['domains']['b']['cursor']
  joined = make({'a': 1, 'c': 1})
  joined.set_state(state)
  assert joined.redraw('c') == ('c', 0)
  assert joined.redraw('a') == ('a', state['domains']['a']['cursor'])
  assert sum(count(joined.next()).values()) == 7
  carry = [e['carry'] for e in joined.state()['domains'].values()]
  assert sum(carry) == pytest.approx(0, abs=1e-9)
  back = make({'a': 1, 'b': 1, 'c': 1})
  back.set_state(json.loads(json.dumps(joined.state())))
  assert back.redraw('b') == ('b', cursor)


def test_resume_is_exact_beside_a_domain_that_left():
  p = make({'a': 1, 'b': 1, 'gone': 1})
  p.next()
  left, right = make({'a': 1, 'b': 2}), make({'a': 1, 'b': 2})
  left.set_state(json.loads(json.dumps(p.state())))
  for _ in range(10):
    right.set_state(json.loads(json.dumps(left.state())))
    assert left.next() == right.next()
    assert left.state() == right.state()


def test_other_data_or_another_seed_is_refused():
  state = make(fingerprint='x').state()
  with pytest.raises(errors.InputError, match="domain 'a' changed"):
    make(fingerprint='y').set_state(state)
  with pytest.raises(errors.InputError, match='size'):
    make(fingerprint='x', size=5).set_state(state)
  with pytest.raises(errors.InputError, match='seed 3, not 4'):
    make(fingerprint='x', seed=4).set_state(state)


@pytest.mark.parametrize(
    'weights',
    [
        {'a': 1.0},
        {'a': 1, 'b': 1, 'x': 1},
        {'a': -1, 'b': 2},
        {'a': float('nan'), 'b': 1},
        {'a': 0, 'b': 0},
    ],
)
def test_bad_weights_are_refused_and_change_nothing(weights):
  p = make({'a': 1, 'b': 1})
  before = p.state()
  with pytest.raises(errors.InputError):
    p.next(weights)
  assert p.state() == before


def test_bad_sizes_are_refused():
  with pytest.raises(errors.InputError):
    make({})
  with pytest.raises(errors.InputError):
    make(prompts=0)
  with pytest.raises(errors.InputError):
    make(size=0)
  with pytest.raises(errors.InputError):
    make(floor=1.5)
