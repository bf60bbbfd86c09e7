"""Shapes of the decoders we know, as one literal table."""

import dataclasses

from rlpost import errors


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """How rotary frequencies are changed to reach longer contexts.

  Attributes:
    kind: 'linear' (position interpolation, Chen et al. 2023,
      arXiv:2306.15595), 'ntk' (a larger base), 'yarn' (Peng et al. 2023,
      arXiv:2309.00071) or 'llama3' (wavelength bands, Llama 3.1).
    factor: extended length over original length, at least 1.
    original_max_position: the length that the base was trained at.
    low_freq_factor, high_freq_factor: band borders of 'llama3'.
    beta_fast, beta_slow: band borders of 'yarn', in rotations.
  """

  kind: str
  factor: float
  original_max_position: int
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  beta_fast: float = 32.0
  beta_slow: float = 1.0

  def __post_init__(self):
    kinds = ('linear', 'ntk', 'yarn', 'llama3')
    if self.kind not in kinds:
      raise errors.InputError(f'{self.kind=} must be one of {kinds}.')
    if self.factor < 1:
      raise errors.InputError(f'{self.factor=} must be at least 1.')


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Shape of a Llama-style decoder.

  Attributes:
    vocab_size, width, num_layers, num_heads, num_kv_heads, head_dim, hidden:
      sizes `V D N H KV P F`.
    rope_theta: base of the rotary frequencies.
    tied: the output head is the embedding table.
    max_position: longest sequence that the model was made for.
    value_head: add a scalar head beside the language head.
    windows: of attention, layer by layer, over and over; None sees all.
  """

  vocab_size: int
  width: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  hidden: int
  rope_theta: float = 10_000.0
  rope_scaling: RopeScaling | None = None
  norm_eps: float = 1e-5
  tied: bool = True
  max_position: int = 8192
  value_head: bool = False
  windows: tuple[int | None, ...] = (None,)

  def __post_init__(self):
    if self.num_heads % self.num_kv_heads:
      raise errors.InputError(
          f'{self.num_heads=} must be a multiple of {self.num_kv_heads=}.'
      )
    if self.head_dim % 2:
      raise errors.InputError(f'{self.head_dim=} must be even for RoPE.')
    if not self.windows or self.num_layers % len(self.windows):
      raise errors.InputError(
          f'{self.num_layers=} must be a multiple of {len(self.windows)}, the '
          f'length of {self.windows=}.'
      )

  @property
  def original_max_position(self) -> int:
    """The length that the base of RoPE was trained at."""
    scaling = self.rope_scaling
    return scaling.original_max_position if scaling else self.max_position

  @property
  def reach(self) -> int:
    """The longest sequence, extension included."""
    scaling = self.rope_scaling
    if scaling is None:
      return self.max_position
    return max(
        self.max_position, int(scaling.factor * scaling.original_max_position)
    )

  @property
  def qkv_rows(self) -> int:
    return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

  @property
  def num_params(self) -> int:
    attn = self.width * (self.qkv_rows + self.num_heads * self.head_dim)
    layer = attn + 3 * self.width * self.hidden + 2 * self.width
    tables = self.vocab_size * self.width * (1 if self.tied else 2)
    value = self.width if self.value_head else 0
    return self.num_layers * layer + tables + self.width + value


_LLAMA31 = {
    'rope_theta': 500_000.0, 'max_position': 131_072,
    'rope_scaling': RopeScaling('llama3', 8.0, 8192),
}

CONFIGS = {
    'smollm2-135m': ModelConfig(
        vocab_size=49152, width=576, num_layers=30, num_heads=9,
        num_kv_heads=3, head_dim=64, hidden=1536, rope_theta=100_000.0,
    ),
    'llama3.1-8b': ModelConfig(
        vocab_size=128256, width=4096, num_layers=32, num_heads=32,
        num_kv_heads=8, head_dim=128, hidden=14336, tied=False, **_LLAMA31,
    ),
    'llama3.1-70b': ModelConfig(
        vocab_size=128256, width=8192, num_layers=80, num_heads=64,
        num_kv_heads=8, head_dim=128, hidden=28672, tied=False, **_LLAMA31,
    ),
    # 4M parameters with a toy vocabulary: the shape that benchmarks use.
    'small': ModelConfig(
        vocab_size=512, width=256, num_layers=4, num_heads=4,
        num_kv_heads=2, head_dim=64, hidden=1024, rope_theta=100_000.0,
    ),
    # 1.1M parameters over bytes: smoke tests and studies, from scratch.
    'tiny': ModelConfig(
        vocab_size=384, width=128, num_layers=4, num_heads=4,
        num_kv_heads=2, head_dim=32, hidden=512, max_position=2048,
    ),
}


def named(name: str, **changes) -> ModelConfig:
  """The config called `name`, with fields replaced by `changes`."""
  if name not in CONFIGS:
    raise errors.InputError(f'No model {name!r}; known: {sorted(CONFIGS)}.')
  return dataclasses.replace(CONFIGS[name], **changes)
