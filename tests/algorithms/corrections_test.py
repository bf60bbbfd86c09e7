"""Sampler, old and current policy, kept apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlpost.algorithms import corrections as lib
from rlpost.algorithms import recipes
from tests.algorithms import layouts

SOURCE = layouts.data(0, spread=1.)
PART = layouts.lay_out(
    SOURCE, [[0, 3], [2], [], [4, 1, 5]], scatter=np.random.default_rng(1))


def weights(name, part=PART, old=None, **hparams):
  """Correction weights per token [N]; padding must be 0."""
  got = np.asarray(lib.CORRECTIONS[name](
      part.old_logp if old is None else old, part.batch.behavior_logp,
      part.batch.mask, part.batch.sequence, **hparams))
  assert np.all(got[part.index < 0] == 0)
  out = np.zeros(len(SOURCE.logp))
  out[part.index[part.index >= 0]] = got[part.index >= 0]
  return out


def oracle(cap=np.inf, low=0., high=np.inf):
  out = np.zeros(len(SOURCE.logp))
  for t, owner in enumerate(SOURCE.owner):
    gaps = (SOURCE.old - SOURCE.behavior)[SOURCE.owner == owner].astype(float)
    mean = np.prod(np.exp(gaps)) ** (1 / len(gaps))
    ratio = min(np.exp(float(SOURCE.old[t] - SOURCE.behavior[t])), cap)
    out[t] = ratio if low <= mean <= high else 0
  return out


def test_weights_equal_plain_numpy():
  truncated, kept = oracle(cap=1.2), oracle(cap=0., low=.8, high=1.4)
  kept = (oracle(low=.8, high=1.4) > 0).astype(float)
  assert 0 < kept.sum() < len(kept)
  np.testing.assert_allclose(
      weights('token_truncation', cap=1.2), truncated, rtol=1e-5)
  np.testing.assert_array_equal(
      weights('geometric_sequence_mask', low=.8, high=1.4), kept)
  np.testing.assert_allclose(
      weights('truncate_and_mask', cap=1.2, low=.8, high=1.4),
      truncated * kept, rtol=1e-5)
  assert np.all(weights('none') == 1)


@pytest.mark.parametrize('name', lib.CORRECTIONS)
def test_equal_policies_weigh_one(name):
  same = weights(name, old=PART.batch.behavior_logp)
  np.testing.assert_array_equal(same, 1)


@pytest.mark.parametrize('name', lib.CORRECTIONS)
@pytest.mark.parametrize('poison', [1e9, np.nan])
def test_padding_never_matters(name, poison):
  part = layouts.lay_out(
      SOURCE, [[0, 3], [2], [], [4, 1, 5]], poison=poison,
      scatter=np.random.default_rng(1))
  np.testing.assert_array_equal(weights(name, part), weights(name))


@pytest.mark.parametrize('name', lib.CORRECTIONS)
def test_weights_have_no_gradient(name):
  def total(old):
    return jnp.sum(lib.CORRECTIONS[name](
        old, PART.batch.behavior_logp, PART.batch.mask, PART.batch.sequence))

  assert np.all(jax.grad(total)(jnp.asarray(PART.old_logp)) == 0)


def test_three_policies_have_three_places():
  """min(old / sampler, cap) times the surrogate of current / old."""
  recipe = recipes.recipe(
      'cispo', anchor='old', correction='token_truncation',
      correction_hparams={'cap': 1.3},
      loss_hparams={'clip_low': .5, 'clip_high': .5})
  outputs = layouts.outputs(layouts.theta(SOURCE), PART)
  values, _ = recipes.policy_terms(outputs, PART.batch, recipe)['policy']
  ratio = np.clip(np.exp(SOURCE.logp - SOURCE.old), .5, 1.5)
  want = -oracle(cap=1.3) * ratio * SOURCE.advantage * SOURCE.logp
  got = np.zeros(len(want))
  trained = PART.index >= 0
  got[PART.index[trained]] = np.asarray(values)[trained]
  np.testing.assert_allclose(got, want, rtol=1e-5)
  # The current policy moves the ratio alone, the sampler the weight alone.
  far = PART.batch._replace(behavior_logp=PART.old_logp)
  moved, _ = recipes.policy_terms(outputs, far, recipe)['policy']
  np.testing.assert_allclose(
      np.asarray(moved)[trained],
      (-ratio * SOURCE.advantage * SOURCE.logp)[PART.index[trained]],
      rtol=1e-5)


def test_a_dropped_sequence_cannot_overflow():
  """Its ratio is infinite, its weight 0: value and gradient stay finite."""
  part = PART._replace(old_logp=np.where(
      (PART.index >= 0) & (SOURCE.owner[PART.index] == 3),
      np.float32(-500.), PART.old_logp))
  recipe = recipes.recipe(
      'dr_grpo', anchor='old', correction='geometric_sequence_mask',
      length_constant=8.)

  def total(theta):
    outputs = layouts.outputs(theta, part)
    return jnp.sum(recipes.policy_terms(outputs, part.batch, recipe)[
        'policy'][0])

  value, gradient = jax.value_and_grad(total)(layouts.theta(SOURCE))
  assert np.isfinite(value) and np.all(np.isfinite(gradient['logp']))
  assert np.all(gradient['logp'][SOURCE.owner == 3] == 0)
  assert np.any(gradient['logp'] != 0)
