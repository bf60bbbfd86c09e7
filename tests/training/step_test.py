"""An update: the same objective however its rows are laid out."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlpost.algorithms import recipes
from rlpost.data import packing
from rlpost.training import state as states
from rlpost.training import step as steps
from tests import compilation, reference
from tests.training import batches

OVERRIDES = {
    'dr_grpo': {'length_constant': 4.0},
    # Choices that no row of the table makes.
    'old': {'anchor': 'old', 'correction': 'truncate_and_mask',
            'entropy_coefficient': 0.1, 'kl': 'k2', 'kl_coefficient': 0.1},
    'self': {'anchor': 'self', 'correction': 'token_truncation'},
}
NAMES = [n for n in recipes.RECIPES if n != 'ppo'] + ['old', 'self']


def recipe(name):
  base = name if name in recipes.RECIPES else 'dapo'
  return recipes.recipe(base, **OVERRIDES.get(name, {}))


@pytest.fixture(scope='module')
def params():
  return reference.random_params(batches.MODEL)


@pytest.fixture(scope='module')
def batch(params):
  return batches.packed(batches.groups(params))


def old_logp(batch):
  """What the policy said before its first update: not what it says now."""
  return (0.9 * batch.behavior_logp - 0.02) * batch.mask


def report(config, params, batch, count, old):
  """What two layouts of one batch must agree on."""
  got = steps.gradient(config, params, {}, batch, count, old)
  grads, terms, metrics, sound = got
  numbers = steps.diagnostics.finish(metrics)
  return {'grads': grads, 'terms': terms, 'metrics': numbers}, sound


# Five micro-batches of two rows hold all groups, or each sequence by itself.
MICRO, ROWS = 5, 10


@functools.cache
def program(name, micro, layout, backend):
  config = steps.StepConfig(
      batches.MODEL, recipe(name), backend=backend, chunk=16, layout=layout
  )
  blank = packing.blank(ROWS, batches.LENGTH, batches.SLOTS)
  blank = packing.micro_batches(blank, micro)
  params = reference.random_params(batches.MODEL)
  return compilation.compiled(
      functools.partial(report, config), params, blank, np.int32(1),
      blank.mask,
  )


def run(name, params, batch, count=MICRO, *, micro=MICRO, layout=None,
        backend='dense'):
  """`report` of rows [10, ...]."""
  old = old_logp(batch)
  batch = packing.micro_batches(batch, micro)
  made = program(name, micro, layout, backend)
  old = old.reshape(batch.mask.shape)
  out, _ = made(params, batch, np.int32(count), old)
  return jax.device_get(out)


def separate(batch):
  """Every sequence in a plain causal row of its own, ten rows."""
  plain, _ = packing.separate(batch, first_segment=1)
  out = packing.blank(ROWS, batches.LENGTH, batches.SLOTS)
  for name, leaf in plain._asdict().items():
    getattr(out, name)[: leaf.shape[0], : leaf.shape[1]] = leaf
  return out


def agree(found, wanted):
  assert found['terms'].keys() == wanted['terms'].keys()
  for kind in ('terms', 'metrics'):
    for name, value in wanted[kind].items():
      np.testing.assert_allclose(
          found[kind][name], value, rtol=2e-6, atol=1e-6, err_msg=name
      )
  # One scale: a leaf whose gradient is all rounding has no digits of its own.
  most = max(np.abs(g).max() for g in wanted['grads'].values())
  assert most > 1e-3
  for name, g in wanted['grads'].items():
    np.testing.assert_allclose(
        found['grads'][name] / most, g / most, atol=1e-5, err_msg=name
    )


@pytest.fixture(scope='module', params=NAMES)
def case(request, params, batch):
  """(recipe, its result with every sequence in a row of its own)."""
  return request.param, run(request.param, params, separate(batch))


# Rows of the batch, -1 for padding, and micro-batches that hold anything.
SPLITS = {
    'in order': ([0, 1, 2, 3, -1, -1, -1, -1, -1, -1], 2),
    'padding counted in': ([0, 1, 2, 3, -1, -1, -1, -1, -1, -1], 5),
    'one row each, permuted': ([3, -1, -1, 0, -1, 2, -1, -1, 1, -1], 5),
}


def split(batch, name):
  index, count = SPLITS[name]
  return batches.rows(batch, index), count


@pytest.mark.parametrize('name', SPLITS)
def test_shared_prompts_in_micro_batches_equal_single_rows(
    case, params, batch, name
):
  recipe, wanted = case
  agree(run(recipe, params, *split(batch, name)), wanted)


@pytest.mark.parametrize('value', [np.nan, 1e9])
def test_what_padding_holds_changes_nothing(case, params, batch, value):
  recipe, wanted = case
  rows, count = split(batch, 'one row each, permuted')
  found = run(recipe, params, batches.poisoned(rows, value), count)
  assert all(np.isfinite(g).all() for g in found['grads'].values())
  agree(found, wanted)


def test_prompts_padded_on_the_left_equal_those_on_the_right(
    case, params, batch
):
  recipe, wanted = case
  rows, count = split(batch, 'in order')
  size_B = (rows.segment[:, : batches.PROMPT] == 0).sum(1)
  order_BT = np.tile(np.arange(batches.LENGTH), (ROWS, 1))
  for b, size in enumerate(size_B):
    order_BT[b, : batches.PROMPT] = np.roll(
        order_BT[b, : batches.PROMPT], batches.PROMPT - size
    )
  left = batches.columns(rows, order_BT)
  assert (left.segment[1:3, 0] < 0).all() and (left.segment[:4, 5] == 0).all()
  agree(run(recipe, params, left, count), wanted)


BLOCKWISE = {'micro': 1, 'backend': 'blockwise'}
LAYOUT = {'micro': 2, 'layout': batches.LAYOUT}


@pytest.mark.parametrize('name, way', [('grpo', BLOCKWISE), ('gspo', LAYOUT)])
def test_other_attention_in_one_or_two_micro_batches(params, batch, name, way):
  wanted = run(name, params, separate(batch))
  rows = batches.poisoned(split(batch, 'one row each, permuted')[0], np.nan)
  agree(run(name, params, rows, way['micro'], **way), wanted)


def test_columns_may_stand_in_any_order(params, batch):
  wanted = run('grpo', params, separate(batch))
  rows, count = split(batch, 'in order')
  for seed, way in enumerate([{}, BLOCKWISE]):
    rng = np.random.default_rng(seed)
    order_BT = np.argsort(rng.random(rows.tokens.shape), axis=1)
    found = run('grpo', params, batches.columns(rows, order_BT), count, **way)
    agree(found, wanted)


def test_gradient_equals_finite_differences_of_the_reference(params, batch):
  """REINFORCE, the only loss that is its own derivative, in float64."""
  found = run('rloo', params, *split(batch, 'in order'))
  rng = np.random.default_rng(0)
  towards = {k: rng.normal(size=v.shape) for k, v in params.items()}
  plain = separate(batch)

  def objective(step):
    moved = {k: v + step * towards[k] for k, v in params.items()}
    total = 0.0
    for b in range(batches.SEQUENCES):
      n = (plain.segment[b] == 0).sum()
      used = plain.mask[b] > 0
      logp = batches.oracle_logp(
          batches.MODEL, moved, plain.tokens[b, :n], plain.temperature[b, 0]
      )
      total -= (
          plain.advantage[b, used] * logp[plain.predictor[b, used]]
      ).sum()
    return total / batches.SEQUENCES

  np.testing.assert_allclose(found['terms']['policy'], objective(0), rtol=1e-5)
  slope = (objective(1e-5) - objective(-1e-5)) / 2e-5
  ours = sum((found['grads'][k] * towards[k]).sum() for k in params)
  np.testing.assert_allclose(ours, slope, rtol=1e-4)


@pytest.fixture(scope='module')
def scored(params):
  """fp32 log-probs of a micro-batched batch, by compute dtype."""
  made = {}

  def score(batch, dtype='float32', count=3):
    if dtype not in made:
      config = steps.StepConfig(
          batches.MODEL, recipe('grpo'), layout=batches.LAYOUT, chunk=16,
          dtype=dtype,
      )
      made[dtype] = compilation.compiled(
          functools.partial(steps.score, config), params, batch, np.int32(1)
      )
    return jax.device_get(made[dtype](params, batch, np.int32(count)))

  return score


def in_three(batch):
  """[3, 2, ...], the last of them padding."""
  return packing.micro_batches(batches.rows(batch, [0, 1, 2, 3, -1, -1]), 3)


def expected_logp(params, batch):
  """[B, K] from the reference forward, slot by slot."""
  out = np.zeros(batch.mask.shape)
  plain, index = packing.separate(batch, first_segment=1)
  for row, (b, sequence) in enumerate(index):
    n = (plain.segment[row] == 0).sum()
    logp = batches.oracle_logp(
        batches.MODEL, params, plain.tokens[row, :n], plain.temperature[row, 0]
    )
    slots = (batch.mask[b] > 0) & (batch.sequence[b] == sequence)
    out[b, slots] = logp[-slots.sum() :]
  return out


def test_slot_i_holds_the_log_prob_of_token_i(params, batch, scored):
  """Also at temperatures other than 1, and 0 outside the mask."""
  found = scored(in_three(batch)).reshape(-1, batches.SLOTS)
  wanted = expected_logp(params, batch)
  np.testing.assert_allclose(found[:4], wanted, atol=1e-5)
  assert not found[4:].any() and not found[:4][batch.mask == 0].any()
  dirty = scored(in_three(batches.poisoned(batch, np.nan)))
  np.testing.assert_allclose(dirty.reshape(found.shape), found, atol=1e-6)
  # The values tell the positions and the temperatures apart.
  trained = wanted[batch.mask > 0]
  assert np.diff(np.sort(trained)).min() > 1e-4


def test_score_skips_micro_batches_beyond_the_count(batch, scored):
  every = in_three(batch)
  first = scored(every, count=1)
  np.testing.assert_array_equal(first[0], scored(every)[0])
  assert first[0].any() and not first[1:].any()


def test_bfloat16_activations_give_fp32_log_probs(params, batch, scored):
  found = scored(in_three(batch), 'bfloat16')
  assert found.dtype == np.float32
  found = found.reshape(-1, batches.SLOTS)[:4]
  gap = np.abs(found - expected_logp(params, batch)).max()
  # Rounding to 8 bits shows, and no more than rounding.
  assert 1e-4 < gap < 0.1
  trained = found[batch.mask > 0]
  short = trained.astype(jnp.bfloat16).astype(np.float32)
  assert (short != trained).mean() > 0.9


@pytest.mark.parametrize('name', ['dapo', 'gspo', 'cispo', 'self'])
def test_ratio_is_1_before_the_first_update_at_any_temperature(
    params, batch, scored, name
):
  own = scored(in_three(batch)).reshape(-1, batches.SLOTS)[:4]
  on_policy = batch._replace(behavior_logp=own)
  assert set(batch.temperature[batch.mask > 0].tolist()) > {1.0}
  found = run(name, params, *split(on_policy, 'in order'))['metrics']
  np.testing.assert_allclose(found['ratio'], 1, atol=1e-6)
  np.testing.assert_allclose(found['ratio_max'], 1, atol=1e-6)
  np.testing.assert_allclose(found['effective_share'], 1, atol=1e-6)
  assert found['logp_gap_max'] < 1e-6
  hot = on_policy._replace(temperature=on_policy.temperature * 1.1)
  found = run(name, params, *split(hot, 'in order'))
  assert found['metrics']['logp_gap_max'] > 1e-2


def test_the_anchor_is_what_the_policy_said_before(params, batch):
  """Not what it says now, nor the sampler; the correction is between those."""
  found = run('old', params, *split(batch, 'in order'))['metrics']
  used = batch.mask > 0
  old, now = old_logp(batch)[used], expected_logp(params, batch)[used]
  # Every sequence's mean is inside [0.5, 2]: the cap is all that acts.
  weight = np.minimum(np.exp(old - batch.behavior_logp[used]), 2)
  np.testing.assert_allclose(found['dropped'], 0)
  np.testing.assert_allclose(found['correction'], weight.mean(), rtol=1e-5)
  np.testing.assert_allclose(
      found['ratio'], np.exp(now - old).mean(), rtol=1e-4
  )


# Updates.

SGD = optax.sgd(1.0)


@pytest.fixture(scope='module')
def update(params, batch):
  """One SGD step at rate 1, clipped at norm 0.5: `update(batch, weight)`."""
  config = steps.StepConfig(
      batches.MODEL, recipe('dapo'), layout=batches.LAYOUT, chunk=16,
      clip_norm=0.5,
  )
  trainable, frozen = states.partition(params, 'layers/.*|norm/scale')

  def function(trainable, frozen, batch, count, weight):
    state = states.create(trainable, SGD)
    return steps.train_step(
        config, SGD, state, frozen, batch, count, weight
    )

  arguments = in_three(batch), np.int32(2), np.float32(1)
  made = compilation.compiled(function, trainable, frozen, *arguments)

  def apply(batch, weight=1.0, trainable=trainable):
    state, report = made(
        trainable, frozen, in_three(batch), np.int32(2), np.float32(weight)
    )
    moved = jax.tree.map(
        lambda new, old: np.asarray(new) - old, state.trainable, trainable
    )
    return moved, jax.device_get(report), state

  return apply


def scaled(batch, factor):
  return batch._replace(advantage=np.float32(batch.advantage * factor))


def norm(tree):
  return np.sqrt(sum((np.asarray(x, np.float64) ** 2).sum()
                     for x in jax.tree.leaves(tree)))


def test_only_trainable_parameters_move_along_minus_the_gradient(
    params, batch, update
):
  small = scaled(batch, 0.05)
  moved, report, state = update(small)
  assert sorted(moved) == sorted(
      k for k in params if k.startswith('layers/') or k == 'norm/scale'
  )
  assert int(state.step) == 1 and report['finite']
  assert 1e-3 < report['grad_norm'] < 0.5, 'must not be clipped'
  whole = run('dapo', params, *split(small, 'in order'))
  for name, delta in moved.items():
    np.testing.assert_allclose(delta, -whole['grads'][name], atol=1e-6)
  np.testing.assert_allclose(report['grad_norm'], norm(moved), rtol=1e-4)
  np.testing.assert_allclose(
      report['loss'], sum(whole['terms'].values()), rtol=1e-6
  )


def test_a_short_batch_moves_the_policy_less(batch, update):
  small = scaled(batch, 0.05)
  full, report, _ = update(small)
  for weight in (0.5, 0.125):
    part, partial, _ = update(small, weight)
    for name, delta in full.items():
      np.testing.assert_allclose(part[name], weight * delta, atol=2e-7)
    np.testing.assert_allclose(
        partial['grad_norm'], weight * report['grad_norm'], rtol=1e-6
    )
    np.testing.assert_allclose(partial['loss'], report['loss'], rtol=1e-6)


def test_a_long_gradient_is_cut_to_the_norm_and_keeps_its_direction(
    batch, update
):
  small, _, _ = update(scaled(batch, 0.05))
  large, report, _ = update(scaled(batch, 50))
  assert report['grad_norm'] > 5
  np.testing.assert_allclose(norm(large), 0.5, rtol=1e-4)
  # The weight comes before the cut: it is part of the gradient.
  weighted, _, _ = update(scaled(batch, 50), 0.5)
  np.testing.assert_allclose(norm(weighted), 0.5, rtol=1e-4)
  cosine = sum((small[k] * large[k]).sum() for k in small)
  np.testing.assert_allclose(cosine / norm(small) / 0.5, 1, rtol=1e-4)


def test_the_row_that_is_not_finite_is_named(batch, update):
  for row, value in ((2, np.nan), (1, np.inf)):
    bad = batch.advantage.copy()
    bad[row, np.flatnonzero(batch.mask[row])[-1]] = value
    _, report, _ = update(batch._replace(advantage=bad))
    assert not report['finite']
    wanted = np.ones((3, 2), bool)
    wanted[divmod(row, 2)] = False
    np.testing.assert_array_equal(report['sound_MB'], wanted)
  assert update(batch)[1]['sound_MB'].all()


def test_parameters_that_are_not_finite_are_noticed(params, batch, update):
  trainable, _ = states.partition(params, 'layers/.*|norm/scale')
  bad = dict(trainable)
  bad['norm/scale'] = np.full_like(bad['norm/scale'], np.nan)
  _, report, _ = update(batch, trainable=bad)
  assert not report['finite'] and not report['sound_MB'][:2].any()


def test_ppo_without_a_critic_is_refused(params, batch):
  config = steps.StepConfig(batches.MODEL, recipes.RECIPES['ppo'])
  with pytest.raises(Exception, match='value_BK was not given'):
    jax.eval_shape(
        functools.partial(steps.gradient, config), params, {}, in_three(batch)
    )


def test_values_are_the_critics_and_never_scaled_by_temperature(params, batch):
  config = steps.StepConfig(
      dataclasses.replace(batches.MODEL, value_head=True), recipe('grpo')
  )
  kernel = np.random.default_rng(3).normal(size=(1, 16)).astype(np.float32)
  whole = params | {'value/kernel': kernel}
  plain = separate(batch)
  function = functools.partial(steps.outputs, config)
  out = compilation.compiled(function, whole, plain)(whole, plain)
  value_BK = np.asarray(out.value_BK)
  for b in range(batches.SEQUENCES):
    n = (plain.segment[b] == 0).sum()
    hidden_TD = reference.hidden(batches.MODEL, params, plain.tokens[b : b + 1])
    used = plain.mask[b] > 0
    at = plain.predictor[b, used]
    assert at.max() < n
    np.testing.assert_allclose(
        value_BK[b, used], hidden_TD[0, at] @ kernel[0], atol=1e-5
    )
  assert not value_BK[plain.mask == 0].any()
