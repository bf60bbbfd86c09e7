"""Named algorithms as rows of choices, and the terms that a row trains on.

An algorithm is advantage x loss x aggregation x KL x correction, plus what
becomes of truncated answers and of groups that tell nothing apart. `RECIPES`
is one literal table; `recipe(name, **overrides)` changes single choices.
"""

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlpost import errors
from rlpost.algorithms import (
  advantages,
  corrections,
  divergences,
  policy_losses,
)
from rlpost.algorithms import aggregation as aggregation_lib
from rlpost.algorithms import overlong as overlong_lib

ANCHORS = ('behavior', 'old', 'self')


def _require(value, known, field: str) -> None:
  if value not in known:
    near = difflib.get_close_matches(str(value), known, n=1)
    hint = f'; did you mean {near[0]!r}?' if near else '.'
    raise errors.InputError(
        f'{field}={value!r} is not one of {sorted(known)}{hint}'
    )


def _require_keywords(given: Mapping, function: Callable, field: str) -> None:
  known = [
      name for name, parameter in inspect.signature(function).parameters.items()
      if parameter.kind is inspect.Parameter.KEYWORD_ONLY
  ]
  for key in given:
    _require(key, known, f'{field} of {function.__name__}')


@dataclasses.dataclass(frozen=True)
class Recipe:
  """One row of choices.

  Attributes:
    advantage: a key of advantages.ADVANTAGES, or 'gae', which needs a critic.
    loss, loss_hparams: a key of policy_losses.LOSSES and its keywords.
    aggregation: a key of aggregation.UNITS.
    length_constant: tokens, for 'constant_length' and 'token_sum' only.
    kl: 'none' or a key of divergences.DIVERGENCES.
    kl_place: 'loss' (divergences.kl_loss) or 'reward' (advantages.kl_penalty,
      whose estimate is k1).
    kl_coefficient: per nat, at least 0.
    anchor: what the ratio is taken to. 'behavior', the sampler: right while
      sampler and trainer share their arithmetic. 'old', the trainer before its
      first update on the batch (`Outputs.old_logp_BK`). 'self', the current
      policy: the ratio is exactly 1, for one update per batch.
    correction, correction_hparams: a key of corrections.CORRECTIONS; old over
      sampler, so it needs the anchor 'old' or 'self'.
    entropy_coefficient: per nat of entropy, subtracted from the objective.
    value_coefficient, value_clip, gamma, lam: of the critic, with 'gae'.
    drop_uninformative: groups without spread leave numerators and denominators
      alike. If not, they train with advantage 0: counted, and pulled by KL and
      entropy terms.
    dynamic_sampling: further groups are drawn in their place, at most
      `draw_factor` times the wanted number in all.
    overlong: 'keep', 'mask' or 'soft' (the last `overlong_buffer` share of the
      token budget is punished).
    paper: where the row comes from.
  """

  advantage: str
  loss: str
  loss_hparams: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  aggregation: str = 'token_mean'
  length_constant: float | None = None
  kl: str = 'none'
  kl_place: str = 'loss'
  kl_coefficient: float = 0.0
  anchor: str = 'behavior'
  correction: str = 'none'
  correction_hparams: Mapping[str, Any] = dataclasses.field(
      default_factory=dict
  )
  entropy_coefficient: float = 0.0
  value_coefficient: float = 0.0
  value_clip: float | None = 0.2
  gamma: float = 1.0
  lam: float = 0.95
  drop_uninformative: bool = False
  dynamic_sampling: bool = False
  draw_factor: float = 1.5
  overlong: str = 'keep'
  overlong_buffer: float = 0.2
  paper: str = ''

  def __post_init__(self):
    names = [*advantages.ADVANTAGES, 'gae']
    _require(self.advantage, names, 'advantage')
    _require(self.loss, policy_losses.LOSSES, 'loss')
    _require(self.aggregation, aggregation_lib.UNITS, 'aggregation')
    _require(self.kl, ['none', *divergences.DIVERGENCES], 'kl')
    _require(self.kl_place, ('loss', 'reward'), 'kl_place')
    _require(self.anchor, ANCHORS, 'anchor')
    _require(self.correction, corrections.CORRECTIONS, 'correction')
    _require(self.overlong, overlong_lib.OVERLONG, 'overlong')
    _require_keywords(
        self.loss_hparams, policy_losses.LOSSES[self.loss], 'loss_hparams'
    )
    _require_keywords(
        self.correction_hparams,
        corrections.CORRECTIONS[self.correction],
        'correction_hparams',
    )
    self._check_pairs()

  def _check_pairs(self):
    """Refuses choices that would do nothing, or the wrong thing, together."""
    if (self.kl == 'none') != (self.kl_coefficient == 0):
      raise errors.InputError(
          f'{self.kl=} with {self.kl_coefficient=}: choose an estimator and a '
          f"coefficient above 0, or 'none' and 0."
      )
    if self.kl_place == 'reward' and self.kl not in ('none', 'k1'):
      raise errors.InputError(f"{self.kl=} in the reward must be 'k1'.")
    if self.correction != 'none' and self.anchor == 'behavior':
      raise errors.InputError(
          f"{self.correction=} with anchor='behavior' counts the mismatch "
          f"twice; use anchor='self' (one update per batch) or 'old'."
      )
    if (self.advantage == 'gae') != (self.value_coefficient > 0):
      raise errors.InputError(
          f'{self.advantage=} with {self.value_coefficient=}: a critic needs '
          f"both advantage='gae' and a value_coefficient above 0."
      )
    if self.dynamic_sampling and not self.drop_uninformative:
      raise errors.InputError(
          'dynamic_sampling draws groups in place of uninformative ones; set '
          'drop_uninformative=True as well.'
      )
    needs = self.aggregation in ('constant_length', 'token_sum')
    if self.length_constant is not None and not needs:
      raise errors.InputError(
          f'{self.length_constant=} is not read by {self.aggregation=}; '
          f'set it to None.'
      )
    if not 0 < self.overlong_buffer <= 1:
      raise errors.InputError(f'{self.overlong_buffer=} must be in (0, 1].')


