"""What went wrong in other rings, and must not in this one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlpost.data import zigzag
from rlpost.ops import blockwise, context
from rlpost.ops.attention import Where
from tests.ops import attention_oracle as oracle

HEADS = 8, 2


def ring(ways=4, kind='causal'):
  return oracle.program('ring', oracle.KINDS[kind], context=ways)


def test_a_document_changes_no_bit_of_another():
  """Borders of documents lie anywhere, not on those of devices or blocks."""
  lengths = 1, 7, 32
  where = oracle.batch(*[oracle.documents(*lengths)] * 3)
  q, k, v, g = oracle.rows(0, HEADS)
  out, grads = ring()(q, k, v, g, where, where)
  start = 0
  for n in lengths:
    own = np.arange(start, start + n)
    q2, k2, v2, g2 = (x.copy() for x in (q, k, v, g))
    for x in (q2, k2, v2, g2):
      x[:, own] += 2
    changed, changed_grads = ring()(q2, k2, v2, g2, where, where)
    rest = np.setdiff1d(np.arange(oracle.LENGTH), own)
    for a, b in zip((changed, *changed_grads), (out, *grads), strict=True):
      np.testing.assert_array_equal(a[:, rest], b[:, rest])
    assert (changed[:, own] != out[:, own]).any((0, 2, 3)).all()
    start += n


def test_huge_scores_merge_over_hops():
  where = oracle.layouts()['zigzag']
  q, k, v, g = oracle.rows(1, HEADS)
  args = q * 100, k * 100, v, g
  out, grads = ring()(*args, where, where)
  assert all(np.isfinite(x).all() for x in (out, *grads))
  want = oracle.answer(oracle.CAUSAL, args, where, where)[0]
  oracle.assert_near(out, want, atol=2e-2)


@pytest.mark.parametrize('kind', ['causal', 'all both ways'])
def test_devices_with_nothing_but_padding(kind):
  """Two of four; with the ids of padding equal, padding still sees nothing."""
  where = oracle.batch(
      oracle.documents(20, -20), oracle.documents(9, -31),
      oracle.documents(-40))
  args = oracle.rows(2, HEADS)
  out, grads = ring(kind=kind)(*args, where, where)
  want = oracle.answer(oracle.KINDS[kind], args, where, where)
  oracle.assert_near(out, want[0], rtol=0, atol=2e-6)
  oracle.assert_near(grads, want[1], rtol=0, atol=1e-5)
  empty = where.segment < 0
  assert (where.segment[empty] == -1).all() and empty[:, 20:].all()
  for x in (out, *grads[:3]):
    assert (x[empty] == 0).all() and np.isfinite(x).all()


@pytest.mark.parametrize('way', context.WAYS)
def test_keys_of_another_length(way):
  """40 places ask about the first 24."""
  query = oracle.layouts()['packed']
  key = Where(*(x[:, :24] for x in query))
  args = oracle.arrays(3, 3, 40, *HEADS, 8, 24)
  got = oracle.program(way, context=4)(*args, query, key)
  want = oracle.answer(oracle.CAUSAL, args, query, key)
  oracle.assert_near(got[0], want[0], rtol=0, atol=2e-6)
  oracle.assert_near(got[1], want[1], rtol=0, atol=1e-5)


def test_error_of_bf16_does_not_grow_with_the_ring():
  where = oracle.layouts()['one document']
  half = tuple(jnp.asarray(x, jnp.bfloat16) for x in oracle.rows(4, HEADS))
  want = oracle.answer(oracle.CAUSAL, half, where, where)

  def error(ways):
    got = ring(ways)(*half, where, where)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(got))
    return [
        np.abs(a.astype(np.float64) - b).max()
        for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True)
    ]

  for eight, one in zip(error(8), error(1), strict=True):
    assert eight <= 1.2 * one


def test_a_shared_prefix_equals_a_row_for_each_sample():
  """The prompt's gradients are the sums over the rows."""
  T, R, N = 10, 3, 10
  row = oracle.batch(*[oracle.shared_prefix(T, R, N)] * R)
  alone = oracle.batch(*[oracle.documents(T + N, -T - N)] * R)
  args = [x[:1] for x in oracle.rows(5, HEADS)]
  out, grads = ring()(*[np.repeat(x, R, 0) for x in args], row, row)
  places = np.stack([
      np.r_[0:T, T + r * N : T + (r + 1) * N, np.arange(T + N) % T]
      for r in range(R)
  ])
  q, k, v, g = (x[0, places] for x in args)
  g = g * (np.arange(2 * (T + N)) >= T)[:, None, None]
  g[0, :T] = args[3][0, :T]  # the prompt's own output counts once
  got, got_grads = ring()(q, k, v, g, alone, alone)
  samples = got[:, T : T + N].reshape(R * N, *got.shape[2:])
  oracle.assert_near(samples, out[0, T:], rtol=0, atol=2e-6)
  for a, b in zip(got_grads, grads, strict=True):
    own = a[:, T : T + N].reshape(R * N, *a.shape[2:])
    oracle.assert_near(own, b[0, T:], rtol=0, atol=1e-5)
    oracle.assert_near(a[:, :T].sum(0), b[0, :T], rtol=0, atol=2e-5)


@functools.partial(jax.jit, static_argnames=['size'])
def visited(query, key, size=512):
  """How many pairs of blocks a device visits of each part of another's keys."""
  queries = blockwise.Queries(None, blockwise._cut_where(query, size))
  where = blockwise._cut_where(key, size)
  parts = context._parts(blockwise.Keys(where.order, where.order, where))
  rule = oracle.CAUSAL.rule
  return jax.lax.map(
      lambda part: blockwise._visits(queries, part, rule)[1].sum(), parts
  )


def critical_path(where, ways):
  """(Blocks on the slowest device of each hop of each part, summed; mean of a
  device)."""
  pieces = [Where(*x) for x in zip(
      *(np.split(x, ways, axis=1) for x in where), strict=True)]
  count = np.array([
      [visited(pieces[i], pieces[i - hop]) for i in range(ways)]
      for hop in range(ways)
  ])
  assert count.shape[2] == 4
  return count.max(1).sum(), count.sum() / ways


@pytest.mark.parametrize('documents', [1, 16])
def test_zigzag_keeps_all_devices_busy(documents):
  length, ways = 2**15, 8
  row = oracle.documents(*[length // documents] * documents)
  order = zigzag.places(length, ways)
  longest, mean = critical_path(Where(*(x[:, order] for x in row)), ways)
  assert longest <= 1.05 * mean
  if documents == 1:  # 64 blocks: half of all pairs, for each device an eighth
    assert mean == 64 * 65 / 2 / ways
    plain, same = critical_path(row, ways)
    assert same == mean and plain > 1.8 * longest
