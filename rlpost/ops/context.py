"""Attention over a sequence that is spread over a mesh axis.

Three ways to the same result, each called with whole arrays of which every
device of the `context` axis holds an equal piece of the tokens, in any order:
the visibility rule reads orders and segments, which travel with the keys.

- ring: keys and values go round the ring, a hop while a block is computed; a
  device holds two pieces of them at a time (Liu et al., 2023,
  arXiv:2310.01889).
- all_gather: each device gathers all keys and values.
- ulysses: each device trades its piece of all heads for all tokens of its
  heads (Jacobs et al., 2023, arXiv:2309.14509).

All are exact, softmax state in fp32; gradients of ring go round as well.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rlpost import errors, sharding
from rlpost.ops import blockwise
from rlpost.ops.blockwise import PLAIN_SPEC, Spec
from rlpost.ops.visibility import Where, blank

AXIS = sharding.RULES['time']


def attention(
    way: str, q_BTHP, k_BSJP, v_BSJP, query: Where, key: Where, *,
    sink_H=None, spec: Spec = PLAIN_SPEC,
):
  """Softmax attention of queries and keys spread over the context axis.

  Needs the mesh of `sharding.use`. Rows are spread as batches are, heads over
  the tensor axis where both kinds divide.

  Args:
    way: a key of `WAYS`.
    sink_H: a logit per head, or None; see `blockwise.with_sink`.
    spec: rule, softcap and block.

  Returns:
    [B, T, H, P], spread like the queries.

  Raises:
    InputError: tokens, or for 'ulysses' heads, do not divide.
  """
  mesh = jax.sharding.get_abstract_mesh()
  ways = mesh.shape.get(AXIS, 1) if not mesh.empty else 1
  heads, kv_heads = q_BTHP.shape[2], k_BSJP.shape[2]
  if mesh.empty:
    return blockwise.attention(
        q_BTHP, k_BSJP, v_BSJP, query, key, sink_H=sink_H, spec=spec
    )
  sharding.check_tokens(q_BTHP.shape[1], mesh, 'queries')
  sharding.check_tokens(k_BSJP.shape[1], mesh, 'keys')
  tensor = mesh.shape['tensor']
  split = tensor if heads % tensor == kv_heads % tensor == 0 else 1
  if way == 'ulysses' and heads // split % ways:
    raise errors.InputError(
        f"'ulysses' needs heads that divide over {ways} devices of the context "
        f"axis; there are {heads // split} on each. Use 'ring'."
    )
  rows = sharding.RULES['batch']
  if q_BTHP.shape[0] % sharding.batch_ways(mesh):
    rows = None
  tokens = PartitionSpec(rows, AXIS)
  over = 'tensor' if split > 1 else None
  states = PartitionSpec(rows, AXIS, over, None)
  run = jax.shard_map(
      functools.partial(WAYS[way], spec=spec), mesh=mesh,
      in_specs=(*[states] * 3, tokens, tokens, PartitionSpec(over)),
      out_specs=states,
  )
  return run(q_BTHP, k_BSJP, v_BSJP, query, key, sink_H)


def _all_gather(q, k, v, query, key, sink_H, *, spec):
  k, v, key = jax.tree.map(
      lambda x: jax.lax.all_gather(x, AXIS, axis=1, tiled=True), (k, v, key)
  )
  return blockwise.attention(
      q, k, v, query, key, sink_H=sink_H, spec=spec
  )


def _ulysses(q, k, v, query, key, sink_H, *, spec):
  ways = jax.lax.axis_size(AXIS)
  if sink_H is not None:  # those of the heads that this device will hold
    sink_H = sink_H.reshape(ways, -1)[jax.lax.axis_index(AXIS)]
  if k.shape[2] % ways:
    # As many key heads as devices need; a repeat stays beside its own.
    repeats = q.shape[2] // k.shape[2]
    if ways % k.shape[2] == 0:
      repeats = ways // k.shape[2]
    k, v = (jnp.repeat(x, repeats, axis=2) for x in (k, v))

  def trade(x, split, concat):
    return jax.lax.all_to_all(
        x, AXIS, split_axis=split, concat_axis=concat, tiled=True
    )

  query, key = jax.tree.map(
      lambda x: jax.lax.all_gather(x, AXIS, axis=1, tiled=True), (query, key)
  )
  out = blockwise.attention(
      *(trade(x, 2, 1) for x in (q, k, v)), query, key, sink_H=sink_H,
      spec=spec,
  )
  return trade(out, 1, 2)


def _ring(q, k, v, query, key, sink_H, *, spec):
  k, v = (blank(x, key.segment) for x in (k, v))
  q = blank(q, query.segment)
  out, lse = _ring_attend(q, k, v, query, key, spec)
  return blank(blockwise.with_sink(out, lse, sink_H), query.segment)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _ring_attend(q, k, v, query, key, spec):
  return _ring_forward(q, k, v, query, key, spec)[0]


def pass_on(tree):
  """Everybody's piece goes to the next device of the ring."""
  ways = jax.lax.axis_size(AXIS)
  around = [(i, (i + 1) % ways) for i in range(ways)]
  return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, around), tree)


