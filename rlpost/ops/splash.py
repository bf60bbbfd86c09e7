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
the prefix shifts positions), or keys that are not the row's own.

Over a context axis rows without a layout, a window or a sink are served, their
tokens in the order of `data.zigzag`: each device has an early and a late piece.
Its own pair of pieces is a causal row like any other. Of the pair of a device
before it, all its queries see the early piece and none the late one; of a
device behind it, its late queries see both. So a hop is one kernel without a
mask, on half of all pairs, whichever way it is.
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
from rlpost.ops import context
from rlpost.ops.blockwise import PLAIN_SPEC, Spec
from rlpost.ops.visibility import MASKED, SharedPrefix, Where, blank

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
  ways = 1 if mesh.empty else mesh.shape[context.AXIS]
  _check(spec.rule, layout)
  if ways > 1:
    _check_ring(q_BTHP.shape[1], ways, spec.rule, layout, sink_H)
  segment = where.segment
  run = functools.partial(
      _ring if ways > 1 else _run, spec=spec, layout=layout, interpret=interpret
  )
  if not mesh.empty:
    tensor = mesh.shape['tensor']
    fits = q_BTHP.shape[2] % tensor == k_BTJP.shape[2] % tensor == 0
    over = 'tensor' if fits else None
    rows = sharding.RULES['batch']
    if q_BTHP.shape[0] % sharding.batch_ways(mesh):
      rows = None
    time = context.AXIS if ways > 1 else None
    states = PartitionSpec(rows, time, over, None)
    run = jax.shard_map(
        run, mesh=mesh, out_specs=states,
        in_specs=(
            *[states] * 3, PartitionSpec(rows, time), PartitionSpec(over)
        ),
        check_vma=False,  # the kernel does not say over what its results vary
    )
  q, k, v = (blank(x, segment) for x in (q_BTHP, k_BTJP, v_BTJP))
  return blank(run(q, k, v, segment, sink_H), segment)


def _check(rule, layout):
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


def _check_ring(length, ways, rule, layout, sink_H):
  if layout or not rule.causal or rule.window is not None or sink_H is not None:
    raise errors.InputError(
        f"'splash' over {ways} devices of the context axis serves causal rows "
        f'of documents, without {layout=}, {rule=} or a sink. Use \'ring\'.'
    )
  unit = 2 * ways * _LANES
  if length % unit:
    raise errors.InputError(
        f"'splash' over {ways} devices needs pieces of {_LANES} tokens: rows "
        f'of {length} tokens must be a multiple of {unit}; make them '
        f"{-(-length // unit) * unit}, or use 'ring'."
    )


