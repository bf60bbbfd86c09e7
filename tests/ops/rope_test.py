"""Rotary embedding against golden numbers, closed forms and its identities."""

import math

import numpy as np
import pytest
from jax import test_util

from rlpost.models.config import RopeScaling
from rlpost.ops import rope

# Printed by transformers 5.24.0: ROPE_INIT_FUNCTIONS[kind](config) for
# (head_dim, theta, scaling); 'ntk' is its 'dynamic' at 4 times the length.
GOLDEN = {
    'llama3': (
        32, 500_000.0, RopeScaling('llama3', 8.0, 8192), 1.0,
        [1.0, 0.44036663, 0.19392276, 0.085397102, 0.037606031, 0.016560441,
         0.0072926651, 0.0032114461, 0.00052484602, 7.7846555e-05,
         3.4281024e-05, 1.5096218e-05, 6.6478697e-06, 2.9274997e-06,
         1.2891732e-06, 5.6770881e-07],
    ),
    'yarn': (
        32, 10_000.0, RopeScaling('yarn', 4.0, 2048), 1.138629436111989,
        [1.0, 0.56234133, 0.31622776, 0.17782794, 0.1, 0.050209042, 0.02484647,
         0.012066896, 0.0057142857, 0.0026108704, 0.001129385, 0.00044456986,
         0.00025000001, 0.00014058533, 7.9056947e-05, 4.4456985e-05],
    ),
    'yarn short': (
        16, 100_000.0, RopeScaling('yarn', 8.0, 512), 1.2079441541679836,
        [1.0, 0.18526356, 0.031631697, 0.00458398, 0.00039528473, 9.3736773e-05,
         2.2228493e-05, 5.2712066e-06],
    ),
    'linear': (
        16, 10_000.0, RopeScaling('linear', 4.0, 2048), 1.0,
        [0.25, 0.079056941, 0.025, 0.0079056947, 0.0024999999, 0.00079056947,
         0.00025000001, 7.9056947e-05],
    ),
    'ntk': (
        16, 10_000.0, RopeScaling('ntk', 4.0, 2048), 1.0,
        [1.0, 0.25941283, 0.067295007, 0.017457189, 0.0045286184, 0.0011747816,
         0.0003047534, 7.9056947e-05],
    ),
}
KINDS = ('linear', 'ntk', 'yarn', 'llama3')


@pytest.mark.parametrize('name', GOLDEN)
def test_scalings_equal_golden_numbers(name):
  head_dim, theta, scaling, mscale, want = GOLDEN[name]
  got, got_mscale = rope.frequencies(head_dim, theta, scaling)
  np.testing.assert_allclose(got, want, rtol=2e-6)
  assert got_mscale == pytest.approx(mscale, rel=1e-12)
  assert got.dtype == np.float32


@pytest.mark.parametrize('theta', [10_000.0, 100_000.0])
def test_plain_frequencies_are_a_geometric_series(theta):
  got, mscale = rope.frequencies(64, theta)
  np.testing.assert_allclose(
      got, [theta ** (-2 * i / 64) for i in range(32)], rtol=1e-6)
  assert mscale == 1.0


@pytest.mark.parametrize('kind', KINDS)
def test_factor_one_changes_nothing(kind):
  got, mscale = rope.frequencies(32, 1e4, RopeScaling(kind, 1.0, 2048))
  np.testing.assert_allclose(got, rope.frequencies(32, 1e4)[0], rtol=1e-6)
  assert mscale == 1.0


@pytest.mark.parametrize('kind', KINDS)
def test_slowest_pair_is_stretched_by_the_factor(kind):
  """So position `factor * n` looks to it as position n did."""
  factor = 6.0
  got, _ = rope.frequencies(64, 5e5, RopeScaling(kind, factor, 4096))
  plain, _ = rope.frequencies(64, 5e5)
  np.testing.assert_allclose(got[-1], plain[-1] / factor, rtol=1e-5)
  if kind != 'linear':  # the others keep the fastest pair
    assert got[0] == plain[0]


