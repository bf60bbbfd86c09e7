"""The work that the benchmarks share, and what it costs at least.

It is the work that other trainers were measured on: random weights, new random
prompts every step, an end token that cannot be reached, so that every answer
has its full length and trains; full fine-tuning in fp32 with AdamW, samples at
temperature 1 with their log-probabilities. The programs are the product's own.

Counting. A product of [m, k] and [k, n] is 2 m k n operations. Attention counts
the pairs that may see each other, a prompt shared by a group counts once, a
language head counts where its logits are used. A backward pass is twice its
forward pass; whatever is computed again counts nothing. Bytes are those that
no cache keeps: all weights at every decoding step, and for an update each
parameter, gradient and moment read once and written once where it changes; a
model of less than 64 MB is taken to stay in a cache and counts none.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from rlpost import sharding, types
from rlpost.algorithms import recipes
from rlpost.data import packing
from rlpost.models import config as model_configs
from rlpost.ops.attention import SharedPrefix
from rlpost.planning.cost import causal_pairs, forward_flops
from rlpost.rewards import normalize
from rlpost.rollouts import engine as engines
from rlpost.training import credit, state, step
from rlpost.training import programs as program_lib
from tools.bench import measure

SHAPES = {'smollm2': 'smollm2-135m', 'small': 'small'}
LEARNING_RATE = 1e-6
CACHED_BYTES = 2**26


class Cost(NamedTuple):
  """Operations in products, and bytes that must be streamed."""

  flops: float
  bytes: float

  def __add__(self, other):
    return Cost(self.flops + other.flops, self.bytes + other.bytes)

  def seconds(self, limits) -> float:
    """flops / GEMM + bytes / stream: nothing overlaps."""
    return self.flops / limits.gemm / 1e9 + self.bytes / limits.stream / 1e9

  def overlapped_seconds(self, limits) -> float:
    """max(flops / GEMM, bytes / stream): the smaller one is hidden."""
    return max(self.flops / limits.gemm / 1e9, self.bytes / limits.stream / 1e9)


class Step(NamedTuple):
  """The size of a step: prompts with a group of answers each.

  Attributes:
    prompts, group, prompt_len, new: of the rollout; lengths in tokens.
    rows: groups in a micro-batch of the update.
  """

  prompts: int
  group: int
  prompt_len: int
  new: int
  rows: int

  @property
  def answers(self) -> int:
    return self.prompts * self.group

  @property
  def micro(self) -> int:
    return self.prompts // self.rows


def model(shape: str) -> model_configs.ModelConfig:
  """The model of a `--shape`."""
  return model_configs.named(SHAPES[shape])


def recipe() -> recipes.Recipe:
  """GRPO as the others run it: clipped, no KL."""
  return recipes.recipe('grpo', kl='none', kl_coefficient=0.0)


def optimizer():
  """AdamW with every term in use, at a rate that changes no reward."""
  return state.adamw(LEARNING_RATE, total_steps=1000, weight_decay=0.01)


def prefill_cost(config, prompts: int, prompt_len: int) -> Cost:
  """Of prompts and the logits of each one's last token."""
  flops = forward_flops(
    config,
    tokens=prompts * prompt_len,
    pairs=prompts * causal_pairs(prompt_len),
    logits=prompts,
  )
  return Cost(flops, 0)


def decode_cost(config, rows: int, prompt_len: int, new: int) -> Cost:
  """Of `new - 1` steps: the first token comes from the prefill."""
  flops = forward_flops(
    config,
    tokens=rows * (new - 1),
    pairs=rows * causal_pairs(new - 1, prompt_len),
    logits=rows * (new - 1),
  )
  return Cost(flops, _weight_bytes(config) * (new - 1))


def train_cost(config, *, tokens, pairs, logits) -> Cost:
  """Forward, backward and the update: 7 fp32 numbers move per parameter."""
  forward = forward_flops(config, tokens=tokens, pairs=pairs, logits=logits)
  return Cost(3 * forward, 7 * _weight_bytes(config))


def _weight_bytes(config) -> float:
  size = 4.0 * config.num_params
  return size if size > CACHED_BYTES else 0.0


def step_costs(config, size: Step) -> dict[str, Cost]:
  """Of a step, and of its 'rollout' and 'train' alone."""
  rollout = prefill_cost(config, size.prompts, size.prompt_len) + decode_cost(
    config, size.answers, size.prompt_len, size.new
  )
  pairs = causal_pairs(size.prompt_len)
  pairs += size.group * causal_pairs(size.new, size.prompt_len)
  train = train_cost(
    config,
    tokens=size.prompts * (size.prompt_len + size.group * size.new),
    pairs=size.prompts * pairs,
    logits=size.answers * size.new,
  )
  return {'step': rollout + train, 'rollout': rollout, 'train': train}


