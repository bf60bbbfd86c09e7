"""Every jitted program of a run, built once from what decides its shapes.

The trainer runs these programs; anything else that wants to know what a run
compiles to (its memory, its collectives) lowers the same ones.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rlpost import sharding, types
from rlpost.data import packing, zigzag
from rlpost.models import transformer
from rlpost.rollouts import cache as caches
from rlpost.rollouts import engine as engines
from rlpost.training import state as states
from rlpost.training import step as steps

# XLA's CPU back end at level 1 compiles a fifth faster and runs as fast.
CPU_OPTIONS = {'xla_backend_optimization_level': 1}


@dataclasses.dataclass(frozen=True)
class Shapes:
  """What decides the programs of a run.

  Attributes:
    step: of the update.
    stacked: parameters have a leading layer axis.
    trainable: regular expression of the names that train.
    optimizer: an optax transformation.
    rows, micro: rows of a micro-batch B, and micro-batches M.
    slots: loss slots of a row, K.
    length: tokens of a row, T.
    rollout, evaluation: shapes of decoding; None where nothing decodes.
    scored: whether log-probs of the batch are needed before the update.
  """

  step: steps.StepConfig
  stacked: bool
  trainable: str
  optimizer: Any
  rows: int
  micro: int
  slots: int
  length: int
  rollout: engines.EngineConfig | None = None
  evaluation: engines.EngineConfig | None = None
  scored: bool = False


class Program:
  """A function, the shapes it will be called with, and its executable."""

  def __init__(
      self, name: str, function: Callable, arguments: tuple, *, donate=(),
      out=None, say: Callable[[str], Any] = lambda _: contextlib.nullcontext(),
  ):
    """A program that is not compiled yet.

    Args:
      out: shardings of the results; what one program returns, another takes,
        so the compiler must not choose.
      say: `say(text)` gives a context that tells what is going on.
    """
    self.name = name
    self.arguments = arguments
    self.compilations = 0
    self._jitted = jax.jit(function, donate_argnums=donate, out_shardings=out)
    self._say = say
    self._compiled = None

  def trace(self):
    return self._jitted.trace(*self.arguments)

  def lower(self):
    return self.trace().lower()

  def compile(self):
    """The executable, compiled at the first call."""
    if self._compiled is None:
      with self._say(f'compiling {self.name}'):
        on_cpu = jax.default_backend() == 'cpu'
        options = CPU_OPTIONS if on_cpu else None
        self._compiled = self.lower().compile(options)
        self.compilations += 1
    return self._compiled

  def __call__(self, *arguments):
    return self.compile()(*arguments)


@dataclasses.dataclass(frozen=True)
class Abstract:
  """Shapes with shardings of what programs are called with."""

  params: Mapping[str, Any]
  state: states.TrainState
  frozen: Mapping[str, Any]


def abstract(shapes: Shapes, mesh) -> Abstract:
  """Abstract parameters and state on a mesh."""
  spec = transformer.spec(shapes.step.model, shapes.stacked)
  placed = sharding.for_params(mesh, spec.shapes, spec.axes)
  params = {
      k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=placed[k])
      for k, v in spec.shapes.items()
  }
  trainable, frozen = states.partition(params, shapes.trainable)
  state = jax.eval_shape(
      lambda p: states.create(p, shapes.optimizer), trainable
  )
  places = states.shardings(
      state, placed, sharding.replicated(mesh), shapes.step.offload
  )
  state = jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      state, places,
  )
  return Abstract(params, state, frozen)


def batch_shapes(shapes: Shapes, mesh):
  """An abstract `types.Batch` [M, B, ...], rows and tokens over the mesh."""
  rows = packing.blank(shapes.rows, shapes.length, shapes.slots)

  def placed(name, x):
    axis = 'time' if name in types.PER_TOKEN else None
    place = sharding.named(mesh, (None, 'batch', axis))
    return jax.ShapeDtypeStruct(
        (shapes.micro, *x.shape), x.dtype, sharding=place
    )

  return types.Batch(*map(placed, rows._fields, rows))


def batch_of(shapes: Shapes, mesh, rows: types.Batch) -> types.Batch:
  """Rows of `packing` as the programs take them: [M, B, ...].

  Missing rows are padding; tokens are spread over the context.
  """
  rows = packing.pad_rows(rows, shapes.rows * shapes.micro)
  rows = zigzag.spread(rows, mesh.shape['context'])
  return packing.micro_batches(rows, shapes.micro)


def _published(shapes: Shapes, mesh, params) -> dict:
  """Abstract parameters as decoding takes them: in the dtype that products
  would cast them to, split by rows."""
  axes = transformer.spec(shapes.step.model, shapes.stacked).axes
  kept = {k: v for k, v in params.items() if not k.startswith('value/')}
  places = sharding.for_params(
      mesh, kept, axes,
      functools.partial(sharding.fitted, rules=sharding.DECODING),
  )
  dtypes = {
      k: v.dtype if 'norm' in axes[k] else jnp.dtype(shapes.step.dtype)
      for k, v in kept.items()
  }
  return {
      k: jax.ShapeDtypeStruct(v.shape, dtypes[k], sharding=places[k])
      for k, v in kept.items()
  }


def programs(
    shapes: Shapes, mesh, say=lambda _: contextlib.nullcontext()
) -> dict[str, Program]:
  """Name -> program; nothing is compiled yet.

  'train' `step.train_step`, 'score' `step.score`, 'init' the optimizer's
  state, 'publish' the parameters for decoding where they are not those of
  training (several devices, or another dtype), and for each of 'rollout' and
  'evaluation' the functions of `rollouts.engine.functions` as '<kind>/<name>'.
  """
  sharding.check_rows(shapes.rows, mesh, 'rows')
  sharding.check_tokens(shapes.length, mesh, 'tokens of a row')
  known = abstract(shapes, mesh)
  batch = batch_shapes(shapes, mesh)
  scalar = jax.ShapeDtypeStruct((), jnp.int32)
  whole = sharding.replicated(mesh)
  state = jax.tree.map(lambda x: x.sharding, known.state)
  found = {}

  def add(name, function, *arguments, out, donate=()):
    found[name] = Program(
        name, function, arguments, donate=donate, out=out, say=say
    )

  def update(state, frozen, batch, count, weight, old_logp):
    return steps.train_step(
        shapes.step, shapes.optimizer, state, frozen, batch, count, weight,
        old_logp,
    )

  old = batch.mask if shapes.step.recipe.anchor == 'old' else None
  weight = jax.ShapeDtypeStruct((), jnp.float32)
  add('train', update, known.state, known.frozen, batch, scalar, weight, old,
      donate=(0,), out=(state, whole))
  add('init', lambda p: states.create(p, shapes.optimizer),
      known.state.trainable, donate=(0,), out=state)
  if shapes.scored:
    add('score', lambda params, batch, count: steps.score(
        shapes.step, params, batch, count), known.params, batch, scalar,
        out=batch.mask.sharding)
  kinds = [k for k in ('rollout', 'evaluation') if getattr(shapes, k)]
  decoded = known.params
  if kinds and (mesh.size > 1 or shapes.step.dtype != 'float32'):
    decoded = _published(shapes, mesh, known.params)
    add('publish', lambda params: {
        k: params[k].astype(v.dtype) for k, v in decoded.items()
    }, known.params, out={k: v.sharding for k, v in decoded.items()})
  for kind in kinds:
    _add_decoding(add, kind, getattr(shapes, kind), shapes.step, decoded, mesh)
  return found


def _placed(mesh, leading, tree):
  """Shapes with shardings: of caches [.., A, J, columns, P], and of anything
  else by its leading axis."""

  def place(x):
    axes = (leading, *[None] * (x.ndim - 1))[: x.ndim]
    if x.ndim >= 4:
      axes = caches.axes(x.ndim, leading)
    return jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=sharding.fitting(mesh, x.shape, axes)
    )

  return jax.tree.map(place, tree)


def _add_decoding(add, kind, config: engines.EngineConfig, step, params, mesh):
  layout = engines.layout(
      step.model, step.dtype, mesh, transformer.is_stacked(params)
  )
  functions = engines.functions(config, layout)

  def ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)

  def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)

  def bools(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bool_)

  A, B = config.admit or config.prompts, config.batch
  shared = ints(config.prefixes, config.prefix_len), ints(config.prefixes)
  cache = jax.eval_shape(functions['shared'], params, *shared)
  cache = _placed(mesh, None, cache)
  slots = _placed(mesh, 'batch', jax.eval_shape(functions['empty']))
  places = [jax.tree.map(lambda x: x.sharding, x) for x in (cache, slots)]
  start = engines.decode.Start(
      bools(B), floats(B), ints(B), ints(B), ints(B)
  )
  key = jax.eval_shape(lambda: jax.random.key(0))
  add(f'{kind}/empty', functions['empty'], out=places[1])
  add(f'{kind}/shared', functions['shared'], params, *shared, out=places[0])
  add(f'{kind}/admit', functions['admit'], params, slots, cache, ints(A),
      ints(A, config.prompt_len), ints(A), ints(config.prompts), donate=(1,),
      out=places[1])
  add(f'{kind}/run', functions['run'], params, slots, start,
      bools(step.model.vocab_size), key, ints(2), donate=(1,),
      out=places[1])


def decoding(known: Mapping[str, Program], kind: str) -> engines.Programs:
  """The programs of an engine."""
  names = engines.Programs._fields
  return engines.Programs(*(known[f'{kind}/{name}'] for name in names))
