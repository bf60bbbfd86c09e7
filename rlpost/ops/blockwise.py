"""Attention that holds the scores of one pair of blocks at a time.

Online softmax: with running maximum m, sum l and unnormalised output o, a
block of scores s gives m' = max(m, max s), p = exp(s - m'), a = exp(m - m'),
l' = a l + sum p, o' = a o + p v (Milakov & Gimelshein, 2018, arXiv:1805.02867;
Dao et al., 2022, arXiv:2205.14135, algorithm 1). The backward pass keeps only
o and the log-sum-exp, and makes the scores again (ibid., algorithm 4).

Each block of queries visits only the blocks of keys in which something may be
visible: a bound of orders, segments, parents and positions decides, once per
call, and a loop runs over the list. Plain XLA: it runs wherever JAX does.
"""

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from rlpost.ops import visibility
from rlpost.ops.visibility import MASKED, PLAIN, Rule, Where

# Where the running maximum starts: far below any score, yet so far above
# MASKED that exp(MASKED - _FLOOR) is 0 in a row that has seen nothing.
_FLOOR = -1e29
# Beyond every order, position and id; twice it still fits in int32.
_FAR = 2**30 - 1


class Spec(NamedTuple):
  """What is the same for all tokens of a call, and known when it is traced.

  Attributes:
    rule: what else decides who sees whom.
    softcap: bound of the scores, or None.
    block: longest edge of a block of scores, in tokens.
  """

  rule: Rule = PLAIN
  softcap: float | None = None
  block: int = 256


PLAIN_SPEC = Spec()


def attention(
    q_BTHP, k_BSJP, v_BSJP, query: Where, key: Where | None = None, *,
    sink_H=None, spec: Spec = PLAIN_SPEC,
):
  """Softmax attention; see `attention_with_lse`. Returns [B, T, H, P]."""
  out, lse = attention_with_lse(q_BTHP, k_BSJP, v_BSJP, query, key, spec=spec)
  return with_sink(out, lse, sink_H)


def with_sink(out_BTHP, lse_BTH, sink_H):
  """The output if one more logit per head takes part in the softmax.

  Its weight is lost: exp(lse) / (exp(lse) + exp(sink)) of the output stays.
  """
  if sink_H is None:
    return out_BTHP
  share = jax.nn.sigmoid(lse_BTH - sink_H.astype(jnp.float32)[None, None])
  out = out_BTHP.astype(jnp.float32) * share[..., None]
  return out.astype(out_BTHP.dtype)


def attention_with_lse(
    q_BTHP, k_BSJP, v_BSJP, query: Where, key: Where | None = None, *,
    spec: Spec = PLAIN_SPEC,
):
  """Softmax attention and the log-sum-exp of its scores.

  Outputs over disjoint sets of keys merge with the weights
  `exp(lse_i - logsumexp(lse))`; gradients flow through both results.

  Args:
    q_BTHP: queries, any length.
    k_BSJP, v_BSJP: keys and values with J heads, any length; J divides H.
    query: where the queries stand.
    key: where the keys stand; the same as `query` if None.
    spec: rule, softcap and block.

  Returns:
    [B, T, H, P] in the dtype of the queries, and fp32 [B, T, H]; 0 and
    `MASKED` where nothing is visible.
  """
  key = query if key is None else key
  chex.assert_equal_shape([k_BSJP, v_BSJP])
  chex.assert_shape([*query], q_BTHP.shape[:2])
  chex.assert_shape([*key], k_BSJP.shape[:2])
  q = visibility.blank(q_BTHP, query.segment)
  k = visibility.blank(k_BSJP, key.segment)
  v = visibility.blank(v_BSJP, key.segment)
  out, lse = _attend(q, k, v, query, key, spec)
  valid = (query.segment >= 0)[:, :, None]
  return visibility.blank(out, query.segment), jnp.where(valid, lse, MASKED)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(q, k, v, query, key, spec):
  return _forward(q, k, v, query, key, spec)[0]


