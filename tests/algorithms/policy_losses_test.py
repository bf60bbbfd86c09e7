"""Policy losses against plain NumPy, and what their gradients must be."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlpost.algorithms import policy_losses as lib
from tests.algorithms import layouts

WIDE = {
    'reinforce': {},
    'clipped_surrogate': {'clip_low': .2, 'clip_high': .28},
    'gspo': {'clip_low': .1, 'clip_high': .15},
    'cispo': {'clip_low': .3, 'clip_high': .25},
}


def oracle(name, source, **hparams):
  """Loss per token, one at a time, in float64."""
  out = np.zeros(len(source.logp))
  for t in range(len(out)):
    logp, mu, a = (float(x[t]) for x in (
        source.logp, source.behavior, source.advantage))
    ratio = np.exp(logp - mu)
    low = 1 - hparams.get('clip_low', 0)
    high = 1 + hparams.get('clip_high', 0)
    if name == 'gspo':
      mine = source.owner == source.owner[t]
      gaps = source.logp[mine].astype(float) - source.behavior[mine]
      ratio = np.prod(np.exp(gaps)) ** (1 / len(gaps))
    if name == 'reinforce':
      out[t] = -a * logp
    elif name == 'cispo':
      out[t] = -min(max(ratio, low), high) * a * logp
    else:
      objective = min(ratio * a, min(max(ratio, low), high) * a)
      if a < 0 and 'dual_clip' in hparams:
        objective = max(objective, hparams['dual_clip'] * a)
      out[t] = -objective
  return out


@functools.partial(jax.jit, static_argnames=('name', 'items'))
def _values(logp, part, name, items):
  hparams = dict(items)

  def total(logp):
    model = {'logp': logp, 'entropy': logp, 'value': logp}
    values = lib.LOSSES[name](
        layouts.outputs(model, part).logp_BK, part.batch, **hparams
    )
    return jnp.sum(values), values

  (_, values), gradient = jax.value_and_grad(total, has_aux=True)(logp)
  return values, gradient


def values_and_gradient(name, source, part=None, **hparams):
  """Loss per token [N] and the gradient of their sum with respect to logp."""
  if part is None:
    part = layouts.lay_out(source, layouts.LAYOUTS['packed'][0])
  values, gradient = _values(
      jnp.asarray(source.logp), part, name, tuple(hparams.items())
  )
  out = np.full(len(source.logp), np.nan)
  trained = part.index >= 0
  assert np.all(np.asarray(values)[~trained] == 0)
  out[part.index[trained]] = np.asarray(values)[trained]
  return out, np.asarray(gradient)


@pytest.mark.parametrize('name', lib.LOSSES)
@pytest.mark.parametrize('seed', range(3))
def test_equals_plain_numpy(name, seed):
  source = layouts.data(seed)
  got, _ = values_and_gradient(name, source, **WIDE[name])
  want = oracle(name, source, **WIDE[name])
  np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


def test_dual_clip_equals_plain_numpy_and_binds():
  source = layouts.data(3, spread=1.5)
  hparams = dict(WIDE['clipped_surrogate'], dual_clip=3.)
  got, gradient = values_and_gradient('clipped_surrogate', source, **hparams)
  want = oracle('clipped_surrogate', source, **hparams)
  np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)
  ratio = np.exp(source.logp - source.behavior)
  bound = (source.advantage < 0) & (ratio > 3)
  assert bound.any() and np.all(gradient[bound] == 0)
  assert np.all(want[bound] == pytest.approx(-3. * source.advantage[bound]))
  with pytest.raises(ValueError, match='above 1'):
    values_and_gradient('clipped_surrogate', source, dual_clip=1.)


@pytest.mark.parametrize('name', lib.LOSSES)
def test_ratio_one_gives_the_reinforce_gradient(name):
  source = layouts.data(4)
  # Tokens of one sequence may differ in advantage.
  advantage = np.random.default_rng(4).normal(size=len(source.logp))
  source = source._replace(
      behavior=source.logp, advantage=advantage.astype(np.float32))
  _, gradient = values_and_gradient(name, source)
  np.testing.assert_allclose(gradient, -source.advantage, atol=1e-6)


@pytest.mark.parametrize('name', lib.LOSSES)
@pytest.mark.parametrize('poison', [1e9, -1e9, np.nan, np.inf])
def test_padding_never_matters(name, poison):
  source, rows = layouts.data(5), [[0, 1], [], [2, 3], [5, 4]]
  clean = values_and_gradient(
      name, source, layouts.lay_out(source, rows), **WIDE[name])
  dirty = values_and_gradient(
      name, source, layouts.lay_out(source, rows, poison=poison), **WIDE[name])
  np.testing.assert_array_equal(dirty[0], clean[0])
  np.testing.assert_array_equal(dirty[1], clean[1])
  assert np.all(np.isfinite(clean[1]))


@pytest.mark.parametrize('name', lib.LOSSES)
def test_an_extreme_ratio_on_padding_does_not_overflow(name):
  source = layouts.data(5)
  part = layouts.lay_out(source, [[0], [1]])
  far = np.where(part.index < 0, np.float32(-1e30), part.batch.behavior_logp)
  part = part._replace(batch=part.batch._replace(behavior_logp=far))
  keep = np.isin(source.owner, (0, 1))
  values, gradient = values_and_gradient(name, source, part, **WIDE[name])
  assert np.all(np.isfinite(values[keep])) and np.all(np.isfinite(gradient))


def test_surrogate_loses_its_gradient_on_the_right_sides():
  ratio = np.float32([1.5, 1.5, .5, .5, 1.25, .75])
  advantage = np.float32([1, -1, 1, -1, 1, -1])
  source = layouts.data(0, lengths=(6,))._replace(
      logp=np.log(ratio), behavior=np.zeros(6, np.float32),
      advantage=advantage)
  part = layouts.lay_out(source, [[0]])
  _, gradient = values_and_gradient(
      'clipped_surrogate', source, part, clip_low=.3, clip_high=.2)
  alive = np.array([0, 1, 1, 0, 0, 1])
  np.testing.assert_allclose(gradient, -alive * ratio * advantage, rtol=1e-6)
  _, gradient = values_and_gradient(
      'cispo', source, part, clip_low=.3, clip_high=.2)
  weight = np.clip(ratio, .7, 1.2)
  np.testing.assert_allclose(gradient, -weight * advantage, rtol=1e-6)


def test_cispo_has_no_lower_bound_by_default():
  source = layouts.data(0, lengths=(2,))._replace(
      logp=np.float32([-9, 3]), behavior=np.zeros(2, np.float32),
      advantage=np.ones(2, np.float32))
  part = layouts.lay_out(source, [[0]])
  _, gradient = values_and_gradient('cispo', source, part)
  np.testing.assert_allclose(gradient, [-np.exp(-9), -5], rtol=1e-5)


def test_gspo_has_the_gradient_of_the_sequence_objective():
  """mean_t of the token form and s A itself: equal values and gradients."""
  source = layouts.data(6)
  part = layouts.lay_out(
      source, [[0, 3], [2], [4, 1, 5]], scatter=np.random.default_rng(0))
  length = np.bincount(source.owner)[source.owner]
  values, gradient = values_and_gradient(
      'gspo', source, part, clip_low=.1, clip_high=.1)
  advantage = source.advantage[np.searchsorted(source.owner, np.arange(6))]

  def sequences(logp):
    gap = np.bincount(source.owner, logp - source.behavior)
    ratio = np.exp(gap / np.bincount(source.owner))
    return np.maximum(-ratio * advantage, -np.clip(ratio, .9, 1.1) * advantage)

  np.testing.assert_allclose(
      np.bincount(source.owner, values / length),
      sequences(source.logp.astype(float)), rtol=1e-5)
  eps = 1e-6
  numeric = [
      np.sum(sequences(source.logp + eps * row)
             - sequences(source.logp - eps * row)) / (2 * eps)
      for row in np.eye(len(source.logp))
  ]
  assert 0 < np.sum(np.array(numeric) == 0) < len(numeric)  # some are clipped
  np.testing.assert_allclose(
      token_mean_gradient(source, part), numeric, rtol=1e-4, atol=1e-6)
  assert np.all(np.isfinite(gradient))


def token_mean_gradient(source, part):
  """Gradient of sum over sequences of the mean over tokens of gspo."""
  length = np.bincount(source.owner)[source.owner]
  scale = np.where(part.index >= 0, 1 / length[part.index], 0)

  def total(logp):
    model = {'logp': logp, 'entropy': logp, 'value': logp}
    values = lib.gspo(layouts.outputs(model, part).logp_BK, part.batch,
                      clip_low=.1, clip_high=.1)
    return jnp.sum(scale.astype(np.float32) * values)

  return np.asarray(jax.grad(total)(jnp.asarray(source.logp)))


def test_the_sequence_ratio_does_not_drift_with_length():
  for length in (1, 16):
    source = layouts.data(0, lengths=(length,))
    source = source._replace(behavior=source.logp - np.float32(1e-3))
    part = layouts.lay_out(source, [[0]])
    ratio = lib.sequence_ratio(
        layouts.outputs(layouts.theta(source), part).logp_BK, part.batch)
    np.testing.assert_allclose(
        ratio[part.index >= 0], np.exp(1e-3), rtol=1e-6)


@pytest.mark.parametrize('name', lib.LOSSES)
def test_clipped_tells_where_the_bound_holds(name):
  source = layouts.data(7, spread=.5)
  part = layouts.lay_out(source, layouts.LAYOUTS['packed'][0], poison=1e9)
  logp = layouts.outputs(layouts.theta(source), part).logp_BK
  got = np.asarray(lib.clipped(name, logp, part.batch, **WIDE[name]))
  assert not got[part.index < 0].any()
  _, gradient = values_and_gradient(name, source, part, **WIDE[name])
  flat = np.zeros(len(source.logp), bool)
  flat[part.index[part.index >= 0]] = got[part.index >= 0]
  if name == 'cispo':
    ratio = np.exp(source.logp - source.behavior)
    want = (ratio < .7) | (ratio > 1.25)
  else:
    want = gradient == 0
  np.testing.assert_array_equal(flat, want)
  assert want.any() == ('clip_low' in WIDE[name])


@pytest.mark.parametrize('field', ['behavior_logp', 'advantage'])
def test_half_precision_and_wrong_shapes_are_refused(field):
  source = layouts.data(0)
  part = layouts.lay_out(source, [[0]])
  logp = layouts.outputs(layouts.theta(source), part).logp_BK
  array = jnp.asarray(getattr(part.batch, field))
  for bad in (array.astype(jnp.bfloat16), array[:, :-1]):
    batch = part.batch._replace(**{field: bad})
    with pytest.raises(ValueError, match=field):
      lib.clipped_surrogate(logp, batch)
  with pytest.raises(ValueError, match='logp is bfloat16'):
    lib.reinforce(logp.astype(jnp.bfloat16), part.batch)


def test_clipped_value_against_numpy_and_with_poison():
  rng = np.random.default_rng(8)
  value, old, target = rng.normal(size=(3, 4, 5)).astype(np.float32)
  mask = np.float32(rng.random((4, 5)) < .6)
  near = old + np.clip(value - old, -.2, .2)
  want = .5 * mask * np.maximum((value - target) ** 2, (near - target) ** 2)
  for poison in (0., 1e20, np.nan):
    value_, old_, target_ = (
        np.where(mask > 0, x, np.float32(poison)) for x in (value, old, target))

    def total(v, old_=old_, target_=target_):
      return jnp.sum(lib.clipped_value(v, old_, target_, mask))

    np.testing.assert_allclose(
        lib.clipped_value(value_, old_, target_, mask), want, atol=1e-6)
    gradient = np.asarray(jax.grad(total)(jnp.asarray(value_)))
    free = np.abs(value - old) < .2
    assert np.all(gradient[mask == 0] == 0)
    np.testing.assert_allclose(
        gradient[free], (mask * (value - target))[free], atol=1e-6)
  plain = lib.clipped_value(value, old, target, mask, clip=None)
  np.testing.assert_allclose(plain, .5 * mask * (value - target)**2, rtol=1e-6)


def test_the_entropy_bonus_rewards_entropy():
  mask = np.float32([[1, 0]])
  got = lib.entropy_bonus(np.float32([[2., np.nan]]), mask)
  np.testing.assert_array_equal(got, [[-2., 0.]])
