"""What an update did, as numbers that no split can change.

`metrics` gives a (sum, count) per name for a part of the update, and maxima
apart; `merge` joins parts; `finish` divides once: a logged number is a global
sum over a global count, never a mean of means.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from rlpost.algorithms import divergences, policy_losses, recipes, slots

_MAXIMA = 'ratio', 'weight', 'logp_gap'


@flax.struct.dataclass
class Metrics:
  """`sums` [names] over `count` tokens, and `maxima` [3], at least 0.

  Vectors, for a compiler's time goes by the number of its kernels.
  """

  sums: Any
  count: Any
  maxima: Any
  names: tuple[str, ...] = flax.struct.field(pytree_node=False)


def metrics(
    outputs: recipes.Outputs, batch, recipe: recipes.Recipe
) -> Metrics:
  """Sums and counts over the trained slots of a part of an update.

  | name           | mean over trained tokens of                            |
  |----------------|--------------------------------------------------------|
  | ratio          | the ratio that the loss clips                          |
  | clipped        | 1 where the loss holds it at a bound                   |
  | weight         | p / p_behavior per token                               |
  | weight_squared | its square; `finish` makes `effective_share` of both   |
  | behavior_kl    | w - 1 - log w, estimating KL(behavior || p), nats      |
  | logp_gap       | |log p - log p_behavior|, nats                         |
  | advantage_abs  | |advantage|                                            |
  | correction     | the correction's weight (0 where dropped)              |
  | dropped        | 1 where the correction dropped the sequence            |
  | entropy        | entropy, nats, where outputs has it                    |
  | ref_kl         | the recipe's estimate of KL(p || ref), nats, if any    |

  Maxima: `ratio_max`, `weight_max`, `logp_gap_max`.
  """
  outputs = jax.lax.stop_gradient(outputs)
  trained_BK = (batch.mask > 0).astype(jnp.float32)
  anchored = recipes.anchor(outputs, batch, recipe)
  # Dropped slots left the anchored mask, so their ratio reads 1 there.
  arguments = recipe.loss, outputs.logp_BK, anchored.batch
  ratio_BK = policy_losses.RATIOS[recipe.loss](*arguments[1:])
  clipped_BK = policy_losses.clipped(*arguments, **recipe.loss_hparams)
  logp_BK, behavior_BK, ref_BK, advantage_BK = slots.select(
      batch.mask,
      outputs.logp_BK,
      batch.behavior_logp,
      batch.ref_logp,
      batch.advantage,
  )
  gap_BK = logp_BK - behavior_BK
  weight_BK = jnp.exp(gap_BK)
  values = {
      'ratio': ratio_BK,
      'clipped': clipped_BK.astype(jnp.float32),
      'weight': weight_BK,
      'weight_squared': jnp.square(weight_BK),
      'behavior_kl': jnp.expm1(gap_BK) - gap_BK,
      'logp_gap': jnp.abs(gap_BK),
      'advantage_abs': jnp.abs(advantage_BK),
      'correction': anchored.weight_BK,
      'dropped': (anchored.weight_BK <= 0).astype(jnp.float32),
  }
  if outputs.entropy_BK is not None:
    (values['entropy'],) = slots.select(batch.mask, outputs.entropy_BK)
  if recipe.kl != 'none':
    values['ref_kl'] = divergences.DIVERGENCES[recipe.kl](logp_BK, ref_BK)
  masked = {name: value_BK * trained_BK for name, value_BK in values.items()}
  return Metrics(
      jnp.stack(list(masked.values())).sum((1, 2)),
      trained_BK.sum(),
      jnp.stack([masked[name] for name in _MAXIMA]).max((1, 2), initial=0.0),
      tuple(values),
  )


def merge(first: Metrics, second: Metrics) -> Metrics:
  """Metrics of two parts of an update, as of both together."""
  return first.replace(
      sums=first.sums + second.sums,
      count=first.count + second.count,
      maxima=jnp.maximum(first.maxima, second.maxima),
  )


def finish(parts: Metrics) -> dict[str, Any]:
  """{name: global sum / global count}, the maxima, and `effective_share`.

  `effective_share` is the effective sample size over the sample size,
  (sum w)^2 / (n sum w^2) (Kong, 1992): 1 on policy, towards 1 / n as one token
  outweighs the rest. Without a trained token everything is 0.
  """
  means = parts.sums / jnp.maximum(parts.count, 1)
  out = {name: means[i] for i, name in enumerate(parts.names)}
  out |= {f'{name}_max': parts.maxima[i] for i, name in enumerate(_MAXIMA)}
  square = jnp.maximum(out['weight_squared'], jnp.finfo(jnp.float32).tiny)
  out['effective_share'] = jnp.square(out['weight']) / square
  return out
