"""Where each tensor of a weight file lives in our parameters.

Parameters are a flat dict of per-layer arrays, weights stored [out, in]. Files
keep q, k, v and gate, up apart; we fuse each group into one matrix. A `Slot`
says which rows of which parameter a file's tensor fills.
"""

from typing import NamedTuple

import numpy as np

from rlpost.models import config as model_config

ModelConfig = model_config.ModelConfig


class Slot(NamedTuple):
  """Rows `[start, stop)` of parameter `param`, and their names in files.

  `rotary_heads` is the number of heads if the rows are rotated by RoPE (GGUF
  stores those interleaved), else 0.
  """

  param: str
  start: int
  stop: int
  hf: str
  gguf: str
  rotary_heads: int = 0


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
  """Shape of every parameter that `config` has, by name."""
  width, hidden = config.width, config.hidden
  result = {'embed/table': (config.vocab_size, width)}
  for i in range(config.num_layers):
    layer = f'layers/{i}'
    result |= {
        f'{layer}/attn_norm/scale': (width,),
        f'{layer}/attn/qkv': (config.qkv_rows, width),
        f'{layer}/attn/out': (width, config.num_heads * config.head_dim),
        f'{layer}/mlp_norm/scale': (width,),
        f'{layer}/mlp/gate_up': (2 * hidden, width),
        f'{layer}/mlp/down': (width, hidden),
    }
  result['norm/scale'] = (width,)
  if not config.tied:
    result['head/kernel'] = (config.vocab_size, width)
  if config.value_head:
    result['value/kernel'] = (1, width)
  return result


def slots(config: ModelConfig) -> list[Slot]:
  """Every tensor of a file of this model, in the order it is written."""
  vocab, width, hidden = config.vocab_size, config.width, config.hidden
  q = config.num_heads * config.head_dim
  kv = config.num_kv_heads * config.head_dim
  heads, kv_heads = config.num_heads, config.num_kv_heads
  result = [
      Slot('embed/table', 0, vocab, 'model.embed_tokens', 'token_embd')
  ]
  for i in range(config.num_layers):
    # (parameter, rows, name in HF, name in GGUF, rotary heads)
    for param, rows, hf, gguf, rotary in (
        ('attn_norm/scale', (0, width), 'input_layernorm', 'attn_norm', 0),
        ('attn/qkv', (0, q), 'self_attn.q_proj', 'attn_q', heads),
        ('attn/qkv', (q, q + kv), 'self_attn.k_proj', 'attn_k', kv_heads),
        ('attn/qkv', (q + kv, q + 2 * kv), 'self_attn.v_proj', 'attn_v', 0),
        ('attn/out', (0, width), 'self_attn.o_proj', 'attn_output', 0),
        ('mlp_norm/scale', (0, width), 'post_attention_layernorm',
         'ffn_norm', 0),
        ('mlp/gate_up', (0, hidden), 'mlp.gate_proj', 'ffn_gate', 0),
        ('mlp/gate_up', (hidden, 2 * hidden), 'mlp.up_proj', 'ffn_up', 0),
        ('mlp/down', (0, width), 'mlp.down_proj', 'ffn_down', 0),
    ):
      result.append(
          Slot(
              f'layers/{i}/{param}', *rows, f'model.layers.{i}.{hf}',
              f'blk.{i}.{gguf}', rotary,
          )
      )
  result.append(Slot('norm/scale', 0, width, 'model.norm', 'output_norm'))
  if not config.tied:
    result.append(Slot('head/kernel', 0, vocab, 'lm_head', 'output'))
  if config.value_head:
    result.append(Slot('value/kernel', 0, 1, 'score', ''))
  return [
      s._replace(hf=f'{s.hf}.weight', gguf=s.gguf and f'{s.gguf}.weight')
      for s in result
  ]


def half_split_rows(heads: int, rows: int) -> np.ndarray:
  """Order that turns interleaved rotary rows into half-split ones.

  GGUF keeps the two members of a rotary pair side by side (row 2i and 2i + 1
  of a head); we keep them half a head apart (i and i + P/2). Returns int [rows]
  such that `stored[order]` is half split.
  """
  return (
      np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2)
  ).reshape(-1)


def allocate(config: ModelConfig, dtype) -> dict[str, np.ndarray]:
  """Uninitialised arrays for every parameter (no memory is touched yet)."""
  return {k: np.empty(s, dtype) for k, s in shapes(config).items()}


def keys_problem(expected, found) -> str:
  """Says which names are missing and which are unknown; '' if none are."""
  expected, found = set(expected), set(found)
  parts = []
  for label, names in (
      ('missing', sorted(expected - found)),
      ('unknown', sorted(found - expected)),
  ):
    if names:
      more = f' and {len(names) - 6} more' if len(names) > 6 else ''
      parts.append(f'{len(names)} {label}: {", ".join(names[:6])}{more}')
  return '; '.join(parts)
