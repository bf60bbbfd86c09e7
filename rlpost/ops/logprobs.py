"""Log-probabilities of given tokens, without holding all logits at once."""

import functools

import chex
import jax
import jax.numpy as jnp

from rlpost import sharding


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def token_logprobs(h_KD, table_VD, target_K, temperature_K, chunk):
  """log p(target | h) and the entropy of p, p = softmax(h table^T / t).

  Works through `chunk` rows at a time, forward and backward: at most
  [chunk, V] logits exist. The backward pass makes them again, unless one chunk
  holds all rows; then they are kept. All sums are fp32.

  Args:
    h_KD: final hidden states of the predicting positions.
    table_VD: output head.
    target_K: int32, tokens to score.
    temperature_K: fp32, positive.
    chunk: rows at a time; K is padded to a multiple of it.

  Returns:
    (fp32 [K] log-probabilities, fp32 [K] entropies in nats).
  """
  args = h_KD, table_VD, target_K, temperature_K
  return _forward(*args, chunk)[0]


def logits(h_KD, table_VD):
  """fp32 [K, V]."""
  out = jax.lax.dot_general(
      h_KD, table_VD.astype(h_KD.dtype), (((1,), (1,)), ((), ())),
      preferred_element_type=jnp.float32,
  )
  # A product that is fused with what follows takes twice the time on CPU.
  return jax.lax.optimization_barrier(out)


def logits_transposed(h_BD, table_VD):
  """fp32 [V, B]: for few rows the large table belongs on the left."""
  return jax.lax.dot_general(
      table_VD.astype(h_BD.dtype), jax.lax.optimization_barrier(h_BD.T),
      (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32,
  )


def _chunks(chunk, *arrays):
  """Pads the leading axis with edge rows and splits it by `chunk`."""
  K = arrays[0].shape[0]
  extra = -K % chunk
  if extra:
    arrays = [
        jnp.pad(x, ((0, extra),) + ((0, 0),) * (x.ndim - 1), mode='edge')
        for x in arrays
    ]
  return tuple(x.reshape(-1, chunk, *x.shape[1:]) for x in arrays)


def _over_chunks(body, carry, arrays):
  """`lax.scan`, or one plain call where there is a single chunk."""
  if arrays[0].shape[0] > 1:
    return jax.lax.scan(body, carry, arrays)
  carry, out = body(carry, tuple(x[0] for x in arrays))
  return carry, jax.tree.map(lambda x: x[None], out)


def _forward(h_KD, table_VD, target_K, temperature_K, chunk):
  """((log-probabilities, entropies), log-normalisers, logits if whole)."""
  chex.assert_equal_shape([target_K, temperature_K])
  K = h_KD.shape[0]
  chunk = min(chunk, K)

  def body(carry, args):
    h, target, temperature = args
    kept = logits(h, table_VD)
    z = kept / temperature[:, None]
    top = z.max(1)
    z = z - top[:, None]
    e = jnp.exp(z)
    total = e.sum(1)
    norm = jnp.log(total)
    chosen = jnp.take_along_axis(z, target[:, None], axis=1)[:, 0]
    entropy = norm - (e * z).sum(1) / total
    whole = (kept,) if chunk == K else ()
    return carry, (chosen - norm, entropy, top + norm, *whole)

  args = _chunks(chunk, h_KD, target_K, temperature_K)
  _, out = _over_chunks(body, None, args)
  logp, entropy, norm = (x.reshape(-1)[:K] for x in out[:3])
  return (logp, entropy), norm, out[3:]


def _forward_rule(h_KD, table_VD, target_K, temperature_K, chunk):
  args = h_KD, table_VD, target_K, temperature_K
  args = tuple(x.value for x in args)
  (logp, entropy), norm, whole = _forward(*args, chunk)
  return (logp, entropy), (*args, entropy, norm, whole)


def _backward(chunk, residuals, cotangents):
  h_KD, table_VD, target_K, temperature_K, entropy_K, norm_K, whole = residuals
  K, V = h_KD.shape[0], table_VD.shape[0]
  chunk = min(chunk, K)
  zero = jax.custom_derivatives.SymbolicZero
  # Most losses leave the entropy alone: then nothing is computed for it.
  plain = isinstance(cotangents[1], zero)
  d_logp, d_entropy = (
      jnp.zeros(K) if isinstance(g, zero) else g for g in cotangents
  )

  def body(d_table, args):
    h, target, temperature, entropy, norm, g, g_entropy, *kept = args
    # A row that nobody asked about may hold anything: 0 * NaN is not 0.
    used = (g != 0) | (g_entropy != 0)
    h = jnp.where(used[:, None], h, jnp.zeros((), h.dtype))
    temperature = jnp.where(used, temperature, 1.0)
    z = kept[0] if kept else logits(h, table_VD)
    log_p = z / temperature[:, None] - norm[:, None]
    log_p = jnp.where(used[:, None], log_p, 0.0)
    slope = g[:, None]
    if not plain:  # d entropy / d z = -p (log p + entropy)
      entropy = jnp.where(used, entropy, 0.0)
      slope = slope + g_entropy[:, None] * (log_p + entropy[:, None])
    hot = jnp.arange(V)[None] == target[:, None]
    d_z = jnp.where(hot, g[:, None], 0.0) - jnp.exp(log_p) * slope
    d_z = (d_z / temperature[:, None]).astype(h.dtype)
    d_z = jax.lax.optimization_barrier(d_z)
    d_h = jnp.dot(
        d_z, table_VD.astype(h.dtype), preferred_element_type=jnp.float32
    )
    d = jax.lax.dot_general(
        d_z, h, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    return d if d_table is None else d_table + d, d_h

  args = _chunks(
      chunk, h_KD, target_K, temperature_K, entropy_K, norm_K
  )
  # Padded rows repeat the last one: their cotangent must be zero.
  extra = -K % chunk
  args += tuple(
      jnp.pad(g, (0, extra)).reshape(-1, chunk) for g in (d_logp, d_entropy)
  )
  many = args[0].shape[0] > 1
  start = None
  if many:
    zero = jnp.zeros(table_VD.shape, jnp.float32)
    start = sharding.as_varying_as(zero, table_VD)
  d_table, d_h = _over_chunks(body, start, args + whole)
  d_h = d_h.reshape(-1, d_h.shape[-1])[:K].astype(h_KD.dtype)
  return d_h, d_table.astype(table_VD.dtype), None, None


token_logprobs.defvjp(_forward_rule, _backward, symbolic_zeros=True)
