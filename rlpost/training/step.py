"""One update, as a pure function. The only place that divides.

Losses give a value per loss slot; this module masks, sums over micro-batches
and divides each term by its own *global* count. The objective is then the same
however rows are packed, micro-batched or spread over a mesh.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rlpost import errors, sharding, types
from rlpost.algorithms import aggregation, diagnostics, recipes
from rlpost.models import transformer
from rlpost.models.config import ModelConfig
from rlpost.ops import spread
from rlpost.ops.attention import (
  BACKENDS,
  Rule,
  SharedPrefix,
  Where,
  attention,
  score_masks,
)
from rlpost.training.state import TrainState, union


@dataclasses.dataclass(frozen=True)
class StepConfig:
  """What decides the traced program of an update.

  Attributes:
    model: shape of the decoder.
    recipe: what is trained on.
    layout: a promise about the rows, or None.
    backend, block: of attention; see `ops.attention.attention`.
    remat: what the backward pass computes again. XLA's CPU back end undoes it
      between per-layer leaves: there it needs the stacked layout.
    chunk: loss slots whose logits exist at one time.
    clip_norm: the gradient is scaled down to this global norm.
    dtype: of activations.
    offload: keep the optimizer's moments in the host's memory; they come to
      the devices once the gradient is there.
  """

  model: ModelConfig
  recipe: recipes.Recipe
  layout: SharedPrefix | None = None
  backend: str = 'dense'
  block: int = 256
  remat: str = 'none'
  chunk: int = 512
  clip_norm: float = 1.0
  dtype: str = 'float32'
  offload: bool = False

  def __post_init__(self):
    # Here, for a program is traced minutes after a run began.
    for name, known in (
        ('backend', BACKENDS), ('remat', transformer.REMAT),
        ('dtype', ('float32', 'bfloat16', 'float16')),
    ):
      if getattr(self, name) not in known:
        raise errors.InputError(
            f'{name}={getattr(self, name)!r} must be one of {sorted(known)}.'
        )


def outputs(config: StepConfig, params, rows: types.Batch):
  """`recipes.Outputs` of the model on rows [B, T] with slots [B, K]."""
  where = Where(rows.order, rows.position, rows.segment, rows.parent)

  masks = {}
  if config.backend == 'dense':
    masks = {
        window: score_masks(where, rule=Rule(window), layout=config.layout)
        for window in set(config.model.windows)
    }

  def attend(q, k, v, window):
    return attention(
        q, k, v, where, backend=config.backend, rule=Rule(window),
        layout=config.layout, block=config.block, masks=masks.get(window),
    )

  h_BTD = transformer.hidden(
      config.model, params, rows.tokens, rows.position, attend,
      remat=config.remat, dtype=jnp.dtype(config.dtype),
  )
  logp_BK, entropy_BK = spread.token_logprobs(
      h_BTD, transformer.head(params), rows.predictor, rows.target,
      rows.temperature, config.chunk,
  )
  trained = rows.mask > 0
  logp_BK = jnp.where(trained, logp_BK, 0.0)
  entropy_BK = jnp.where(trained, entropy_BK, 0.0)
  value_BK = None
  if config.model.value_head:
    value_BT = transformer.value(params, h_BTD)
    value_BK = jnp.take_along_axis(value_BT, rows.predictor, axis=1)
    value_BK = jnp.where(trained, value_BK, 0.0)
  return recipes.Outputs(logp_BK, entropy_BK, value_BK)


def _denominators(config: StepConfig, batch: types.Batch):
  """Counts of each unit over all micro-batches [M, B, K]."""
  unit = aggregation.unit_of(config.recipe.aggregation)
  K = batch.mask.shape[-1]
  count = aggregation.count(
      unit, batch.mask.reshape(-1, K), batch.sequence.reshape(-1, K)
  )
  return {unit: aggregation.denominator(unit, count)}


def _micro(batch: types.Batch, i) -> types.Batch:
  def pick(name, x):
    x = jax.lax.dynamic_index_in_dim(x, i, keepdims=False)
    axis = 'time' if name in types.PER_TOKEN else None
    return sharding.constrain(x, ('batch', axis))

  return types.Batch(*map(pick, batch._fields, batch))


def gradient(
    config: StepConfig, trainable, frozen, batch: types.Batch, count=None,
    old_logp=None,
):
  """Gradient of the objective over a batch [M, B, ...].

  Args:
    count: int32, micro-batches that hold anything; the others are skipped at
      no cost. None: all.
    old_logp: fp32 [M, B, K], for recipes anchored on it.

  Returns:
    (gradient, {term: value}, `diagnostics.Metrics`, bool [M, B] rows whose
    every value is finite).
  """
  M = batch.mask.shape[0]
  denominators = _denominators(config, batch)

  def judge(out, rows):
    values = recipes.policy_terms(out, rows, config.recipe)
    terms = {
        name: values_BK.sum() / denominators[unit]
        for name, (values_BK, unit) in values.items()
    }
    sound_B = jnp.stack(
        [jnp.isfinite(x).all(1) for x, _ in values.values()]
    ).all(0)
    metrics = diagnostics.metrics(out, rows, config.recipe)
    return sum(terms.values()), (terms, metrics, sound_B)

  def part(trainable, rows, old):
    out = outputs(config, union(trainable, frozen), rows)
    return judge(out._replace(old_logp_BK=old), rows)

  def at(i):
    old = None if old_logp is None else old_logp[i]
    grads, (terms, metrics, sound_B) = jax.grad(part, has_aux=True)(
        trainable, _micro(batch, i), old
    )
    return grads, terms, metrics, sound_B

  if M == 1:
    *out, sound_B = at(0)
    return *out, sound_B[None]

  def add(i, carry):
    part = at(i)
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.size > 1:
      # XLA would sum the gradient over devices once, after the loop, and holds
      # it whole until then; where it is scattered as well, its pass fails.
      part = jax.lax.optimization_barrier(part)
    grads, terms, metrics, sound_B = part
    total = jax.tree.map(jnp.add, (grads, terms), carry[:2])
    metrics = diagnostics.merge(carry[2], metrics)
    return *total, metrics, carry[3].at[i].set(sound_B)

  rows = jax.tree.map(lambda x: x[0], batch)
  value = rows.mask if config.model.value_head else None
  out = recipes.Outputs(rows.mask, rows.mask, value, rows.mask)
  _, (terms, metrics, _) = jax.eval_shape(judge, out, rows)
  zeros = jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype), (trainable, terms, metrics)
  )
  sound_MB = jnp.ones(batch.mask.shape[:2], bool)
  return jax.lax.fori_loop(
      0, M if count is None else count, add, (*zeros, sound_MB)
  )


def train_step(
    config: StepConfig, optimizer, state: TrainState, frozen,
    batch: types.Batch, count, weight, old_logp=None,
) -> tuple[TrainState, dict[str, Any]]:
  """One update of the trainable parameters.

  A loss or gradient that is not finite says so in `finite`; the state is then
  lost, and the caller must neither save nor go on from it.

  Args:
    batch: [M, B, ...] arrays.
    count: int32, micro-batches that hold anything.
    weight: fp32, scales the objective (a short batch moves the policy less).
    old_logp: see `gradient`.

  Returns:
    (state, {'loss', 'loss_<term>', 'grad_norm', 'finite', 'sound_MB', and
    what `diagnostics.finish` gives}).
  """
  grads, terms, metrics, sound_MB = gradient(
      config, state.trainable, frozen, batch, count, old_logp
  )
  norm = optax.global_norm(grads) * weight
  loss = sum(terms.values())
  # One factor for the weight and the clipping: optax's own clipping holds a
  # second copy of the gradient.
  scale = weight * jnp.minimum(1.0, config.clip_norm / (norm + 1e-6))
  grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
  opt = state.opt
  if config.offload:
    opt = jax.device_put(opt, jax.memory.Space.Device)
  updates, opt = optimizer.update(grads, opt, state.trainable)
  trainable = optax.apply_updates(state.trainable, updates)
  new = TrainState(trainable, opt, state.step + 1)
  report = diagnostics.finish(metrics)
  report |= {f'loss_{name}': value for name, value in terms.items()}
  finite = jnp.isfinite(norm) & jnp.isfinite(loss)
  report |= {'loss': loss, 'grad_norm': norm, 'finite': finite}
  report['sound_MB'] = sound_MB
  return new, report


def score(config: StepConfig, params, batch: types.Batch, count):
  """fp32 [M, B, K]: log-probs of a batch, of a reference or before updates."""

  def add(i, out):
    logp = outputs(config, params, _micro(batch, i)).logp_BK
    return out.at[i].set(logp)

  zeros = jnp.zeros(batch.mask.shape, jnp.float32)
  return jax.lax.fori_loop(0, count, add, zeros)
