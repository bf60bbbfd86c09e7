"""Attention pair by pair in float64, and rows of every kind to try it on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from rlpost.ops import attention as attention_ops
from rlpost.ops.attention import Rule, Where

LENGTH = 40


def sees(query, key, b, t, s, window):
  """Whether query t of row b sees key s: the rule, one pair at a time."""
  segment = int(key.segment[b, s])
  if segment < 0 or query.segment[b, t] < 0:
    return False
  if segment not in (query.segment[b, t], query.parent[b, t]):
    return False
  if key.order[b, s] > query.order[b, t]:
    return False
  back = int(query.position[b, t]) - int(key.position[b, s])
  return window is None or back < window


def seen_BTS(query, key, window=None):
  B, T = query.segment.shape
  S = key.segment.shape[1]
  out = np.zeros((B, T, S), bool)
  for b, t, s in np.ndindex(B, T, S):
    out[b, t, s] = sees(query, key, b, t, s, window)
  return out


def attention(q_BTHP, k_BSJP, v_BSJP, g_BTHP, seen_BTS):
  """Output, log-sum-exp and gradients (dq, dk, dv) of sum(g * output)."""
  q, k, v, g = (np.asarray(x, np.float64) for x in (
      q_BTHP, k_BSJP, v_BSJP, g_BTHP))
  B, T, H, P = q.shape
  group = H // k.shape[2]
  out, lse = np.zeros_like(q), np.full((B, T, H), -np.inf)
  dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
  for b, t, h in np.ndindex(B, T, H):
    keys = np.flatnonzero(seen_BTS[b, t])
    if not len(keys):
      continue
    kk, vv = k[b, keys, h // group], v[b, keys, h // group]
    scores = kk @ q[b, t, h] / np.sqrt(P)
    top = scores.max()
    weights = np.exp(scores - top)
    lse[b, t, h] = top + np.log(weights.sum())
    weights /= weights.sum()
    out[b, t, h] = weights @ vv
    d_weights = vv @ g[b, t, h]
    d_scores = weights * (d_weights - weights @ d_weights) / np.sqrt(P)
    dq[b, t, h] = d_scores @ kk
    dk[b, keys, h // group] += d_scores[:, None] * q[b, t, h]
    dv[b, keys, h // group] += weights[:, None] * g[b, t, h]
  return out, lse, (dq, dk, dv)


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
  }


@functools.cache
def program(backend='dense', window=None, layout=None, block=16):
  """Jitted (q, k, v, g, query, key) -> (output, (dq, dk, dv))."""

  def run(q, k, v, g, query, key):
    def attend(q, k, v):
      return attention_ops.attention(
          q, k, v, query, key, backend=backend, rule=Rule(window),
          layout=layout, block=block,
      )

    out, pull = jax.vjp(attend, q, k, v)
    return out, pull(g)

  jitted = jax.jit(run) if layout is None else jax.jit(
      lambda q, k, v, g, query, key: run(q, k, v, g, query, None))
  return lambda *args: jax.tree.map(
      np.asarray, jitted(*jax.tree.map(jnp.asarray, args)))


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
