"""Chunked token log-probabilities against whole logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlpost.ops import logprobs
from tests.ops import attention_oracle

K, D, V = 10, 8, 37


def inputs(seed=0):
  rng = np.random.default_rng(seed)
  h = rng.normal(size=(K, D)).astype(np.float32)
  table = rng.normal(size=(V, D)).astype(np.float32)
  target = rng.integers(0, V, K).astype(np.int32)
  temperature = rng.uniform(0.5, 2, K).astype(np.float32)
  g = rng.normal(size=(2, K)).astype(np.float32)
  g[0, 2], g[1, 3] = 0, 0  # only the entropy counts; only the log-probability
  return h, table, target, temperature, g


def plain(h, table, target, temperature, g):
  """Values and gradients (d_h, d_table) in float64, by the formulas."""
  h, table, temperature, g = (
      np.asarray(x, np.float64) for x in (h, table, temperature, g))
  z = h @ table.T / temperature[:, None]
  log_p = z - z.max(1, keepdims=True)
  log_p = log_p - np.log(np.exp(log_p).sum(1, keepdims=True))
  p = np.exp(log_p)
  entropy = -(p * log_p).sum(1)
  hot = np.eye(V)[target]
  # d log p_y / d z = hot - p;  d H / d z = -p (log p + H)
  d_z = g[0][:, None] * (hot - p)
  d_z -= g[1][:, None] * p * (log_p + entropy[:, None])
  d_z /= temperature[:, None]
  values = (log_p * hot).sum(1), entropy
  return values, (d_z @ table, d_z.T @ h)


@functools.partial(jax.jit, static_argnums=5)
def ours(h, table, target, temperature, g, chunk):
  def score(h, table):
    return logprobs.token_logprobs(h, table, target, temperature, chunk)

  out, pull = jax.vjp(score, h, table)
  return out, pull((g[0], g[1]))


@pytest.mark.parametrize('chunk', [1, 3, K, 4 * K])
def test_any_chunk_equals_whole_logits(chunk):
  args = inputs()
  attention_oracle.assert_near(
      ours(*args, chunk), plain(*args), rtol=1e-5, atol=1e-5)


def test_gradients_equal_autodiff_of_log_softmax():
  h, table, target, temperature, g = inputs(1)

  def score(h, table):
    log_p = jax.nn.log_softmax(h @ table.T / temperature[:, None])
    return (
        jnp.take_along_axis(log_p, target[:, None], 1)[:, 0],
        -(jnp.exp(log_p) * log_p).sum(1),
    )

  out, pull = jax.vjp(score, h, table)
  want = out, pull((g[0], g[1]))
  attention_oracle.assert_near(
      ours(h, table, target, temperature, g, 3), want, rtol=1e-5, atol=1e-5)


def test_entropy_of_equal_logits_is_log_v():
  h, table, target, temperature, g = inputs(2)
  (logp, entropy), (_, d_table) = ours(
      0 * h, table, target, temperature, g, 3)
  np.testing.assert_allclose(entropy, np.full(K, np.log(V)), rtol=1e-6)
  np.testing.assert_allclose(logp, np.full(K, -np.log(V)), rtol=1e-6)
  assert (d_table == 0).all()


def test_no_whole_logits_exist():
  K, chunk = 64, 4
  args = (
      jax.ShapeDtypeStruct((K, D), jnp.float32),
      jax.ShapeDtypeStruct((V, D), jnp.float32),
      jax.ShapeDtypeStruct((K,), jnp.int32),
      jax.ShapeDtypeStruct((K,), jnp.float32),
      jax.ShapeDtypeStruct((2, K), jnp.float32),
  )

  def largest(chunk):
    jaxpr = jax.make_jaxpr(lambda *a: ours(*a, chunk))(*args)
    return max(attention_oracle.sizes(jaxpr.jaxpr))

  assert largest(K) == K * V
  assert largest(chunk) < K * V / 4


@pytest.mark.parametrize('poison', [np.nan, np.inf, 1e9])
@pytest.mark.parametrize('chunk', [3, K])
def test_poisoned_rows_without_cotangent_change_nothing(chunk, poison):
  h, table, target, temperature, g = inputs(3)
  unused = np.isin(np.arange(K), [1, 4, K - 1])
  g[:, unused] = 0
  (logp, entropy), (d_h, d_table) = ours(
      h, table, target, temperature, g, chunk)
  h[unused] = poison
  temperature[unused] = 0 if poison == 1e9 else poison
  target[unused] = V + 5
  (logp_2, entropy_2), (d_h_2, d_table_2) = ours(
      h, table, target, temperature, g, chunk)
  np.testing.assert_array_equal(logp_2[~unused], logp[~unused])
  np.testing.assert_array_equal(entropy_2[~unused], entropy[~unused])
  np.testing.assert_array_equal(d_h_2[~unused], d_h[~unused])
  assert (d_h_2[unused] == 0).all()
  np.testing.assert_allclose(d_table_2, d_table, rtol=1e-6, atol=1e-6)


def test_a_poisoned_row_with_a_cotangent_shows():
  """A NaN that is asked about must reach the gradient, not be hidden."""
  h, table, target, temperature, g = inputs(4)
  h[2] = np.nan
  _, (d_h, _) = ours(h, table, target, temperature, g, 3)
  assert np.isnan(d_h[2]).all() and np.isfinite(np.delete(d_h, 2, 0)).all()


def test_huge_logits_stay_finite():
  h, table, target, temperature, g = inputs(5)
  out, grads = ours(1e4 * h, table, target, temperature, g, 3)
  for x in jax.tree.leaves((out, grads)):
    assert np.isfinite(x).all()


def test_bf16_states_have_fp32_results_and_sums():
  h, table, target, temperature, g = inputs(6)
  half = h.astype('bfloat16'), table.astype('bfloat16')
  (logp, entropy), grads = ours(*half, target, temperature, g, 3)
  assert logp.dtype == entropy.dtype == np.float32
  assert all(x.dtype == half[0].dtype for x in grads)
  exact = (x.astype(np.float32) for x in half)
  want, want_grads = plain(*exact, target, temperature, g)
  attention_oracle.assert_near((logp, entropy), want, rtol=1e-5, atol=1e-5)
  attention_oracle.assert_near(
      tuple(x.astype(np.float32) for x in grads), want_grads,
      rtol=3e-2, atol=3e-2)