class Queries(NamedTuple):
  """I blocks of c queries."""

  q: Any  # [I, B, J, G c, P], scaled
  where: Where  # [I, B, c] each


class Keys(NamedTuple):
  """N blocks of s keys and values."""

  k: Any  # [N, B, J, s, P]
  v: Any  # [N, B, J, s, P]
  where: Where  # [N, B, s] each


def cut_queries(q_BTHP, where: Where, groups: int, block: int) -> Queries:
  """Blocks of queries, `groups` of them to a key head."""
  size = _edge(q_BTHP.shape[1], block)
  q = q_BTHP * jnp.asarray(q_BTHP.shape[-1] ** -0.5, q_BTHP.dtype)
  return Queries(_cut_heads(q, groups, size), _cut_where(where, size))


def cut_keys(k_BSJP, v_BSJP, where: Where, block: int) -> Keys:
  """Blocks of keys and values."""
  size = _edge(k_BSJP.shape[1], block)
  return Keys(
      _cut_heads(k_BSJP, 1, size), _cut_heads(v_BSJP, 1, size),
      _cut_where(where, size),
  )


def _visits(queries: Queries, keys: Keys, rule):
  """(live [I, N], count [I]): for each block of queries, first the `count`
  blocks of keys that it must visit."""
  live = _may_see(queries.where, keys.where, rule)
  return jnp.argsort(~live, axis=1, stable=True), live.sum(1)


def _may_see(query: Where, key: Where, rule):
  """Boolean [I, N]: false only if no query of block i sees a key of block n.

  A bound: two ranges of segment ids that overlap need not share an id.
  """

  def span(x, keep):  # least and greatest kept [blocks, B]; none: inverted
    least = jnp.where(keep, x, _FAR).min(-1)
    return least, jnp.where(keep, x, -_FAR).max(-1)

  asks, shows = query.segment >= 0, key.segment >= 0
  first, last = (x[None] for x in span(key.segment, shows))

  def reaches(segment, keep):
    low, high = (x[:, None] for x in span(segment, keep))
    return (low <= last) & (first <= high)

  live = reaches(query.segment, asks)
  live |= reaches(query.parent, asks & (query.parent >= 0))
  if rule.causal:
    latest = span(query.order, asks)[1][:, None]
    live &= span(key.order, shows)[0][None] <= latest
  low, high = (x[:, None] for x in span(query.position, asks))
  least, most = (x[None] for x in span(key.position, shows))
  near = jnp.ones_like(live)
  if rule.window is not None:
    near &= low - most < rule.window
    if not rule.causal:
      near &= least - high < rule.window
  if rule.chunk is not None:
    near &= low // rule.chunk <= most // rule.chunk
    near &= least // rule.chunk <= high // rule.chunk
  if rule.first:
    near |= least < rule.first
  return (live & near).any(-1)


