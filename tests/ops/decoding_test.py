"""Attention of one query per row to caches, whole and spread over devices."""

import jax
import numpy as np
import pytest

from rlpost import sharding
from rlpost.ops.decoding import decode_attention
from tests.ops import attention_oracle as oracle
from tests.rollouts import collectives

Q, R, H, J, T, W, P = 2, 3, 6, 2, 64, 16, 8
B = Q * R


def arguments(spread, seed=3):
  """Caches of which rows see little, everything, and nothing at all."""
  rng = np.random.default_rng(seed)
  q = rng.normal(size=(B, H, P)).astype(np.float32)
  prompt = rng.normal(size=(2, Q, J, T, P)).astype(np.float32)
  own = rng.normal(size=(2, B, J, W, P)).astype(np.float32)
  length, count = np.array([3, T]), np.array([0, 1, W, 3, 5, 0])
  seen_QRT = np.arange(T)[None, None] < length[:, None, None]
  if spread == 'a window of each row':
    low = rng.integers(-9, T, (Q, R, 1))
    seen_QRT = seen_QRT & (np.arange(T)[None, None] >= low)
    seen_QRT[0, 0] = False
  seen_BW = np.arange(W)[None] < count[:, None]
  return q, tuple(prompt), tuple(own), seen_QRT, seen_BW


def wanted(q, prompt, own, seen_QRT, seen_BW):
  """Row by row, over the keys that it sees."""
  out = np.zeros(q.shape)
  seen_QRT = np.broadcast_to(seen_QRT, (Q, R, T))
  for b in range(B):
    keep, mine = seen_QRT[b // R, b % R], seen_BW[b]
    k, v = (
        np.concatenate([x[b // R][:, keep], y[b][:, mine]], 1)
        .swapaxes(0, 1)[None]
        for x, y in zip(prompt, own, strict=True)
    )
    if k.shape[1]:
      seen = np.ones((1, 1, k.shape[1]), bool)
      row = q[b, None, None]
      out[b] = oracle.attention(row, k, v, row, seen)[0][0, 0]
  return out


@pytest.mark.parametrize('spread', ['a window of each row', 'all'])
@pytest.mark.parametrize('context, tensor', [(1, 1), (4, 2), (8, 1)])
def test_equals_attention_to_the_keys_seen(spread, context, tensor):
  """Also where a device sees nothing of some rows, and a row nothing at all."""
  args = arguments(spread)
  mesh = sharding.make_mesh(context=context, tensor=tensor)
  axes = (None, 'heads', None), (None, 'heads', 'time', None)
  one, cache = (sharding.named(mesh, x) for x in axes)
  whole = sharding.replicated(mesh)
  program = jax.jit(
      decode_attention, in_shardings=(one, cache, cache, whole, whole),
      out_shardings=one,
  )
  with sharding.use(mesh):
    compiled = program.lower(*args).compile()
    got = np.asarray(program(*args))
  expected = wanted(*args)
  oracle.assert_near(got, expected)
  if spread != 'all':
    assert (got[0] == 0).all() and np.abs(got[1:]).min(1).max() > 0
  kinds = {kind for kind, _ in collectives.found(compiled)}
  assert kinds == (set() if context == 1 else {'all-reduce'})
  assert collectives.largest(compiled) <= q_size(tensor)


def q_size(tensor):
  """Elements of a result on one device; a cache holds many times more."""
  return B * H * P // tensor


def test_scores_beyond_the_range_of_exp_are_finite():
  q, prompt, own, seen_QRT, seen_BW = arguments('all')
  args = 1e3 * q, prompt, own, seen_QRT, seen_BW
  got = np.asarray(decode_attention(*args))
  oracle.assert_near(got, wanted(*args))
