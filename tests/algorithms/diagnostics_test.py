"""Logged numbers are global sums over global counts, under every split."""

import functools

import jax
import numpy as np
import pytest

from rlpost.algorithms import diagnostics as lib
from rlpost.algorithms import recipes
from tests.algorithms import layouts

SOURCE = layouts.data(2, spread=.4)
RECIPE = recipes.Recipe(
    advantage='group_centered', loss='clipped_surrogate',
    loss_hparams={'clip_low': .2, 'clip_high': .3}, kl='k3', kl_coefficient=.1,
    anchor='old', correction='truncate_and_mask',
    correction_hparams={'cap': 1.2, 'low': .75, 'high': 1.29})


@jax.jit
def part_metrics(theta, part):
  return lib.metrics(layouts.outputs(theta, part), part.batch, RECIPE)


def compute(layout, poison=0.0):
  parts = [
      part_metrics(
          layouts.theta(SOURCE), layouts.lay_out(SOURCE, rows, poison=poison))
      for rows in layout
  ]
  return lib.finish(functools.reduce(lib.merge, parts))


def test_equal_plain_numpy():
  s = type(SOURCE)(*(np.asarray(x, float) for x in SOURCE))
  mean_gap = np.bincount(SOURCE.owner, s.old - s.behavior) / np.bincount(
      SOURCE.owner)
  kept = ((np.exp(mean_gap) >= .75) & (np.exp(mean_gap) <= 1.29))[SOURCE.owner]
  assert 0 < kept.sum() < len(kept)
  ratio = np.where(kept, np.exp(s.logp - s.old), 1)
  clipped = np.where(s.advantage > 0, ratio > 1.3, ratio < .8)
  weight, x = np.exp(s.logp - s.behavior), s.logp - s.ref
  want = {
      'ratio': ratio.mean(),
      'ratio_max': ratio.max(),
      'clipped': clipped.mean(),
      'weight': weight.mean(),
      'weight_max': weight.max(),
      'weight_squared': np.mean(weight**2),
      'effective_share': weight.sum()**2 / (len(x) * np.sum(weight**2)),
      'behavior_kl': np.mean(weight - 1 - np.log(weight)),
      'logp_gap': np.mean(np.abs(s.logp - s.behavior)),
      'logp_gap_max': np.max(np.abs(s.logp - s.behavior)),
      'advantage_abs': np.mean(np.abs(s.advantage)),
      'correction': np.mean(
          kept * np.minimum(np.exp(s.old - s.behavior), 1.2)),
      'dropped': np.mean(~kept),
      'entropy': s.entropy.mean(),
      'ref_kl': np.mean(np.exp(-x) - 1 + x),
  }
  got = compute(layouts.LAYOUTS['packed'])
  assert set(got) == set(want)
  for name, value in want.items():
    assert got[name] == pytest.approx(value, rel=1e-4), name


@pytest.mark.parametrize('layout', layouts.LAYOUTS)
@pytest.mark.parametrize('poison', [0.0, 1e9, np.nan])
def test_no_split_or_padding_changes_them(layout, poison):
  want = compute(layouts.LAYOUTS['packed'])
  got = compute(layouts.LAYOUTS[layout], poison)
  for name, value in want.items():
    np.testing.assert_allclose(got[name], value, rtol=2e-6, err_msg=name)


def test_on_policy_they_read_zero_and_one():
  source = SOURCE._replace(
      behavior=SOURCE.logp, old=SOURCE.logp, ref=SOURCE.logp)
  part = layouts.lay_out(source, layouts.LAYOUTS['packed'][0])
  got = lib.finish(part_metrics(layouts.theta(source), part))
  for name in ('ratio', 'ratio_max', 'weight', 'weight_max', 'correction',
               'effective_share'):
    assert got[name] == pytest.approx(1, rel=1e-6)
  for name in ('clipped', 'behavior_kl', 'logp_gap', 'logp_gap_max',
               'dropped', 'ref_kl'):
    assert got[name] == 0


def test_one_heavy_token_lowers_the_effective_share():
  source = SOURCE._replace(behavior=SOURCE.logp.copy())
  source.behavior[4] -= 8
  part = layouts.lay_out(source, layouts.LAYOUTS['packed'][0])
  got = lib.finish(part_metrics(layouts.theta(source), part))
  assert 1 / 22 < got['effective_share'] < 1.1 / 22


def test_nothing_trained_reads_zero():
  got = lib.finish(part_metrics(
      layouts.theta(SOURCE), layouts.lay_out(SOURCE, [], poison=np.nan)))
  assert all(np.all(value == 0) for value in got.values())
