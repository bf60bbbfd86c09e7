"""Attention of one query per row to what has been cached."""

import functools

import jax
import jax.numpy as jnp

from rlpost import sharding
from rlpost.ops.visibility import MASKED

AXIS = sharding.RULES['time']


def decode_attention(q_BHP, prompt, own, seen_QRT, seen_BW):
  """One query per row against its prompt's cache and its own.

  Rows b of one prompt are neighbours: row b belongs to prompt b // R. A
  prompt's keys are stored once and read by its R rows in one product.

  On a mesh both caches are spread over the context axis by their columns. Each
  device sums what it holds, relative to the largest score m of all, and the
  parts are added: o = sum exp(s - m) v / sum exp(s - m). Masks are finite, so
  a part in which nothing is seen adds 0.

  Args:
    q_BHP: one query per row.
    prompt: (k, v), each [Q, J, T, P], the prompts' cache.
    own: (k, v), each [B, J, W, P], the rows' own cache.
    seen_QRT: boolean, which keys of its prompt a row sees; [Q, 1, T] if all
      rows of a prompt see the same.
    seen_BW: boolean, which of its own.

  Returns:
    [B, H, P]; 0 where nothing is seen.

  Raises:
    InputError: columns do not divide over the context axis.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.shape[AXIS] == 1:
    return _attend(q_BHP, prompt, own, seen_QRT, seen_BW)
  Q, J, T, _ = prompt[0].shape
  sharding.check_tokens(T, mesh, 'columns of a prompt')
  sharding.check_tokens(own[0].shape[2], mesh, 'columns of a row')
  # Said outright: XLA's partitioner would move weights as long as a cache.
  rows = None if Q % sharding.batch_ways(mesh) else 'batch'
  heads = None if J % mesh.shape['tensor'] else 'heads'
  one, cache, by_prompt, by_row = map(
      sharding.spec, (
          (rows, heads, None), (rows, heads, 'time', None),
          (rows, None, 'time'), (rows, 'time'),
      )
  )
  run = jax.shard_map(
      functools.partial(_attend, axis=AXIS), mesh=mesh,
      in_specs=(one, cache, cache, by_prompt, by_row), out_specs=one,
  )
  return run(q_BHP, prompt, own, seen_QRT, seen_BW)


def _attend(q_BHP, prompt, own, seen_QRT, seen_BW, axis=None):
  """`decode_attention` on a device; `axis`: over which others hold more."""
  B, H, P = q_BHP.shape
  Q, J = prompt[0].shape[:2]
  R, G, W = B // Q, H // J, own[0].shape[2]
  q = q_BHP.reshape(B, J, G, P) * jnp.asarray(P**-0.5, q_BHP.dtype)

  def by_prompt(x):  # [B, J, G, S] -> [Q, J, R G, S]
    x = x.reshape(Q, R, J, G, -1).swapaxes(1, 2)
    return x.reshape(Q, J, R * G, -1)

  def by_row(x):  # [Q, J, R G, S] -> [B, J, G, S]
    x = x.reshape(Q, J, R, G, -1).swapaxes(1, 2)
    return x.reshape(B, J, G, -1)

  def seen_by_prompt(seen_QRS):  # -> [Q, 1, R G or 1, S]
    if seen_QRS.shape[1] == 1:
      return seen_QRS[:, None]
    seen = jnp.broadcast_to(
        seen_QRS[:, :, None], (Q, R, G, seen_QRS.shape[2])
    )
    return seen.reshape(Q, 1, R * G, -1)

  scores = [
      _product('...qp,...sp->...qs', by_prompt(q), prompt[0]),
      by_prompt(_product('...qp,...sp->...qs', q, own[0])),
  ]
  seen = [seen_by_prompt(x) for x in (seen_QRT, seen_BW.reshape(Q, R, W))]
  scores = [jnp.where(m, s, MASKED) for m, s in zip(seen, scores, strict=True)]
  top = jnp.maximum(*(s.max(-1, keepdims=True) for s in scores))
  if axis is not None:
    top = jax.lax.pmax(top, axis)
  weights = [
      jnp.where(m, jnp.exp(s - top), 0.0)
      for m, s in zip(seen, scores, strict=True)
  ]
  total = by_row(sum(w.sum(-1, keepdims=True) for w in weights))
  out = by_row(_mix(weights[0], prompt[1])) + _mix(by_row(weights[1]), own[1])
  if axis is not None:
    out, total = jax.lax.psum((out, total), axis)
  out = out / jnp.where(total > 0, total, 1.0)
  return out.reshape(B, H, P).astype(q_BHP.dtype)


def _product(equation, x, y):
  return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


def _mix(weights, v):
  return _product('...qs,...sp->...qp', weights.astype(v.dtype), v)
