"""Operations and bytes of a run's programs, counted from their shapes.

A compiler's own count is of no use here: it counts the body of a loop once.
Products of [m, k] and [k, n] are 2 m k n operations; attention counts the
pairs that may see each other, a prompt that completions share once.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax

from rlpost import types
from rlpost.models.config import ModelConfig
from rlpost.rollouts import engine as engines
from rlpost.training.programs import Program, Shapes
from rlpost.training.state import TrainState


def causal_pairs(queries: int, before: int = 0, window=None) -> int:
  """Pairs of `queries` tokens in a row that follow `before` others."""
  pairs = queries * before + queries * (queries + 1) // 2
  if window is None or window >= before + queries:
    return pairs
  # Query i sees before + i + 1 keys, at most `window`.
  short = max(0, window - before)
  return causal_pairs(short, before) + (queries - short) * window


def layer_pairs(
    config: ModelConfig, queries: int, before: int = 0, sequences: int = 1
) -> float:
  """`causal_pairs` of a layer of the model, the mean over its windows."""
  pairs = sum(causal_pairs(queries, before, w) for w in config.windows)
  return sequences * pairs / len(config.windows)


def forward_flops(
    config: ModelConfig, *, tokens: float, pairs: float, logits: float
) -> float:
  """Of the products of a forward pass.

  Args:
    tokens: that pass the layers.
    pairs: (query, key) of a layer that may see each other.
    logits: positions whose logits are used.
  """
  heads = config.num_heads * config.head_dim
  layer = config.width * (config.qkv_rows + heads + 3 * config.hidden)
  inside = config.num_layers * (2.0 * layer * tokens + 4 * heads * pairs)
  return inside + 2.0 * config.width * config.vocab_size * logits


@dataclasses.dataclass(frozen=True)
class Work:
  """Of one call of a program, on all devices together.

  Attributes:
    flops: of the model: each product once, backward twice.
    again: that rematerialisation repeats.
    tokens: that it is about: trained, scored, prefilled or sampled.
    unit: what a call is.
  """

  flops: float
  again: float
  tokens: int
  unit: str


def work(shapes: Shapes, name: str) -> Work | None:
  """Of a program of `training.programs`; None where nothing is multiplied."""
  model = shapes.step.model
  kind, _, function = name.rpartition('/')
  if name in ('train', 'score'):
    rows, slots = shapes.rows * shapes.micro, shapes.slots
    tokens = rows * shapes.length
    forward = _rows_flops(shapes, rows, tokens, slots)
    if name == 'score':
      return Work(forward, 0.0, tokens, 'scoring of a batch')
    head = 2.0 * model.width * model.vocab_size * rows * slots
    again = {'none': 0.0, 'full': forward - head, 'dots': 0.0}
    return Work(3 * forward, again[shapes.step.remat], tokens, 'update')
  if not kind:
    return None
  engine: engines.EngineConfig = getattr(shapes, kind)
  prompt = engine.prefix_len + engine.prompt_len
  if function == 'admit':
    count = engine.admit or engine.prompts
    tokens = count * engine.prompt_len
    pairs = layer_pairs(model, engine.prompt_len, engine.prefix_len, count)
    flops = forward_flops(model, tokens=tokens, pairs=pairs, logits=0)
    return Work(flops, 0.0, tokens, 'prefill of prompts')
  if function == 'run':
    rows = engine.batch
    pairs = layer_pairs(model, 1, prompt + engine.width // 2, rows)
    flops = forward_flops(model, tokens=rows, pairs=pairs, logits=rows)
    return Work(flops, 0.0, rows, 'token of every row')
  return None


def _rows_flops(shapes: Shapes, rows: int, tokens: int, slots: int) -> float:
  model, engine = shapes.step.model, shapes.rollout
  if engine is None:  # documents; the most that they can be is one of a row
    pairs = layer_pairs(model, shapes.length, 0, rows)
  else:
    prompt = engine.prefix_len + engine.prompt_len
    samples = slots // engine.width
    pairs = layer_pairs(model, prompt, 0, rows)
    pairs += layer_pairs(model, engine.width, prompt, rows * samples)
  return forward_flops(
      model, tokens=tokens, pairs=pairs, logits=rows * slots
  )


def device_bytes(leaf, layout=None) -> int:
  """Of an abstract array, on one device.

  Args:
    layout: a compiler's; a TPU pads the minor dimensions of an array to tiles,
      of which the first counts and the others sort its elements.
  """
  shape = leaf.shape
  if getattr(leaf, 'sharding', None) is not None:
    shape = leaf.sharding.shard_shape(shape)
  item = getattr(leaf.dtype, 'itemsize', 8)
  if layout is not None and layout.tiling and shape:
    shape = [shape[i] for i in layout.major_to_minor]
    tile = layout.tiling[0]
    for i, edge in zip(range(-len(tile), 0), tile, strict=True):
      shape[i] += -shape[i] % edge
  return math.prod(shape) * item


def taken(program: Program, compiled) -> dict[int, Any]:
  """Layouts of the arguments that a compiled program takes, by their ids.

  A prefill, for one, does not read the output head.
  """
  given, formats = map(
      jax.tree.leaves, (program.arguments, compiled.input_formats[0])
  )
  return {
      id(x): found.layout for x, found in zip(given, formats, strict=True)
      if found.layout is not None
  }


def argument_bytes(
    program: Program, layouts: Mapping[int, Any] | None = None
) -> dict[str, int]:
  """Bytes of what a program is called with, on one device, by kind.

  'host' is what stays in the memory of the host.

  Args:
    layouts: of `taken`; what is not there is left out.
  """
  sums = dict.fromkeys(
      ('parameters', 'optimizer', 'cache', 'batch', 'host'), 0
  )

  def add(kind, tree):
    for leaf in jax.tree.leaves(tree):
      if layouts is not None and id(leaf) not in layouts:
        continue
      layout = layouts and layouts[id(leaf)]
      sharding = getattr(leaf, 'sharding', None)
      away = getattr(sharding, 'memory_kind', None) == 'pinned_host'
      sums['host' if away else kind] += device_bytes(leaf, layout)

  for argument in program.arguments:
    if isinstance(argument, TrainState):
      add('parameters', argument.trainable)
      add('optimizer', (argument.opt, argument.step))
    elif isinstance(argument, types.Batch):
      add('batch', argument)
    elif isinstance(argument, Mapping):
      add('parameters', argument)
    elif isinstance(argument, tuple) and hasattr(argument, '_fields'):
      kept = 'cache' if {'keys', 'prompt'} & {*argument._fields} else 'batch'
      add(kept, argument)
    else:
      add('batch', argument)
  return sums


def beside(shapes: Shapes, known: Mapping[str, Program], name: str) -> int:
  """Bytes of a device that the trainer holds while a program runs, and does
  not hand to it: of the state and a reference.

  The published policy and the slots of decoding go once it is done.

  Args:
    known: all programs of the run, of `training.programs`.
    name: of one of them.
  """
  held = argument_bytes(known['train'])
  reference = held['parameters'] * (shapes.step.recipe.kl != 'none')
  if name == 'init':  # the state is yet to come
    return reference
  held['parameters'] += reference
  given = argument_bytes(known[name])
  if '/' in name and 'publish' in known:
    given['parameters'] = 0  # another copy
  return sum(
      max(0, held[k] - given[k]) for k in ('parameters', 'optimizer')
  )


def weight_bytes(shapes: Shapes, axes_size: int) -> float:
  """Of all matrices in the dtype of activations, on one of `axes_size`."""
  item = jax.numpy.dtype(shapes.step.dtype).itemsize
  return shapes.step.model.num_params * item / axes_size
