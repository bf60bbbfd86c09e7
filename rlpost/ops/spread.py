"""What a row needs at its two ends when its tokens are spread over devices.

Tokens of a row lie over the `context` axis, rows over `data` and `fsdp`, and a
table's rows over all devices that share a batch: so the embedding trades
columns for tokens, and the head trades hidden states for slots. No device ever
holds all tokens of a row, nor the hidden states of all its loss slots.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rlpost import sharding
from rlpost.ops import logprobs

_ROWS, _TIME = sharding.RULES['batch'], sharding.RULES['time']
_TABLE = 'vocab', 'embed'


def lookup(table_VD, tokens_BT, dtype):
  """Rows of an embedding table: [B, T, D] in `dtype`.

  On a mesh the table is dealt anew, by columns. Each device looks up its
  columns for all tokens of its neighbours, then they trade; gradients go the
  same way back, and no device ever holds the table.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return table_VD.astype(dtype)[tokens_BT]
  stored = sharding.stored(mesh, table_VD.shape, _TABLE)
  names = sharding.mesh_axes(stored[0])
  run = functools.partial(
      _local_lookup, dtype=dtype, tensor='tensor' in names,
      split=[a for a in names if a in sharding.COPIES],
  )
  return jax.shard_map(
      run, mesh=mesh, in_specs=(stored, PartitionSpec(_ROWS, _TIME)),
      out_specs=PartitionSpec(_ROWS, _TIME, None),
  )(table_VD, tokens_BT)


def _local_lookup(table, tokens, *, dtype, tensor, split):
  if table.shape[1] % math.prod(map(jax.lax.axis_size, split)):
    # Too few columns to deal: every device looks up its own tokens.
    for name in reversed(split):
      table = jax.lax.all_gather(table, name, axis=0, tiled=True)
    split = []
  for name in reversed(split):
    table = jax.lax.all_to_all(table, name, 1, 0, tiled=True)
  axis = {name: 1 if name == _TIME else 0 for name in split}
  for name in split:
    tokens = jax.lax.all_gather(tokens, name, axis=axis[name], tiled=True)
  if tensor:
    tokens = tokens - jax.lax.axis_index('tensor') * table.shape[0]
  mine = (tokens >= 0) & (tokens < table.shape[0])
  x = table[jnp.clip(tokens, 0, table.shape[0] - 1)].astype(dtype)
  x = jnp.where(mine[..., None], x, 0)
  if tensor:
    x = jax.lax.psum(x, 'tensor')
  for name in split:
    x = jax.lax.all_to_all(x, name, axis[name], 2, tiled=True)
  return x


def token_logprobs(
    h_BTD, table_VD, predictor_BK, target_BK, temperature_BK, chunk
):
  """`logprobs.token_logprobs` of loss slots whose predictors lie anywhere.

  Slots are dealt to all devices that share a row, `context` x `tensor`, whoever
  holds their predictors: each scores as many. A chunk of hidden states at a
  time is summed over the context and scattered over its devices.

  Args:
    h_BTD: final hidden states.
    table_VD: output head.
    predictor_BK: int32, where in T the state is that predicts a slot.
    target_BK: int32, tokens to score.
    temperature_BK: fp32, positive.
    chunk: slots of one device whose logits exist at one time.

  Returns:
    (fp32 [B, K] log-probabilities, fp32 [B, K] entropies in nats).
  """
  mesh = jax.sharding.get_abstract_mesh()
  B, K = predictor_BK.shape
  if mesh.empty or mesh.size == 1:
    h_BKD = jnp.take_along_axis(h_BTD, predictor_BK[..., None], axis=1)
    out = logprobs.token_logprobs(
        h_BKD.reshape(B * K, -1), table_VD, target_BK.reshape(-1),
        temperature_BK.reshape(-1), chunk,
    )
    return tuple(x.reshape(B, K) for x in out)
  stored = sharding.stored(mesh, table_VD.shape, _TABLE)
  slots, states, out = (
      PartitionSpec(_ROWS, *rest)
      for rest in [(None,), (_TIME, None), (None, (_TIME, 'tensor'))]
  )
  found = jax.shard_map(
      functools.partial(_local_logprobs, stored=stored, chunk=chunk),
      mesh=mesh, in_specs=(states, stored, slots, slots, slots),
      out_specs=(out, out),
  )(h_BTD, table_VD, predictor_BK, target_BK, temperature_BK)
  return tuple(
      sharding.constrain(x.reshape(B, -1)[:, :K], ('batch', None))
      for x in found
  )


def _local_logprobs(
    h_BTD, table_VD, predictor_BK, target_BK, temperature_BK, *, stored, chunk
):
  """This device's share of the slots: two of fp32 [B, chunks, share]."""
  table = table_VD.astype(h_BTD.dtype)
  for name in reversed(sharding.mesh_axes(stored[0])):  # see `sharding`
    table = jax.lax.all_gather(table, name, axis=0, tiled=True)
  (B, T, D), K = h_BTD.shape, predictor_BK.shape[1]
  tensor = jax.lax.axis_size('tensor')
  ways = jax.lax.axis_size(_TIME) * tensor
  share = max(1, min(chunk // B, -(-K // ways)))

  def deal(x_BK):  # [chunks, B, ways x share]
    x = jnp.pad(x_BK, ((0, 0), (0, -K % (ways * share))), mode='edge')
    return x.reshape(B, -1, ways * share).swapaxes(0, 1)

  def mine(x):  # [chunks, B, share]
    at = jax.lax.axis_index((_TIME, 'tensor')) * share
    return jax.lax.dynamic_slice_in_dim(x, at, share, 2)

  def pick(_, at):
    at = at - jax.lax.axis_index(_TIME) * T
    here = (at >= 0) & (at < T)
    h = jnp.take_along_axis(h_BTD, jnp.clip(at, 0, T - 1)[..., None], axis=1)
    h = jnp.where(here[..., None], h, 0)
    h = jax.lax.psum_scatter(h, _TIME, scatter_dimension=1, tiled=True)
    first = jax.lax.axis_index('tensor') * share
    return None, jax.lax.dynamic_slice_in_dim(h, first, share, 1)

  _, h = jax.lax.scan(pick, None, deal(predictor_BK))
  target, temperature = (mine(deal(x)) for x in (target_BK, temperature_BK))
  slots = (x.reshape(-1) for x in (target, temperature))
  found = logprobs.token_logprobs(
      *map(sharding.varying, (h.reshape(-1, D), table, *slots)), chunk
  )
  return tuple(x.reshape(-1, B, share).swapaxes(0, 1) for x in found)
