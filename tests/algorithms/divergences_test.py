"""KL on a 6-way categorical, in exact expectation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlpost.algorithms import divergences as lib
from rlpost.types import Batch

RNG = np.random.default_rng(0)
POLICY, REF, SAMPLER = (np.float32(x) for x in RNG.normal(size=(3, 6)))


def log_softmax(x):
  x = np.asarray(x, np.float64)
  return x - np.log(np.sum(np.exp(x)))


def reverse_gradient(policy):
  """d/d logits of sum p log(p / ref), by hand: p (x - KL)."""
  logp = log_softmax(policy)
  x, p = logp - log_softmax(REF), np.exp(logp)
  return p * (x - np.sum(p * x))


def forward_gradient(policy):
  """d/d logits of sum ref log(ref / p), by hand: p - ref."""
  return np.exp(log_softmax(policy)) - np.exp(log_softmax(REF))


def batch(sampler, ref=REF, mask=None):
  """One slot per action: a sum weighted by p_sampler is the expectation."""
  mask = np.ones((1, 6), np.float32) if mask is None else mask
  return Batch(
      *[None] * 7,
      mask=mask,
      behavior_logp=np.float32(log_softmax(sampler))[None],
      ref_logp=np.float32(log_softmax(ref))[None],
      advantage=np.zeros((1, 6), np.float32),
      reward=None,
      temperature=None,
      sequence=np.zeros((1, 6), np.int32),
      group=None,
      domain=None,
  )


def expectation_and_gradient(term, sampler):
  """E_sampler[term(log p, batch)] and its gradient in the policy's logits."""
  weight = np.float32(np.exp(log_softmax(sampler)))[None]
  slots = batch(sampler)

  def total(logits):
    return jnp.sum(weight * term(jax.nn.log_softmax(logits)[None], slots))

  value, gradient = jax.value_and_grad(total)(jnp.asarray(POLICY))
  return float(value), np.asarray(gradient)


def raw(name):
  return lambda logp, b: lib.DIVERGENCES[name](logp, b.ref_logp)


def stopped(name):
  def term(logp, b):
    weight = jax.lax.stop_gradient(jnp.exp(logp - b.behavior_logp))
    return weight * lib.DIVERGENCES[name](logp, b.ref_logp)
  return term


def through(name):
  return lambda logp, b: (
      jnp.exp(logp - b.behavior_logp) * lib.DIVERGENCES[name](logp, b.ref_logp))


def exact(estimator):
  return lambda logp, b: lib.kl_loss(
      logp, b, estimator=estimator, weight_cap=1e3)


def test_own_gradients_on_policy_are_what_theory_says():
  want = {
      'k1': np.zeros(6),
      'k2': reverse_gradient(POLICY),
      'k3': forward_gradient(POLICY),
  }
  for name, gradient in want.items():
    _, got = expectation_and_gradient(raw(name), POLICY)
    np.testing.assert_allclose(got, gradient, atol=1e-6)


def test_off_policy_only_two_weighted_forms_are_exact():
  want = reverse_gradient(POLICY)
  for name in lib.DIVERGENCES:
    _, got = expectation_and_gradient(raw(name), SAMPLER)
    assert np.max(np.abs(got - want)) > .02
  _, got = expectation_and_gradient(stopped('k2'), SAMPLER)
  np.testing.assert_allclose(got, want, atol=1e-6)
  _, got = expectation_and_gradient(through('k3'), SAMPLER)
  np.testing.assert_allclose(got, want, atol=1e-6)
  _, got = expectation_and_gradient(stopped('k3'), SAMPLER)
  np.testing.assert_allclose(got, forward_gradient(POLICY), atol=1e-6)


@pytest.mark.parametrize('estimator', lib.DIVERGENCES)
@pytest.mark.parametrize('sampler', [POLICY, SAMPLER], ids=['on', 'off'])
def test_the_loss_has_the_reverse_gradient(estimator, sampler):
  value, got = expectation_and_gradient(exact(estimator), sampler)
  np.testing.assert_allclose(got, reverse_gradient(POLICY), atol=1e-6)
  assert np.max(np.abs(got)) > .02  # and is no constant
  logp = log_softmax(POLICY)
  x = logp - log_softmax(REF)
  kl = np.sum(np.exp(logp) * (x**2 / 2 if estimator == 'k2' else x))
  assert value == pytest.approx(kl, abs=1e-6)


