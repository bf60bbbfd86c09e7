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
from rlpost.data import zigzag
from rlpost.domains import domain as domain_lib
from rlpost.domains import table
from rlpost.models import transformer
from rlpost.ops import context
from rlpost.ops.attention import SharedPrefix
from rlpost.rewards import scoring
from rlpost.rewards.normalize import RewardScale
from rlpost.rollouts import collect
from rlpost.rollouts import engine as engines
from rlpost.training import curriculum as curricula
from rlpost.training import imitation, lengths, sections
from rlpost.training import programs as program_lib
from rlpost.training import state as states
from rlpost.training import step as steps
from rlpost.training.model import Model, load_model, split_model


@dataclasses.dataclass(frozen=True)
class Tasks:
  """The domains of a run, split into pools, with their environments.

  Of the domains that are not in `trained` there are held-out tasks only.
  """

  pools: Mapping[str, domain_lib.Pools]
  environments: Mapping[str, Any]
  trained: tuple[str, ...]

  @property
  def sources(self) -> dict:
    """The pools that training draws from."""
    return {name: self.pools[name] for name in self.trained}

  @property
  def heldout(self) -> dict:
    return {name: p.heldout for name, p in self.pools.items()}

  @property
  def validation(self) -> dict:
    return {name: p.validation for name, p in self.sources.items()}

  @property
  def hardest(self) -> dict[str, float]:
    """The largest difficulty of each trained domain, as its pools show it."""
    return {
        name: max(t.difficulty for t in (*pool.heldout, *pool.validation))
        for name, pool in self.sources.items()
    }

  def fingerprint(self, name: str) -> str:
    """Digest of a domain's shots and of the items that training refuses."""
    pool = self.pools[name]
    text = json.dumps(
        [[t.content_id for t in pool.shots], sorted(pool.refused)]
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_tasks(
    *, names: tuple[str, ...], unseen: tuple[str, ...] = (),
    heldout: int = 64, validation: int = 16,
    heldout_seed: int = 0, form: str | None = None, num_shots: int = -1,
    shots: Mapping | None = None, trained=(),
) -> Tasks:
  """Splits the named domains.

  Args:
    names: keys of `domains.table.DOMAINS`.
    unseen: more of them, evaluated and never trained on.
    heldout, validation: tasks per domain in these pools.
    heldout_seed: draws both pools; independent of the run's seed.
    form: of prompts; each domain's own if None.
    num_shots: solved examples in a plain prompt; each domain's own if -1.
    shots: the examples of an earlier run, by domain.
    trained: content ids that held-out tasks must avoid.
  """
  if not names:
    raise errors.InputError('config.domains.names is empty; name one domain.')
  every = tuple(dict.fromkeys((*names, *unseen)))
  if len(every) < len(names) + len(unseen):
    raise errors.InputError(
        f'A domain may be named once in domains.{names=} and {unseen=}.'
    )
  forms = {form or table.load(name).form for name in every}
  if num_shots > 0 and 'plain' not in forms:
    raise errors.InputError(
        f'domains.{num_shots=} shows nothing: only plain prompts have '
        f'examples, and these are {", ".join(sorted(forms))}; take 0.'
    )

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
      for name in every
  }
  environments = {n: p.environment(form=form) for n, p in pools.items()}
  return Tasks(pools, environments, tuple(names))


def longest(tasks: Tasks, tokenizer) -> tuple[int, int, int]:
  """(shared prefix, rest of the prompt, answer with its end) in tokens.

  Measured on the held-out and validation tasks.
  """
  most = [1, 1, 1]
  for name, pool in tasks.pools.items():
    environment = tasks.environments[name]
    for task in (*pool.heldout, *pool.validation):
      prompt = collect.prompt_tokens(tokenizer, environment.render(task))
      # A chat template adds the end token.
      answer = [*tokenizer.encode(environment.solution(task)), None]
      parts = (*prompt, answer)
      most = [max(a, len(b)) for a, b in zip(most, parts, strict=True)]
  return tuple(most)


class Policy:
  """What every run says of its parameters; it has `programs`."""

  state: states.TrainState | None
  frozen: Mapping[str, Any] | None

  @property
  def params(self) -> dict:
    """What is trained, and the rest, where training wants them."""
    return states.union(self.state.trainable, self.frozen)

  @property
  def policy(self) -> dict:
    """The parameters as decoding takes them."""
    publish = self.programs.get('publish')
    return self.params if publish is None else publish(self.params)