def _pass_keys_on(keys):
  # What says where they stand in one message: a TPU has five on their way.
  where = type(keys.where)(*pass_on(jnp.stack(keys.where)))
  return type(keys)(*pass_on((keys.k, keys.v)), where)


def _parts(keys):
  """Keys that tour the ring one part after the other.

  So that what is on its way takes little memory. A part has every so manieth
  block: early and late tokens, that no device waits for others.
  """
  blocks = len(keys.k)
  count = next(n for n in (4, 3, 2, 1) if blocks % n == 0)
  return jax.tree.map(
      lambda x: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1), keys
  )


def _ring_forward(q, k, v, query, key, spec):
  # See `blockwise`: a scan over layers would store every mask.
  q_, query_, key_ = jax.lax.optimization_barrier((q, query, key))
  groups = q.shape[2] // k.shape[2]
  queries = blockwise.cut_queries(q_, query_, groups, spec.block)

  def hop(carry, _):
    sums, keys = carry
    coming = _pass_keys_on(keys)  # on its way while these are used
    return (blockwise.accumulate(sums, queries, keys, spec), coming), None

  def tour(sums, keys):
    ways = jax.lax.axis_size(AXIS)
    sums, keys = jax.lax.scan(hop, (sums, keys), None, length=ways - 1)[0]
    return blockwise.accumulate(sums, queries, keys, spec), None

  parts = _parts(blockwise.cut_keys(k, v, key_, spec.block))
  sums = jax.lax.scan(tour, blockwise.no_sums(queries), parts)[0]
  out, lse = blockwise.joined(*blockwise.finish(sums), groups, q)
  return (out, lse), (q, k, v, query, key, out, lse)


def _ring_backward(spec, residuals, cotangents):
  q, k, v, query, key, out, lse = residuals
  d_out, d_lse = cotangents
  d_out, query, key = jax.lax.optimization_barrier((d_out, query, key))
  groups = q.shape[2] // k.shape[2]
  queries = blockwise.cut_queries(q, query, groups, spec.block)
  size = queries.where.segment.shape[-1]
  pull = blockwise.cut_pull(d_out, d_lse, out, lse, groups, size, v.dtype)

  def hop(carry, _):
    # One hop behind: what the last one added and the next keys both travel
    # while these keys are used. Adding first would leave nothing to hide it.
    d_q, d_kv, keys = carry
    d_kv, coming = pass_on(d_kv), _pass_keys_on(keys)
    d_q, *more = blockwise.gradients(d_q, queries, keys, pull, spec)
    d_kv = [a + b for a, b in zip(d_kv, more, strict=True)]
    return (d_q, d_kv, coming), None

  def tour(d_q, keys):
    coming = _pass_keys_on(keys)
    d_q, *d_kv = blockwise.gradients(d_q, queries, keys, pull, spec)
    carry = d_q, d_kv, coming
    ways = jax.lax.axis_size(AXIS)
    d_q, d_kv, _ = jax.lax.scan(hop, carry, None, length=ways - 1)[0]
    return d_q, pass_on(d_kv)

  parts = _parts(blockwise.cut_keys(k, v, key, spec.block))
  d_q, d_kv = jax.lax.scan(tour, blockwise.zeros(queries.q), parts)
  d_kv = (x.swapaxes(0, 1).reshape(-1, *x.shape[2:]) for x in d_kv)
  found = blockwise.joined_gradients(d_q, *d_kv, q, k, v)
  return *found, None, None


_ring_attend.defvjp(_ring_forward, _ring_backward)

WAYS = {'ring': _ring, 'all_gather': _all_gather, 'ulysses': _ulysses}
