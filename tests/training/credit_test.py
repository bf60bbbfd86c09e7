"""From verdicts to advantages: who counts, what is shaped, and by which scale.
"""

import numpy as np
import pytest

from rlpost import types
from rlpost.algorithms import recipes
from rlpost.data import packing
from rlpost.rewards.normalize import RewardScale
from rlpost.training import credit
from tests.training import batches

BUDGET = 10
GROUP_RECIPES = [
    n for n, r in recipes.RECIPES.items() if r.advantage not in ('gae',)
]


def verdict(value, high=1.0):
  if isinstance(value, str):
    return types.Verdict(value, np.nan)  # nobody may read it
  return types.Verdict('value', value, high=high)


def group(id_, values, domain='a', lengths=None, stops=None, high=1.0):
  """A value, or 'invalid' or 'infra', for each answer."""
  lengths = lengths or [3] * len(values)
  stops = stops or ['stop'] * len(values)
  task = batches.task(domain, f'{domain} {id_}')
  return types.Group(id_, task, tuple(
      batches.trajectory(
          np.arange(2 + n), 2, group=id_, sample=10 + i, task=task,
          stop_reason=stop, verdict=verdict(v, high),
      )
      for i, (v, n, stop) in enumerate(
          zip(values, lengths, stops, strict=True)
      )
  ))


def unscaled():
  """A scale that divides by 1, whatever it sees."""
  seen = {'moment': 1e30, 'weight': 1e30, 'count': 1, 'nonfinite': 0}
  scale = RewardScale(decay=1.0, clip=1e9)
  domains = {name: dict(seen) for name in 'ab'}
  scale.set_state(scale.state() | {'domains': domains})
  return scale


def assign(groups, name='dr_grpo', scale=None, wanted=None, **changes):
  penalty = changes.pop('penalty', None)
  return credit.assign(
      groups, recipes.recipe(name, **changes), scale or unscaled(),
      wanted=wanted or max(len(groups), 1), max_tokens=BUDGET,
      penalty=penalty,
  )


def by_member(found):
  """{(group, sample): (advantage, trained)}."""
  return {
      (t.group, t.sample): (float(a), bool(k))
      for g, adv, kept in zip(found.groups, found.advantages, found.trained,
                              strict=True)
      for t, a, k in zip(g.trajectories, adv, kept, strict=True)
  }


@pytest.mark.parametrize('name', GROUP_RECIPES)
def test_members_without_a_value_leave_no_trace(name):
  changes = {'overlong': 'keep', 'dynamic_sampling': False}
  dirty = [
      group(4, [1.0, 'invalid', 0.0, 'infra', 1.0]),
      group(5, ['infra', 0.0, 0.25, 'invalid']),
  ]
  clean = [group(4, [1.0, 0.0, 1.0]), group(5, [0.0, 0.25])]
  scales = RewardScale(), RewardScale()
  found = assign(dirty, name, scales[0], **changes)
  wanted = assign(clean, name, scales[1], **changes)
  for adv, kept, better, g in zip(
      found.advantages, found.trained, wanted.advantages, dirty, strict=True
  ):
    valid = np.array([t.verdict.valid for t in g.trajectories])
    np.testing.assert_array_equal(kept, valid)
    np.testing.assert_array_equal(adv[valid], better)
    assert not adv[~valid].any() and np.abs(better).max() > 0
  assert scales[0].state() == scales[1].state()
  rows = [
      packing.pack_groups(
          c.groups, prompt_len=2, samples=5, width=3, advantages=c.advantages,
          trained=c.trained,
      )
      for c in (found, wanted)
  ]
  assert rows[0].mask.sum() == rows[1].mask.sum() == 5 * 3


def test_centred_per_prompt_in_numpy():
  found = by_member(assign([
      group(0, [1.0, 0.0, 0.0, 'invalid']), group(9, [0.5, 1.0]),
      group(2, [0.25]),
  ]))
  wanted = {
      (0, 10): (2 / 3, True), (0, 11): (-1 / 3, True), (0, 12): (-1 / 3, True),
      (0, 13): (0.0, False), (9, 10): (-0.25, True), (9, 11): (0.25, True),
      (2, 10): (0.0, True),  # alone: nothing to compare with
  }
  assert found.keys() == wanted.keys()
  for key, (advantage, trained) in wanted.items():
    np.testing.assert_allclose(found[key][0], advantage, atol=1e-6)
    assert found[key][1] == trained


@pytest.mark.parametrize('name', [
    n for n in GROUP_RECIPES if n != 'reinforce_pp'
])
def test_equal_rewards_are_dropped_or_give_exactly_0(name):
  flat = [
      group(0, [0.0] * 4), group(1, [1.0] * 3),
      group(2, [0.1 + 0.2, 0.3, 0.3, 'infra']), group(3, ['invalid'] * 2),
  ]
  found = assign(
      [flat[0], group(4, [0.0, 1.0]), *flat[1:]], name, overlong='keep'
  )
  if recipes.RECIPES[name].drop_uninformative:
    assert [g.id for g in found.groups] == [4]
  else:
    assert [g.id for g in found.groups] == [0, 4, 1, 2, 3]
  for g, adv in zip(found.groups, found.advantages, strict=True):
    assert adv.any() == (g.id == 4), g.id


def test_a_short_batch_weighs_less_only_where_more_was_drawn():
  groups = [group(i, [0.0, float(i % 2)]) for i in range(6)]
  found = assign(groups, 'dapo', wanted=4)
  assert [g.id for g in found.groups] == [1, 3, 5] and found.weight == 0.75
  found = assign(groups, 'dapo', wanted=2)
  assert [g.id for g in found.groups] == [1, 3] and found.weight == 1
  found = assign(groups, 'dapo', wanted=4, dynamic_sampling=False)
  assert [g.id for g in found.groups] == [1, 3, 5] and found.weight == 1
  found = assign(groups, 'grpo', wanted=4)
  assert [g.id for g in found.groups] == [0, 1, 2, 3] and found.weight == 1


