"""Blockwise attention: equal to the oracle, and never a whole mask."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rlpost.ops import attention as ops
from rlpost.ops import blockwise
from rlpost.ops.attention import Where
from tests.ops import attention_oracle as oracle

LAYOUTS = oracle.layouts()
EIGHT = blockwise.Spec(block=8)


@functools.cache
def program():
  """Jitted (q, k, v, g, g_lse, query, key) -> ((out, lse), gradients)."""

  def run(q, k, v, g, g_lse, query, key):
    attend = functools.partial(
        blockwise.attention_with_lse, query=query, key=key, spec=EIGHT)
    out, pull = jax.vjp(attend, q, k, v)
    return out, pull((g, g_lse))

  jitted = jax.jit(run)
  return lambda *args: jax.tree.map(np.asarray, jitted(*args))


@oracle.kinds
def test_equals_the_pairwise_oracle(kind):
  kind = oracle.KINDS[kind]
  args = oracle.rows(0)
  for where in LAYOUTS.values():
    got = oracle.program('blockwise', kind)(*args, where, where)
    want = oracle.answer(kind, args, where, where)
    oracle.assert_near(got[0], want[0], rtol=0, atol=2e-6)
    oracle.assert_near(got[1], want[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('name', LAYOUTS)
def test_log_sum_exp_equals_the_oracle(name):
  where = LAYOUTS[name]
  q, k, v, g = oracle.rows(0)
  (_, got), _ = program()(q, k, v, g, g[..., 0], where, where)
  _, lse, _ = oracle.attention(q, k, v, g, oracle.seen_BTS(where, where))
  oracle.assert_near(got, np.where(np.isfinite(lse), lse, -1e30))


@pytest.mark.parametrize('T,S,block', [(1, 33, 16), (33, 7, 24)])
def test_any_length_of_queries_and_keys(T, S, block):
  """The last T places of a row may ask about all S keys."""
  row = oracle.documents(-2, max(T, S) - 2)
  query = Where(*(x[:, -T:] for x in row))
  key = Where(*(x[:, -S:] for x in row))
  q, k, v, g = oracle.arrays(1, 1, T, 4, 2, 8, S)
  spec = blockwise.Spec(block=block)
  attend = jax.jit(functools.partial(blockwise.attention, spec=spec))
  got = attend(q, k, v, query, key)
  want, _, _ = oracle.attention(q, k, v, g, oracle.seen_BTS(query, key))
  oracle.assert_near(got, want)


def test_halves_merge_by_their_log_sum_exp():
  """Keys in two parts, merged: same output, same gradient through both."""
  where = LAYOUTS['packed']
  q, k, v, g = oracle.rows(2)
  halves = slice(None, 17), slice(17, None)

  def part(half, q, k, v):
    key = Where(*(x[:, half] for x in where))
    return blockwise.attention_with_lse(
        q, k[:, half], v[:, half], where, key, spec=EIGHT)

  def merged(q, k, v):
    outs, lses = zip(*(part(half, q, k, v) for half in halves), strict=True)
    lse = jnp.logaddexp(*lses)
    return sum(
        out * jnp.exp(x - lse)[..., None]
        for out, x in zip(outs, lses, strict=True)
    ), lse

  @jax.jit
  def run(q, k, v, g, g_lse):
    out, pull = jax.vjp(merged, q, k, v)
    return out, pull((g, g_lse))

  valid = (where.segment >= 0)[:, :, None]
  g_lse = np.where(valid, g[..., 0], 0)
  (out, lse), grads = run(q, k, v, g, g_lse)
  want = program()(q, k, v, g, g_lse, where, where)
  lse = np.where(valid, lse, -1e30)
  oracle.assert_near(((out, lse), grads), want, atol=1e-5)


def test_log_sum_exp_has_a_gradient():
  """d lse_t / d v is 0; d lse_t / d q_t is the mean key under the weights."""
  where = LAYOUTS['shared prefix']
  q, k, v, g = oracle.rows(3)
  _, (dq, _, dv) = program()(
      q, k, v, np.zeros_like(g), np.ones(q.shape[:3], np.float32), where, where)
  assert (dv == 0).all()
  means, _, _ = oracle.attention(q, k, k, g, oracle.seen_BTS(where, where))
  oracle.assert_near(dq, means / np.sqrt(q.shape[-1]))


def test_a_token_that_sees_nothing_gives_zeros():
  """As when its keys are all on another device: its log-sum-exp is finite."""
  where = LAYOUTS['packed']
  later = where._replace(order=where.order + 3)
  q, k, v, g = oracle.rows(8)
  (out, lse), grads = program()(q, k, v, g, g[..., 0], where, later)
  seen = oracle.seen_BTS(where, later)
  blind = ~seen.any(2) & (where.segment >= 0)
  assert blind.any()
  assert (out[blind] == 0).all() and (lse[blind] == np.float32(-1e30)).all()
  again = program()(
      q, k, v, *(np.where(blind.reshape(*blind.shape, *(1,) * n), 0, x)
                 for n, x in ((2, g), (1, g[..., 0]))), where, later)
  jax.tree.map(np.testing.assert_array_equal, again[1], grads)


@functools.partial(jax.jit, static_argnames=['rule', 'size'])
def live(where, rule=ops.PLAIN, size=8):
  """Boolean [blocks, blocks]: pairs that the loop visits."""
  cut = blockwise._cut_where(where, size)
  return blockwise._may_see(cut, cut, rule)


def test_no_visible_pair_is_skipped():
  for name, where in LAYOUTS.items():
    for rule in {ops.Rule(1), *(kind.rule for kind in oracle.KINDS.values())}:
      seen_BTS = oracle.seen_BTS(where, where, rule)
      for b in range(3):
        row = Where(*(x[[b]] for x in where))
        blocks = seen_BTS[b].reshape(5, 8, 5, 8).any((1, 3))
        assert not (blocks & ~live(row, rule)).any(), (name, rule, b)
      blocks = seen_BTS.any(0).reshape(5, 8, 5, 8).any((1, 3))
      assert not (blocks & ~live(where, rule)).any(), (name, rule)


def test_invisible_blocks_are_skipped():
  """As many pairs as must be, in every layout that training uses."""
  assert live(oracle.documents(64)).sum() == 8 * 9 // 2
  assert live(oracle.documents(*[8] * 8)).sum() == 8
  assert live(oracle.documents(64), ops.Rule(8)).sum() == 8 + 7
  both = ops.Rule(8, causal=False)
  assert live(oracle.documents(64), both).sum() == 7 + 8 + 7
  assert live(oracle.documents(64), ops.Rule(causal=False)).sum() == 64
  assert live(oracle.documents(64), ops.Rule(chunk=16)).sum() == 4 * 3
  # And the block of the first positions, from six more.
  assert live(oracle.documents(64), ops.Rule(8, first=2)).sum() == 8 + 7 + 6
  assert live(oracle.documents(-64)).sum() == 0
  assert live(oracle.documents(16, -48)).sum() == 3
  # Two blocks of prompt, then samples of two: each sees the prompt and itself.
  row = oracle.shared_prefix(16, 3, 16)
  assert live(row).sum() == 3 + 3 * (4 + 3)
  # Another group behind the first sees nothing of it.
  group = oracle.shared_prefix(16, 1, 16)
  row = oracle.beside(group, oracle.shared_prefix(16, 1, 16, first=2))
  assert live(row).sum() == 2 * (3 + 4 + 3)


def test_skipped_blocks_are_not_computed():
  """A NaN in a block that nobody sees would show: 0 * NaN is NaN."""
  row = oracle.batch(*[oracle.documents(16, 16, 8)] * 3)
  q, k, v, g = oracle.rows(4)
  v[:, 32:] = np.nan
  g[:, 32:] = 0
  no = np.zeros(q.shape[:3], np.float32)
  (out, _), (dq, dk, dv) = program()(q, k, v, g, no, row, row)
  for x in (out, dq, dk, dv):
    assert np.isfinite(x[:, :32]).all()
  assert np.isnan(out[:, 32:]).all()


def test_vmap_and_batch_agree():
  where = LAYOUTS['packed']
  q, k, v, _ = oracle.rows(5)

  def one(q, k, v, where):
    where = Where(*(x[None] for x in where))
    return blockwise.attention(q[None], k[None], v[None], where)[0]

  got = jax.jit(jax.vmap(one))(q, k, v, Where(*map(jnp.asarray, where)))
  want = oracle.program('blockwise')(q, k, v, q, where, where)[0]
  oracle.assert_near(got, want, atol=2e-6)


def test_batch_shards_over_devices_without_moving_keys():
  mesh = jax.make_mesh((4,), ('data',), axis_types=(AxisType.Auto,))
  where = oracle.batch(*[oracle.documents(13, 20, -7)] * 4)
  q, k, v, g = oracle.arrays(6, 4, oracle.LENGTH, 4, 2, 8)

  def gradient(q, k, v, g, where):
    attend = functools.partial(
        blockwise.attention, query=where, spec=blockwise.Spec(block=16))
    return jax.vjp(attend, q, k, v)[1](g)

  args = jax.device_put(
      (q, k, v, g, where), NamedSharding(mesh, PartitionSpec('data')))
  compiled = jax.jit(gradient).lower(*args).compile()
  text = compiled.as_text()
  for movement in ('all-gather(', 'all-to-all(', 'collective-permute('):
    assert movement not in text
  _, _, want = oracle.attention(q, k, v, g, oracle.seen_BTS(where, where))
  oracle.assert_near(jax.tree.map(np.asarray, compiled(*args)), want)


def layers(backend, remat, q, k, v, segment):
  """Gradient through a scan over layers, as the model runs attention."""
  where = ops.causal(segment)

  def layer(q, k, v):
    rule = ops.Rule(window=1000)
    return q + ops.attention(q, k, v, where, backend=backend, rule=rule)

  layer = jax.checkpoint(layer) if remat else layer

  def energy(q, k, v):
    q, _ = jax.lax.scan(lambda q, kv: (layer(q, *kv), None), q, (k, v))
    return (q * q).sum()

  return jax.grad(energy, (0, 1, 2))(q, k, v)


def long_row(S=4096, N=2, H=2, J=1, P=32):
  def shape(*s):
    return jax.ShapeDtypeStruct(s, jnp.float32)

  segment = jax.ShapeDtypeStruct((1, S), jnp.int32)
  k = shape(N, 1, S, J, P)
  return shape(1, S, H, P), k, k, segment


@pytest.mark.parametrize('remat', [False, True])
def test_no_value_as_large_as_a_mask_inside_a_scan_over_layers(remat):
  S = 4096
  largest = {
      backend: max(oracle.sizes(jax.make_jaxpr(
          functools.partial(layers, backend, remat))(*long_row(S)).jaxpr))
      for backend in ('blockwise', 'dense')
  }
  assert largest['dense'] >= S * S
  assert largest['blockwise'] < S * S / 4


def test_compiled_scan_over_layers_holds_no_mask():
  """XLA may hoist what the jaxpr does not show: ask the compiled program."""
  S = 2048
  f = functools.partial(layers, 'blockwise', True)
  compiled = jax.jit(f).lower(*long_row(S)).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < 2 * S * S


def temp_bytes(attend, T):
  args = [
      jax.ShapeDtypeStruct((1, T, heads, 64), jnp.float32)
      for heads in (8, 2, 2, 8)
  ]

  def run(q, k, v, g):
    out, pull = jax.vjp(attend, q, k, v)
    return out, pull(g)

  compiled = jax.jit(run).lower(*args).compile()
  return compiled.memory_analysis().temp_size_in_bytes


def test_memory_is_a_small_part_of_dot_product_attention():
  def ours(q, k, v):
    segment = jnp.zeros(q.shape[:2], jnp.int32)
    return blockwise.attention(q, k, v, ops.causal(segment))

  theirs = functools.partial(jax.nn.dot_product_attention, is_causal=True)
  assert temp_bytes(ours, 2048) <= 0.06 * temp_bytes(theirs, 2048)


def test_bf16_error_does_not_grow_with_the_number_of_blocks():
  """Sums over blocks are fp32, so three blocks are as exact as one."""
  where = LAYOUTS['one document']
  half = tuple(jnp.asarray(x, jnp.bfloat16) for x in oracle.rows(7))
  seen = oracle.seen_BTS(where, where)
  exact, _, grads = oracle.attention(*half, seen)
  blocks, whole = (
      jax.tree.map(
          lambda x, y: np.abs(x.astype(np.float32) - y).max(),
          oracle.program(backend)(*half, where, where), (exact, grads))
      for backend in ('blockwise', 'dense')
  )
  for ours, dense in zip(*map(jax.tree.leaves, (blocks, whole)), strict=True):
    assert ours <= 1.5 * dense