def test_llama3_bands():
  """By wavelength, as its authors' code has it, pair by pair."""
  scaling = RopeScaling('llama3', 8.0, 512, 1.0, 4.0)
  got, _ = rope.frequencies(64, 1e4, scaling)
  plain, _ = rope.frequencies(64, 1e4)
  bands = set()
  for new, old in zip(got, plain.astype(np.float64), strict=True):
    wavelength = 2 * math.pi / old
    if wavelength < 512 / 4.0:
      band, want = 'kept', old
    elif wavelength > 512 / 1.0:
      band, want = 'stretched', old / 8.0
    else:
      smooth = (512 / wavelength - 1.0) / (4.0 - 1.0)
      band, want = 'between', (1 - smooth) * old / 8.0 + smooth * old
    bands.add(band)
    np.testing.assert_allclose(new, want, rtol=1e-6)
  assert bands == {'kept', 'stretched', 'between'}


def rotated(x, position):
  cos, sin = rope.angles(np.asarray(position), *rope.frequencies(8, 1e4))
  return np.asarray(rope.rotate(x, cos, sin))


def test_rotation_is_a_complex_product():
  """Pair i, (x[i], x[i + P/2]), turns by position * frequency."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(2, 5, 3, 8)).astype(np.float32)
  position = rng.integers(0, 2000, (2, 5)).astype(np.int32)
  frequency = np.array([1e4 ** (-i / 4) for i in range(4)])
  turn = np.exp(1j * position[:, :, None, None] * frequency)
  want = (x[..., :4] + 1j * x[..., 4:]) * turn
  got = rotated(x, position)
  np.testing.assert_allclose(got[..., :4], want.real, atol=5e-4)
  np.testing.assert_allclose(got[..., 4:], want.imag, atol=5e-4)


def test_gradient_of_a_rotation_equals_finite_differences():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(2, 3, 4, 8)).astype(np.float32)
  angles = rope.angles(np.arange(6).reshape(2, 3), np.array([1, 0.5, 0.2, 0.1]))
  test_util.check_grads(
      lambda x: rope.rotate(x, *angles), (x,), order=1, modes=['rev'],
      atol=1e-2, rtol=1e-2,
  )


def test_products_depend_on_the_distance_alone():
  rng = np.random.default_rng(1)
  q, k = rng.normal(size=(2, 1, 1, 1, 8)).astype(np.float32)

  def product(m, n):
    return float((rotated(q, [[m]]) * rotated(k, [[n]])).sum())

  for m, n in ((3, 0), (50, 41)):
    assert product(m, n) == pytest.approx(product(m + 37, n + 37), abs=1e-4)
  assert abs(product(3, 0) - product(0, 3)) > 1e-2
  assert abs(product(3, 0) - product(4, 0)) > 1e-2


def test_yarn_scales_cos_and_sin():
  """So products of queries and keys grow by the square of mscale."""
  inverse, mscale = rope.frequencies(8, 1e4, RopeScaling('yarn', 4.0, 64))
  position = np.arange(6, dtype=np.int32)[None]
  cos, sin = rope.angles(position, inverse, mscale)
  np.testing.assert_allclose(
      np.hypot(cos, sin), np.full((1, 6, 4), 0.1 * math.log(4) + 1), rtol=1e-6)


def test_rotation_keeps_the_dtype_but_computes_in_fp32():
  x = np.random.default_rng(2).normal(size=(1, 4, 1, 8))
  position = np.array([[0, 7, 300, 4000]], np.int32)
  half = x.astype('bfloat16')
  got = rotated(half, position)
  assert got.dtype == half.dtype
  want = rotated(half.astype(np.float32), position)
  np.testing.assert_allclose(
      got.astype(np.float32), want, rtol=2**-8, atol=1e-6)
