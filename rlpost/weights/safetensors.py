"""Hugging Face folders of the Llama architecture: parameters in and out."""

import dataclasses
import json
import os
import pathlib
import re

import numpy as np

from rlpost import errors
from rlpost.data import tokenizer as tokenizers
from rlpost.models import config as model_config
from rlpost.weights import hf_config, layout, tensorfile

_FLOATS = tuple(tensorfile.DTYPES[n] for n in ('F32', 'BF16', 'F16', 'F64'))
_INDEX = 'model.safetensors.index.json'
# Old exports store the rotary frequencies, which follow from the config.
_IGNORED = re.compile(r'model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq')


def _read_json(path: pathlib.Path):
  """The JSON in a file; InputError names the file if it cannot be read."""
  try:
    return json.loads(path.read_text('utf-8'))
  except (OSError, ValueError) as error:
    raise errors.InputError(f'Cannot read {path}: {error}.') from error


def load_config(path: str | os.PathLike) -> model_config.ModelConfig:
  """The ModelConfig that a folder's config.json describes."""
  where = pathlib.Path(path) / 'config.json'
  return hf_config.from_json(_read_json(where), str(where))


def load_folder(
    path: str | os.PathLike, dtype=np.float32
) -> tuple[model_config.ModelConfig, dict[str, np.ndarray]]:
  """Config and parameters of a folder with config.json and *.safetensors.

  Tensors are memory maps until they are copied to their place, so that peak
  memory is the result. A folder with a `score.weight` of one row gets
  `value_head=True`.

  Args:
    path: the folder; one file, or shards named by an index.
    dtype: type of the parameters (np.float32 or a type of ml_dtypes).

  Raises:
    InputError: a file is missing or damaged, a tensor is missing, unknown or
      of another shape than config.json says.
  """
  path = pathlib.Path(path)
  config = load_config(path)
  tensors = {
      k: v for k, v in _read_tensors(path).items() if not _IGNORED.fullmatch(k)
  }
  config = _with_heads(config, tensors, path)
  slots = layout.slots(config)
  problem = layout.keys_problem([s.hf for s in slots], tensors)
  if problem:
    raise errors.InputError(f'Tensors of {path}: {problem}.')
  params = layout.allocate(config, dtype)
  for slot in slots:
    out, tensor = params[slot.param][slot.start : slot.stop], tensors[slot.hf]
    if out.shape != tensor.shape:
      raise errors.InputError(
          f'{path}: {slot.hf} has shape {tensor.shape}, expected {out.shape} '
          'from config.json.'
      )
    if tensor.dtype not in _FLOATS:
      raise errors.InputError(
          f'{path}: {slot.hf} has type {tensor.dtype}; supported: '
          f'{", ".join(str(d) for d in _FLOATS)}.'
      )
    out[...] = tensor
  return config, params


def _read_tensors(path: pathlib.Path) -> dict[str, np.ndarray]:
  """Memory maps of all tensors of a folder, over its shards."""
  if (path / _INDEX).exists():
    where = _read_json(path / _INDEX).get('weight_map', {})
    files = [path / name for name in sorted(set(where.values()))]
    for file in files:
      if file.parent != path:
        raise errors.InputError(f'{path / _INDEX} points outside its folder.')
  else:
    where = None
    files = sorted(path.glob('*.safetensors'))
    if len(files) != 1:
      raise errors.InputError(
          f'{path} has {len(files)} *.safetensors files and no {_INDEX}: '
          'expected one file, or an index that names the shards.'
      )
  tensors = {}
  for file in files:
    for name, tensor in tensorfile.read(file).items():
      if name in tensors:
        raise errors.InputError(f'{path}: {name} is in two shards.')
      tensors[name] = tensor
  if where is not None:
    problem = layout.keys_problem(where, tensors)
    if problem:
      raise errors.InputError(f'Shards of {path / _INDEX}: {problem}.')
  return tensors


def _with_heads(config, tensors, path):
  """Adds a value head if stored; drops a stored copy of a tied head."""
  if 'score.weight' in tensors:
    config = dataclasses.replace(config, value_head=True)
  head, table = tensors.get('lm_head.weight'), 'model.embed_tokens.weight'
  if config.tied and head is not None and table in tensors:
    if not np.array_equal(head, tensors[table]):
      raise errors.InputError(
          f'{path}: tie_word_embeddings is true, but lm_head.weight differs '
          f'from {table}. Set tie_word_embeddings to false.'
      )
    del tensors['lm_head.weight']
  return config


def save_folder(
    path: str | os.PathLike,
    config: model_config.ModelConfig,
    params,
    tokenizer: tokenizers.Tokenizer | None = None,
    dtype='bfloat16',
) -> None:
  """Writes a folder that transformers, vLLM and others load as Llama.

  A value head is written as `score.weight`, which a causal model ignores.

  Args:
    path: the folder; made if absent. Files of the same names are replaced,
      config.json last.
    config: the shape of the model.
    params: flat dict of per-layer arrays (NumPy or JAX).
    tokenizer: written with its chat template when given.
    dtype: 'bfloat16' (rounded to nearest even) or 'float32'.

  Raises:
    InputError: a parameter is missing, unknown or of a wrong shape.
  """
  if dtype not in ('bfloat16', 'float32'):
    raise errors.InputError(f'{dtype=} must be bfloat16 or float32.')
  shapes = layout.shapes(config)
  problem = layout.keys_problem(shapes, params)
  if problem:
    raise errors.InputError(f'Parameters to save: {problem}.')
  for name, shape in shapes.items():
    if tuple(params[name].shape) != shape:
      raise errors.InputError(
          f'{name} has shape {tuple(params[name].shape)}, expected {shape}.'
      )
  path = pathlib.Path(path)
  path.mkdir(parents=True, exist_ok=True)
  sources = [
      tensorfile.Source(
          s.hf,
          (s.stop - s.start, *shapes[s.param][1:]),
          lambda s=s: np.asarray(params[s.param])[s.start : s.stop],
      )
      for s in layout.slots(config)
  ]
  code = {'bfloat16': 'BF16', 'float32': 'F32'}[dtype]
  tensorfile.write(
      path / 'model.safetensors', sources, tensorfile.DTYPES[code]
  )
  data = hf_config.to_json(config, dtype)
  generation = {'_from_model_config': True}
  if tokenizer is not None:
    tokenizer.save(path)
    ids = {
        'bos_token_id': tokenizer.bos_id,
        'eos_token_id': tokenizer.eos_id,
        'pad_token_id': tokenizer.pad_id,
    }
    data |= ids
    generation = ids
  _write_json(path / 'generation_config.json', generation)
  _write_json(path / 'config.json', data)


def _write_json(path: pathlib.Path, data) -> None:
  text = json.dumps(data, indent=2, ensure_ascii=False)
  path.write_text(text + '\n', 'utf-8')
