"""Two-level sampling against one long cumulative sum in float64."""

import jax
import numpy as np
import pytest

from rlpost.ops import sampling

ALMOST_ONE = np.float32(1 - 2**-24)
sample = jax.jit(sampling.sample)


def probabilities(logits_VB, temperature_B):
  z = np.asarray(logits_VB, np.float64) / np.asarray(temperature_B, np.float64)
  e = np.exp(z - z.max(0))
  return e / e.sum(0)


def columns(logits_V, uniform):
  """The same logits for each uniform number, at temperature 1."""
  B = len(uniform)
  logits = np.repeat(np.asarray(logits_V, np.float32)[:, None], B, 1)
  return map(np.asarray, sample(
      logits, np.asarray(uniform, np.float32), np.ones(B, np.float32)))


# Blocks of 256, of 250, of 1 (a prime), and a vocabulary of one block.
@pytest.mark.parametrize('V', [2048, 1000, 257, 100])
def test_equals_a_single_inverse_cdf(V):
  B = 64
  rng = np.random.default_rng(V)
  logits = (3 * rng.normal(size=(V, B))).astype(np.float32)
  uniform = rng.random(B, np.float32)
  temperature = rng.uniform(0.3, 2, B).astype(np.float32)
  token, logp = map(np.asarray, sample(logits, uniform, temperature))
  p = probabilities(logits, temperature)
  cdf = np.cumsum(p, 0)
  want = (cdf <= uniform).sum(0)
  # A uniform number within rounding of a step may fall on either side.
  margin = np.abs(cdf - uniform).min(0)
  sure = margin > 1e-6
  assert sure.mean() > 0.9
  np.testing.assert_array_equal(token[sure], want[sure])
  chosen = p[token, np.arange(B)]
  np.testing.assert_allclose(logp, np.log(chosen), atol=5e-6)


def test_a_step_of_the_cdf_belongs_to_the_token_above_it():
  token, logp = columns(np.zeros(4), [0, 0.25, 0.5, 0.75])
  np.testing.assert_array_equal(token, np.arange(4))
  np.testing.assert_allclose(logp, np.log(np.full(4, 0.25)), rtol=1e-6)


def test_frequencies_pass_a_chi_square_test():
  """Even uniform numbers give each token its share to within one draw."""
  p = np.array([0.02, 0.3, 0.05, 0.13, 0.2, 0.001, 0.249, 0.05])
  n = 20_000
  uniform = np.random.default_rng(0).random(n, np.float32)
  token, _ = columns(np.log(p), uniform)
  counts = np.bincount(token, minlength=8)
  statistic = ((counts - n * p) ** 2 / (n * p)).sum()
  assert statistic < 24.3  # 7 degrees of freedom, p = 0.001
  token, _ = columns(np.log(p), (np.arange(n) + 0.5) / n)
  assert np.abs(np.bincount(token, minlength=8) - n * p).max() <= 1


def test_temperature_zero_takes_the_largest_logit():
  rng = np.random.default_rng(1)
  logits = rng.normal(size=(1000, 16)).astype(np.float32)
  zero = np.zeros(16, np.float32)
  for uniform in (0.0, 0.5, ALMOST_ONE):
    token, logp = sample(logits, np.full(16, uniform, np.float32), zero)
    np.testing.assert_array_equal(token, logits.argmax(0))
    np.testing.assert_allclose(
        logp, np.log(probabilities(logits, 1 + zero).max(0)), atol=5e-6)


def test_a_column_depends_on_its_own_number_alone():
  rng = np.random.default_rng(2)
  logits = rng.normal(size=(512, 8)).astype(np.float32)
  uniform = rng.random(8, np.float32)
  ones = np.ones(8, np.float32)
  token, logp = map(np.asarray, sample(logits, uniform, ones))
  order = rng.permutation(8)
  moved = sample(logits[:, order], uniform[order], ones)
  np.testing.assert_array_equal(moved[0], token[order])
  np.testing.assert_array_equal(moved[1], logp[order])


def test_the_largest_uniform_number_never_draws_an_impossible_token():
  """The tail has probability zero: in the last block, and as whole blocks."""
  for end in (700, 512, 1):
    for seed in range(20):
      logits = np.random.default_rng(seed).normal(size=1024)
      logits[end:] = -np.inf if seed % 2 else -1e4
      (token,), (logp,) = columns(logits, [ALMOST_ONE])
      assert token < end
      assert np.isfinite(logp)


def test_no_uniform_number_draws_an_impossible_token():
  """Impossible tokens and blocks lie between the others and before them."""
  rng = np.random.default_rng(3)
  logits = rng.normal(size=2048)
  impossible = rng.random(2048) < 0.7
  impossible[:300] = True
  impossible[512:1024] = True
  logits[impossible] = -np.inf
  cdf = np.cumsum(probabilities(logits[:, None], 1)[:, 0])
  steps = cdf[~impossible].astype(np.float32)
  near = np.concatenate([
      [0.0, ALMOST_ONE], steps, np.nextafter(steps, np.float32(0)),
      np.nextafter(steps, np.float32(1))])
  token, logp = columns(logits, np.clip(near, 0, ALMOST_ONE))
  assert not impossible[token].any()
  assert np.isfinite(logp).all()


def test_rounding_of_sums_cannot_reach_an_entry_without_mass():
  """Parallel sums may rise where nothing is added, or end below the goal."""
  cumulative = np.array([[1, 1, 1], [2, 2, 2], [2.1, 2.1, 1.9], [4, 2.1, 2]])
  mass = np.array([[1, 1, 1], [1, 1, 1], [0, 0, 0], [2, 0, 0]])
  first = sampling._first_beyond(cumulative, mass, np.array([2.05, 2.05, 3]))
  np.testing.assert_array_equal(first, [3, 1, 1])
