"""The decoder against golden logits, the NumPy reference, and itself."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlpost import errors
from rlpost.models import transformer
from rlpost.models.config import ModelConfig
from rlpost.ops.attention import Rule, Where, attention, causal
from rlpost.weights import hf_config, safetensors
from tests import compilation, reference
from tests.ops import attention_oracle

FIXTURES = pathlib.Path(__file__).parents[1] / 'fixtures'
CONFIG = ModelConfig(
    vocab_size=24, width=16, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=4, hidden=20, tied=False, value_head=True,
)


def hidden(config, params, tokens_BT, where, **choices):
  return transformer.hidden(
      config, params, tokens_BT, where.position,
      lambda q, k, v, window: attention(q, k, v, where, rule=Rule(window)),
      **choices,
  )


def logits(config, params, tokens_BT, where):
  h_BTD = hidden(config, params, tokens_BT, where)
  return h_BTD @ transformer.head(params).T


def random_tokens(shape, seed=0):
  rng = np.random.default_rng(seed)
  return rng.integers(0, CONFIG.vocab_size, shape).astype(np.int32)


def packed_rows():
  """Two documents and padding; a prompt with two answers of its own."""
  segment = np.array([[0] * 5 + [1] * 4 + [-1], [0] * 3 + [-1] + [1] * 3
                      + [2] * 2 + [-1]], np.int32)
  position = np.array([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0],
                       [0, 1, 2, 0, 3, 4, 5, 3, 4, 0]], np.int32)
  parent = np.full((2, 10), -2, np.int32)
  parent[1, 4:9] = 0
  order = np.tile(np.arange(10, dtype=np.int32), (2, 1))
  return Where(order, position, segment, parent)


@pytest.fixture(scope='module')
def params():
  return reference.random_params(CONFIG)


# Golden values and the reference.


def golden_cases():
  with np.load(FIXTURES / 'llama_logits.npz') as file:
    return sorted(k for k in file.files if not k.endswith('/tokens'))


@pytest.mark.parametrize('case', golden_cases())
def test_logits_equal_those_of_transformers(case):
  """Tied and untied, and every way of stretching the rotary frequencies."""
  folder, rope = case.split('/')
  config, params = safetensors.load_folder(FIXTURES / folder)
  if rope != 'default':
    configs = json.loads((FIXTURES / 'llama_configs.json').read_text())
    config = hf_config.from_json(configs[rope], rope)
  golden = np.load(FIXTURES / 'llama_logits.npz')
  tokens_BT = golden[f'{folder}/tokens'][None]
  where = causal(jnp.zeros(tokens_BT.shape, jnp.int32))
  run = compilation.compiled(
      functools.partial(logits, config), params, tokens_BT, where
  )
  found = run(params, tokens_BT, where)[0]
  wanted = golden[case]
  np.testing.assert_allclose(found[-len(wanted) :], wanted, atol=2e-4)
  assert np.ptp(wanted) > 1


@pytest.mark.parametrize('theta', [1e4, 50.0])
@pytest.mark.parametrize('tied', [False, True])
def test_logits_of_packed_rows_equal_the_reference(tied, theta):
  config = dataclasses.replace(CONFIG, tied=tied, rope_theta=theta)
  params = reference.random_params(config, seed=1)
  where, tokens_BT = packed_rows(), random_tokens((2, 10))
  run = compilation.compiled(
      functools.partial(logits, config), params, tokens_BT, where
  )
  seen_BTS = attention_oracle.seen_BTS(where, where)
  real = where.segment >= 0
  # The reference has no padding: let such tokens look at themselves.
  seen_BTS |= np.eye(10, dtype=bool) & ~real[:, :, None]
  wanted = reference.forward(
      config, params, tokens_BT, where.position, seen_BTS
  )
  found = run(params, tokens_BT, where)
  np.testing.assert_allclose(found[real], wanted[real], atol=1e-5)
  assert np.isfinite(found).all()


def test_the_rotary_base_and_distances_act(params):
  """A shift of all positions changes nothing; a stretch does, or a base."""
  tokens_BT = random_tokens((1, 8))
  where = causal(jnp.zeros((1, 8), jnp.int32))
  made = {
      theta: compilation.compiled(
          functools.partial(
              logits, dataclasses.replace(CONFIG, rope_theta=theta)
          ),
          params, tokens_BT, where,
      )
      for theta in (1e4, 1e5)
  }

  def last(theta, factor=1, shift=0):
    moved = where._replace(position=where.position * factor + shift)
    return np.asarray(made[theta](params, tokens_BT, moved)[0, -1])

  start = last(1e4)
  np.testing.assert_allclose(last(1e4, shift=1000), start, atol=1e-4)
  assert np.abs(last(1e4, factor=3) - start).max() > 1e-2
  # Two pairs of 4 coordinates: 1e5 turns the second one 3 times slower.
  assert np.abs(last(1e5) - start).max() > 1e-4


# Two parameter layouts, and what the backward pass makes again.


def objective(config, remat, params, tokens_BT, where, weight_BTD):
  h_BTD = hidden(config, params, tokens_BT, where, remat=remat)
  return (h_BTD * weight_BTD).sum() + transformer.value(params, h_BTD).sum()


@pytest.fixture(scope='module')
def gradients(params):
  """{(stacked, remat): (value, per-layer gradients, products in the program)}.
  """
  where, tokens_BT = packed_rows(), random_tokens((2, 10))
  weight_BTD = np.random.default_rng(2).normal(size=(2, 10, 16))
  rest = tokens_BT, where, weight_BTD.astype(np.float32)
  out = {}
  for stacked in (False, True):
    whole = transformer.stack(params) if stacked else params
    for remat in transformer.REMAT:
      function = functools.partial(objective, CONFIG, remat)
      lowered = jax.jit(jax.value_and_grad(function)).lower(whole, *rest)
      products = lowered.as_text().count('dot_general')
      if (stacked, remat) == (True, 'dots'):
        out[stacked, remat] = None, None, products
        continue
      run = lowered.compile(compilation.FAST)
      value, grads = run(whole, *rest)
      grads = transformer.unstack(grads) if stacked else grads
      out[stacked, remat] = value, grads, products
  return out


@pytest.mark.parametrize('stacked, remat', [
    (False, 'dots'), (False, 'full'), (True, 'none'), (True, 'full')
])
def test_layouts_and_rematerialisation_change_no_number(
    gradients, params, stacked, remat
):
  wanted, wanted_grads, _ = gradients[False, 'none']
  value, grads, _ = gradients[stacked, remat]
  np.testing.assert_allclose(value, wanted, rtol=1e-6)
  assert grads.keys() == params.keys()
  for name, g in wanted_grads.items():
    np.testing.assert_allclose(
        grads[name], g, atol=1e-5 * np.abs(g).max(), err_msg=name
    )
    unused = name == 'head/kernel'
    assert (np.abs(g).max() > 1e-3) != unused, name


@pytest.mark.parametrize('stacked', [False, True])
def test_every_choice_of_rematerialisation_acts(gradients, stacked):
  products = [gradients[stacked, r][2] for r in ('none', 'dots', 'full')]
  assert products[0] < products[1] < products[2]


def test_an_unknown_rematerialisation_is_refused(params):
  where = causal(jnp.zeros((1, 2), jnp.int32))
  with pytest.raises(errors.InputError, match="remat='some' must be one of"):
    hidden(CONFIG, params, random_tokens((1, 2)), where, remat='some')


def test_stack_and_layer_are_views_of_the_same_numbers(params):
  stacked = transformer.stack(params)
  assert transformer.is_stacked(stacked) and not transformer.is_stacked(params)
  for i in range(CONFIG.num_layers):
    for name, x in transformer.layer(stacked, i).items():
      np.testing.assert_array_equal(x, params[f'layers/{i}/{name}'])
    assert transformer.layer(params, i).keys() == transformer.layer(
        stacked, i
    ).keys()
  back = transformer.unstack(stacked)
  assert back.keys() == params.keys()
  for name, x in params.items():
    np.testing.assert_array_equal(back[name], x)


def test_more_than_ten_layers_stack_in_order():
  params = {f'layers/{i}/norm': np.full(1, i) for i in (10, 2, 0, 1, 11)}
  params |= {f'layers/{i}/norm': np.full(1, i) for i in range(3, 10)}
  stacked = transformer.stack(params)
  assert stacked['layers/norm'][:, 0].tolist() == list(range(12))


# Who may know what.


def test_a_gradient_flows_from_what_is_seen_and_from_nothing_else(params):
  """Every token its own id, so that rows of the table stand for positions."""
  where = packed_rows()
  tokens_BT = np.stack([np.arange(10), np.arange(10, 20)]).astype(np.int32)

  def outputs(table):
    h_BTD = hidden(CONFIG, params | {'embed/table': table}, tokens_BT, where)
    return (h_BTD * jnp.arange(1.0, 17)[None, None]).sum(-1)

  table = params['embed/table']
  run = compilation.compiled(jax.jacrev(outputs), table)
  flow = np.abs(run(table)).max(-1)  # [B, T, V]
  seen_BTS = attention_oracle.seen_BTS(where, where)
  # A token always knows itself: the residual stream.
  seen_BTS |= np.eye(10, dtype=bool)[None]
  for b in range(2):
    own = flow[b][:, tokens_BT[b]]
    assert (own[seen_BTS[b]] > 1e-5).all()
    assert not own[~seen_BTS[b]].any()
    assert not flow[b][:, tokens_BT[1 - b]].any(), 'another row'


# The value head, initial values, names.


def test_value_is_a_product_with_the_kernel_in_fp32(params):
  h = np.random.default_rng(0).normal(size=(2, 3, 16)).astype(np.float32)
  wanted = h.astype(np.float64) @ params['value/kernel'][0]
  np.testing.assert_allclose(transformer.value(params, h), wanted, atol=1e-6)
  short = transformer.value(params, jnp.asarray(h, jnp.bfloat16))
  assert short.dtype == jnp.float32
  with pytest.raises(errors.InputError, match='set value_head'):
    transformer.value({'embed/table': h}, h)


def test_activations_have_the_dtype_that_was_asked_for(params):
  where = causal(jnp.zeros((1, 4), jnp.int32))
  tokens_BT = random_tokens((1, 4))
  out = jax.eval_shape(
      functools.partial(hidden, CONFIG, dtype=jnp.bfloat16), params,
      tokens_BT, where,
  )
  assert out.dtype == jnp.bfloat16


INIT = ModelConfig(
    vocab_size=512, width=64, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, hidden=128, tied=False, value_head=True,
)


def test_initial_values_have_the_spread_of_their_kind():
  params = transformer.init(INIT, jax.random.key(0))
  residual = 2 * INIT.num_layers  # this many branches add up
  spread = {
      'qkv': 64**-0.5, 'gate_up': 64**-0.5, 'table': 64**-0.5,
      'kernel': 64**-0.5, 'out': (residual * 64) ** -0.5,
      'down': (residual * 128) ** -0.5,
  }
  for name, x in params.items():
    assert x.dtype == jnp.float32
    kind = name.rpartition('/')[2]
    if kind == 'scale':
      np.testing.assert_array_equal(x, 1)
      continue
    error = 5 / np.sqrt(2 * x.size)  # of a standard deviation, five sigma
    np.testing.assert_allclose(np.std(x), spread[kind], rtol=error)
    assert abs(np.mean(x)) < 5 * spread[kind] / np.sqrt(x.size), name


def test_no_two_initial_matrices_are_alike_and_the_key_decides_all():
  params = transformer.init(INIT, jax.random.key(0))
  again = transformer.init(INIT, jax.random.key(0))
  other = transformer.init(INIT, jax.random.key(1))
  first = {}
  for name, x in params.items():
    np.testing.assert_array_equal(x, again[name])
    if not name.endswith('scale'):
      assert (np.asarray(x) != other[name]).mean() > 0.99, name
      start = float(x.ravel()[0]) / float(jnp.std(x))
      assert not any(np.isclose(start, s, atol=1e-5) for s in first), name
      first[start] = name


def test_a_new_model_knows_nothing():
  """Its distribution is near the even one."""
  params = transformer.init(INIT, jax.random.key(3))
  tokens = np.random.default_rng(0).integers(0, INIT.vocab_size, (1, 16))
  logits_TV = reference.forward(INIT, params, tokens)[0]
  assert 0.5 < np.std(logits_TV) < 2
  p = np.exp(logits_TV - logits_TV.max(-1, keepdims=True))
  p /= p.sum(-1, keepdims=True)
  entropy = -(p * np.log(p)).sum(-1)
  assert (entropy > np.log(INIT.vocab_size) - 1.5).all()


@pytest.mark.parametrize('tied', [False, True])
@pytest.mark.parametrize('value_head', [False, True])
def test_names_and_shapes_are_those_of_the_reference(tied, value_head):
  config = dataclasses.replace(CONFIG, tied=tied, value_head=value_head)
  params = reference.random_params(config)
  spec = transformer.spec(config)
  assert {k: v.shape for k, v in spec.shapes.items()} == {
      k: v.shape for k, v in params.items()
  }
  assert sum(v.size for v in spec.shapes.values()) == config.num_params
  made = jax.eval_shape(
      functools.partial(transformer.init, config), jax.random.key(0)
  )
  assert {k: v.shape for k, v in made.items()} == {
      k: v.shape for k, v in params.items()
  }
  stacked = transformer.spec(config, stacked=True)
  assert {k: v.shape for k, v in stacked.shapes.items()} == {
      k: v.shape for k, v in transformer.stack(params).items()
  }
  for one in (spec, stacked):
    assert one.axes.keys() == one.shapes.keys()
    for name, axes in one.axes.items():
      assert len(axes) == len(one.shapes[name].shape), name
      layered = one is stacked and name.startswith('layers/')
      assert (axes[0] == 'layers') == layered, name
