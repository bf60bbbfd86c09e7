"""GGUF files to parameters, one tensor at a time.

Tensor types and rarer dequantisers come from the `gguf` package; the common
ones are written here straight into their place in the fused matrices.
"""

import math
import os

import gguf
import numpy as np

from rlpost import errors
from rlpost.models import config as model_config
from rlpost.weights import gguf_header, layout

Type = gguf.GGMLQuantizationType
_CHUNK = 1 << 17  # elements dequantised at a time: what a core's cache holds
_ROPE_FREQS = 'rope_freqs.weight'


def _f16(blocks, at):
  """The half-precision number at byte `at` of each block, as fp32 [n, 1]."""
  return blocks[:, at : at + 2].copy().view('<f2').astype(np.float32)


def _f32(blocks, out):
  out[...] = blocks.view('<f4')


def _half(blocks, out):
  out[...] = blocks.view('<f2')


def _bf16(blocks, out):
  out.view(np.uint32)[...] = blocks.view('<u2')
  out.view(np.uint32)[...] <<= 16


def _q8_0(blocks, out):
  np.multiply(blocks[:, 2:].view(np.int8), _f16(blocks, 0), out=out)


def _nibbles(bytes_NC, out):
  half = bytes_NC.shape[1]
  out[:, :half] = bytes_NC & 15
  out[:, half:] = bytes_NC >> 4


def _q4_0(blocks, out):
  _nibbles(blocks[:, 2:], out)
  out -= 8
  out *= _f16(blocks, 0)


def _q4_1(blocks, out):
  _nibbles(blocks[:, 4:], out)
  out *= _f16(blocks, 0)
  out += _f16(blocks, 2)


def _with_package(kind):
  def dequantise(blocks, out):
    out[...] = gguf.quants.dequantize(blocks, kind)

  return dequantise


# Writes blocks (uint8 [n, bytes per block]) into fp32 [n, values per block].
DEQUANTISERS = {
    Type.F32: _f32,
    Type.F16: _half,
    Type.BF16: _bf16,
    Type.Q8_0: _q8_0,
    Type.Q4_0: _q4_0,
    Type.Q4_1: _q4_1,
} | {
    kind: _with_package(kind)
    for kind in (
        Type.Q5_0, Type.Q5_1, Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K,
        Type.Q6_K, Type.IQ4_NL, Type.IQ4_XS,
    )
}


