"""Single layers against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rlpost import errors
from rlpost.models import config as configs
from rlpost.models import layers
from tests import reference

CONFIG = configs.ModelConfig(
    vocab_size=8, width=12, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=4, hidden=6, norm_eps=1e-2,
)


# Up to 128 rows the operands change places.
@pytest.mark.parametrize('lead', [(1,), (2, 64), (129,), (3, 100)])
def test_linear_is_one_product_for_few_rows_and_for_many(lead):
  rng = np.random.default_rng(0)
  x = rng.normal(size=(*lead, 12)).astype(np.float32)
  w = rng.normal(size=(5, 12)).astype(np.float32)
  g = rng.normal(size=(*lead, 5)).astype(np.float32)

  @jax.jit
  def run(x, w, g):
    y, pull = jax.vjp(layers.linear, x, w)
    return y, *pull(g)

  y, d_x, d_w = run(x, w, g)
  np.testing.assert_allclose(y, x @ w.T, atol=1e-5)
  np.testing.assert_allclose(d_x, g @ w, atol=1e-5)
  wanted = g.reshape(-1, 5).T @ x.reshape(-1, 12)
  np.testing.assert_allclose(d_w, wanted, atol=1e-4)


def test_linear_computes_in_the_dtype_of_its_input():
  x = jnp.ones((2, 12), jnp.bfloat16)
  w = jnp.full((5, 12), 1 + 2**-10)  # 1 in bfloat16
  y = layers.linear(x, w)
  assert y.dtype == jnp.bfloat16
  np.testing.assert_array_equal(np.float32(y), 12)


def plain_norm(x, scale):
  size = jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-2)
  return x / size * scale[None, None]


def plain_swiglu(both):
  gate, up = both[..., :6], both[..., 6:]
  return gate / (1 + jnp.exp(-gate)) * up


@pytest.mark.parametrize('function, plain, shapes', [
    (lambda x, scale: layers.rms_norm(x, scale, 1e-2), plain_norm,
     [(2, 3, 12), (12,)]),
    (layers.swiglu, plain_swiglu, [(2, 3, 12)]),
])
def test_gradients_equal_those_of_the_plain_formula(function, plain, shapes):
  rng = np.random.default_rng(0)
  args = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
  out, pull = jax.vjp(function, *args)
  want, plain_pull = jax.vjp(plain, *args)
  np.testing.assert_allclose(out, want, atol=1e-6)
  g = rng.normal(size=out.shape).astype(np.float32)
  for found, wanted in zip(pull(g), plain_pull(g), strict=True):
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_norm_reads_its_epsilon_and_works_in_fp32():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(2, 3, 12)).astype(np.float32) * 0.1
  norm = layers.RMSNorm(CONFIG, nnx.Rngs(0))
  scale = rng.normal(size=12).astype(np.float32)
  norm.scale[...] = scale
  np.testing.assert_allclose(
      norm(x), reference.rms_norm(x, scale, 1e-2), atol=1e-6
  )
  # In bfloat16 only the result is rounded, once.
  short = jnp.asarray(x, jnp.bfloat16)
  found = norm(short)
  assert found.dtype == jnp.bfloat16
  wanted = reference.rms_norm(np.float64(short), scale, 1e-2)
  np.testing.assert_allclose(np.float32(found), wanted, rtol=1.01 * 2**-8)


def test_mlp_gates_with_the_first_half():
  rng = np.random.default_rng(0)
  mlp = layers.Mlp(CONFIG, nnx.Rngs(0))
  x = rng.normal(size=(2, 12)).astype(np.float32)
  gate, up = np.split(x @ np.asarray(mlp.gate_up[...]).T, 2, axis=-1)
  inner = gate / (1 + np.exp(-gate)) * up
  wanted = inner @ np.asarray(mlp.down[...]).T
  np.testing.assert_allclose(mlp(x), wanted, atol=1e-6)


@pytest.mark.parametrize('changes, message', [
    ({'num_heads': 3, 'num_kv_heads': 2}, 'must be a multiple'),
    ({'head_dim': 5}, 'must be even'),
])
def test_impossible_shapes_are_refused(changes, message):
  with pytest.raises(errors.InputError, match=message):
    configs.named('tiny', **changes)


def test_rope_scalings_are_checked():
  with pytest.raises(errors.InputError, match="kind='dynamic'"):
    configs.RopeScaling('dynamic', 2.0, 64)
  with pytest.raises(errors.InputError, match='factor=0.5 must be'):
    configs.RopeScaling('linear', 0.5, 64)


def test_an_unknown_name_lists_the_known_ones():
  with pytest.raises(errors.InputError, match="'huge'.*smollm2-135m.*tiny"):
    configs.named('huge')
