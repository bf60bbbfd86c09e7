"""Attention under one visibility rule; see `visibility` for who sees whom."""

import chex
import jax
import jax.numpy as jnp

from rlpost import errors
from rlpost.ops import blockwise, context, visibility
from rlpost.ops.visibility import (
  MASKED,
  PLAIN,
  Rule,
  SharedPrefix,
  Where,
  visible,
)

causal = visibility.causal
BACKENDS = 'dense', 'blockwise', 'splash', *context.WAYS


def attention(
    q_BTHP, k_BSJP, v_BSJP, query: Where, key: Where | None = None, *,
    backend='dense', rule: Rule = PLAIN, softcap: float | None = None,
    sink_H=None, layout: SharedPrefix | None = None, block=256, masks=None,
):
  """Softmax attention with grouped key heads, scores and sums in fp32.

  Args:
    q_BTHP: queries.
    k_BSJP, v_BSJP: keys and values with J heads; J divides H.
    query: where the queries stand.
    key: where the keys stand; the same as `query` if None.
    backend: one of `BACKENDS`. 'dense' holds all scores, 'blockwise' holds
      `block` x `block`; 'ring', 'all_gather' and 'ulysses' are blockwise over
      tokens that are spread over the context axis of the mesh; 'splash' is
      the TPU kernel for rows of the kinds that `ops.splash` lists.
    rule: what else decides who sees whom.
    softcap: scores s become softcap tanh(s / softcap) before the softmax
      (Gemma 2, 2024, arXiv:2408.00118).
    sink_H: a learned logit per head that takes part in the softmax with
      nothing behind it, so that the weights may sum to less than 1 (gpt-oss,
      2025, arXiv:2508.10925).
    layout: a promise that lets 'dense' and 'splash' skip scores between
      samples.
    block: edge of a block for all but 'dense', in tokens.
    masks: what `score_masks` gives for the same arguments; for 'dense', where
      several layers share them.

  Returns:
    [B, T, H, P] in the dtype of the queries; 0 where nothing is visible.

  Raises:
    InputError: a softcap that is not positive.
  """
  if softcap is not None and not softcap > 0:
    raise errors.InputError(
        f'{softcap=} must be positive, or None for scores as they are.'
    )
  if layout is not None and key is not None and key is not query:
    raise ValueError(f'{layout=} is about a row that attends to its own keys.')
  key = query if key is None else key
  chex.assert_equal_shape([k_BSJP, v_BSJP])
  chex.assert_shape([query.segment], q_BTHP.shape[:2])
  chex.assert_shape([key.segment], k_BSJP.shape[:2])
  if sink_H is not None:
    chex.assert_shape(sink_H, q_BTHP.shape[2:3])
  spec = blockwise.Spec(rule, softcap, block)
  if backend == 'blockwise':
    return blockwise.attention(
        q_BTHP, k_BSJP, v_BSJP, query, key, sink_H=sink_H, spec=spec
    )
  if backend == 'splash':
    from rlpost.ops import splash  # Pallas takes a second to import

    return splash.attention(
        q_BTHP, k_BSJP, v_BSJP, query, key, sink_H=sink_H, spec=spec,
        layout=layout,
    )
  if backend in context.WAYS:
    return context.attention(
        backend, q_BTHP, k_BSJP, v_BSJP, query, key, sink_H=sink_H, spec=spec
    )
  if backend != 'dense':
    raise ValueError(f'{backend=} must be one of {BACKENDS}.')
  if masks is None:
    masks = score_masks(query, key, rule=rule, layout=layout)
  q = visibility.blank(q_BTHP, query.segment)
  k, v = (visibility.blank(x, key.segment) for x in (k_BSJP, v_BSJP))
  if layout is None:
    out = _dense(q, k, v, *masks, softcap, sink_H)
  else:
    out = _shared_prefix(q, k, v, masks, layout, softcap, sink_H)
  return visibility.blank(out, query.segment)


def score_masks(
    query: Where, key: Where | None = None, *, rule: Rule = PLAIN,
    layout: SharedPrefix | None = None,
):
  """Boolean masks of the score blocks that dense `attention` computes.

  Without a layout [B, T, S]. With one, of the prefix and itself [B, T, T], of
  the samples and the prefix [B, R, N, T], and of each sample and itself
  [B, R, N, N].
  """
  if layout is None:
    key = query if key is None else key
    masks = (visible(query, key, rule),)
  else:
    T, R, N = layout.prefix, layout.samples, layout.width
    B = query.order.shape[0]
    head, tail = (Where(*(x[:, s] for x in query))
                  for s in (slice(None, T), slice(T, None)))
    alone = Where(*(x.reshape(B * R, N) for x in tail))
    masks = (
        visible(head, head, rule),
        visible(tail, head, rule).reshape(B, R, N, T),
        visible(alone, alone, rule).reshape(B, R, N, N),
    )
  # Else XLA compares the ids anew in each layer, forward and backward.
  return jax.lax.optimization_barrier(masks)