def check_group_size(recipe: Recipe, samples_per_prompt: int) -> None:
  """Refuses group estimators on groups of one, which train on nothing.

  Raises:
    InputError: fewer than two samples where siblings are the baseline.
  """
  grouped = recipe.advantage in advantages.GROUP_ADVANTAGES
  if grouped and samples_per_prompt < 2:
    raise errors.InputError(
        f'{recipe.advantage=} compares answers to one prompt, and there '
        f'is {samples_per_prompt=}: every advantage would be 0. Use at least '
        f"2, or advantage='reinforce_pp'."
    )


RECIPES = {
    'grpo': Recipe(
        advantage='group_normalized',
        loss='clipped_surrogate',
        loss_hparams={'clip_low': 0.2, 'clip_high': 0.2},
        aggregation='sequence_mean',
        kl='k3',
        kl_coefficient=0.04,
        paper='Shao et al., 2024 (DeepSeekMath), arXiv:2402.03300',
    ),
    # length_constant: the generation budget in tokens, which the config knows.
    'dr_grpo': Recipe(
        advantage='group_centered',
        loss='clipped_surrogate',
        loss_hparams={'clip_low': 0.2, 'clip_high': 0.2},
        aggregation='constant_length',
        paper='Liu et al., 2025, arXiv:2503.20783',
    ),
    # Whole answers are the actions: sums over a sequence, no clip. The paper
    # has KL in the reward: kl='k1', kl_place='reward', kl_coefficient=...
    'rloo': Recipe(
        advantage='leave_one_out',
        loss='reinforce',
        aggregation='constant_length',
        length_constant=1.0,
        paper='Ahmadian et al., 2024, arXiv:2402.14740',
    ),
    'dapo': Recipe(
        advantage='group_normalized',
        loss='clipped_surrogate',
        loss_hparams={'clip_low': 0.2, 'clip_high': 0.28},
        aggregation='token_mean',
        drop_uninformative=True,
        dynamic_sampling=True,
        overlong='soft',
        paper='Yu et al., 2025, arXiv:2503.14476',
    ),
    'gspo': Recipe(
        advantage='group_normalized',
        loss='gspo',
        loss_hparams={'clip_low': 3e-4, 'clip_high': 4e-4},
        aggregation='sequence_mean',
        paper='Zheng et al., 2025, arXiv:2507.18071',
    ),
    'cispo': Recipe(
        advantage='group_normalized',
        loss='cispo',
        loss_hparams={'clip_low': 1.0, 'clip_high': 4.0},
        aggregation='token_mean',
        paper='MiniMax, 2025 (MiniMax-M1), arXiv:2506.13585',
    ),
    # The paper has KL in the reward: kl='k1', kl_place='reward'.
    'reinforce_pp': Recipe(
        advantage='reinforce_pp',
        loss='clipped_surrogate',
        loss_hparams={'clip_low': 0.2, 'clip_high': 0.2},
        aggregation='token_mean',
        paper='Hu, 2025, arXiv:2501.03262',
    ),
    'maxrl': Recipe(
        advantage='maxrl',
        loss='clipped_surrogate',
        loss_hparams={'clip_low': 0.2, 'clip_high': 0.28},
        aggregation='token_mean',
        paper='Tajwar et al., 2026, arXiv:2602.02710',
    ),
    'ppo': Recipe(
        advantage='gae',
        loss='clipped_surrogate',
        loss_hparams={'clip_low': 0.2, 'clip_high': 0.2},
        aggregation='token_mean',
        value_coefficient=1.0,
        paper='Schulman et al., 2017, arXiv:1707.06347',
    ),
}


