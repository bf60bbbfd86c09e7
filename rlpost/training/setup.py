"""From a config to everything that a run holds, before the first step."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from rlpost import errors, sharding
from rlpost.algorithms import recipes
from rlpost.data import plan as plans
from rlpost.data import tokenizer as tokenizers
from rlpost.domains import domain as domain_lib
from rlpost.domains import table
from rlpost.models import config as model_configs
from rlpost.models import transformer
from rlpost.ops.attention import SharedPrefix
from rlpost.rewards import scoring
from rlpost.rewards.normalize import RewardScale
from rlpost.rollouts import collect
from rlpost.rollouts import engine as engines
from rlpost.training import curriculum as curricula
from rlpost.training import programs as program_lib
from rlpost.training import state as states
from rlpost.training import step as steps
from rlpost.weights import load as weights


@dataclasses.dataclass(frozen=True)
class Rollout:
  """What a step samples.

  Attributes:
    prompts, samples: prompts per step, and completions of each.
    max_new: most tokens of a completion, its end included.
    temperature: of sampling, above 0.
    prefix_len, prompt_len: room for shared and own prompt tokens; 0 measures
      the longest of the held-out and validation tasks. A longer prompt is
      counted as 'overlong' and not attempted.
    slots, rows: prompt slots and rows of each; 0 for prompts and samples.
    prefixes: shared prefixes held at one time, at most.
    admit, refill: see `rollouts.engine.EngineConfig`.
  """

  prompts: int
  samples: int
  max_new: int
  temperature: float = 1.0
  prefix_len: int = 0
  prompt_len: int = 0
  slots: int = 0
  rows: int = 0
  prefixes: int = 16
  admit: int = 0
  refill: int = 0

  def __post_init__(self):
    if self.temperature <= 0:
      raise errors.InputError(
          f'rollout.temperature={self.temperature} must be above 0: a greedy '
          'policy gives no gradient.'
      )
    for name in ('prompts', 'samples', 'max_new', 'prefixes'):
      if getattr(self, name) < 1:
        raise errors.InputError(
            f'rollout.{name}={getattr(self, name)} must be at least 1.'
        )


@dataclasses.dataclass(frozen=True)
class Train:
  """How an update is computed; see `step.StepConfig`.

  Attributes:
    rows: rows (groups, or packed documents) of a micro-batch.
    groups: most groups of an update; 0 for all prompts of a step. Fewer than
      prompts leaves room for groups that tell nothing apart.
    updates: updates on each step's batch.
  """

  rows: int
  groups: int = 0
  updates: int = 1
  backend: str = 'dense'
  remat: str = 'none'
  chunk: int = 512
  clip_norm: float = 1.0


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """Held-out attempts: one greedy, `samples` at `temperature` per task.

  Attributes:
    slots: prompts decoded at one time.
    admit, refill: see `rollouts.engine.EngineConfig`.
  """

  slots: int
  samples: int = 3
  temperature: float = 1.0
  admit: int = 0
  refill: int = 0


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """Save every so many steps; keep so many of the latest, and the best."""

  every: int
  keep_latest: int = 2


@dataclasses.dataclass(frozen=True)
class Model:
  """A decoder's shape, its tokenizer, and a way to get its parameters.

  `params()` reads or makes them on the host: {name: array}, per-layer leaves.
  """

  config: model_configs.ModelConfig
  tokenizer: tokenizers.Tokenizer
  params: Any
  fingerprint: str
  stacked: bool
  trainable: str
  dtype: str


def load_model(
    *, source: str, seed: int, value_head: bool = False,
    stacked: bool = False, trainable: str = '.*', dtype: str = 'float32',
) -> Model:
  """The model of `config.model`.

  Args:
    source: 'scratch:NAME' for random parameters of a named shape over bytes;
      else what `weights.load` reads: 'smollm2', a .gguf file, a folder of
      safetensors, 'hub:ORG/NAME'.
    seed: of random parameters.
    value_head: add a scalar head, random.
    stacked: one scanned layer instead of per-layer leaves.
    trainable: regular expression of the names of parameters that train.
    dtype: of activations; parameters are fp32.
  """
  kind, _, name = source.partition(':')
  if kind == 'scratch':
    config = model_configs.named(name, value_head=value_head)
    tokenizer = tokenizers.bytes_tokenizer()

    def init():
      return transformer.init(config, jax.random.key(seed))

    return Model(
        config, tokenizer, init, f'{source}:{seed}', stacked, trainable, dtype
    )
  config = weights.load_config(source)
  tokenizer = weights.load_tokenizer(source)

  def read():
    params = weights.load(source)[1]
    if value_head and 'value/kernel' not in params:
      rng = np.random.default_rng(seed)
      draw = rng.standard_normal((1, config.width)) * config.width**-0.5
      params = {**params, 'value/kernel': draw.astype(np.float32)}
    return params

  config = dataclasses.replace(config, value_head=value_head)
  fingerprint = f'{source}:{tokenizer.fingerprint}'
  return Model(
      config, tokenizer, read, fingerprint, stacked, trainable, dtype
  )


@dataclasses.dataclass(frozen=True)
class Tasks:
  """The domains of a run, split into pools, with their environments."""

  pools: Mapping[str, domain_lib.Pools]
  environments: Mapping[str, Any]

  @property
  def heldout(self) -> dict:
    return {name: p.heldout for name, p in self.pools.items()}

  @property
  def validation(self) -> dict:
    return {name: p.validation for name, p in self.pools.items()}

  def fingerprint(self, name: str) -> str:
    """Digest of a domain's shots and of the items that training refuses."""
    pool = self.pools[name]
    text = json.dumps(
        [[t.content_id for t in pool.shots], sorted(pool.refused)]
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_tasks(
    *, names: tuple[str, ...], heldout: int = 64, validation: int = 16,
    heldout_seed: int = 0, form: str | None = None, num_shots: int = -1,
    shots: Mapping | None = None, trained=(),
) -> Tasks:
  """Splits the named domains.

  Args:
    names: keys of `domains.table.DOMAINS`.
    heldout, validation: tasks per domain in these pools.
    heldout_seed: draws both pools; independent of the run's seed.
    form: of prompts; each domain's own if None.
    num_shots: solved examples in a plain prompt; each domain's own if -1.
    shots: the examples of an earlier run, by domain.
    trained: content ids that held-out tasks must avoid.
  """
  if not names:
    raise errors.InputError('config.domains.names is empty; name one domain.')

  def load(name):
    domain = table.load(name)
    if num_shots < 0 or domain.form != 'plain':
      return domain
    return dataclasses.replace(domain, num_shots=num_shots)

  pools = {
      name: domain_lib.pools(
          load(name), heldout_seed=heldout_seed, heldout=heldout,
          validation=validation, shots=shots and shots[name],
          trained=trained,
      )
      for name in names
  }
  return Tasks(pools, {n: p.environment(form=form) for n, p in pools.items()})


def _lengths(tasks: Tasks, tokenizer, names):
  """(longest shared prefix, longest rest, longest answer) in tokens.

  The rest is measured on the held-out and validation tasks.
  """
  prefix = rest = answer = 1
  for name in names:
    environment, pool = tasks.environments[name], tasks.pools[name]
    prefix = max(prefix, len(tokenizer.encode(environment.prefix)))
    for task in (*pool.heldout, *pool.validation):
      state = environment.render(task)
      rest = max(rest, len(tokenizer.encode(state.suffix)))
      gold = task.checker.get('gold')
      answer = max(answer, len(tokenizer.encode(f' {gold}\n')))
  return prefix, rest, answer


@dataclasses.dataclass
class Run:
  """Everything that a reinforcement-learning run holds.

  `state` changes with every update; `plan`, `curriculum` and `scale` are host
  objects whose state is JSON.
  """

  config: Any
  rollout: Rollout
  train: Train
  evaluation: Evaluation
  checkpoint: Checkpoint
  mesh: Any
  model: Model
  tasks: Tasks
  recipe: recipes.Recipe
  shapes: program_lib.Shapes
  programs: Mapping[str, program_lib.Program]
  rollouts: collect.Collector
  evaluations: collect.Collector
  scorer: scoring.Scorer
  plan: plans.Plan
  curriculum: curricula.Curriculum
  scale: RewardScale
  state: states.TrainState | None = None
  frozen: Mapping[str, Any] | None = None
  reference: Mapping[str, Any] | None = None

  @property
  def params(self) -> dict:
    return states.union(self.state.trainable, self.frozen)


def make_recipe(*, name: str, **overrides) -> recipes.Recipe:
  """A row of `recipes.RECIPES` with `config.recipe`'s changes."""
  for key, value in overrides.items():
    if key.endswith('hparams'):
      overrides[key] = dict(value)
  return recipes.recipe(name, **overrides)


def _engine_configs(rollout, evaluation, measured, domains):
  """Shapes of decoding, for training and for evaluation."""
  shared = {
      'prefix_len': rollout.prefix_len or _bucket(measured[0]),
      'prompt_len': rollout.prompt_len or _bucket(measured[1]),
      'width': rollout.max_new,
      'prefixes': min(domains, rollout.prefixes),
  }
  train = engines.EngineConfig(
      prompts=rollout.slots or rollout.prompts,
      rows=rollout.rows or rollout.samples, admit=rollout.admit,
      refill=rollout.refill, **shared,
  )
  return train, engines.EngineConfig(
      prompts=evaluation.slots, rows=evaluation.samples + 1,
      admit=evaluation.admit, refill=evaluation.refill, **shared,
  )


def _shapes(config, model, recipe, rollout, train, decoding):
  """What decides the run's programs."""
  prompt = decoding[0].prefix_len + decoding[0].prompt_len
  slots = rollout.samples * rollout.max_new
  step = steps.StepConfig(
      model=model.config, recipe=recipe,
      layout=SharedPrefix(prompt, rollout.samples, rollout.max_new),
      backend=train.backend, remat=train.remat, chunk=train.chunk,
      clip_norm=train.clip_norm, dtype=model.dtype,
  )
  optimizer = states.adamw(
      total_steps=config.steps * train.updates, **config.optimizer
  )
  return program_lib.Shapes(
      step=step, stacked=model.stacked, trainable=model.trainable,
      optimizer=optimizer, rows=train.rows,
      micro=-(-(train.groups or rollout.prompts) // train.rows),
      slots=slots, length=prompt + slots, rollout=decoding[0],
      evaluation=None if decoding[1] == decoding[0] else decoding[1],
      scored=recipe.kl != 'none' or recipe.anchor == 'old',
  )


def build(config, scorer, display, workdir_tasks: Mapping | None = None) -> Run:
  """Everything but the parameters; reads no weights and compiles nothing.

  Args:
    config: a locked ConfigDict.
    scorer: over running workers.
    display: `training.display.Display`.
    workdir_tasks: changes to `config.domains` (an evaluation's own seed).
  """
  mesh = sharding.make_mesh(**config.mesh)
  model = load_model(**config.model, seed=config.seed)
  domains = {**config.domains, **(workdir_tasks or {})}
  tasks = make_tasks(**domains)
  names = tuple(domains['names'])
  recipe = make_recipe(**config.recipe)
  if recipe.advantage == 'gae':
    raise errors.InputError(
        "recipe 'ppo' needs a critic; choose a recipe with group advantages."
    )
  rollout, train = Rollout(**config.rollout), Train(**config.train)
  evaluation = Evaluation(**config.evaluation)
  recipes.check_group_size(recipe, rollout.samples)
  measured = _lengths(tasks, model.tokenizer, names)
  decoding = _engine_configs(rollout, evaluation, measured, len(names))
  shapes = _shapes(config, model, recipe, rollout, train, decoding)
  programs = program_lib.programs(shapes, mesh, display.phase)
  stop = model.tokenizer.stop_ids(_stops(tasks, names))

  def collector(kind, engine):
    decoding = program_lib.decoding(programs, kind)
    return collect.Collector(
        engines.Engine(engine, decoding, stop), model.tokenizer, scorer
    )

  rollouts = collector('rollout', decoding[0])
  evaluations = rollouts
  if shapes.evaluation is not None:
    evaluations = collector('evaluation', decoding[1])
  sources = {n: plans.Source(fingerprint=tasks.fingerprint(n)) for n in names}
  return Run(
      config=config, rollout=rollout, train=train, evaluation=evaluation,
      checkpoint=Checkpoint(**config.checkpoint), mesh=mesh, model=model,
      tasks=tasks, recipe=recipe, shapes=shapes, programs=programs,
      rollouts=rollouts, evaluations=evaluations, scorer=scorer,
      plan=plans.Plan(sources, prompts=rollout.prompts, seed=config.seed,
                      **config.plan),
      curriculum=curricula.Curriculum(names, **config.curriculum),
      scale=RewardScale(**config.reward_scale),
  )


def _bucket(length: int, step: int = 8) -> int:
  return -(-length // step) * step


def _stops(tasks: Tasks, names) -> tuple[str, ...]:
  stops = [s for n in names for s in tasks.environments[n].stop]
  return tuple(dict.fromkeys(stops))


def place(run: Run, params: Mapping[str, Any]) -> None:
  """Puts fresh parameters on the mesh and makes the optimizer's state."""
  if run.shapes.stacked:
    params = transformer.stack(params)
  known = program_lib.abstract(run.shapes, run.mesh)
  params = {
      k: jax.device_put(np.asarray(v), known.params[k].sharding)
      for k, v in params.items()
  }
  if run.recipe.kl != 'none':
    run.reference = jax.tree.map(lambda x: x.copy(), params)
  trainable, run.frozen = states.partition(params, run.shapes.trainable)
  run.state = run.programs['init'](trainable)


# Each section of a config is the keyword arguments of what it builds; the
# second entry names those that `build` supplies itself.
SECTIONS = {
    'model': (load_model, ('seed',)),
    'mesh': (sharding.make_mesh, ('devices',)),
    'domains': (make_tasks, ('shots', 'trained')),
    'rollout': (Rollout, ()),
    'optimizer': (states.adamw, ('total_steps',)),
    'train': (Train, ()),
    'plan': (plans.Plan, ('sources', 'prompts', 'seed')),
    'curriculum': (curricula.Curriculum, ('names',)),
    'reward_scale': (RewardScale, ()),
    'evaluation': (Evaluation, ()),
    'checkpoint': (Checkpoint, ()),
}
