"""The table of algorithms: each row, and the choices that are refused."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlpost import errors
from rlpost.algorithms import advantages, aggregation, policy_losses, recipes
from tests.algorithms import layouts
from tests.algorithms.policy_losses_test import oracle

SOURCE = layouts.data(1)
PART = layouts.lay_out(SOURCE, layouts.LAYOUTS['packed'][0])


def complete(name, **overrides):
  """A row with the number that only a config knows."""
  if name == 'dr_grpo':
    overrides.setdefault('length_constant', 8.)
  return recipes.recipe(name, **overrides)


def terms_of(recipe, source=SOURCE, part=PART):
  return recipes.policy_terms(
      layouts.outputs(layouts.theta(source), part), part.batch, recipe,
      critic=part.critic)


def weight_of(recipe):
  """Slot weights over the global count, by hand."""
  length = np.bincount(SOURCE.owner)[SOURCE.owner]
  return {
      'token_mean': np.full(len(length), 1 / len(length)),
      'sequence_mean': 1 / length / 6,
      'constant_length': np.full(len(length), 1 / 6) / (
          recipe.length_constant or 1),
  }[recipe.aggregation]


@pytest.mark.parametrize('name', recipes.RECIPES)
def test_each_row_is_its_published_objective(name):
  recipe = complete(name)
  assert re.search(r'arXiv:\d{4}\.\d{5}', recipe.paper)
  terms = terms_of(recipe)
  want = {'policy'} | ({'kl'} if name == 'grpo' else set()) | (
      {'value'} if name == 'ppo' else set())
  assert set(terms) == want
  values, unit = terms['policy']
  count = aggregation.count(unit, PART.batch.mask, PART.batch.sequence)
  got = float(jnp.sum(values) / aggregation.denominator(unit, count))
  losses = oracle(recipe.loss, SOURCE, **recipe.loss_hparams)
  assert got == pytest.approx(np.sum(weight_of(recipe) * losses), rel=1e-4)
  if name == 'grpo':
    x = (SOURCE.logp - SOURCE.ref).astype(float)
    kl = np.exp(SOURCE.logp - SOURCE.behavior) * (np.exp(-x) - 1 + x)
    assert float(jnp.sum(terms['kl'][0]) / count) == pytest.approx(
        np.sum(weight_of(recipe) * .04 * kl), rel=1e-4)


@pytest.mark.parametrize('name,advantage,clips,mode,sampling,overlong', [
    ('grpo', 'group_normalized', (.2, .2), 'sequence_mean', False, 'keep'),
    ('dr_grpo', 'group_centered', (.2, .2), 'constant_length', False, 'keep'),
    ('rloo', 'leave_one_out', (), 'constant_length', False, 'keep'),
    ('dapo', 'group_normalized', (.2, .28), 'token_mean', True, 'soft'),
    ('gspo', 'group_normalized', (3e-4, 4e-4), 'sequence_mean', False, 'keep'),
    ('cispo', 'group_normalized', (1., 4.), 'token_mean', False, 'keep'),
    ('reinforce_pp', 'reinforce_pp', (.2, .2), 'token_mean', False, 'keep'),
    ('maxrl', 'maxrl', (.2, .28), 'token_mean', False, 'keep'),
    ('ppo', 'gae', (.2, .2), 'token_mean', False, 'keep'),
])
def test_the_table_as_printed(
    name, advantage, clips, mode, sampling, overlong):
  row = recipes.RECIPES[name]
  assert row.advantage == advantage and row.aggregation == mode
  assert tuple(row.loss_hparams.values()) == clips
  assert row.dynamic_sampling == row.drop_uninformative == sampling
  assert row.overlong == overlong


@pytest.mark.parametrize('name', recipes.RECIPES)
def test_on_policy_each_row_is_weighted_reinforce(name):
  source = SOURCE._replace(behavior=SOURCE.logp)
  part = layouts.lay_out(source, layouts.LAYOUTS['packed'][0])
  recipe = complete(name)

  def total(theta):
    outputs = layouts.outputs(theta, part)
    terms = recipes.policy_terms(
        outputs, part.batch, recipe, critic=part.critic)
    return jnp.sum(terms['policy'][0])

  gradient = np.asarray(jax.grad(total)(layouts.theta(source))['logp'])
  count = 6 if aggregation.unit_of(recipe.aggregation) == 'sequence' else 22
  np.testing.assert_allclose(
      gradient / count, -weight_of(recipe) * source.advantage, atol=1e-6)


def test_the_anchor_self_pins_the_ratio_to_one():
  """Whatever the sampler's numbers, the gradient is that of REINFORCE."""
  recipe = complete('dr_grpo', anchor='self')

  def total(theta):
    outputs = layouts.outputs(theta, PART)
    return jnp.sum(recipes.policy_terms(outputs, PART.batch, recipe)[
        'policy'][0])

  value, gradient = jax.value_and_grad(total)(layouts.theta(SOURCE))
  np.testing.assert_array_equal(gradient['logp'], -SOURCE.advantage / 8)
  np.testing.assert_allclose(value, -np.sum(SOURCE.advantage) / 8, rtol=1e-5)


@pytest.mark.parametrize('anchor', recipes.ANCHORS)
def test_the_kl_is_weighed_against_the_sampler_whatever_the_anchor(anchor):
  values, _ = terms_of(complete('grpo', anchor=anchor))['kl']
  want, _ = terms_of(complete('grpo'))['kl']
  np.testing.assert_array_equal(values, want)


