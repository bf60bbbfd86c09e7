"""One name for a model, whatever it is stored as."""

import os
import pathlib

import numpy as np

from rlpost import errors
from rlpost.data import tokenizer as tokenizers
from rlpost.models import config as model_config
from rlpost.weights import fetch, gguf, gguf_header, safetensors

_HUB_PATTERNS = ('*.json', '*.safetensors', '*.jinja')


def load(
    spec: str | os.PathLike, dtype=np.float32
) -> tuple[
    model_config.ModelConfig, dict[str, np.ndarray], tokenizers.Tokenizer
]:
  """Config, parameters and tokenizer of a model.

  Args:
    spec: 'smollm2' (the cached base model), a path to a .gguf file, a Hugging
      Face folder of the Llama architecture, or 'hub:ORG/NAME', which asks the
      hub.
    dtype: type of the parameters.

  Raises:
    InputError: there is no such model, or its files are not usable.
  """
  path = resolve(spec)
  module = safetensors.load_folder if path.is_dir() else gguf.load
  config, params = module(path, dtype)
  tokenizer = load_tokenizer(path)
  if tokenizer.vocab_size > config.vocab_size:
    raise errors.InputError(
        f'{path}: the tokenizer has {tokenizer.vocab_size} ids, the model '
        f'{config.vocab_size}.'
    )
  return config, params, tokenizer


def load_tokenizer(spec: str | os.PathLike) -> tokenizers.Tokenizer:
  """The tokenizer alone; `spec` as in `load`."""
  path = resolve(spec)
  if path.is_dir():
    return tokenizers.from_file(path)
  return tokenizers.from_gguf_metadata(gguf_header.read(path).metadata)


def load_config(spec: str | os.PathLike) -> model_config.ModelConfig:
  """The ModelConfig alone, without reading weights; `spec` as in `load`."""
  path = resolve(spec)
  if path.is_dir():
    return safetensors.load_config(path)
  return gguf.read_config(gguf_header.read(path))


def resolve(spec: str | os.PathLike) -> pathlib.Path:
  """The local .gguf file or folder that `spec` names."""
  spec = os.fspath(spec)
  if spec == 'smollm2':
    return fetch.base_model_path()
  if spec.startswith('hub:'):
    return _from_hub(spec.removeprefix('hub:'))
  path = pathlib.Path(spec).expanduser()
  if path.is_dir() or (path.suffix == '.gguf' and path.exists()):
    return path
  raise errors.InputError(
      f"No model {spec!r}: neither 'smollm2', an existing .gguf file, an "
      "existing folder, nor 'hub:ORG/NAME'."
  )


def _from_hub(repo: str) -> pathlib.Path:
  """Downloads a repository's folder, or finds it in the hub's cache."""
  try:
    import huggingface_hub
  except ImportError as error:
    raise errors.InputError(
        f'hub:{repo} needs the package huggingface_hub: pip install it, or '
        'give a local folder.'
    ) from error
  try:
    folder = huggingface_hub.snapshot_download(
        repo, allow_patterns=list(_HUB_PATTERNS)
    )
  except Exception as error:  # network, authorisation, a wrong name: many types
    raise errors.InputError(
        f'Cannot get hub:{repo} ({type(error).__name__}: {error}). Is the '
        'machine online, and the name right? A local folder works offline.'
    ) from error
  return pathlib.Path(folder)
