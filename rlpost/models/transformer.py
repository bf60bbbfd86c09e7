"""The one decoder: tokens and where they stand in, hidden states out.

Parameters are a flat dict, `'layers/0/attn/qkv' -> array`, in one of two
layouts that compute the same: per-layer leaves (decoding, and training where
compile time is no matter) or `'layers/attn/qkv'` with a leading layer axis
(one scanned layer: large models compile in minutes).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from rlpost import errors, sharding
from rlpost.models.config import ModelConfig
from rlpost.models.layers import Block, RMSNorm, Table
from rlpost.ops import rope as rope_ops
from rlpost.ops import spread

Params = Mapping[str, Any]

REMAT = {
    'none': None,
    'full': jax.checkpoint_policies.nothing_saveable,
    'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class Decoder(nnx.Module):
  """Holds the parameters; `hidden` and the decoder programs run them."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    self.embed = Table(config.vocab_size, config, rngs, 'table')
    self.layers = nnx.List(
        [Block(config, rngs) for _ in range(config.num_layers)]
    )
    self.norm = RMSNorm(config, rngs)
    if not config.tied:
      self.head = Table(config.vocab_size, config, rngs, 'kernel')
    if config.value_head:
      self.value = Table(1, config, rngs, 'kernel', axis=None)


@dataclasses.dataclass(frozen=True)
class Spec:
  """What the parameters of a config look like.

  Attributes:
    shapes: name -> `jax.ShapeDtypeStruct`.
    axes: name -> logical axis of each dimension.
  """

  shapes: Mapping[str, jax.ShapeDtypeStruct]
  axes: Mapping[str, tuple]


def _flat(state) -> dict:
  return {'/'.join(map(str, path)): x for path, x in nnx.to_flat_state(state)}


def spec(config: ModelConfig, stacked=False) -> Spec:
  """Shapes and logical axes of the parameters, in either layout."""
  abstract = nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0)))
  flat = _flat(nnx.state(abstract))
  shapes = {
      k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in flat.items()
  }
  axes = {k: v.get_metadata()['axes'] for k, v in flat.items()}
  if stacked:
    shapes = jax.eval_shape(stack, shapes)
    first = {k: axes[k] for k in axes if not k.startswith('layers/')}
    for k in axes:
      if k.startswith('layers/0/'):
        first['layers/' + k.split('/', 2)[2]] = ('layers', *axes[k])
    axes = first
  return Spec(shapes, axes)


def init(config: ModelConfig, key) -> dict:
  """Random parameters, per-layer leaves."""
  return _init(config, key)


@functools.partial(jax.jit, static_argnums=0)
def _init(config, key):
  model = Decoder(config, nnx.Rngs(params=key))
  return {k: v[...] for k, v in _flat(nnx.state(model)).items()}


def is_stacked(params: Params) -> bool:
  """Whether layers have a leading axis instead of leaves of their own."""
  return 'layers/attn/qkv' in params


def stack(params: Params) -> dict:
  """Per-layer leaves -> leaves with a leading layer axis."""
  out, layers = {}, {}
  for name, x in params.items():
    if name.startswith('layers/'):
      _, i, rest = name.split('/', 2)
      layers.setdefault(rest, {})[int(i)] = x
    else:
      out[name] = x
  for rest, xs in layers.items():
    out['layers/' + rest] = jnp.stack([xs[i] for i in range(len(xs))])
  return out


def unstack(params: Params) -> dict:
  """The inverse of `stack`."""
  out = {}
  for name, x in params.items():
    if name.startswith('layers/'):
      rest = name.split('/', 1)[1]
      out |= {f'layers/{i}/{rest}': x[i] for i in range(x.shape[0])}
    else:
      out[name] = x
  return out


def layer(params: Params, i: int) -> dict:
  """Parameters of layer i, from either layout."""
  prefix = 'layers/' if is_stacked(params) else f'layers/{i}/'
  part = {
      k[len(prefix):]: x for k, x in params.items() if k.startswith(prefix)
  }
  return {k: x[i] for k, x in part.items()} if is_stacked(params) else part