def dequantise(raw: np.ndarray, kind: int, out: np.ndarray) -> None:
  """Fills `out` from the bytes of a tensor.

  Args:
    raw: uint8 [rows, bytes per row].
    kind: a key of DEQUANTISERS.
    out: [rows, columns] of any float type, contiguous.
  """
  block_values, block_bytes = gguf.GGML_QUANT_SIZES[Type(kind)]
  blocks = raw.reshape(-1, block_bytes)
  values = out.reshape(-1, block_values)
  step = max(_CHUNK // block_values, 1)
  for i in range(0, len(blocks), step):
    part = values[i : i + step]
    if out.dtype == np.float32:
      DEQUANTISERS[kind](blocks[i : i + step], part)
    else:
      wide = np.empty(part.shape, np.float32)
      DEQUANTISERS[kind](blocks[i : i + step], wide)
      part[...] = wide


def load(
    path: str | os.PathLike, dtype=np.float32
) -> tuple[model_config.ModelConfig, dict[str, np.ndarray]]:
  """Config and parameters of a Llama-architecture GGUF file.

  Peak memory is the result and the bytes of one tensor.

  Args:
    path: the file.
    dtype: type of the parameters (np.float32 or a type of ml_dtypes).

  Raises:
    InputError: the file is missing, damaged, cut off, of another architecture
      or tensor type, or holds other tensors than its config says.
  """
  header = gguf_header.read(path)
  config = read_config(header)
  slots = layout.slots(config)
  ignored = {_ROPE_FREQS} & header.tensors.keys()
  problem = layout.keys_problem(
      [s.gguf for s in slots], header.tensors.keys() - ignored
  )
  if problem:
    raise errors.InputError(f'Tensors of {header.path}: {problem}.')
  slots.sort(key=lambda s: header.tensors[s.gguf].offset)
  params = layout.allocate(config, dtype)
  with open(header.path, 'rb') as file:
    for slot in slots:
      out = params[slot.param][slot.start : slot.stop]
      tensor = header.tensors[slot.gguf]
      raw = _read_rows(header, file, tensor, out.shape)
      if slot.rotary_heads:
        # Rows are quantised one by one, so their bytes can be reordered.
        raw = raw[layout.half_split_rows(slot.rotary_heads, len(raw))]
      dequantise(raw, tensor.type_id, out)
  return config, params


def _read_rows(header, file, tensor, shape) -> np.ndarray:
  """Bytes of a tensor, uint8 [rows, bytes per row] (one row for a vector)."""
  if tensor.type_id not in DEQUANTISERS:
    known = {t.value: t.name for t in Type}
    raise errors.InputError(
        f'{header.path}: tensor {tensor.name} has type '
        f'{known.get(tensor.type_id, tensor.type_id)}; supported: '
        f'{", ".join(t.name for t in DEQUANTISERS)}.'
    )
  if tensor.shape != shape:
    raise errors.InputError(
        f'{header.path}: tensor {tensor.name} has shape {tensor.shape}, '
        f'expected {shape} from its metadata.'
    )
  block_values, block_bytes = gguf.GGML_QUANT_SIZES[Type(tensor.type_id)]
  if shape[-1] % block_values:
    raise errors.InputError(
        f'{header.path}: rows of {tensor.name} have {shape[-1]} values, not a '
        f'multiple of the block of {block_values}.'
    )
  rows = math.prod(shape[:-1])
  row_bytes = shape[-1] // block_values * block_bytes
  end = tensor.offset + rows * row_bytes
  if end > header.size:
    raise errors.InputError(
        f'{header.path} is cut off: tensor {tensor.name} ends at byte {end} '
        f'of {header.size}. Download it again.'
    )
  file.seek(tensor.offset)
  raw = np.fromfile(file, np.uint8, rows * row_bytes)
  return raw.reshape(rows, row_bytes)


def read_config(header: gguf_header.Header) -> model_config.ModelConfig:
  """The ModelConfig that the metadata of a GGUF file describes."""
  meta = header.metadata
  architecture = meta.get('general.architecture')
  if architecture != 'llama':
    raise errors.InputError(
        f'{header.path} has architecture {architecture!r}; supported: llama.'
    )
  if meta.get('split.count', 1) > 1:
    raise errors.InputError(
        f'{header.path} is one of {meta["split.count"]} parts; merge them with '
        'llama-gguf-split --merge.'
    )

  def get(key, *default):
    value = meta.get(f'llama.{key}', *default)
    if value is None and not default:
      raise errors.InputError(f'{header.path} has no metadata llama.{key}.')
    if isinstance(value, list):
      raise errors.InputError(
          f'{header.path}: llama.{key} differs by layer; not supported.'
      )
    return value

  heads, width = get('attention.head_count'), get('embedding_length')
  head_dim = get('attention.key_length', width // heads)
  for key, value, wanted in (
      ('expert_count', get('expert_count', 0), 0),
      ('attention.value_length', get('attention.value_length', head_dim),
       head_dim),
      ('rope.dimension_count', get('rope.dimension_count', head_dim),
       head_dim),
  ):
    if value != wanted:
      raise errors.InputError(
          f'{header.path}: llama.{key} is {value}; only {wanted} is supported.'
      )
  table = header.tensors.get('token_embd.weight')
  if table is None:
    raise errors.InputError(f'{header.path} has no tensor token_embd.weight.')
  theta = get('rope.freq_base', 10_000.0)
  return model_config.ModelConfig(
      vocab_size=table.shape[0],
      width=width,
      num_layers=get('block_count'),
      num_heads=heads,
      num_kv_heads=get('attention.head_count_kv', heads),
      head_dim=head_dim,
      hidden=get('feed_forward_length'),
      rope_theta=theta,
      rope_scaling=_rope_scaling(header, get, theta, head_dim),
      # Metadata holds fp32: 1e-5 comes back as 9.99999974e-06.
      norm_eps=float(str(np.float32(get('attention.layer_norm_rms_epsilon')))),
      tied='output.weight' not in header.tensors,
      max_position=get('context_length'),
  )


def _rope_scaling(header, get, theta, head_dim):
  """RopeScaling from metadata, or from the table of a Llama 3 file."""
  if _ROPE_FREQS in header.tensors:
    return _llama3_scaling(header, theta, head_dim)
  kind = get('rope.scaling.type', 'none')
  factor = get('rope.scaling.factor', get('rope.scale_linear', 1.0))
  if kind == 'none' and get('rope.scale_linear', None):
    kind = 'linear'
  if kind == 'none':
    return None
  if kind not in ('linear', 'yarn'):
    raise errors.InputError(
        f'{header.path}: RoPE scaling {kind!r}; supported: linear, yarn, and '
        'the frequency table of Llama 3.'
    )
  for key in ('attn_factor', 'yarn_attn_factor', 'yarn_ext_factor'):
    if get(f'rope.scaling.{key}', 1.0) not in (1.0, -1.0):
      raise errors.InputError(
          f'{header.path}: llama.rope.scaling.{key} is not supported.'
      )
  length = get(
      'rope.scaling.original_context_length', get('context_length')
  )
  return model_config.RopeScaling(
      kind,
      factor,
      length,
      beta_fast=get('rope.scaling.yarn_beta_fast', 32.0),
      beta_slow=get('rope.scaling.yarn_beta_slow', 1.0),
  )


def _llama3_scaling(header, theta, head_dim):
  """Finds the factor whose Llama 3 bands give the file's table of divisors.

  Llama 3.1 and later store, for each rotary pair, what its frequency is
  divided by; all of them use bands 1 and 4 over 8,192 positions.
  """
  tensor = header.tensors[_ROPE_FREQS]
  with open(header.path, 'rb') as file:
    raw = _read_rows(header, file, tensor, (head_dim // 2,))
  stored = np.empty((1, head_dim // 2), np.float32)
  dequantise(raw, tensor.type_id, stored)
  scaling = model_config.RopeScaling('llama3', float(stored.max()), 8192)
  freq = theta ** (-np.arange(head_dim // 2) * 2 / head_dim)
  turns = scaling.original_max_position * freq / (2 * math.pi)
  low, high = scaling.low_freq_factor, scaling.high_freq_factor
  keep = np.clip((turns - low) / (high - low), 0, 1)
  if not np.allclose(stored, 1 / (keep + (1 - keep) / scaling.factor), 1e-3):
    raise errors.InputError(
        f'{header.path}: {_ROPE_FREQS} is not the table of Llama 3 with factor '
        f'{scaling.factor:g}, bands 1 and 4 over 8192 positions.'
    )
  return scaling
