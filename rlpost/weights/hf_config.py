"""config.json of a Hugging Face Llama folder to and from a ModelConfig.

A key that would change the mathematics and that we do not compute is an error;
all other keys say nothing about the numbers and are ignored.
"""

import math
from collections.abc import Mapping
from typing import Any

from rlpost import errors
from rlpost.models import config as model_config

# Key -> the values that mean "as in our model".
_ONLY = {
    'model_type': ('llama',),
    'hidden_act': ('silu', 'swish'),
    'attention_bias': (False, None),
    'mlp_bias': (False, None),
    'partial_rotary_factor': (1.0, None),
    'quantization_config': (None,),
}


def from_json(data: Mapping[str, Any], where: str) -> model_config.ModelConfig:
  """The ModelConfig that a config.json describes.

  Reads both spellings of RoPE: `rope_theta` with `rope_scaling`, and the
  `rope_parameters` of newer files.

  Args:
    data: the parsed file.
    where: its path, for messages.

  Raises:
    InputError: a key is missing, or asks for something that we do not compute.
  """
  for key, allowed in _ONLY.items():
    value = data.get(key, allowed[0] if key != 'model_type' else None)
    if value not in allowed:
      raise errors.InputError(
          f'{where}: {key} is {value!r}; supported: {allowed[0]!r}.'
      )
  try:
    width, heads = data['hidden_size'], data['num_attention_heads']
    head_dim = data.get('head_dim') or width // heads
    rope = dict(data.get('rope_scaling') or {})
    rope |= data.get('rope_parameters') or {}
    theta = rope.get('rope_theta', data.get('rope_theta', 10_000.0))
    max_position = data.get('max_position_embeddings', 2048)
    return model_config.ModelConfig(
        vocab_size=data['vocab_size'],
        width=width,
        num_layers=data['num_hidden_layers'],
        num_heads=heads,
        num_kv_heads=data.get('num_key_value_heads') or heads,
        head_dim=head_dim,
        hidden=data['intermediate_size'],
        rope_theta=float(theta),
        rope_scaling=_rope_scaling(rope, data, max_position, where),
        norm_eps=data.get('rms_norm_eps', 1e-6),
        tied=bool(data.get('tie_word_embeddings', False)),
        max_position=max_position,
    )
  except KeyError as error:
    raise errors.InputError(f'{where} has no key {error}.') from error


def _rope_scaling(rope, data, max_position, where):
  """RopeScaling of a `rope_parameters` dict, or None."""
  kind = rope.get('rope_type', rope.get('type', 'default')) or 'default'
  if kind == 'default':
    return None
  if kind not in ('linear', 'yarn', 'llama3'):
    raise errors.InputError(
        f'{where}: RoPE scaling {kind!r}; supported: default, linear, yarn, '
        'llama3.'
    )
  if rope.get('partial_rotary_factor', 1.0) != 1.0:
    raise errors.InputError(f'{where}: partial rotary is not supported.')
  factor = float(rope['factor'])
  length = data.get('original_max_position_embeddings') or rope.get(
      'original_max_position_embeddings', max_position
  )
  if kind == 'linear':
    return model_config.RopeScaling(kind, factor, length)
  if kind == 'llama3':
    return model_config.RopeScaling(
        kind, factor, length, float(rope['low_freq_factor']),
        float(rope['high_freq_factor']),
    )
  usual = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
  if (
      not math.isclose(rope.get('attention_factor') or usual, usual)
      or (rope.get('mscale') and rope.get('mscale_all_dim'))
      or not rope.get('truncate', True)
  ):
    raise errors.InputError(
        f'{where}: YaRN with its own attention_factor, mscale or truncate is '
        f'not supported (the usual attention factor is {usual:.6g}).'
    )
  return model_config.RopeScaling(
      kind, factor, length,
      beta_fast=float(rope.get('beta_fast') or 32),
      beta_slow=float(rope.get('beta_slow') or 1),
  )


def to_json(config: model_config.ModelConfig, dtype: str) -> dict[str, Any]:
  """config.json of a LlamaForCausalLM with this shape.

  Args:
    config: the shape; a value head is not part of the file's architecture.
    dtype: what the weights are stored as, for example 'bfloat16'.
  """
  theta, scaling = config.rope_theta, config.rope_scaling
  rope = None
  if scaling is not None and scaling.kind == 'ntk':
    # The same as a larger base, which every reader knows.
    theta *= scaling.factor ** (config.head_dim / (config.head_dim - 2))
  elif scaling is not None:
    rope = {
        'rope_type': scaling.kind,
        'factor': scaling.factor,
        'original_max_position_embeddings': scaling.original_max_position,
    }
    if scaling.kind == 'llama3':
      rope['low_freq_factor'] = scaling.low_freq_factor
      rope['high_freq_factor'] = scaling.high_freq_factor
    if scaling.kind == 'yarn':
      rope['beta_fast'] = scaling.beta_fast
      rope['beta_slow'] = scaling.beta_slow
  return {
      'architectures': ['LlamaForCausalLM'],
      'model_type': 'llama',
      'vocab_size': config.vocab_size,
      'hidden_size': config.width,
      'intermediate_size': config.hidden,
      'num_hidden_layers': config.num_layers,
      'num_attention_heads': config.num_heads,
      'num_key_value_heads': config.num_kv_heads,
      'head_dim': config.head_dim,
      'hidden_act': 'silu',
      'attention_bias': False,
      'mlp_bias': False,
      'max_position_embeddings': config.max_position,
      'rms_norm_eps': config.norm_eps,
      'rope_theta': theta,
      'rope_scaling': rope,
      'tie_word_embeddings': config.tied,
      'torch_dtype': dtype,
  }
