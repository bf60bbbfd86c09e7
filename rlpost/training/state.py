"""What an update changes, and the optimizer that changes it."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlpost import errors

SCHEDULES = ('constant', 'cosine', 'linear')


class TrainState(NamedTuple):
  """Trainable parameters, their optimizer's state, and updates made."""

  trainable: Mapping[str, Any]
  opt: Any
  step: Any


def partition(params: Mapping, trainable: str) -> tuple[dict, dict]:
  """Splits parameters into (trainable, frozen) by a regular expression."""
  chosen = {k: v for k, v in params.items() if re.fullmatch(trainable, k)}
  if not chosen:
    raise errors.InputError(
        f'{trainable=} matches none of {len(params)} parameters, such as '
        f'{next(iter(params))!r}.'
    )
  return chosen, {k: v for k, v in params.items() if k not in chosen}


def schedule(
    learning_rate: float, *, warmup_steps: int, total_steps: int,
    decay: str = 'constant', final_scale: float = 0.1,
):
  """Linear warm-up from learning_rate / warmup_steps, then `decay`.

  The length is the planned number of updates, so that the last update runs at
  `final_scale` times the peak.
  """
  if decay not in SCHEDULES:
    raise errors.InputError(f'{decay=} must be one of {SCHEDULES}.')
  if warmup_steps > total_steps:
    raise errors.InputError(
        f'{warmup_steps=} must not exceed the {total_steps=} planned updates.'
    )
  rest = max(total_steps - warmup_steps - 1, 1)
  after = {
      'constant': lambda: optax.constant_schedule(learning_rate),
      'cosine': lambda: optax.cosine_decay_schedule(
          learning_rate, rest, final_scale
      ),
      'linear': lambda: optax.linear_schedule(
          learning_rate, final_scale * learning_rate, rest
      ),
  }[decay]()
  if not warmup_steps:
    return after
  warmup = optax.linear_schedule(
      learning_rate / warmup_steps, learning_rate, max(warmup_steps - 1, 1)
  )
  return optax.join_schedules([warmup, after], [warmup_steps])


def adamw(
    learning_rate: float, *, total_steps: int, warmup_steps: int = 0,
    decay: str = 'constant', b1: float = 0.9, b2: float = 0.99,
    eps: float = 1e-8, weight_decay: float = 0.0,
) -> optax.GradientTransformation:
  """AdamW (arXiv:1711.05101); norm scales are not decayed."""
  rate = schedule(
      learning_rate, warmup_steps=warmup_steps, total_steps=total_steps,
      decay=decay,
  )

  def decayed(params):
    return {k: not k.endswith('scale') for k in params}

  return optax.adamw(
      rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decayed
  )


def create(trainable: Mapping, optimizer) -> TrainState:
  """The state before the first update."""
  return TrainState(trainable, optimizer.init(trainable), jnp.int32(0))


def union(trainable: Mapping, frozen: Mapping) -> dict:
  """All parameters by name."""
  return {**trainable, **frozen}


def shardings(
    abstract: TrainState, params: Mapping, default, offload=False
) -> TrainState:
  """A sharding for each leaf: moments follow the parameter they belong to.

  Args:
    abstract: the state's shapes.
    params: name -> sharding.
    default: sharding of everything else.
    offload: moments stay in the memory of the host.
  """

  def of(path, leaf):
    name = next(
        (p.key for p in reversed(path)
         if isinstance(p, jax.tree_util.DictKey)), None
    )
    if name not in params or not leaf.ndim:
      return default
    moment = offload and path[0].name == 'opt'
    return params[name].with_memory_kind('pinned_host' if moment else None)

  return jax.tree_util.tree_map_with_path(of, abstract)
