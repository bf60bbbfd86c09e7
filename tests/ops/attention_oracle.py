"""Attention pair by pair in float64, and rows of every kind to try it on."""

import contextlib
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlpost import sharding
from rlpost.data import zigzag
from rlpost.ops import attention as attention_ops
from rlpost.ops.attention import PLAIN, Rule, Where

LENGTH = 40


class Kind(NamedTuple):
  """A kind of attention."""

  rule: Rule = PLAIN
  softcap: float | None = None
  sink: bool = False


CAUSAL = Kind()
KINDS = {
    'causal': CAUSAL,
    'bidirectional': Kind(Rule(causal=False)),
    'window': Kind(Rule(6)),
    'window both ways': Kind(Rule(6, causal=False)),
    'chunk': Kind(Rule(chunk=7)),
    'chunk both ways': Kind(Rule(chunk=7, causal=False)),
    'first and window': Kind(Rule(5, first=2)),
    'first and chunk': Kind(Rule(chunk=8, first=3), sink=True),
    'softcap': Kind(softcap=1.5),
    'sink': Kind(sink=True),
    'all': Kind(Rule(9, chunk=16, first=2), 2.0, True),
    'all both ways': Kind(Rule(9, False, 16, 2), 2.0, True),
}

# All of them, most in the slow suite: the others meet every branch.
QUICK = 'causal', 'window both ways', 'first and chunk', 'all'
kinds = pytest.mark.parametrize('kind', [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in KINDS
])


def sees(query, key, b, t, s, rule):
  """Whether query t of row b sees key s: the rule, one pair at a time."""
  segment = int(key.segment[b, s])
  if segment < 0 or query.segment[b, t] < 0:
    return False
  if segment not in (query.segment[b, t], query.parent[b, t]):
    return False
  if rule.causal and key.order[b, s] > query.order[b, t]:
    return False
  here, there = int(query.position[b, t]), int(key.position[b, s])
  if there < rule.first:
    return True
  if rule.window is not None and abs(here - there) >= rule.window:
    return False
  return rule.chunk is None or here // rule.chunk == there // rule.chunk


def seen_BTS(query, key, rule=PLAIN):
  B, T = query.segment.shape
  S = key.segment.shape[1]
  out = np.zeros((B, T, S), bool)
  for b, t, s in np.ndindex(B, T, S):
    out[b, t, s] = sees(query, key, b, t, s, rule)
  return out


