"""Dense attention, its short cuts, and what every back end owes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlpost import errors
from rlpost.ops import attention as ops
from rlpost.ops.attention import Rule, SharedPrefix, Where
from tests.ops import attention_oracle as oracle

LAYOUTS = oracle.layouts()
PREFIX = SharedPrefix(10, 3, 10)
# Rows that keep PREFIX's promise; the last is padding.
SAMPLES = oracle.batch(
    oracle.shared_prefix(10, 3, 10, real=[10, 7, 3]),
    oracle.shared_prefix(10, 3, 10, real=[1, 10, 0]),
    oracle.documents(-40),
)
WAYS = {
    'dense': {},
    'shared prefix': {'layout': PREFIX},
    'blockwise': {'backend': 'blockwise', 'block': 16},
}
ways = pytest.mark.parametrize('way', WAYS)


@oracle.kinds
def test_dense_equals_the_pairwise_oracle(kind):
  kind = oracle.KINDS[kind]
  args = oracle.rows(0)
  for where in LAYOUTS.values():
    got = oracle.program(kind=kind)(*args, where, where)
    oracle.assert_near(got, oracle.answer(kind, args, where, where))


def test_visible_is_the_pairwise_rule():
  for where in LAYOUTS.values():
    for rule in {Rule(1), *(kind.rule for kind in oracle.KINDS.values())}:
      got = ops.visible(Where(*map(jnp.asarray, where)), where, rule)
      want = oracle.seen_BTS(where, where, rule)
      np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize('wrong, message', [
    ({'window': 0}, 'window=0 must be at least 1'),
    ({'chunk': -2}, 'chunk=-2 must be at least 1'),
    ({'window': 4, 'first': -1}, 'first=-1 must be at least 0'),
    ({'first': 4}, 'first=4 excepts .* give window or chunk'),
])
def test_a_rule_that_means_nothing_is_refused(wrong, message):
  with pytest.raises(errors.InputError, match=message):
    Rule(**wrong)


def test_a_softcap_that_is_not_positive_is_refused():
  q, k, v, _ = oracle.rows(0)
  with pytest.raises(errors.InputError, match='softcap=0.0 must be positive'):
    ops.attention(q, k, v, SAMPLES, softcap=0.0)


@pytest.mark.parametrize('way', ['dense', 'blockwise'])
def test_a_sink_far_below_and_a_cap_far_above_change_nothing(way):
  q, k, v, g = oracle.rows(0)
  where = jax.tree.map(jnp.asarray, SAMPLES)
  far = jax.jit(functools.partial(
      ops.attention, q, k, v, where, **WAYS[way], softcap=1e6,
      sink_H=jnp.full(9, -1e4)))()
  plain, _ = oracle.program(**WAYS[way])(q, k, v, g, SAMPLES, SAMPLES)
  oracle.assert_near(far, plain, rtol=0, atol=1e-6)


def test_causal_describes_contiguous_documents():
  row = oracle.documents(3, 4, -2)
  got = ops.causal(jnp.asarray(row.segment))
  for name in ('order', 'position', 'segment', 'parent'):
    np.testing.assert_array_equal(getattr(got, name), getattr(row, name))


@pytest.mark.parametrize('way', ['dense', 'blockwise'])
@pytest.mark.parametrize('H,J', [(9, 3), (8, 1)])
def test_grouped_heads_read_their_own_key_head(H, J, way):
  where = LAYOUTS['packed']
  q, k, v, g = oracle.rows(1, (H, J))
  got = oracle.program(**WAYS[way])(q, k, v, g, where, where)
  seen = oracle.seen_BTS(where, where)
  out, _, grads = oracle.attention(q, k, v, g, seen)
  oracle.assert_near(got, (out, grads))


@pytest.mark.parametrize('kind', ['causal', 'all', 'all both ways'])
def test_shared_prefix_layout_equals_the_pairwise_oracle(kind):
  kind = oracle.KINDS[kind]
  args = oracle.rows(2)
  got = oracle.program(kind=kind, layout=PREFIX)(*args, SAMPLES, SAMPLES)
  oracle.assert_near(got, oracle.answer(kind, args, SAMPLES, SAMPLES))


def test_shared_prefix_layout_scores_no_siblings():
  q, k, v, _ = oracle.rows(2)
  where = jax.tree.map(jnp.asarray, SAMPLES)

  def largest(layout):
    jaxpr = jax.make_jaxpr(
        lambda *a: ops.attention(*a, where, layout=layout))(q, k, v)
    return max(oracle.sizes(jaxpr.jaxpr))

  # 30 x 10 of the samples to the prefix, in place of 40 x 40.
  assert largest(None) == 3 * 9 * 40 * 40
  assert largest(PREFIX) == max(3 * 9 * 30 * 10, 3 * 9 * 40 * 8)


def test_layout_refuses_other_keys():
  q, k, v, _ = oracle.rows(2)
  where = jax.tree.map(jnp.asarray, SAMPLES)
  other = where._replace(order=where.order + 1)
  with pytest.raises(ValueError, match='own keys'):
    ops.attention(q, k, v, where, other, layout=PREFIX)


def test_unknown_backend_is_named():
  q, k, v, _ = oracle.rows(2)
  with pytest.raises(ValueError, match='flash'):
    ops.attention(q, k, v, SAMPLES, backend='flash')


@ways
def test_padding_gives_zeros_and_zero_gradients(way):
  args = oracle.rows(4)
  out, grads = oracle.program(**WAYS[way])(*args, SAMPLES, SAMPLES)
  empty = SAMPLES.segment < 0
  assert empty[2].all() and empty[0].any() and not empty[0].all()
  for x in (out, *grads):
    assert np.isfinite(x).all()
    assert (x[empty] == 0).all()
    assert (x[~empty] != 0).any(-1).mean() > 0.9


@pytest.mark.parametrize('poison', [1e9, np.nan])
@ways
def test_poisoned_padding_changes_nothing(way, poison):
  args = oracle.rows(4)
  run = oracle.program(**WAYS[way])
  clean = run(*args, SAMPLES, SAMPLES)
  empty = (SAMPLES.segment < 0)[:, :, None, None]
  dirty = tuple(np.where(empty, np.float32(poison), x) for x in args)
  jax.tree.map(np.testing.assert_array_equal, run(*dirty, SAMPLES, SAMPLES),
               clean)


@ways
def test_gradients_reach_exactly_what_is_visible(way):
  """Token t's output moves with the keys it sees, and with no other."""
  q, k, v, g = oracle.rows(5)
  run = oracle.program(**WAYS[way])
  seen = oracle.seen_BTS(SAMPLES, SAMPLES)
  for t in (0, 4, 9, 10, 19, 22, 31):
    _, (_, dk, dv) = run(
        q, k, v, np.where(np.arange(40)[:, None, None] == t, g, 0),
        SAMPLES, SAMPLES)
    np.testing.assert_array_equal((dv != 0).any((2, 3)), seen[:, t])
    alone = seen[:, t].sum(1) == 1  # one key: its weight is 1, whatever k is
    moved = (np.abs(dk) > 1e-7).any((2, 3)) & seen[:, t]
    np.testing.assert_array_equal(
        moved[~alone], seen[:, t][~alone])
    assert (dk[~seen[:, t]] == 0).all()
    assert not seen[:, t, t + 1 :].any()


