"""A plain NumPy Llama forward: slow, readable, and independent of the model.

It reads the flat parameter dict and a ModelConfig, one sequence layout (causal
rows, positions 0..T-1 unless given), and follows the papers, not our model's
code. Tests compare against it; nothing in the product imports it.
"""

import math

import numpy as np

from rlpost.models.config import ModelConfig


def rms_norm(x_BTD, scale_D, eps):
  """x / sqrt(mean(x^2) + eps) * scale. Zhang & Sennrich, arXiv:1910.07467."""
  mean_BT1 = np.mean(np.square(x_BTD), axis=-1, keepdims=True)
  return x_BTD / np.sqrt(mean_BT1 + eps) * scale_D


def rope_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
  """Angular frequencies [P/2] and the factor on cos and sin, in float64."""
  dim = config.head_dim
  base = config.rope_theta
  pair = np.arange(dim // 2, dtype=np.float64)
  scaling = config.rope_scaling
  if scaling is None:
    return base ** (-2 * pair / dim), 1.0
  factor, length = scaling.factor, scaling.original_max_position
  if scaling.kind == 'ntk':  # a base so large that the last pair is /factor
    base *= factor ** (dim / (dim - 2))
    return base ** (-2 * pair / dim), 1.0
  freq = base ** (-2 * pair / dim)
  if scaling.kind == 'linear':
    return freq / factor, 1.0
  if scaling.kind == 'llama3':
    # Rotations over the original length: few -> stretch, many -> keep.
    turns = length * freq / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return keep * freq + (1 - keep) * freq / factor, 1.0
  assert scaling.kind == 'yarn'

  def pair_with(turns):  # the (real-valued) pair that makes `turns` rotations
    return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

  low = max(math.floor(pair_with(scaling.beta_fast)), 0)
  high = min(math.ceil(pair_with(scaling.beta_slow)), dim - 1)
  stretch = np.clip((pair - low) / max(high - low, 1e-3), 0, 1)
  freq = (1 - stretch) * freq + stretch * freq / factor
  return freq, 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


def rotate(x_BTHP, position_BT, config: ModelConfig):
  """Rotary embedding, half split: pair i is (x[i], x[i + P/2]).

  Su et al., 2021, arXiv:2104.09864, eq. 34.
  """
  freq, magnitude = rope_frequencies(config)
  angle = position_BT[:, :, None, None] * freq
  cos, sin = np.cos(angle) * magnitude, np.sin(angle) * magnitude
  first, second = np.split(x_BTHP, 2, axis=-1)
  return np.concatenate(
      [first * cos - second * sin, second * cos + first * sin], axis=-1
  )


def attention(q_BTHP, k_BSHP, v_BSHP, visible_BTS):
  """softmax(q k^T / sqrt(P)) v over the visible keys, head by head."""
  out = np.zeros_like(q_BTHP)
  for h in range(q_BTHP.shape[2]):
    scores = q_BTHP[:, :, h] @ k_BSHP[:, :, h].swapaxes(1, 2)
    scores = scores / math.sqrt(q_BTHP.shape[-1])
    scores = np.where(visible_BTS, scores, -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    weights = scores / scores.sum(-1, keepdims=True)
    out[:, :, h] = weights @ v_BSHP[:, :, h]
  return out


def block(x_BTD, p, position_BT, visible_BTS, config: ModelConfig):
  """One pre-norm decoder layer; `p(name)` gives its parameters."""
  batch, time, _ = x_BTD.shape
  heads, kv, width = config.num_heads, config.num_kv_heads, config.head_dim
  h_BTD = rms_norm(x_BTD, p('attn_norm/scale'), config.norm_eps)
  q, k, v = np.split(
      h_BTD @ p('attn/qkv').T, [heads * width, (heads + kv) * width], axis=-1
  )
  q = rotate(q.reshape(batch, time, heads, width), position_BT, config)
  k = rotate(k.reshape(batch, time, kv, width), position_BT, config)
  v = v.reshape(batch, time, kv, width)
  # Query head h reads key head h // (heads per key head).
  k, v = (np.repeat(a, heads // kv, axis=2) for a in (k, v))
  mixed = attention(q, k, v, visible_BTS).reshape(batch, time, heads * width)
  x_BTD = x_BTD + mixed @ p('attn/out').T
  h_BTD = rms_norm(x_BTD, p('mlp_norm/scale'), config.norm_eps)
  gate, up = np.split(h_BTD @ p('mlp/gate_up').T, 2, axis=-1)
  return x_BTD + (gate / (1 + np.exp(-gate)) * up) @ p('mlp/down').T


def hidden(
    config, params, tokens_BT, position_BT=None, visible_BTS=None,
    dtype=np.float64,
):
  """Final hidden states [B, T, D] after the last norm."""
  tokens_BT = np.asarray(tokens_BT)
  batch, time = tokens_BT.shape

  def get(name):
    return np.asarray(params[name]).astype(dtype)

  if position_BT is None:
    position_BT = np.broadcast_to(np.arange(time), (batch, time))
  if visible_BTS is None:
    causal = np.tril(np.ones((time, time), bool))
    visible_BTS = np.broadcast_to(causal, (batch, time, time))
  x_BTD = np.asarray(params['embed/table'])[tokens_BT].astype(dtype)
  for i in range(config.num_layers):
    x_BTD = block(
        x_BTD, lambda n, i=i: get(f'layers/{i}/{n}'), position_BT,
        visible_BTS, config,
    ).astype(dtype)
  return rms_norm(x_BTD, get('norm/scale'), config.norm_eps)


def forward(
    config, params, tokens_BT, position_BT=None, visible_BTS=None,
    dtype=np.float64,
):
  """Logits [B, T, V] of a Llama decoder.

  Args:
    config: a ModelConfig.
    params: flat dict of per-layer arrays, weights stored [out, in].
    tokens_BT: int [B, T].
    position_BT: RoPE positions; 0..T-1 when None.
    visible_BTS: bool, which keys each query sees; causal when None.
    dtype: float type to compute in.
  """
  x_BTD = hidden(config, params, tokens_BT, position_BT, visible_BTS, dtype)
  name = 'embed/table' if config.tied else 'head/kernel'
  return x_BTD @ np.asarray(params[name]).astype(dtype).T


def random_params(config: ModelConfig, seed=0, scale=0.2, dtype=np.float32):
  """Random parameters of every name that `config` has, far from zero."""
  rng = np.random.default_rng(seed)
  D, F, P = config.width, config.hidden, config.head_dim
  shapes = {'embed/table': (config.vocab_size, D), 'norm/scale': (D,)}
  for i in range(config.num_layers):
    shapes |= {
        f'layers/{i}/attn_norm/scale': (D,),
        f'layers/{i}/attn/qkv': (config.qkv_rows, D),
        f'layers/{i}/attn/out': (D, config.num_heads * P),
        f'layers/{i}/mlp_norm/scale': (D,),
        f'layers/{i}/mlp/gate_up': (2 * F, D),
        f'layers/{i}/mlp/down': (D, F),
    }
  if not config.tied:
    shapes['head/kernel'] = (config.vocab_size, D)
  if config.value_head:
    shapes['value/kernel'] = (1, D)
  params = {}
  for name, shape in shapes.items():
    center = 1.0 if name.endswith('/scale') else 0.0
    params[name] = rng.normal(center, scale, shape).astype(dtype)
  return params