def test_the_anchor_old_takes_the_ratio_to_the_old_policy():
  recipe = complete('dapo', anchor='old')
  values, _ = terms_of(recipe)['policy']
  want = oracle(
      'clipped_surrogate', SOURCE._replace(behavior=SOURCE.old),
      **recipe.loss_hparams)
  np.testing.assert_allclose(jnp.sum(values), np.sum(want), rtol=1e-4)
  outputs = recipes.Outputs(PART.old_logp)
  with pytest.raises(errors.InputError, match='old_logp_BK'):
    recipes.policy_terms(outputs, PART.batch, recipe)


@pytest.mark.parametrize('drop', [False, True])
def test_groups_without_spread_and_the_kl(drop):
  """Kept they are pulled by the KL and counted; dropped they do neither."""
  flat = np.isin(SOURCE.owner, (3, 4))
  source = SOURCE._replace(
      advantage=np.where(flat, 0, SOURCE.advantage).astype(np.float32))
  rows = [[0, 1, 2], [5]] if drop else layouts.LAYOUTS['packed'][0]
  part = layouts.lay_out(source, rows)
  recipe = complete('grpo')

  def total(theta):
    outputs = layouts.outputs(theta, part)
    terms = recipes.policy_terms(outputs, part.batch, recipe)
    return sum(jnp.sum(values) for values, _ in terms.values())

  gradient = np.asarray(jax.grad(total)(layouts.theta(source))['logp'])
  assert np.all((gradient[flat] == 0) == drop)
  count = aggregation.count('sequence', part.batch.mask, part.batch.sequence)
  assert count == (4 if drop else 6)


def test_kl_in_the_reward_is_not_in_the_loss():
  recipe = recipes.recipe(
      'rloo', kl='k1', kl_place='reward', kl_coefficient=.1)
  assert set(terms_of(recipe)) == {'policy'}


@pytest.mark.parametrize('name,overrides,message', [
    ('grpo', {'kl': 'k4'}, "['k1', 'k2', 'k3', 'none']"),
    ('grpo', {'kl_coefficient': 0.}, 'coefficient above 0'),
    ('dapo', {'kl_coefficient': .1}, 'coefficient above 0'),
    ('grpo', {'kl_place': 'reward'}, "must be 'k1'"),
    ('dapo', {'loss': 'clipped_surogate'}, "did you mean 'clipped_surrogate'"),
    ('dapo', {'loss_hparams': {'clip': .1}}, "did you mean 'clip_"),
    ('dapo', {'loss': 'reinforce'}, 'loss_hparams of reinforce'),
    ('dapo', {'aggregation': 'mean'}, 'sequence_mean'),
    ('dapo', {'length_constant': 8.}, 'set it to None'),
    ('dapo', {'advantage': 'grpo'}, 'group_normalized'),
    ('dapo', {'advantage': 'gae'}, 'critic'),
    ('dapo', {'value_coefficient': 1.}, 'critic'),
    ('dapo', {'correction': 'token_truncation'}, 'twice'),
    ('dapo', {'correction': 'tis', 'anchor': 'self'}, 'token_truncation'),
    ('dapo', {'correction_hparams': {'cap': 2.}}, 'correction_hparams'),
    ('dapo', {'anchor': 'olds'}, "did you mean 'old'"),
    ('dapo', {'overlong': 'drop'}, 'mask'),
    ('dapo', {'overlong_buffer': 0.}, 'overlong_buffer'),
    ('dapo', {'drop_uninformative': False}, 'drop_uninformative=True'),
    ('dapo', {'agregation': 'token_mean'}, "did you mean 'aggregation'"),
    ('dappo', {}, "did you mean 'dapo'"),
])
def test_choices_that_do_nothing_or_harm_are_refused(name, overrides, message):
  with pytest.raises(errors.InputError, match=re.escape(message)):
    recipes.recipe(name, **overrides)


def test_an_override_changes_one_choice():
  base, changed = recipes.RECIPES['gspo'], recipes.recipe('gspo', gamma=.9)
  assert dataclasses.replace(changed, gamma=base.gamma) == base != changed


@pytest.mark.parametrize('name', recipes.RECIPES)
def test_group_estimators_refuse_groups_of_one(name):
  recipe = recipes.RECIPES[name]
  recipes.check_group_size(recipe, 2)
  if recipe.advantage in advantages.GROUP_ADVANTAGES:
    with pytest.raises(errors.InputError, match='reinforce_pp'):
      recipes.check_group_size(recipe, 1)
  else:
    recipes.check_group_size(recipe, 1)
    assert name in ('ppo', 'reinforce_pp')


@pytest.mark.parametrize('overrides,missing', [
    ({'entropy_coefficient': .1}, 'entropy_BK'),
    ({'advantage': 'gae', 'value_coefficient': 1.}, 'value_BK'),
])
def test_a_missing_output_is_named(overrides, missing):
  recipe = recipes.recipe('cispo', **overrides)
  outputs = layouts.outputs(layouts.theta(SOURCE), PART)
  with pytest.raises(errors.InputError, match=missing):
    recipes.policy_terms(
        outputs._replace(**{missing: None}), PART.batch, recipe,
        critic=PART.critic)
  if missing == 'value_BK':
    with pytest.raises(errors.InputError, match='critic'):
      recipes.policy_terms(outputs, PART.batch, recipe)


def test_the_tables_hold_what_their_names_say():
  for table in (advantages.ADVANTAGES, policy_losses.LOSSES):
    assert all(name == f.__name__ for name, f in table.items())
  assert set(policy_losses.RATIOS) == set(policy_losses.LOSSES)