def recipe(name: str, **overrides) -> Recipe:
  """A row of the table with single choices replaced.

  Raises:
    InputError: an unknown name, key or value, with the nearest known one.
  """
  _require(name, RECIPES, 'recipe')
  fields = [field.name for field in dataclasses.fields(Recipe)]
  for key in overrides:
    _require(key, fields, f'a field of recipe {name}')
  return dataclasses.replace(RECIPES[name], **overrides)


class Outputs(NamedTuple):
  """What the model says about each loss slot, fp32 [B, K].

  Attributes:
    logp_BK: log-probability of the target at the slot's temperature, nats.
    entropy_BK: entropy of the same distribution, nats.
    value_BK: the critic's output, never scaled by temperature.
    old_logp_BK: `logp_BK` before the first update on this batch.
  """

  logp_BK: Any
  entropy_BK: Any = None
  value_BK: Any = None
  old_logp_BK: Any = None


class Critic(NamedTuple):
  """Constants of the value loss: the critic before the update, and targets."""

  old_value_BK: Any
  target_BK: Any


class Anchored(NamedTuple):
  """A batch whose `behavior_logp` is the anchor, and slot weights."""

  batch: Any
  weight_BK: Any


def anchor(outputs: Outputs, batch, recipe: Recipe) -> Anchored:
  """Puts the ratio's denominator in place and weighs sampler mismatch.

  Slots that the correction drops leave the mask, so that nothing of them is
  ever exponentiated; they still count, as counts read the batch's own mask.

  Raises:
    InputError: the anchor 'old' without `old_logp_BK`.
  """
  if recipe.anchor == 'behavior':
    return Anchored(batch, (batch.mask > 0).astype(jnp.float32))
  if recipe.anchor == 'self':
    old_logp_BK = jax.lax.stop_gradient(outputs.logp_BK)
  elif outputs.old_logp_BK is None:
    raise errors.InputError(
        "anchor='old' needs outputs.old_logp_BK, the trainer's log-probs "
        "before its first update on the batch; use anchor='self' for one "
        'update per batch.'
    )
  else:
    old_logp_BK = jax.lax.stop_gradient(outputs.old_logp_BK)
  weight_BK = corrections.CORRECTIONS[recipe.correction](
      old_logp_BK,
      batch.behavior_logp,
      batch.mask,
      batch.sequence,
      **recipe.correction_hparams,
  )
  mask_BK = jnp.where(weight_BK > 0, batch.mask, jnp.zeros_like(batch.mask))
  return Anchored(
      batch._replace(behavior_logp=old_logp_BK, mask=mask_BK), weight_BK
  )


def policy_terms(
    outputs: Outputs, batch, recipe: Recipe, *, critic: Critic | None = None
) -> dict[str, tuple[Any, str]]:
  """The terms of a policy update: {name: (weighted values [B, K], unit)}.

  A term's objective is sum(values) over the update, divided by
  aggregation.denominator(unit, sum of aggregation.count(unit, ...)); the total
  is the sum of the terms. All terms are aggregated alike, so a coefficient
  weighs a token of one against a token of another.

  Args:
    outputs: of the policy on this batch.
    batch: types.Batch.
    recipe: the choices.
    critic: with advantage 'gae'.

  Returns:
    'policy' always; 'kl', 'entropy' and 'value' where the recipe has them.

  Raises:
    InputError: an output that the recipe needs is missing.
  """
  unit = aggregation_lib.unit_of(recipe.aggregation)
  scale_BK = aggregation_lib.weights(
      recipe.aggregation,
      batch.mask,
      batch.sequence,
      constant=recipe.length_constant,
  )
  anchored = anchor(outputs, batch, recipe)
  loss = policy_losses.LOSSES[recipe.loss]
  loss_BK = loss(outputs.logp_BK, anchored.batch, **recipe.loss_hparams)
  terms = {'policy': (scale_BK * anchored.weight_BK * loss_BK, unit)}
  if recipe.kl != 'none' and recipe.kl_place == 'loss':
    kl_BK = divergences.kl_loss(outputs.logp_BK, batch, estimator=recipe.kl)
    terms['kl'] = (recipe.kl_coefficient * scale_BK * kl_BK, unit)
  if recipe.entropy_coefficient:
    _require_output(outputs.entropy_BK, 'entropy_BK', 'entropy_coefficient')
    bonus_BK = policy_losses.entropy_bonus(outputs.entropy_BK, batch.mask)
    terms['entropy'] = (recipe.entropy_coefficient * scale_BK * bonus_BK, unit)
  if recipe.value_coefficient:
    _require_output(outputs.value_BK, 'value_BK', 'value_coefficient')
    _require_output(critic, 'critic', 'value_coefficient')
    value_BK = policy_losses.clipped_value(
        outputs.value_BK,
        critic.old_value_BK,
        critic.target_BK,
        batch.mask,
        clip=recipe.value_clip,
    )
    terms['value'] = (recipe.value_coefficient * scale_BK * value_BK, unit)
  return terms


def _require_output(value, name, field):
  if value is None:
    raise errors.InputError(
        f'{field} is above 0 and {name} was not given; compute it or set '
        f'{field}=0.'
    )