def by_period(config: ModelConfig, params: Params) -> dict:
  """Stacked layers, to be scanned: [periods, layers of a period, ...]."""
  return {
      k.removeprefix('layers/'): v.reshape(
          -1, len(config.windows), *v.shape[1:]
      )
      for k, v in params.items() if k.startswith('layers/')
  }


@functools.cache
def layer_axes(config: ModelConfig) -> dict:
  """Logical axes of the parameters of one layer, named as `layer` does."""
  axes, prefix = spec(config).axes, 'layers/0/'
  return {
      k.removeprefix(prefix): v for k, v in axes.items() if k.startswith(prefix)
  }


@functools.cache
def _definition(kind, config):
  return nnx.graphdef(nnx.eval_shape(lambda: kind(config, nnx.Rngs(0))))


def block(config: ModelConfig, params: Params) -> Block:
  """A `Block` over the parameters that `layer` returns."""
  nested = {}
  for name, x in params.items():
    inner = nested
    *path, last = name.split('/')
    for part in path:
      inner = inner.setdefault(part, {})
    inner[last] = x
  return nnx.merge(_definition(Block, config), nested)


def norm(config: ModelConfig, params: Params, x):
  """The final norm."""
  state = {'scale': params['norm/scale']}
  return nnx.merge(_definition(RMSNorm, config), state)(x)


def head(params: Params):
  """The output table [V, D]."""
  return params.get('head/kernel', params['embed/table'])


def value(params: Params, h):
  """The scalar head: fp32 [...] from [..., D]."""
  if 'value/kernel' not in params:
    raise errors.InputError('The model has no value head; set value_head.')
  w = params['value/kernel'][0].astype(jnp.float32)
  return (h.astype(jnp.float32) * w[(None,) * (h.ndim - 1)]).sum(-1)


def rope(config: ModelConfig, position_BT):
  """(cos, sin) for `Block`."""
  scaling = rope_ops.frequencies(
      config.head_dim, config.rope_theta, config.rope_scaling
  )
  return rope_ops.angles(position_BT, *scaling)


def embed(params: Params, tokens_BT, dtype):
  """Token embeddings [B, T, D]."""
  return params['embed/table'].astype(dtype)[tokens_BT]


def hidden(
    config: ModelConfig, params: Params, tokens_BT, position_BT,
    attend: Callable, *, remat='none', dtype=jnp.float32,
):
  """Final hidden states [B, T, D], normed: what the heads read.

  Args:
    attend: `attend(q, k, v, window) -> o`, closed over the visibility;
      `window` is the layer's of `config.windows`.
    remat: 'none', 'full' or 'dots': what the backward pass computes again.
      On CPU it needs stacked layers: XLA merges what unrolled ones repeat.
    dtype: of activations and of weights inside products.
  """
  x = spread.lookup(params['embed/table'], tokens_BT, dtype)
  x = sharding.constrain(x, ('batch', 'time', None))
  cos, sin = rope(config, position_BT)

  axes = layer_axes(config)

  def one(window, x, w, cos, sin):
    w = {k: sharding.gathered(v, axes[k], dtype) for k, v in w.items()}

    def look(q, k, v):
      return attend(q, k, v, window), None

    return block(config, w)(x, (cos, sin), look)[0]

  if remat not in REMAT:
    raise errors.InputError(f'{remat=} must be one of {sorted(REMAT)}.')
  scanned = is_stacked(params)
  layers = {}  # one function per window: a layer is traced once
  for window in config.windows:
    layer_ = functools.partial(one, window)
    if remat != 'none':
      layer_ = jax.checkpoint(
          layer_, policy=REMAT[remat], prevent_cse=not scanned
      )
    layers[window] = layer_ if scanned else jax.jit(layer_)
  period = len(config.windows)
  if scanned:
    stacked = by_period(config, params)

    def some(x, w):
      for i, window in enumerate(config.windows):
        x = layers[window](x, {k: v[i] for k, v in w.items()}, cos, sin)
      return x, None

    x, _ = jax.lax.scan(some, x, stacked)
  else:
    for i in range(config.num_layers):
      window = config.windows[i % period]
      x = layers[window](x, layer(params, i), cos, sin)
  return norm(config, params, x)