def step_shapes(config, size: Step, **changes: Any) -> program_lib.Shapes:
  """Programs of a step: one decoding batch, packed rows of one group each."""
  slots = size.group * size.new
  layout = SharedPrefix(size.prompt_len, size.group, size.new)
  return program_lib.Shapes(
    step=step_config(config, layout=layout, **changes),
    stacked=False,
    trainable='.*',
    optimizer=optimizer(),
    rows=size.rows,
    micro=size.micro,
    slots=slots,
    length=size.prompt_len + slots,
    rollout=engines.EngineConfig(
      prompts=size.prompts,
      rows=size.group,
      prefix_len=0,
      prompt_len=size.prompt_len,
      width=size.new,
    ),
  )


def random_params(
  shapes: program_lib.Shapes, mesh, seed: int = 0
) -> dict[str, jax.Array]:
  """Parameters on the mesh, drawn leaf by leaf: no second copy exists."""
  known = program_lib.abstract(shapes, mesh)
  rng = np.random.default_rng(seed)

  def draw(name, leaf):
    if name.endswith('scale'):
      return np.ones(leaf.shape, np.float32)
    x = rng.standard_normal(leaf.shape, np.float32)
    x *= leaf.shape[-1] ** -0.5
    return x

  return {
    name: jax.device_put(draw(name, leaf), leaf.sharding)
    for name, leaf in known.params.items()
  }


def random_state(
  shapes: program_lib.Shapes, init: program_lib.Program, mesh
) -> state.TrainState:
  """A fresh state on the mesh: everything trains."""
  return init(random_params(shapes, mesh))


def no_stop(config) -> np.ndarray:
  """A stop table that no token is in."""
  return np.zeros(config.vocab_size, bool)


def requests(
  config, *, prompts: int, group: int, prompt_len: int, seed: int
) -> list[engines.Request]:
  """Random prompts; their group ids are 0, 1, ..."""
  rng = np.random.default_rng([seed, 1])
  tokens = rng.integers(4, config.vocab_size - 4, (prompts, prompt_len))
  samples = tuple((r, 1.0) for r in range(group))
  return [
    engines.Request(g, (), tuple(map(int, row)), samples)
    for g, row in enumerate(tokens)
  ]


def even_share(tokens: np.ndarray) -> float:
  """The reward: the share of even ids, which any model can learn."""
  return float(np.mean(tokens % 2 == 0))


def groups(
  asked: list[engines.Request], completions: list[engines.Completion]
) -> list[types.Group]:
  """Scored groups of what an engine gave for the requests."""
  task = types.Task('even', (types.Message.of('user', ''),), {})
  found: dict[int, list] = {request.group: [] for request in asked}
  prompts = {request.group: request.suffix for request in asked}
  for done in completions:
    length = len(prompts[done.group])
    total = length + len(done.tokens)
    empty = np.zeros(length, np.float32)
    found[done.group].append(
      types.Trajectory(
        task=task,
        group=done.group,
        sample=done.sample,
        tokens=np.concatenate([prompts[done.group], done.tokens]),
        spans=(
          types.Span(0, length, 'user', False),
          types.Span(length, total, 'assistant', True),
        ),
        logp=np.concatenate([empty, done.logp]),
        versions=np.zeros(total, np.int32),
        temperature=done.temperature,
        stop_reason=done.stop_reason,
        verdict=types.Verdict('value', even_share(done.tokens)),
      )
    )
  return [
    types.Group(g, task, tuple(sorted(members, key=lambda t: t.sample)))
    for g, members in found.items()
  ]


def batch(scored: list[types.Group], size: Step) -> types.Batch:
  """Advantages and packed rows, as the product's loop makes them."""
  chosen = credit.assign(
    scored,
    recipe(),
    normalize.RewardScale(),
    wanted=len(scored),
    max_tokens=size.new,
  )
  rows = packing.pack_groups(
    chosen.groups,
    prompt_len=size.prompt_len,
    samples=size.group,
    width=size.new,
    advantages=chosen.advantages,
    trained=chosen.trained,
  )
  trained = int((rows.mask > 0).sum())
  if trained != size.answers * size.new:
    raise ValueError(f'{trained=} tokens of {size}: an answer ended early.')
  return packing.micro_batches(rows, size.micro)