@ways
def test_siblings_do_not_see_each_other(way):
  q, k, v, g = oracle.rows(6)
  run = oracle.program(**WAYS[way])
  before, _ = run(q, k, v, g, SAMPLES, SAMPLES)
  k, v = k.copy(), v.copy()
  k[0, 20:30] += 3
  v[0, 20:30] -= 3
  after, _ = run(q, k, v, g, SAMPLES, SAMPLES)
  np.testing.assert_array_equal(after[0, :20], before[0, :20])
  np.testing.assert_array_equal(after[0, 30:], before[0, 30:])
  assert np.abs(after[0, 20:27] - before[0, 20:27]).min((1, 2)).min() > 0


@pytest.mark.parametrize('way', ['dense', 'blockwise'])
def test_packed_documents_equal_rows_of_their_own(way):
  lengths = 12, 17, 11
  row = oracle.batch(*[oracle.documents(*lengths)] * 3)
  q, k, v, g = oracle.rows(7)
  run = oracle.program(**WAYS[way])
  out, grads = run(q, k, v, g, row, row)
  start = 0
  for n in lengths:
    own = slice(start, start + n)
    alone = oracle.batch(*[oracle.documents(n, n - oracle.LENGTH)] * 3)
    args = (np.roll(x, -start, axis=1) for x in (q, k, v, g))
    got = run(*args, alone, alone)
    want = jax.tree.map(lambda x, own=own: x[:, own], (out, grads))
    got = jax.tree.map(lambda x, n=n: x[:, :n], got)
    oracle.assert_near(got, want, atol=2e-6)
    changed, _ = run(*(_shift(x, own) for x in (q, k, v)), g, row, row)
    others = np.r_[0:start, start + n : oracle.LENGTH]
    np.testing.assert_array_equal(changed[:, others], out[:, others])
    assert (changed[:, own] != out[:, own]).any((0, 2, 3)).all()
    start += n


def _shift(x, own):
  x = x.copy()
  x[:, own] += 2
  return x


@pytest.mark.parametrize('way', ['dense', 'blockwise'])
def test_window_counts_positions_and_not_places(way):
  """A sample's first token sees the prefix's end, however far the row puts it.

  The third sample begins 30 places into the row, at position 10.
  """
  q, k, v, g = oracle.rows(8)
  one = np.where(np.arange(40)[:, None, None] == 30, g, 0)
  run = oracle.program(**WAYS[way], kind=oracle.Kind(Rule(5)))
  _, (_, _, dv) = run(q, k, v, one, SAMPLES, SAMPLES)
  reached = np.flatnonzero((dv[0] != 0).any((1, 2)))
  np.testing.assert_array_equal(reached, [6, 7, 8, 9, 30])


@pytest.mark.parametrize('way', ['dense', 'blockwise'])
def test_huge_scores_stay_finite(way):
  """Scores of +-1e4 choose one key, and do not overflow."""
  row = oracle.batch(*[oracle.documents(oracle.LENGTH)] * 3)
  q, k, v, g = oracle.rows(9)
  out, grads = oracle.program(**WAYS[way])(
      q * 100, k * 100, v, g, row, row)
  want, _, _ = oracle.attention(
      q * 100, k * 100, v, g, oracle.seen_BTS(row, row))
  assert all(np.isfinite(x).all() for x in grads)
  oracle.assert_near(out, want, atol=2e-2)


@pytest.mark.parametrize('way', ['dense', 'blockwise'])
def test_bf16_keeps_sums_in_fp32(way):
  """Weights of 30 equal keys would not sum to 1 in bf16."""
  args = oracle.rows(10)
  half = tuple(jnp.asarray(x, jnp.bfloat16) for x in args)
  run = oracle.program(**WAYS[way])
  out, grads = run(*half, SAMPLES, SAMPLES)
  assert all(x.dtype == jnp.bfloat16 for x in (out, *grads))
  full = run(*(np.asarray(x, np.float32) for x in half), SAMPLES, SAMPLES)
  oracle.assert_near(
      jax.tree.map(lambda x: x.astype(np.float32), (out, grads)), full,
      rtol=2e-2, atol=2e-2)