@dataclasses.dataclass
class Run(Policy):
  """Everything that a reinforcement-learning run holds.

  `state` changes with every update; `plan` to `scale` are host
  objects whose state is JSON.
  """

  config: Any
  rollout: sections.Rollout
  train: sections.Train
  evaluation: sections.Evaluation
  warmup: imitation.Warmup
  checkpoint: sections.Checkpoint
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
  lengths: lengths.Lengths
  scale: RewardScale
  state: states.TrainState | None = None
  frozen: Mapping[str, Any] | None = None
  reference: Mapping[str, Any] | None = None


def make_recipe(*, name: str, **overrides) -> recipes.Recipe:
  """A row of `recipes.RECIPES` with `config.recipe`'s changes."""
  for key, value in overrides.items():
    if key.endswith('hparams'):
      overrides[key] = dict(value)
  return recipes.recipe(name, **overrides)


def _engine_configs(rollout, evaluation, measured, domains):
  """Shapes of decoding, for training and for evaluation."""
  shared = {
      'prefix_len': rollout.prefix_len or bucket(measured[0]),
      'prompt_len': rollout.prompt_len or bucket(measured[1]),
      'width': rollout.max_new,
      'prefixes': min(domains, rollout.prefixes),
      'prefill_chunk': rollout.prefill_chunk,
      'backend': rollout.backend,
  }
  train = engines.EngineConfig(
      prompts=rollout.slots or rollout.prompts,
      rows=rollout.rows or rollout.samples, admit=rollout.admit,
      refill=rollout.refill, **shared,
  )
  if not evaluation.slots:
    return train, train
  return train, engines.EngineConfig(
      prompts=evaluation.slots, rows=evaluation.samples + 1,
      admit=evaluation.admit, refill=evaluation.refill, **shared,
  )