def attention(
    q_BTHP, k_BSJP, v_BSJP, g_BTHP, seen_BTS, softcap=None, sink_H=None
):
  """Output, log-sum-exp and gradients (dq, dk, dv) of sum(g * output).

  With a sink its gradient follows; the log-sum-exp is that of the keys.
  """
  q, k, v, g = (np.asarray(x, np.float64) for x in (
      q_BTHP, k_BSJP, v_BSJP, g_BTHP))
  B, T, H, P = q.shape
  group = H // k.shape[2]
  out, lse = np.zeros_like(q), np.full((B, T, H), -np.inf)
  dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
  d_sink = np.zeros(H)
  for b, t, h in np.ndindex(B, T, H):
    keys = np.flatnonzero(seen_BTS[b, t])
    if not len(keys):
      continue
    kk, vv = k[b, keys, h // group], v[b, keys, h // group]
    scores = plain = kk @ q[b, t, h] / np.sqrt(P)
    if softcap is not None:
      scores = softcap * np.tanh(plain / softcap)
    top = scores.max()
    lse[b, t, h] = norm = top + np.log(np.exp(scores - top).sum())
    if sink_H is not None:
      norm = np.logaddexp(norm, float(sink_H[h]))
    weights = np.exp(scores - norm)
    out[b, t, h] = weights @ vv
    d_weights = vv @ g[b, t, h]
    mean = weights @ d_weights
    d_scores = weights * (d_weights - mean) / np.sqrt(P)
    if softcap is not None:
      d_scores *= 1 / np.cosh(plain / softcap) ** 2
    if sink_H is not None:
      d_sink[h] -= np.exp(sink_H[h] - norm) * mean
    dq[b, t, h] = d_scores @ kk
    dk[b, keys, h // group] += d_scores[:, None] * q[b, t, h]
    dv[b, keys, h // group] += weights[:, None] * g[b, t, h]
  grads = dq, dk, dv
  return out, lse, grads if sink_H is None else (*grads, d_sink)


def sinks(kind, heads):
  """(A sink per head,) for a kind that has them."""
  rng = np.random.default_rng(99)
  return (rng.normal(size=heads).astype(np.float32),) * kind.sink


def answer(kind, args, query, key):
  """(Output, gradients) of `program` for a kind."""
  sink = sinks(kind, args[0].shape[2])
  seen = seen_BTS(query, key, kind.rule)
  out, _, grads = attention(*args, seen, kind.softcap, *sink)
  return out, grads


def arrays(seed, B, T, H, J, P, S=None):
  """Random q, k, v and output cotangent, fp32."""
  rng = np.random.default_rng(seed)
  S = T if S is None else S
  shapes = (B, T, H, P), (B, S, J, P), (B, S, J, P), (B, T, H, P)
  return tuple(rng.normal(size=s).astype(np.float32) for s in shapes)


def rows(seed, heads=(9, 3)):
  """`arrays` for a batch of `layouts`: few shapes, so few programs."""
  return arrays(seed, 3, LENGTH, *heads, 8)


def documents(*lengths):
  """One row of documents; a negative length is padding."""
  segment = np.concatenate(
      [np.full(abs(n), i if n > 0 else -1) for i, n in enumerate(lengths)]
  )
  position = np.concatenate([np.arange(abs(n)) for n in lengths])
  return Where(
      *(x.astype(np.int32)[None] for x in (
          np.arange(len(segment)), position, segment,
          np.full(len(segment), -2)))
  )


def shared_prefix(prefix, samples, width, real=None, first=0):
  """One row: a prompt, then samples of `width` of which `real` are tokens."""
  real = [width] * samples if real is None else real
  row = [(i, first, -2) for i in range(prefix)]
  for r in range(samples):
    for i in range(width):
      segment = first + 1 + r if i < real[r] else -1
      row.append((prefix + i, segment, first))
  position, segment, parent = np.array(row, np.int32).T
  order = np.arange(len(row), dtype=np.int32)
  return Where(*(x[None] for x in (order, position, segment, parent)))


def beside(*rows):
  """Rows laid end to end in one: orders go on."""
  parts, start = [], 0
  for row in rows:
    parts.append(row._replace(order=row.order + start))
    start += row.order.shape[1]
  return Where(*(np.concatenate(x, axis=1) for x in zip(*parts, strict=True)))


def shuffled(row, seed=0):
  """(The row with its tokens in another place, the permutation)."""
  places = np.random.default_rng(seed).permutation(row.order.shape[1])
  return Where(*(x[:, places] for x in row)), places


def batch(*rows):
  return Where(*(np.concatenate(x) for x in zip(*rows, strict=True)))


def layouts():
  """{name: Where [3, LENGTH]}; every batch ends with a row of padding."""
  padding = documents(-LENGTH)
  prefix = shared_prefix(10, 3, 10, real=[10, 7, 3])
  two = beside(shared_prefix(6, 2, 7, real=[7, 4]),
               shared_prefix(8, 2, 6, real=[2, 6], first=3))
  return {
      'one document': batch(
          documents(LENGTH), documents(31, -9), padding),
      'packed': batch(
          documents(7, 13, 1, 12, -7), documents(-3, 20, 17), padding),
      'shared prefix': batch(prefix, two, padding),
      'shuffled': batch(
          shuffled(prefix)[0], shuffled(documents(19, 21))[0], padding),
      'zigzag': batch(*(
          Where(*(x[:, zigzag.places(LENGTH, 4)] for x in row))
          for row in (documents(LENGTH), documents(5, 28, -7), padding))),
  }


@functools.cache
def program(backend='dense', kind=CAUSAL, layout=None, block=16, **mesh):
  """(q, k, v, g, query, key) -> (output, (dq, dk, dv, of the sink if any)).

  Jitted, over a mesh if its axes are given.
  """

  def run(q, k, v, g, query, key, *sink):
    def attend(q, k, v, *sink):
      return attention_ops.attention(
          q, k, v, query, key if layout is None else None, backend=backend,
          rule=kind.rule, softcap=kind.softcap, sink_H=next(iter(sink), None),
          layout=layout, block=block,
      )

    out, pull = jax.vjp(attend, q, k, v, *sink)
    return out, pull(g)

  jitted = jax.jit(run)
  made = sharding.make_mesh(**mesh) if mesh else None

  def call(*args):
    args = jax.tree.map(jnp.asarray, args)
    args += sinks(kind, args[0].shape[2])
    with sharding.use(made) if mesh else contextlib.nullcontext():
      return jax.tree.map(np.asarray, jitted(*args))

  return call


def sizes(jaxpr):
  """Sizes of all values that a jaxpr makes, nested ones included."""
  for equation in jaxpr.eqns:
    yield from (x.aval.size for x in equation.outvars)
    for inner in jax.core.jaxprs_in_params(equation.params):
      yield from sizes(inner)


def assert_near(got, want, rtol=2e-5, atol=2e-5):
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol),
      got, want,
  )