def test_the_gradient_is_that_of_both_exact_forms_token_by_token():
  slots = batch(SAMPLER)
  logp = jnp.asarray(np.float32(log_softmax(POLICY)))[None]

  def gradient(term):
    return np.asarray(jax.grad(lambda x: jnp.sum(term(x, slots)))(logp))

  for estimator in lib.DIVERGENCES:
    got = gradient(exact(estimator))
    np.testing.assert_allclose(got, gradient(stopped('k2')), atol=1e-6)
    np.testing.assert_allclose(got, gradient(through('k3')), atol=1e-6)


def test_descending_reaches_the_reference():
  weight = np.float32(np.exp(log_softmax(SAMPLER)))[None]

  def total(logits):
    logp = jax.nn.log_softmax(logits)[None]
    return jnp.sum(weight * exact('k3')(logp, batch(SAMPLER)))

  step = jax.jit(lambda logits: logits - 2. * jax.grad(total)(logits))
  logits = jnp.asarray(POLICY)
  for _ in range(200):
    logits = step(logits)
  np.testing.assert_allclose(log_softmax(logits), log_softmax(REF), atol=1e-2)


@pytest.mark.parametrize('estimator', lib.DIVERGENCES)
def test_a_clamp_kills_value_and_weight_gradient_together(estimator):
  slots = batch(SAMPLER, ref=np.float32([0, 0, 0, 0, 0, -50]))
  logp = jnp.asarray(np.float32(log_softmax(POLICY)))[None]

  def total(logp):
    return jnp.sum(lib.kl_loss(logp, slots, estimator=estimator, clamp=5.))

  gradient = np.asarray(jax.grad(total)(logp))[0]
  assert gradient[5] == 0 and np.all(gradient[:5] != 0)
  huge = batch(SAMPLER, ref=np.float32([0, 0, 0, 0, 0, 500]))
  assert np.isfinite(jnp.sum(lib.kl_loss(logp, huge, estimator=estimator)))


def test_the_weight_cap_holds_in_value_and_gradient():
  logp = np.float32(log_softmax(POLICY))[None]
  slots = batch(SAMPLER)
  slots = slots._replace(behavior_logp=logp - 3)
  x = logp - slots.ref_logp

  def total(logp):
    return jnp.sum(lib.kl_loss(logp, slots, estimator='k3', weight_cap=2.))

  value, gradient = jax.value_and_grad(total)(jnp.asarray(logp))
  np.testing.assert_allclose(value, 2 * np.sum(np.expm1(-x) + x), rtol=1e-5)
  np.testing.assert_allclose(gradient, 2 * x, rtol=1e-5)


@pytest.mark.parametrize('estimator', lib.DIVERGENCES)
@pytest.mark.parametrize('poison', [1e9, -1e9, np.nan])
def test_padding_never_matters(estimator, poison):
  mask = np.float32([[1, 0, 1, 1, 0, 1]])
  clean = batch(SAMPLER, mask=mask)
  logp = np.float32(log_softmax(POLICY))[None]

  def dirty(x):
    return np.where(mask > 0, x, np.float32(poison))

  poisoned = clean._replace(
      behavior_logp=dirty(clean.behavior_logp), ref_logp=dirty(clean.ref_logp))

  def run(logp, slots):
    def total(logp):
      values = lib.kl_loss(logp, slots, estimator=estimator)
      return jnp.sum(values), values
    return jax.grad(total, has_aux=True)(jnp.asarray(logp))

  want, got = run(logp, clean), run(dirty(logp), poisoned)
  for a, b in zip(want, got, strict=True):
    np.testing.assert_array_equal(a, b)
    assert np.all(np.asarray(b)[mask == 0] == 0)


def test_unknown_estimators_and_half_precision_are_refused():
  logp = jnp.asarray(np.float32(log_softmax(POLICY)))[None]
  with pytest.raises(ValueError, match='k1'):
    lib.kl_loss(logp, batch(SAMPLER), estimator='k4')
  with pytest.raises(ValueError, match='float32'):
    lib.kl_loss(logp.astype(jnp.bfloat16), batch(SAMPLER))