def test_no_informative_group_gives_nothing_to_learn():
  scale = RewardScale()
  found = assign([group(0, [1.0, 1.0]), group(1, ['infra'] * 2)], 'dapo', scale)
  assert found == credit.Credit((), (), (), 0.0)
  assert scale.state() == RewardScale().state()
  assert assign([]).groups == ()


def test_length_is_punished_after_the_filter_and_in_right_answers_only():
  """DAPO, eq. 13: the last fifth of ten tokens are two."""
  groups = [
      group(0, [0.0, 0.0, 0.0], lengths=[1, 9, 10]),  # all wrong
      group(1, [1.0, 1.0, 1.0], lengths=[1, 9, 10]),  # all right
      group(2, [1.0, 1.0, 0.0, 1.0, 'infra'], lengths=[8, 9, 10, 10, 10]),
  ]
  found = assign(groups, 'dapo', advantage='group_centered')
  assert [g.id for g in found.groups] == [2]
  shaped = np.array([1.0, 0.5, 0.0, 0.0])
  np.testing.assert_allclose(
      found.advantages[0][:4], shaped - shaped.mean(), atol=1e-6
  )
  assert found.advantages[0][4] == 0 and not found.trained[0][4]


def test_cut_off_answers_may_leave_baseline_and_loss_alike():
  cut = group(0, [1.0, 0.0, 0.0, 1.0],
              stops=['stop', 'length', 'stop', 'overlong'])
  found = assign([cut], overlong='mask')
  assert found.trained[0].tolist() == [True, False, True, False]
  np.testing.assert_allclose(found.advantages[0], [0.5, 0, -0.5, 0], atol=1e-6)
  kept = assign([cut], overlong='keep')
  assert kept.trained[0].tolist() == [True, True, True, False]
  np.testing.assert_allclose(
      kept.advantages[0], [2 / 3, -1 / 3, -1 / 3, 0], atol=1e-6
  )


def test_a_penalty_belongs_to_its_group_and_sample():
  groups = [group(3, [1.0, 0.0]), group(1, [1.0, 0.0]), group(8, [1.0, 1.0])]
  penalty = {(1, 10): -0.5, (3, 11): -1.0, (8, 11): -0.25}
  found = assign(groups, penalty=penalty)
  np.testing.assert_allclose(
      found.advantages, [[1, -1], [0.25, -0.25], [0.125, -0.125]], atol=1e-6
  )
  # It shapes, and does not make a group worth training on.
  found = assign(groups, 'dapo', overlong='keep', penalty=penalty)
  assert [g.id for g in found.groups] == [3, 1]


def test_every_domain_has_a_scale_of_its_own():
  """Rewards of 1, 100 and 0.01 become equal; names, not places, decide."""
  sizes = {'small': 0.01, 'unit': 1.0, 'large': 100.0}
  rng = np.random.default_rng(0)
  groups = [
      group(i, (sizes[d] * rng.random(4)).tolist(), d, high=100.0)
      for i, d in enumerate(['unit', 'large', 'small'] * 4)
  ]
  scale = RewardScale(decay=1.0, clip=1e9)
  found = assign(groups, scale=scale)
  for name, size in sizes.items():
    own = [g.task.domain == name for g in found.groups]
    adv = np.array([a for a, o in zip(found.advantages, own) if o])
    np.testing.assert_allclose(np.sqrt(np.mean(adv**2)), 1, rtol=1e-5)
    values = np.array([
        [t.verdict.value for t in g.trajectories]
        for g in groups if g.task.domain == name
    ])
    centred = values - values.mean(1, keepdims=True)
    wanted = np.sqrt(np.mean(centred**2))
    np.testing.assert_allclose(scale.scale(name), wanted, rtol=1e-6)
    np.testing.assert_allclose(adv, centred / wanted, rtol=1e-4, atol=1e-5)
    assert 0.1 * size < wanted < size
  # The next step remembers: half of the weight, as decay 1 keeps everything.
  before = scale.scale('unit')
  assign([group(50, [0.0, 1.0] * 8, 'unit')], scale=scale)
  np.testing.assert_allclose(
      scale.scale('unit'), np.sqrt((before**2 + 0.25) / 2), rtol=1e-6
  )


@pytest.mark.parametrize('name', GROUP_RECIPES)
def test_the_order_of_groups_changes_nothing(name):
  rng = np.random.default_rng(1)
  groups = [
      group(
          g, rng.choice([0.0, 0.5, 1.0], 3 + g % 3).tolist(), 'ab'[g % 2],
          lengths=rng.integers(1, BUDGET + 1, 3 + g % 3).tolist(),
      )
      for g in range(8)
  ]
  first = RewardScale()
  wanted = by_member(assign(groups, name, first))
  assert any(a for a, _ in wanted.values())
  for seed in range(3):
    order = np.random.default_rng(seed).permutation(8)
    scale = RewardScale()
    found = by_member(assign([groups[i] for i in order], name, scale))
    assert found.keys() == wanted.keys()
    for key, (advantage, trained) in wanted.items():
      np.testing.assert_allclose(found[key][0], advantage, atol=1e-6)
      assert found[key][1] == trained
    for domain in 'ab':
      np.testing.assert_allclose(
          scale.scale(domain), first.scale(domain), rtol=1e-9
      )
