"""Every aggregation against closed forms, and under every split."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlpost.algorithms import aggregation as lib
from rlpost.algorithms import policy_losses, recipes
from tests.algorithms import layouts
from tests.algorithms.policy_losses_test import WIDE, oracle

SOURCE = layouts.data(0)
CONSTANT = {'constant_length': 8., 'token_sum': 5.}


def closed_form(mode, values, owner):
  """The objective, from values per token and the sequence of each."""
  per_sequence = [values[owner == i] for i in np.unique(owner)]
  return {
      'token_mean': np.sum(values) / len(values),
      'sequence_mean': np.mean([np.mean(v) for v in per_sequence]),
      'constant_length': np.mean([np.sum(v) / 8 for v in per_sequence]),
      'token_sum': np.sum(values) / 5,
  }[mode]


def reduce(mode, values, parts):
  """What a training step does with values per slot of several parts."""
  unit, total, count = lib.unit_of(mode), 0., 0.
  for part in parts:
    mask, sequence = part.batch.mask, part.batch.sequence
    slot_values = np.where(part.index >= 0, values[part.index], 0)
    weights = lib.weights(mode, mask, sequence, constant=CONSTANT.get(mode))
    total += np.sum(np.asarray(weights, float) * slot_values)
    count += lib.count(unit, mask, sequence)
  return total / lib.denominator(unit, count)


@pytest.mark.parametrize('mode', lib.UNITS)
@pytest.mark.parametrize('layout', layouts.LAYOUTS)
@pytest.mark.parametrize('poison', [0., 1e9])
def test_equals_the_closed_form_in_any_layout(mode, layout, poison):
  values = SOURCE.advantage + SOURCE.logp
  parts = [
      layouts.lay_out(SOURCE, rows, poison=poison)
      for rows in layouts.LAYOUTS[layout]
  ]
  got = reduce(mode, values, parts)
  assert got == pytest.approx(
      closed_form(mode, values.astype(float), SOURCE.owner), rel=1e-6)


def test_modes_differ():
  values = (SOURCE.advantage + SOURCE.logp).astype(float)
  results = [closed_form(mode, values, SOURCE.owner) for mode in lib.UNITS]
  for a, b in itertools.combinations(results, 2):
    assert abs(a - b) > 1e-3


def test_a_mean_of_micro_batch_means_is_not_the_token_mean():
  """Lengths 3/50/7/400 in two micro-batches: the global count decides."""
  rng, lengths = np.random.default_rng(0), (3, 50, 7, 400)
  values = [rng.normal(loc=i, size=n) for i, n in enumerate(lengths)]
  total = count = 0.
  means = []
  for pair in (values[:2], values[2:]):
    mask = np.zeros((2, 400), np.float32)
    rows = np.zeros((2, 400))
    for b, row in enumerate(pair):
      mask[b, : len(row)], rows[b, : len(row)] = 1, row
    sequence = np.zeros((2, 400), np.int32)
    total += np.sum(np.asarray(lib.weights('token_mean', mask, sequence))
                    * rows)
    count += lib.count('token', mask, sequence)
    means.append(np.mean(np.concatenate(pair)))
  want = np.mean(np.concatenate(values))
  assert total / count == pytest.approx(want, rel=1e-6)
  assert abs(np.mean(means) - want) > .1


def test_counts_are_of_trained_slots_and_sequences_only():
  mask = np.float32([[1, 1, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0]])
  sequence = np.int32([[2, 0, 0, 2], [3, 1, 0, 0], [0, 3, 1, 2]])
  assert lib.count('token', mask, sequence) == 4
  assert lib.count('sequence', mask, sequence) == 3
  assert lib.count('one', mask, sequence) == 0
  np.testing.assert_array_equal(
      lib.weights('sequence_mean', mask, sequence),
      [[.5, 1, 0, .5], [0, 0, 0, 0], [0, 1, 0, 0]])
  micro = mask.reshape(3, 1, 4), sequence.reshape(3, 1, 4)
  assert lib.count('sequence', *micro) == 3
  np.testing.assert_array_equal(
      lib.weights('sequence_mean', *micro).reshape(3, 4),
      lib.weights('sequence_mean', mask, sequence))


@pytest.mark.parametrize('mode', lib.UNITS)
def test_nothing_to_train_on_gives_zero(mode):
  mask, sequence = np.zeros((2, 4), np.float32), np.zeros((2, 4), np.int32)
  weights = lib.weights(mode, mask, sequence, constant=CONSTANT.get(mode))
  unit = lib.unit_of(mode)
  assert np.all(weights == 0)
  assert lib.denominator(unit, lib.count(unit, mask, sequence)) == 1


def test_wrong_modes_and_constants_are_refused():
  mask = np.ones((1, 2), np.float32), np.zeros((1, 2), np.int32)
  for constant in (None, 0., -1.):
    with pytest.raises(ValueError, match='positive constant'):
      lib.weights('constant_length', *mask, constant=constant)
  with pytest.raises(ValueError, match='remove'):
    lib.weights('token_mean', *mask, constant=8.)
  with pytest.raises(ValueError, match='token_mean'):
    lib.weights('mean', *mask)
  with pytest.raises(ValueError, match='sequence'):
    lib.count('row', *mask)


# Every loss in every mode, with KL, entropy and value terms beside it.
PAIRS = list(itertools.product(policy_losses.LOSSES, lib.UNITS))


def recipe_of(loss, mode):
  return recipes.Recipe(
      advantage='gae', loss=loss, loss_hparams=WIDE[loss], aggregation=mode,
      length_constant=CONSTANT.get(mode), kl='k3', kl_coefficient=.1,
      entropy_coefficient=.01, value_coefficient=.5)


@functools.cache
def numerators(loss, mode):
  """Jitted part -> (sum per term, gradient of their total, count)."""
  recipe = recipe_of(loss, mode)

  def total(theta, part):
    terms = recipes.policy_terms(
        layouts.outputs(theta, part), part.batch, recipe, critic=part.critic)
    assert {unit for _, unit in terms.values()} == {lib.unit_of(mode)}
    sums = {name: jnp.sum(values) for name, (values, _) in terms.items()}
    return sum(sums.values()), sums

  def run(theta, part):
    (_, sums), gradient = jax.value_and_grad(total, has_aux=True)(theta, part)
    count = lib.count(
        lib.unit_of(mode), part.batch.mask, part.batch.sequence)
    return sums, gradient, count

  return jax.jit(run)


def objective(loss, mode, parts, source=SOURCE):
  """Per-term objectives and the gradient, over all parts."""
  results = [numerators(loss, mode)(layouts.theta(source), part)
             for part in parts]
  sums, gradients, counts = zip(*results, strict=True)
  denominator = lib.denominator(lib.unit_of(mode), sum(counts))
  return jax.tree.map(
      lambda *x: np.sum(np.asarray(x, float), axis=0) / denominator,
      *zip(sums, gradients, strict=True))


def assert_same(got, want):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize('loss,mode', PAIRS)
def test_the_split_never_changes_value_or_gradient(loss, mode):
  parts = {
      name: [layouts.lay_out(SOURCE, rows) for rows in layout]
      for name, layout in layouts.LAYOUTS.items()
  }
  want = objective(loss, mode, parts['packed'])
  for layout in parts.values():
    assert_same(objective(loss, mode, layout), want)
  scatter = np.random.default_rng(0)
  for poison in (0., 1e9, np.nan):
    strewn = [
        layouts.lay_out(SOURCE, rows, poison=poison, scatter=scatter)
        for rows in layouts.LAYOUTS['all in two']
    ]
    assert_same(objective(loss, mode, strewn), want)
  values = oracle(loss, SOURCE, **WIDE[loss])
  assert want[0]['policy'] == pytest.approx(
      closed_form(mode, values, SOURCE.owner), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize('mode', lib.UNITS)
def test_the_other_terms_equal_plain_numpy(mode):
  terms, gradient = objective(
      'reinforce', mode,
      [layouts.lay_out(SOURCE, layouts.LAYOUTS['packed'][0])])
  s = Data64(*(np.asarray(x, float) for x in SOURCE))
  x, weight = s.logp - s.ref, np.exp(s.logp - s.behavior)
  near = s.old_value + np.clip(s.value - s.old_value, -.2, .2)
  want = {
      'kl': .1 * weight * (np.exp(-x) - 1 + x),
      'entropy': -.01 * s.entropy,
      'value': .25 * np.maximum((s.value - s.target)**2, (near - s.target)**2),
  }
  for name, values in want.items():
    assert terms[name] == pytest.approx(
        closed_form(mode, values, SOURCE.owner), rel=1e-5)
  slot = [closed_form(mode, row, SOURCE.owner) for row in np.eye(len(x))]
  np.testing.assert_allclose(
      gradient['logp'], slot * (.1 * weight * x - s.advantage), rtol=1e-4,
      atol=1e-6)
  np.testing.assert_allclose(gradient['entropy'], -.01 * np.array(slot),
                             rtol=1e-5)


Data64 = type(SOURCE)


@pytest.mark.parametrize('loss,devices', [
    ('gspo', 1), ('gspo', 2), ('gspo', 4), ('gspo', 8), ('cispo', 8)])
def test_the_mesh_never_changes_value_or_gradient(loss, devices):
  part = layouts.lay_out(
      SOURCE, [[0, 1], [], [2, 3], [], [], [4], [5]], num_rows=8)
  mesh = jax.make_mesh(
      (devices,), ('data',), devices=jax.devices()[:devices],
      axis_types=(jax.sharding.AxisType.Auto,))
  rows = jax.NamedSharding(mesh, jax.P('data'))
  whole = jax.NamedSharding(mesh, jax.P())
  poison, part = part.poison, part._replace(poison=None)
  placed = jax.device_put(part, rows)._replace(
      poison=jax.device_put(poison, whole))
  theta = jax.device_put(layouts.theta(SOURCE), whole)
  sums, gradient, count = numerators(loss, 'sequence_mean')(theta, placed)
  got = jax.tree.map(lambda x: np.asarray(x, float) / float(count),
                     (sums, gradient))
  assert_same(got, objective(
      loss, 'sequence_mean', [part._replace(poison=poison)]))