def _heads_first(x_BTHP, groups):
  """[B, T, J G, P] -> [B, J, G T, P]: one product per key head, no repeats."""
  B, T, H, P = x_BTHP.shape
  x = x_BTHP.reshape(B, T, H // groups, groups, P).transpose(0, 2, 3, 1, 4)
  return x.reshape(B, H // groups, groups * T, P)


def _scores(q, k):
  """[.., Q, P] and [.., S, P] -> fp32 [.., Q, S]."""
  return jnp.einsum(
      '...qp,...sp->...qs', q, k, preferred_element_type=jnp.float32
  )


def _weights(scores, seen, softcap, sink):
  """Weights of score blocks, each [.., S]; `sink` [.., 1] is one more block.

  The weight of the sink is dropped.
  """
  if softcap is not None:
    scores = [softcap * jnp.tanh(s / softcap) for s in scores]
  if sink is None:
    return _softmax(scores, seen)
  sink = jnp.broadcast_to(
      sink.astype(jnp.float32), (*scores[0].shape[:-1], 1)
  )
  return _softmax([*scores, sink], [*seen, True])[:-1]


def _mix(weights, v):
  return jnp.einsum(
      '...qs,...sp->...qp', weights.astype(v.dtype), v,
      preferred_element_type=jnp.float32,
  )


@jax.custom_vjp
def _softmax(scores, seen):
  """Softmax over the last axes of several score blocks taken together.

  Returns the weights of each block; 0 for a query that sees nothing.
  """
  masked = [jnp.where(m, s, MASKED) for s, m in zip(scores, seen, strict=True)]
  top = masked[0].max(-1, keepdims=True)
  for s in masked[1:]:
    top = jnp.maximum(top, s.max(-1, keepdims=True))
  weights = [jnp.exp(s - top) for s in masked]
  total = sum(w.sum(-1, keepdims=True) for w in weights)
  scale = jnp.where(top > MASKED / 2, 1 / total, 0.0)
  return [w * scale for w in weights]


def _softmax_gradient(weights, g):
  """ds = w (g - sum w g), the sum over all blocks of a query."""
  mean = sum(
      (w * x).sum(-1, keepdims=True) for w, x in zip(weights, g, strict=True)
  )
  return [w * (x - mean) for w, x in zip(weights, g, strict=True)], None


def _softmax_forward(scores, seen):
  weights = _softmax(scores, seen)
  return weights, weights


_softmax.defvjp(_softmax_forward, _softmax_gradient)


def _dense(q_BTHP, k_BSJP, v_BSJP, seen_BTS, softcap=None, sink_H=None):
  B, T, H, P = q_BTHP.shape
  J = k_BSJP.shape[2]
  G = H // J
  q = _heads_first(q_BTHP * jnp.asarray(P**-0.5, q_BTHP.dtype), G)
  k, v = _heads_first(k_BSJP, 1), _heads_first(v_BSJP, 1)
  scores = _scores(q, k).reshape(B, J, G, T, -1)
  sink = None if sink_H is None else sink_H.reshape(1, J, G, 1, 1)
  (weights,) = _weights([scores], [seen_BTS[:, None, None]], softcap, sink)
  out = _mix(weights.reshape(B, J, G * T, -1), v)
  return _tokens_first(out, G).astype(q_BTHP.dtype)


def _tokens_first(x, groups):
  """[B, J, G T, P] -> [B, T, J G, P]."""
  B, J, GT, P = x.shape
  x = x.reshape(B, J, groups, GT // groups, P).transpose(0, 3, 1, 2, 4)
  return x.reshape(B, GT // groups, J * groups, P)


def _shared_prefix(q, k, v, masks, layout, softcap, sink_H):
  """The prefix attends to itself; every sample to the prefix and itself."""
  B, _, H, P = q.shape
  T, R, N, J = layout.prefix, layout.samples, layout.width, k.shape[2]
  G = H // J
  chex.assert_axis_dimension(q, 1, layout.length)
  seen_head, seen_shared, seen_own = masks
  first = _dense(q[:, :T], k[:, :T], v[:, :T], seen_head, softcap, sink_H)

  def samples(x):  # [B, R N, J g, P] -> [B, J, R, g N, P]
    x = x[:, T:].reshape(B, R, N, J, -1, P).transpose(0, 3, 1, 4, 2, 5)
    return x.reshape(B, J, R, -1, P)

  q = samples(q * jnp.asarray(P**-0.5, q.dtype))
  k_head, v_head = _heads_first(k[:, :T], 1), _heads_first(v[:, :T], 1)
  together = B, J, R * G * N, -1
  shared = _scores(q.reshape(together), k_head).reshape(B, J, R, G, N, T)
  own = _scores(q, samples(k)).reshape(B, J, R, G, N, N)
  seen = [m[:, None, :, None] for m in (seen_shared, seen_own)]
  sink = None if sink_H is None else sink_H.reshape(1, J, 1, G, 1, 1)
  w_shared, w_own = _weights([shared, own], seen, softcap, sink)
  out = _mix(w_shared.reshape(together), v_head).reshape(q.shape)
  out = out + _mix(w_own.reshape(B, J, R, G * N, N), samples(v))
  out = out.reshape(B, J, R, G, N, P).transpose(0, 2, 4, 1, 3, 5)
  out = out.reshape(B, R * N, H, P).astype(first.dtype)
  return jnp.concatenate([first, out], axis=1)