def _run(q, k, v, segment, sink_H, *, spec, layout, interpret):
  T, dtype = q.shape[1], q.dtype
  size = _edge(spec.block, -(-T // _LANES))
  extra = -T % size
  states = [
      jnp.pad(x, ((0, 0), (0, extra), (0, 0), (0, 0))).swapaxes(1, 2)
      for x in (_scaled(q), k, v)
  ]
  # Padding sees itself, so that no softmax is empty; it is blanked later.
  ids = segment if layout is None else jnp.zeros_like(segment)
  ids = jnp.where(segment < 0, -1, ids)
  ids = jnp.pad(ids, ((0, 0), (0, extra)), constant_values=-1)
  mask = _mask(T + extra, spec.rule, layout)
  kernel = _kernel(mask, q.shape[2], size, spec, interpret)

  def one_row(q, k, v, ids):
    return kernel(q, k, v, kernels.SegmentIds(ids, ids), sink_H)

  out = jax.vmap(one_row)(*states, ids)
  return out.swapaxes(1, 2)[:, :T].astype(dtype)


def _scaled(q_BTHP):
  return q_BTHP * jnp.asarray(q_BTHP.shape[-1] ** -0.5, q_BTHP.dtype)


def _edge(block, most):
  """Edge of a block in tokens: at most `block`, and `most` lanes."""
  return min(max(block // _LANES, 1), most) * _LANES


def _kernel(mask, heads, size, spec, interpret, **more):
  names = (f.name for f in dataclasses.fields(kernels.BlockSizes))
  blocks = {name: size for name in names if name.startswith('block')}
  return kernels.make_splash_mha_single_device(
      masks.MultiHeadMask([mask] * heads),
      block_sizes=kernels.BlockSizes(**blocks),
      attn_logits_soft_cap=spec.softcap, interpret=interpret, **more,
  )


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


def _ring(q, k, v, segment, sink_H, *, spec, layout, interpret):
  del sink_H, layout  # there are none
  ids = jnp.where(segment < 0, -1, segment)
  states = (x.swapaxes(1, 2) for x in (_scaled(q), k, v))
  return _around(*states, ids, spec, interpret).swapaxes(1, 2)


class _Kernels:
  """Of a device's own pieces, and of those that a hop brings."""

  def __init__(self, q, spec, interpret):
    _, heads, length, _ = q.shape
    half = length // 2
    most = half // _LANES  # blocks have to divide a piece
    size = _edge(spec.block, most)
    while half % size:
      size -= _LANES
    make = functools.partial(
        _kernel, heads=heads, size=size, spec=spec, interpret=interpret,
        save_residuals=True,
    )
    self.half = half
    self.own = make(masks.CausalMask((length, length)))
    self.before = make(masks.FullMask((length, half)))
    self.behind = make(masks.FullMask((half, length)))


def _outputs(kernel, q, k, v, asks, shows):
  """Output [B, H, T, P] and its log-sum-exp [B, H, T]."""

  def one_row(q, k, v, asks, shows):
    out, (lse,) = kernel(q, k, v, kernels.SegmentIds(asks, shows))
    return out, lse

  return jax.vmap(one_row)(q, k, v, asks, shows)


def _gradients(kernel, q, k, v, asks, shows, out, lse, d_out):
  """What these pairs add to the gradients, the softmax being over all keys.

  The package's own gradient, given the output and log-sum-exp of all of them.
  """

  def one_row(q, k, v, asks, shows, out, lse, d_out):
    ids = kernels.SegmentIds(asks, shows)
    residuals = (
        q, k, v, ids, None, out, lse, kernel.dq_mask_info, kernel.dkv_mask_info
    )
    keep = {n: kernel.kwargs[n] for n in (
        'mask_value', 'is_mqa', 'block_sizes', 'residual_checkpoint_name',
        'mask_function', 'attn_logits_soft_cap', 'interpret')}
    found = kernels._splash_attention_bwd(
        save_residuals=False, **keep, res=residuals, do=d_out
    )
    return tuple(x.astype(jnp.float32) for x in found[3:6])

  return jax.vmap(one_row)(q, k, v, asks, shows, out, lse, d_out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _around(q, k, v, ids, spec, interpret):
  return _around_forward(q, k, v, ids, spec, interpret)[0]


def _around_forward(q, k, v, ids, spec, interpret):
  use = _Kernels(q, spec, interpret)
  me, half = jax.lax.axis_index(context.AXIS), use.half

  def before(k, v, shows):
    return _outputs(
        use.before, q, k[:, :, :half], v[:, :, :half], ids, shows[:, :half]
    )

  def behind(k, v, shows):
    out, lse = _outputs(use.behind, q[:, :, half:], k, v, ids[:, half:], shows)
    early = [(0, 0), (0, 0), (half, 0)]
    lse = jnp.pad(lse, early, constant_values=MASKED)
    return jnp.pad(out, (*early, (0, 0))), lse

  def merged(state, keys, number):
    # Outside of the branches: inside, the compiler would round sums to bf16.
    out, lse = state
    more, its = jax.lax.cond(number <= me, before, behind, *keys)
    total = jnp.logaddexp(lse, its)
    a, b = (jnp.exp(x - total)[..., None] for x in (lse, its))
    return a * out + b * more.astype(jnp.float32), total

  def hop(carry, number):
    state, keys = carry
    coming = context.pass_on(keys)  # on its way while these are used
    return (merged(state, keys, number), coming), None

  keys = context.pass_on((k, v, ids))
  out, lse = _outputs(use.own, q, k, v, ids, ids)
  carry = (out.astype(jnp.float32), lse), keys
  ways = jax.lax.axis_size(context.AXIS)
  (state, keys), _ = jax.lax.scan(hop, carry, jnp.arange(1, ways - 1))
  out, lse = merged(state, keys, ways - 1)
  out = out.astype(q.dtype)
  return out, (q, k, v, ids, out, lse)


def _around_backward(spec, interpret, residuals, d_out):
  q, k, v, ids, out, lse = residuals
  use = _Kernels(q, spec, interpret)
  me, half = jax.lax.axis_index(context.AXIS), use.half
  late = [x[:, :, half:] for x in (q, out, lse, d_out)]

  def before(d_q, k, v, shows):
    more, *d_kv = _gradients(
        use.before, q, k[:, :, :half], v[:, :, :half], ids, shows[:, :half],
        out, lse, d_out,
    )
    nothing = [(0, 0), (0, 0), (0, half), (0, 0)]
    return d_q + more, *(jnp.pad(x, nothing) for x in d_kv)

  def behind(d_q, k, v, shows):
    q, *rest = late
    more, *d_kv = _gradients(
        use.behind, q, k, v, ids[:, half:], shows, *rest
    )
    return d_q.at[:, :, half:].add(more), *d_kv

  def hop(carry, number):
    # As in `context`: what was added and the next keys travel together.
    d_q, d_kv, keys = carry
    d_kv, coming = context.pass_on((d_kv, keys))
    d_q, *more = jax.lax.cond(number <= me, before, behind, d_q, *keys)
    d_kv = [a + b for a, b in zip(d_kv, more, strict=True)]
    return (d_q, d_kv, coming), None

  keys = context.pass_on((k, v, ids))
  d_q, *d_kv = _gradients(use.own, q, k, v, ids, ids, out, lse, d_out)
  ways = jax.lax.axis_size(context.AXIS)
  carry = d_q, d_kv, keys
  d_q, d_kv, _ = jax.lax.scan(hop, carry, jnp.arange(1, ways))[0]
  found = zip((d_q, *context.pass_on(d_kv)), (q, k, v), strict=True)
  return *(x.astype(y.dtype) for x, y in found), None


_around.defvjp(_around_forward, _around_backward)
