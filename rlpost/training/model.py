"""The model of a run: its shape, its tokenizer, a way to its parameters."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from rlpost import errors
from rlpost.data import tokenizer as tokenizers
from rlpost.models import config as model_configs
from rlpost.models import transformer
from rlpost.weights import load as weights


@dataclasses.dataclass(frozen=True)
class Model:
  """A decoder's shape, its tokenizer, and a way to get its parameters.

  `params()` reads or makes them on the host: {name: array}, per-layer leaves.
  """

  config: model_configs.ModelConfig
  tokenizer: tokenizers.Tokenizer
  params: Any
  fingerprint: str
  stacked: bool
  trainable: str
  dtype: str


class Section(NamedTuple):
  """What `config.model` says of programs."""

  model: model_configs.ModelConfig
  stacked: bool
  trainable: str
  dtype: str


def split_model(section: Mapping) -> Section:
  """Of a `config.model`; reads no file where it gives a shape."""
  rest = dict(section)
  stacked = rest.pop('stacked', False)
  trainable, dtype = rest.pop('trainable', '.*'), rest.pop('dtype', 'float32')
  return Section(model_config(**rest), stacked, trainable, dtype)


def model_config(
    *, source: str, shape: str = '', value_head: bool = False,
    rope: Mapping | None = None,
) -> model_configs.ModelConfig:
  """The decoder's shape; arguments as of `load_model`.

  Reads no file where `shape` says it all.
  """
  changes = {'value_head': value_head}
  if rope and rope['kind'] != 'none':
    changes['rope_scaling'] = model_configs.RopeScaling(**rope)
  kind, _, name = source.partition(':')
  if shape or kind == 'scratch':
    return model_configs.named(shape or name, **changes)
  return dataclasses.replace(weights.load_config(source), **changes)


def load_model(
    *, source: str, seed: int, value_head: bool = False,
    stacked: bool = False, trainable: str = '.*', dtype: str = 'float32',
    rope: Mapping | None = None, shape: str = '',
) -> Model:
  """The model of `config.model`.

  Args:
    source: 'scratch:NAME' for random parameters of a named shape over bytes;
      else what `weights.load` reads: 'smollm2', a .gguf file, a folder of
      safetensors, 'hub:ORG/NAME'.
    seed: of random parameters.
    value_head: add a scalar head, random.
    stacked: one scanned layer instead of per-layer leaves.
    trainable: regular expression of the names of parameters that train.
    dtype: of activations; parameters are fp32.
    rope: fields of `models.config.RopeScaling` that take the place of the
      model's own; those of kind 'none', or None, change nothing.
    shape: a name in `models.config.CONFIGS`, so that a run can be planned
      where the files of the model are not; they must agree with it.
  """
  config = model_config(
      source=source, shape=shape, value_head=value_head, rope=rope
  )
  if source.startswith('scratch:'):

    def init():
      return transformer.init(config, jax.random.key(seed))

    return Model(
        config, tokenizers.bytes_tokenizer(), init, f'{source}:{seed}',
        stacked, trainable, dtype,
    )
  if shape:
    found = model_config(source=source, value_head=value_head, rope=rope)
    if found != config:
      raise errors.InputError(
          f'model.{shape=} is {config}, but {source} holds {found}; leave '
          'shape out.'
      )
  tokenizer = weights.load_tokenizer(source)

  def read():
    params = weights.load(source)[1]
    if not value_head:
      params.pop('value/kernel', None)  # of a critic that is not wanted
    elif 'value/kernel' not in params:
      rng = np.random.default_rng(seed)
      draw = rng.standard_normal((1, config.width)) * config.width**-0.5
      params = {**params, 'value/kernel': draw.astype(np.float32)}
    return params

  fingerprint = f'{source}:{tokenizer.fingerprint}'
  return Model(
      config, tokenizer, read, fingerprint, stacked, trainable, dtype
  )