def _edge(length, block):
  """Edge of the fewest blocks of at most `block` that cover `length` evenly."""
  even = -(-length // -(-length // block))
  return min(-(-even // 8) * 8, block)


def _pad(x, size, fill=0):
  extra = -x.shape[1] % size
  if not extra:
    return x
  widths = ((0, 0), (0, extra)) + ((0, 0),) * (x.ndim - 2)
  return jnp.pad(x, widths, constant_values=fill)


def _cut_where(where, size):
  """[B, T] -> [I, B, c]; what is added is padding."""
  B = where.segment.shape[0]
  padded = (_pad(x, size, fill=-1) for x in where)
  return Where(*(x.reshape(B, -1, size).swapaxes(0, 1) for x in padded))


def _cut_heads(x_BTHP, groups, size):
  """[B, I c, J G, P] -> [I, B, J, G c, P]."""
  x = _pad(x_BTHP, size)
  B, T, H, P = x.shape
  x = x.reshape(B, T // size, size, H // groups, groups, P)
  x = x.transpose(1, 0, 3, 4, 2, 5)
  return x.reshape(T // size, B, H // groups, groups * size, P)


def _join_heads(x, groups, length):
  """The inverse of `_cut_heads`, cut back to `length`."""
  count, B, J, rows, P = x.shape
  x = x.reshape(count, B, J, groups, rows // groups, P)
  x = x.transpose(1, 0, 4, 2, 3, 5)
  return x.reshape(B, -1, J * groups, P)[:, :length]


def _pick(tree, n):
  return jax.tree.map(
      lambda x: jax.lax.dynamic_index_in_dim(x, n, keepdims=False), tree
  )


def _put(x, n, row):
  return jax.lax.dynamic_update_index_in_dim(x, row, n, 0)


def _add_at(x, n, change):
  return _put(x, n, _pick(x, n) + change)


def _product(equation, x, y):
  return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


def _scores(q, k, query, key, spec: Spec):
  """fp32 [B, J, G c, s]: q k^T, capped, where visible; MASKED elsewhere."""
  B, J, rows, _ = q.shape
  seen_Bcs = visibility.visible(query, key, spec.rule)
  c, s = seen_Bcs.shape[1:]
  scores = _product('bjqp,bjsp->bjqs', q, k)
  if spec.softcap is not None:
    scores = spec.softcap * jnp.tanh(scores / spec.softcap)
  scores = scores.reshape(B, J, rows // c, c, s)
  scores = jnp.where(seen_Bcs[:, None, None], scores, MASKED)
  return scores.reshape(B, J, rows, s)


def _slope(capped, softcap):
  """Derivative of softcap tanh(s / softcap), from its value; 0 if MASKED."""
  return 1 - jnp.square(jnp.maximum(capped, -softcap) / softcap)


class Sums(NamedTuple):
  """Running maximum and sum [I, B, J, G c], and output [..., P], in fp32."""

  top: Any
  total: Any
  out: Any


def no_sums(queries: Queries) -> Sums:
  """What queries have before they saw a key."""
  first = queries.q[..., 0]
  return Sums(
      jnp.full_like(first, _FLOOR, jnp.float32), zeros(first), zeros(queries.q)
  )


def zeros(like):
  """fp32 zeros, spread over devices as `like` is: a loop's carry must be."""
  return jnp.zeros_like(like, jnp.float32)


def accumulate(sums: Sums, queries: Queries, keys: Keys, spec: Spec) -> Sums:
  """Adds what the queries see of these keys."""

  live, count = _visits(queries, keys, spec.rule)

  def one_query_block(i, sums):
    q, query = _pick(queries, i)

    def visit(n, sums):
      top, total, out = sums
      k, v, key = _pick(keys, live[i, n])
      scores = _scores(q, k, query, key, spec)
      new = jnp.maximum(top, scores.max(-1))
      p = jnp.exp(scores - new[..., None])
      fade = jnp.exp(top - new)
      total = total * fade + p.sum(-1)
      out = out * fade[..., None] + _product(
          'bjqs,bjsp->bjqp', p.astype(v.dtype), v
      )
      return Sums(new, total, out)

    found = jax.lax.fori_loop(0, count[i], visit, _pick(sums, i))
    return jax.tree.map(lambda x, y: _put(x, i, y), sums, found)

  # Not a scan: its results would take a second place beside `sums`.
  return jax.lax.fori_loop(0, len(live), one_query_block, sums)


def finish(sums: Sums):
  """(output [I, B, J, G c, P], log-sum-exp [I, B, J, G c])."""
  some = sums.total > 0
  total = jnp.where(some, sums.total, 1.0)
  lse = jnp.where(some, sums.top + jnp.log(total), MASKED)
  return sums.out / total[..., None], lse


class Pull(NamedTuple):
  """What the backward pass knows of each block of queries.

  With P the weights: dS = P (dP - delta), dP = dO V^T, and
  delta = sum_p dO O - d lse.
  """

  d_out: Any
  delta: Any
  lse: Any


def cut_pull(d_out, d_lse, out, lse, groups, size, dtype) -> Pull:
  """Of [B, T, H, P] and [B, T, H]; `size` queries to a block."""
  delta = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
  delta, lse = (
      _cut_heads(x[..., None], groups, size)[..., 0]
      for x in (delta - d_lse, jnp.maximum(lse, _FLOOR))  # nothing seen: exp 0
  )
  return Pull(_cut_heads(d_out.astype(dtype), groups, size), delta, lse)


def gradients(d_q, queries: Queries, keys: Keys, pull: Pull, spec: Spec):
  """fp32 gradients in blocks: (`d_q` and what these keys add to that of the
  scaled queries, that of the keys, that of the values)."""

  live, count = _visits(queries, keys, spec.rule)

  def one_query_block(i, state):
    (q, query), (d_out, delta, lse) = _pick((queries, pull), i)
    all_d_q, *state = state

    def visit(n, state):
      d_q, d_k, d_v = state
      k, v, key = _pick(keys, live[i, n])
      scores = _scores(q, k, query, key, spec)
      p = jnp.exp(scores - lse[..., None])
      d_p = _product('bjqp,bjsp->bjqs', d_out, v)
      d_s = p * (d_p - delta[..., None])
      if spec.softcap is not None:
        d_s *= _slope(scores, spec.softcap)
      d_s, p = d_s.astype(k.dtype), p.astype(v.dtype)
      d_q = d_q + _product('bjqs,bjsp->bjqp', d_s, k)
      d_k = _add_at(d_k, live[i, n], _product('bjqs,bjqp->bjsp', d_s, q))
      d_v = _add_at(d_v, live[i, n], _product('bjqs,bjqp->bjsp', p, d_out))
      return d_q, d_k, d_v

    d_q, *state = jax.lax.fori_loop(
        0, count[i], visit, (_pick(all_d_q, i), *state)
    )
    return _put(all_d_q, i, d_q), *state

  start = d_q, zeros(keys.k), zeros(keys.v)
  return jax.lax.fori_loop(0, len(live), one_query_block, start)


def _forward(q, k, v, query, key, spec):
  # Inside a scan over layers, all that depends only on the layout would be
  # computed for every block at once and stored; tied to q, it is not.
  q_, query_, key_ = jax.lax.optimization_barrier((q, query, key))
  groups = q.shape[2] // k.shape[2]
  queries = cut_queries(q_, query_, groups, spec.block)
  keys = cut_keys(k, v, key_, spec.block)
  found = finish(accumulate(no_sums(queries), queries, keys, spec))
  out, lse = joined(*found, groups, q)
  return (out, lse), (q, k, v, query, key, out, lse)


def joined(out, lse, groups, like_BTHP):
  """[B, T, H, P] in the dtype of the queries, and [B, T, H], of blocks."""
  length = like_BTHP.shape[1]
  out = _join_heads(out, groups, length).astype(like_BTHP.dtype)
  return out, _join_heads(lse[..., None], groups, length)[..., 0]


def _backward(spec, residuals, cotangents):
  q, k, v, query, key, out, lse = residuals
  d_out, d_lse = cotangents
  d_out, query, key = jax.lax.optimization_barrier((d_out, query, key))
  groups = q.shape[2] // k.shape[2]
  queries = cut_queries(q, query, groups, spec.block)
  keys = cut_keys(k, v, key, spec.block)
  size = queries.where.segment.shape[-1]
  pull = cut_pull(d_out, d_lse, out, lse, groups, size, v.dtype)
  found = gradients(zeros(queries.q), queries, keys, pull, spec)
  return *joined_gradients(*found, q, k, v), None, None


def joined_gradients(d_q, d_k, d_v, q, k, v):
  """Gradients in blocks, as the arrays they belong to."""
  groups = q.shape[2] // k.shape[2]
  d_q = _join_heads(d_q, groups, q.shape[1]) * q.shape[-1] ** -0.5
  d_k, d_v = (_join_heads(x, 1, k.shape[1]) for x in (d_k, d_v))
  return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype)


_attend.defvjp(_forward, _backward)
