"""Attention by the TPU kernel that comes with JAX, for whole rows.

The kernel's masks are fixed when it is traced and know a token by its place in
the row, so it serves rows whose layout is a promise:

- no layout: tokens stand in their order, documents one behind the other, each
  with positions that count up; no token has a parent. Windows are served.
- `SharedPrefix`: the prefix is one document, and so is every sample; padding
  anywhere.

Padding and the borders of documents may move from row to row: the kernel reads
segment ids. It does not serve chunks and first positions (they count from a
document's start, wherever that is), windows beside a shared prefix (padding in
the prefix shifts positions), keys that are not the row's own, or tokens that
are spread over devices: around a ring, which keys a block sees depends on
orders that travel with it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as kernels,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
)
from jax.sharding import PartitionSpec

from rlpost import errors, sharding
from rlpost.ops.blockwise import PLAIN_SPEC, Spec
from rlpost.ops.visibility import SharedPrefix, Where, blank

_LANES = 128  # edges of the kernel's blocks are multiples of this


def attention(
    q_BTHP, k_BTJP, v_BTJP, where: Where, key: Where | None = None, *,
    sink_H=None, spec: Spec = PLAIN_SPEC, layout: SharedPrefix | None = None,
    interpret=False,
):
  """Softmax attention of rows to themselves; see the module for which rows.

  Over a mesh, rows are spread as batches are and heads over the tensor axis.

  Args:
    key: where the keys stand: None or `where` itself.
    interpret: run the kernel's steps one by one, on any device; for tests.

  Returns:
    [B, T, H, P] in the dtype of the queries; 0 at padding.

  Raises:
    InputError: keys, a rule or a mesh that the kernel does not serve.
  """
  if key is not None and key is not where:
    raise errors.InputError(
        "'splash' attends to a row's own keys alone. Use 'blockwise'."
    )
  mesh = jax.sharding.get_abstract_mesh()
  _check(spec.rule, layout, mesh)
  segment = where.segment
  run = functools.partial(
      _run, spec=spec, layout=layout, interpret=interpret
  )
  if not mesh.empty:
    tensor = mesh.shape['tensor']
    fits = q_BTHP.shape[2] % tensor == k_BTJP.shape[2] % tensor == 0
    over = 'tensor' if fits else None
    rows = sharding.RULES['batch']
    if q_BTHP.shape[0] % sharding.batch_ways(mesh):
      rows = None
    states = PartitionSpec(rows, None, over, None)
    run = jax.shard_map(
        run, mesh=mesh, out_specs=states,
        in_specs=(*[states] * 3, PartitionSpec(rows), PartitionSpec(over)),
        check_vma=False,  # the kernel does not say over what its results vary
    )
  q, k, v = (blank(x, segment) for x in (q_BTHP, k_BTJP, v_BTJP))
  return blank(run(q, k, v, segment, sink_H), segment)


def _check(rule, layout, mesh):
  if rule.chunk is not None or rule.first:
    raise errors.InputError(
        f"'splash' serves no chunks or first positions; {rule} has some. Use "
        "'blockwise'."
    )
  if rule.window is not None and layout is not None:
    raise errors.InputError(
        f"'splash' serves no windows beside {layout}; {rule} has one. Use "
        "'blockwise'."
    )
  ways = 1 if mesh.empty else mesh.shape['context']
  if ways > 1:
    raise errors.InputError(
        f"'splash' needs whole rows; the context axis spreads them over {ways} "
        "devices. Use 'ring'."
    )


def _run(q, k, v, segment, sink_H, *, spec, layout, interpret):
  T, dtype = q.shape[1], q.dtype
  size = min(max(spec.block // _LANES, 1), -(-T // _LANES)) * _LANES
  extra = -T % size
  states = [
      jnp.pad(x, ((0, 0), (0, extra), (0, 0), (0, 0))).swapaxes(1, 2)
      for x in (q * jnp.asarray(q.shape[-1] ** -0.5, dtype), k, v)
  ]
  # Padding sees itself, so that no softmax is empty; it is blanked later.
  ids = segment if layout is None else jnp.zeros_like(segment)
  ids = jnp.where(segment < 0, -1, ids)
  ids = jnp.pad(ids, ((0, 0), (0, extra)), constant_values=-1)
  names = (f.name for f in dataclasses.fields(kernels.BlockSizes))
  blocks = {name: size for name in names if name.startswith('block')}
  mask = _mask(T + extra, spec.rule, layout)
  kernel = kernels.make_splash_mha_single_device(
      masks.MultiHeadMask([mask] * q.shape[2]),
      block_sizes=kernels.BlockSizes(**blocks),
      attn_logits_soft_cap=spec.softcap, interpret=interpret,
  )

  def one_row(q, k, v, ids):
    return kernel(q, k, v, kernels.SegmentIds(ids, ids), sink_H)

  out = jax.vmap(one_row)(*states, ids)
  return out.swapaxes(1, 2)[:, :T].astype(dtype)


def _mask(length, rule, layout):
  """What the rule and the layout allow between places, ids apart."""
  shape = length, length
  if layout is not None:
    return _SharedPrefixMask(length, layout, rule.causal)
  if rule.window is not None:
    back = rule.window - 1
    return masks.LocalMask(shape, (back, 0 if rule.causal else back), 0)
  return masks.CausalMask(shape) if rule.causal else masks.FullMask(shape)


@dataclasses.dataclass(frozen=True)
class _SharedPrefixMask(masks.Mask):
  """Samples see the prefix and themselves; asked for block by block."""

  length: int
  layout: SharedPrefix
  causal: bool

  @property
  def shape(self):
    return self.length, self.length

  def __getitem__(self, block):
    row, column = (np.arange(self.length)[part] for part in block)
    query, key = self._sample(row)[:, None], self._sample(column)[None]
    seen = (key < 0) | (key == query)
    return seen & (column[None] <= row[:, None]) if self.causal else seen

  def _sample(self, place):
    behind = place - self.layout.prefix
    return np.where(behind < 0, -1, behind // self.layout.width)