def run_step(
  config, size: Step, engine: engines.Engine, train, old, number: int
) -> tuple[state.TrainState, dict[str, float]]:
  """One step, numbered from 0; every array is ready when it ends.

  Returns:
    The new state, CPU seconds by part, and 'logp_gap_max': how far the
    sampler's log-probabilities are from the trainer's.
  """
  asked = requests(
    config,
    prompts=size.prompts,
    group=size.group,
    prompt_len=size.prompt_len,
    seed=number,
  )
  root = jax.random.fold_in(jax.random.key(0), number)
  with measure.clock() as rollout:
    done = [
      completion
      for part in engine.generate(
        state.union(old.trainable, {}), number, asked, root
      )
      for completion in part
    ]
  with measure.clock() as host:
    rows = batch(groups(asked, done), size)
  with measure.clock() as learning:
    count, weight = np.int32(size.micro), np.float32(1)
    new, report = train(old, {}, rows, count, weight, None)
    jax.block_until_ready((new, report))
  report = jax.device_get(report)
  if not report['finite']:
    raise ValueError(f'{report["loss"]=} is not finite.')
  return new, {
    'step': rollout.cpu_s + host.cpu_s + learning.cpu_s,
    'rollout': rollout.cpu_s,
    'credit': host.cpu_s,
    'train': learning.cpu_s,
    'logp_gap_max': float(report['logp_gap_max']),
  }


def mesh():
  """One device."""
  return sharding.make_mesh(devices=jax.devices()[:1])


def step_config(config, **changes: Any) -> step.StepConfig:
  """An update of the model, by `recipe` unless changed."""
  return step.StepConfig(**{'model': config, 'recipe': recipe()} | changes)


def decode_seconds(
  config, size: Step, decoding: engines.Programs, params, times: int
) -> list[float]:
  """CPU seconds of decoding `new` tokens a row, prompts already admitted."""
  asked = requests(
    config,
    prompts=size.prompts,
    group=size.group,
    prompt_len=size.prompt_len,
    seed=0,
  )
  A, B = size.prompts, size.answers
  cache = decoding.shared(
    params, np.zeros((1, 0), np.int32), np.zeros(1, np.int32)
  )
  slots = decoding.admit(
    params,
    decoding.empty(),
    cache,
    np.zeros(A, np.int32),
    np.array([r.suffix for r in asked], np.int32),
    np.full(A, size.prompt_len, np.int32),
    np.arange(A, dtype=np.int32),
  )
  start = engines.decode.Start(
    fresh=np.ones(B, bool),
    temperature=np.ones(B, np.float32),
    budget=np.full(B, size.new, np.int32),
    group=np.arange(B, dtype=np.int32) // size.group,
    sample=np.arange(B, dtype=np.int32) % size.group,
  )
  root, pause = jax.random.key(0), np.zeros(2, np.int32)
  jax.block_until_ready(slots)
  seconds = []
  for _ in range(times + 1):
    with measure.clock() as clock:
      slots = decoding.run(params, slots, start, no_stop(config), root, pause)
      jax.block_until_ready(slots)
    seconds.append(clock.cpu_s)
    if not (np.asarray(slots.count) == size.new).all():
      raise ValueError(f'{slots.count=}: an answer ended early.')
  return seconds[1:]


def document_shapes(
  config, batch: int, length: int, rows: int, **changes: Any
) -> program_lib.Shapes:
  """Programs of an update on plain rows that train all but their first."""
  return program_lib.Shapes(
    step=step_config(config, **changes),
    # XLA's CPU back end undoes remat between unrolled layers.
    stacked=changes.get('remat', 'none') != 'none',
    trainable='.*',
    optimizer=optimizer(),
    rows=rows,
    micro=batch // rows,
    slots=length - 1,
    length=length,
  )


def documents(config, batch: int, length: int, rows: int) -> types.Batch:
  """Random documents for `document_shapes`, one a row."""
  rng = np.random.default_rng(2)
  packed = packing.pack_documents(
    [
      packing.Document(
        rng.integers(4, config.vocab_size - 4, length, np.int32),
        np.arange(length) > 0,
      )
      for _ in range(batch)
    ],
    length=length,
    slots=length - 1,
  )
  return packing.micro_batches(packed, batch // rows)


def train_seconds(train, fresh, rows: types.Batch, times: int) -> list[float]:
  """CPU seconds of 1 + `times` updates; the first one is not yet warm."""
  seconds, current = [], fresh
  count, weight = np.int32(len(rows.mask)), np.float32(1)
  for _ in range(times + 1):
    with measure.clock() as clock:
      current, report = train(current, {}, rows, count, weight, None)
      jax.block_until_ready((current, report))
    seconds.append(clock.cpu_s)
  return seconds