def check_reach(model, engine: engines.EngineConfig) -> None:
  """Raises if a prompt and its answer go beyond what the model was made for."""
  length = engine.prefix_len + engine.prompt_len + engine.width
  if length > model.reach:
    factor = -(-length // model.original_max_position)
    raise errors.InputError(
        f'prompts and answers take {length} positions, the model reaches '
        f'{model.reach}; shorten them, or extend it by config.model.rope = '
        f"{{'kind': 'yarn', 'factor': {float(factor)}, "
        f"'original_max_position': {model.original_max_position}}}."
    )


def check_backend(backend: str, mesh, documents: bool = False) -> None:
  """Raises unless these devices can run it, each on its own tokens only.

  Args:
    documents: rows hold whole documents, no prompt that completions share.
  """
  ways = mesh.shape['context']
  if backend == 'splash' and isinstance(mesh, jax.sharding.Mesh):
    platform = mesh.devices.flat[0].platform  # an abstract mesh has none
    if platform != 'tpu':
      raise errors.InputError(
          f"train.{backend=} is a kernel for TPUs, these devices are "
          f"{platform}; choose 'dense' or 'blockwise'."
      )
  known = [*context.WAYS, *(['splash'] if documents else [])]
  if ways > 1 and backend not in known:
    raise errors.InputError(
        f'train.{backend=} would have each of the {ways} devices of '
        f'mesh.context work on whole rows; choose one of {known}.'
    )


def shapes(config, mesh, measured=(0, 0, 0)) -> program_lib.Shapes:
  """What decides the programs of a run; reads nothing that `config` states.

  Args:
    config: of a run of `experiments.train`.
    mesh: of the run, with devices or without.
    measured: of `longest`; of no matter where the config gives the room.
  """
  section = split_model(config.model)
  recipe = make_recipe(**config.recipe)
  rollout = sections.Rollout(**config.rollout)
  train = sections.Train(**config.train)
  domains = len(config.domains.names) + len(config.domains.get('unseen', ()))
  decoding = _engine_configs(
      rollout, sections.Evaluation(**config.evaluation), measured, domains
  )
  check_backend(train.backend, mesh)
  check_reach(section.model, decoding[0])
  prompt = decoding[0].prefix_len + decoding[0].prompt_len
  slots = rollout.samples * rollout.max_new
  layout = None  # is of use where the mask of a row is one of its shape
  if train.backend in ('dense', 'splash'):
    layout = SharedPrefix(prompt, rollout.samples, rollout.max_new)
  return program_lib.Shapes(
      step=steps.StepConfig(
          model=section.model, recipe=recipe, layout=layout,
          backend=train.backend, block=train.block, remat=train.remat,
          chunk=train.chunk, clip_norm=train.clip_norm, dtype=section.dtype,
          offload=train.offload,
      ),
      stacked=section.stacked, trainable=section.trainable,
      optimizer=states.adamw(
          total_steps=config.steps * train.updates, **config.optimizer
      ),
      rows=train.rows,
      micro=-(-(train.groups or rollout.prompts) // train.rows),
      slots=slots, rollout=decoding[0],
      length=zigzag.padded(prompt + slots, mesh.shape['context']),
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
  recipe = make_recipe(**config.recipe)
  if recipe.advantage == 'gae':
    raise errors.InputError(
        "recipe 'ppo' needs a critic; choose a recipe with group advantages."
    )
  rollout = sections.Rollout(**config.rollout)
  train = sections.Train(**config.train)
  evaluation = sections.Evaluation(**config.evaluation)
  recipes.check_group_size(recipe, rollout.samples)
  names = tasks.trained
  found = shapes(config, mesh, longest(tasks, model.tokenizer))
  programs = program_lib.programs(found, mesh, display.phase)
  rollouts = collector(
      programs, 'rollout', found.rollout, model, tasks, scorer
  )
  evaluations = rollouts
  if found.evaluation is not None:
    evaluations = collector(
        programs, 'evaluation', found.evaluation, model, tasks, scorer
    )
  sources = {n: plans.Source(fingerprint=tasks.fingerprint(n)) for n in names}
  return Run(
      config=config, rollout=rollout, train=train, evaluation=evaluation,
      warmup=imitation.Warmup(**config.get('warmup', {})),
      checkpoint=sections.Checkpoint(**config.checkpoint), mesh=mesh,
      model=model, tasks=tasks, recipe=recipe, shapes=found, programs=programs,
      rollouts=rollouts, evaluations=evaluations, scorer=scorer,
      plan=plans.Plan(sources, prompts=rollout.prompts, seed=config.seed,
                      **config.plan),
      curriculum=curricula.Curriculum(names, **config.curriculum),
      lengths=lengths.Lengths(tasks.hardest, **config.get('lengths', {})),
      scale=RewardScale(**config.reward_scale),
  )


def bucket(length: int, step: int = 8) -> int:
  """The next multiple, so that few shapes exist."""
  return -(-length // step) * step


def collector(
    programs, kind: str, engine: engines.EngineConfig, model: Model,
    tasks: Tasks, scorer,
) -> collect.Collector:
  """Attempts tasks with the programs of a kind: 'rollout' or 'evaluation'."""
  stops = [s for e in tasks.environments.values() for s in e.stop]
  stop_V = model.tokenizer.stop_ids(dict.fromkeys(stops))
  decoding = program_lib.decoding(programs, kind)
  return collect.Collector(
      engines.Engine(engine, decoding, stop_V), model.tokenizer, scorer
  )


def on_mesh(run, params: Mapping[str, Any]) -> dict:
  """Parameters in the run's layout, each where the mesh wants it."""
  if run.shapes.stacked:
    params = transformer.stack(params)
  known = program_lib.abstract(run.shapes, run.mesh)
  return {
      k: jax.device_put(np.asarray(v), known.params[k].sharding)
      for k, v in params.items()
  }


def place(run, params: Mapping[str, Any]) -> None:
  """Gives a run its parameters, without undoing what was restored.

  Args:
    run: `Run` or `supervised.Run`.
    params: of `on_mesh`.
  """
  if run.recipe.kl != 'none':
    run.reference = jax.tree.map(lambda x: x.copy(), params)
  trainable, run.frozen = states.partition(params, run.shapes.trainable)
  if run.state is None:
    run.state = run.programs['init'](trainable)


# Each section of a config is the keyword arguments of what it builds; the
# second entry names those that `build` supplies itself. None: checked there.
SECTIONS = {
    'launcher': None,
    'seed': None,
    'steps': None,
    'recipe': None,
    'model': (load_model, ('seed',)),
    'mesh': (sharding.make_mesh, ('devices',)),
    'domains': (make_tasks, ('shots', 'trained')),
    'rollout': (sections.Rollout, ()),
    'optimizer': (states.adamw, ('total_steps',)),
    'train': (sections.Train, ()),
    'warmup': (imitation.Warmup, ()),
    'plan': (plans.Plan, ('sources', 'prompts', 'seed')),
    'curriculum': (curricula.Curriculum, ('names',)),
    'lengths': (lengths.Lengths, ('hardest',)),
    'reward_scale': (RewardScale, ()),
    'evaluation': (sections.Evaluation, ()),
    'checkpoint': (sections.Checkpoint, ()),
}
