"""From a config to a run: every field of it matters, or is refused.

`CASES` holds another value for every key that a config may have, the probe
that must see the difference and, if need be, what else that takes. A new key
fails the test until it has a case.
"""

import dataclasses
import functools
import importlib
import inspect
import io
import pathlib
import types as simple
from unittest import mock

import jax
import numpy as np
import pytest

from configs import quickstart
from experiments import launching
from rlpost import errors, sharding, types
from rlpost.algorithms import recipes
from rlpost.domains import domain as domain_lib
from rlpost.models import config as model_configs
from rlpost.rollouts import engine as engines
from rlpost.training import credit, imitation, loop, outcome, setup, supervised
from rlpost.training import display as displays
from tests.training import runs

ROOT = pathlib.Path(__file__).parents[2]
MODELS = {
  'one': dataclasses.replace(runs.MODEL, num_layers=1),
  'other': dataclasses.replace(runs.MODEL, num_layers=1, width=64),
}
BASE = {
  'steps': 8,
  'model.source': 'scratch:one',
  'domains.names': ('add', 'upper'),
  'domains.heldout': 4,
  'domains.validation': 2,
  'domains.num_shots': 2,
  'rollout.prompts': 4,
  'train.groups': 4,
  'train.rows': 2,
  'warmup.steps': 4,
  'evaluation.slots': 6,
}


@pytest.fixture(scope='module', autouse=True)
def models():
  probed = functools.cache(domain_lib._few_items)
  with (
    mock.patch.dict(model_configs.CONFIGS, MODELS),
    mock.patch.object(domain_lib, '_few_items', probed),
  ):
    yield


def build(changes):
  config = quickstart.get_config()
  with config.unlocked():
    for key, value in (BASE | changes).items():
      section, _, name = key.rpartition('.')
      part = config[section] if section else config
      part[name] = value
  launching.check_config(config, setup.SECTIONS)
  display = displays.Display(1, io.StringIO(), live=False)
  return setup.build(config, runs.Parity(), display)


# Probes: what a run is, or does, seen from one side.


def lowered(run, *names):
  with sharding.use(run.mesh):
    return [run.programs[name].lower().as_text() for name in names]


def train(run):
  return lowered(run, 'train')


def prefill(run):
  return lowered(run, 'rollout/shared', 'evaluation/admit')


def admit(run):
  return lowered(run, 'rollout/admit')


def rollout(run):
  return lowered(run, 'rollout/run')


def optimizer(run):
  """The update rule alone; that it is the trained one, `train` shows."""
  params = {'a': np.ones(3, np.float32), 'b/scale': np.ones(3, np.float32)}
  update = run.shapes.optimizer
  return str(jax.make_jaxpr(update.update)(params, update.init(params), params))


def pauses(run, engine):
  """When decoding stops to be refilled, with samples of its prompts left."""
  session = engines._Session(engine, None, {}, [], None, 1)
  session._left[0].append((0, 1.0))
  return session._pause(8).tolist()


def rollout_pauses(run):
  return pauses(run, run.rollouts._engine)


def evaluation_pauses(run):
  return pauses(run, run.evaluations._engine)


def plan(run):
  """What is drawn while one domain succeeds and the other does not."""
  drawn = []
  for step in range(12):
    drawn.append(run.plan.next(run.curriculum.weights()))
    hit = float(step < 8)
    run.curriculum.update({'add': [hit] * 4, 'upper': [0.0, 0.0, hit, 0.0]})
  return drawn, run.curriculum.report()


def tasks(run):
  task = run.tasks.pools['upper'].train_task(0, 0)
  prompts = [e.render(task) for e in run.tasks.environments.values()]
  return prompts, [
    [t.content_id for t in part]
    for p in run.tasks.pools.values() for part in (p.heldout, p.validation)
  ]


def arguments(run):
  """Names, shapes and places of what programs are called with."""
  return [
    [(jax.tree_util.keystr(path), x.shape, x.dtype, str(x.sharding))
     for path, x in jax.tree.leaves_with_path(run.programs[name].arguments)]
    for name in ('train', 'evaluation/run')
  ]


def answered(episodes, tokens=2):
  """Groups whose answers are half right, of other lengths."""
  groups = []
  for e in episodes:
    members = []
    for place, (sample, temperature) in enumerate(e.samples):
      cut = place % 4 == 3
      size = 1 + tokens + 3 * cut
      members.append(types.Trajectory(
        task=e.task, group=e.group, sample=sample,
        tokens=np.arange(1, size + 1, dtype=np.int32),
        spans=(types.Span(0, 1, 'user', False),
               types.Span(1, size, 'assistant', True)),
        logp=np.zeros(size, np.float32), versions=np.zeros(size, np.int32),
        temperature=temperature, stop_reason='length' if cut else 'stop',
        verdict=types.Verdict('value', place % 2 if e.group % 3 else place / 8),
      ))
    groups.append(types.Group(e.group, e.task, tuple(members)))
  return groups


class Recorded:
  """Stands for a collector; keeps what it was asked for."""

  def __init__(self, right=None):
    self.asked, self._right = [], right

  def collect(self, params, version, episodes, root, budget=None,
              progress=None):
    key = jax.random.key_data(root).tolist()
    self.asked.append((key, [(e.group, e.task.content_id, e.samples)
                             for e in episodes]))
    groups = answered(episodes)
    if self._right is not None:
      all_right = types.Verdict('value', self._right)
      groups = [
        dataclasses.replace(g, trajectories=tuple(
          dataclasses.replace(t, verdict=all_right) for t in g.trajectories
        )) for g in groups
      ]
    return groups


def recorded(run, right=None):
  run.rollouts = run.evaluations = Recorded(right)
  run.state = simple.SimpleNamespace(trainable={}, opt={}, step=0)
  run.frozen = {}
  return run.rollouts


def attempts(run):
  """Which tasks are attempted, at which temperatures, with which keys."""
  asked = recorded(run, right=1.0)
  story = started(run)
  for _ in range(2):
    story.rollouts()
    story.progress.step += 1
  display = displays.Display(1, io.StringIO(), live=False)
  outcome.heldout(run, run.tasks.heldout, 0, display, 'held-out')
  return asked.asked


def started(run):
  display = displays.Display(1, io.StringIO(), live=False)
  with mock.patch('rlpost.training.workdir.Checkpoints'):
    return loop.Loop(run, '/nowhere', display, lambda: False, lambda: 0)


def credited(run):
  """What trains, and with which advantages, over some steps."""
  out = []
  story, asked = started(run), recorded(run)
  for _ in range(3):
    groups = story.rollouts()
    chosen = credit.assign(
      groups, run.recipe, run.scale, wanted=4, max_tokens=6
    )
    out.append([a.tolist() for a in chosen.advantages])
  assert asked.asked
  return out


def updates(run):
  """How often an update program is called in a step."""
  story, calls = started(run), []
  recorded(run)

  def update(*arguments):
    calls.append(arguments[2].mask.shape)
    return run.state, {'finite': True, 'loss': 0.0}

  programs = {'train': update, 'score': lambda p, batch, n: batch.mask}
  run.programs = programs
  story.update(story.rollouts())
  return calls


def warmup(run):
  """The warm-up's examples and its first rows."""
  return warmed(run, lambda programs: None)


def warmup_rule(run):
  """The warm-up's update."""
  return warmed(run, lambda programs: programs['train'].lower().as_text())


def warmed(run, look):
  seen = []

  def learn(programs, state, frozen, rows, micro):
    seen.append((look(programs), jax.tree.map(lambda x: x.tolist(), rows)))
    raise StopIteration

  display = displays.Display(1, io.StringIO(), live=False)
  examples = []
  make = imitation.demonstrations.examples

  def kept(*args, **keywords):
    examples.extend(make(*args, **keywords))
    return examples

  with (
    sharding.use(run.mesh),
    mock.patch.object(imitation, 'learn', learn),
    mock.patch.object(imitation.demonstrations, 'examples', kept),
    mock.patch.object(imitation.program_lib.Program, '__call__',
                      lambda self, *arguments: None),
    pytest.raises(StopIteration),
  ):
    imitation.warm_up(run, dict(run.programs['train'].arguments[0].trainable),
                      display)
  return seen, [e.content_id for e in examples]


def saves(run):
  """The steps that are saved, and how many of them are kept."""
  story = started(run)
  saved = story.workdir._checkpoints.save = mock.Mock()
  recorded(run)
  with (
    mock.patch.multiple(
      story.workdir, evaluate=mock.DEFAULT, finish=mock.DEFAULT,
      writer=mock.DEFAULT, end_if_asked=mock.DEFAULT, restore=mock.DEFAULT,
    ),
    mock.patch.multiple(
      story, update=mock.DEFAULT, restore=mock.DEFAULT,
    ),
    mock.patch.object(displays.Display, 'step'),
    mock.patch('rlpost.training.alarms.Alarms'),
  ):
    story.train()
  with mock.patch('rlpost.training.workdir.Checkpoints') as made:
    loop.Loop(run, '/nowhere', story.display, None, None)
  keep = made.call_args.kwargs['keep_latest']
  return [call.args[0] for call in saved.call_args_list], keep


def launcher(run):
  return run.config.launcher  # what tools/run starts


CASES = {
  'launcher': ('experiments.sft', launcher),
  'seed': (1, attempts),
  'steps': (9, saves),
  'model.source': ('scratch:other', arguments),
  'model.value_head': (True, arguments),
  'model.stacked': (True, arguments),
  'model.trainable': ('layers/.*', arguments),
  'model.dtype': ('bfloat16', prefill),
  'mesh.data': (2, arguments),
  'mesh.fsdp': (2, arguments),
  'mesh.tensor': (2, arguments),
  'mesh.context': (2, arguments),
  'domains.names': (('upper', 'quote'), tasks),
  'domains.heldout': (5, tasks),
  'domains.validation': (3, tasks),
  'domains.heldout_seed': (1, tasks),
  'domains.form': ('bare', tasks, {'domains.num_shots': 0}),
  'domains.num_shots': (3, tasks),
  'rollout.prompts': (6, attempts),
  'rollout.samples': (6, attempts),
  'rollout.max_new': (7, rollout),
  'rollout.temperature': (0.5, attempts),
  'rollout.prefix_len': (160, prefill),
  'rollout.prompt_len': (40, prefill),
  'rollout.slots': (2, rollout),
  'rollout.rows': (4, rollout),
  'rollout.prefixes': (1, prefill),
  'rollout.admit': (2, admit),
  'rollout.refill': (3, rollout_pauses),
  'recipe.name': ('gspo', train),
  'recipe.advantage': ('group_centered', credited),
  'recipe.overlong': ('mask', credited),
  'recipe.dynamic_sampling': (True, attempts),
  'optimizer.learning_rate': (1e-3, train),
  'optimizer.warmup_steps': (2, optimizer),
  'optimizer.decay': ('cosine', optimizer),
  'optimizer.b1': (0.8, optimizer),
  'optimizer.b2': (0.9, optimizer),
  'optimizer.eps': (1e-6, optimizer),
  'optimizer.weight_decay': (0.1, optimizer),
  'train.rows': (4, arguments),
  'train.groups': (2, updates),
  'train.updates': (2, updates),
  'train.backend': ('blockwise', train),
  'train.remat': ('full', train),
  'train.chunk': (8, train),
  'train.clip_norm': (0.5, train),
  'warmup.steps': (5, warmup_rule),
  'warmup.rows': (2, warmup),
  'warmup.length': (256, warmup),
  'warmup.slots': (32, warmup),
  'warmup.examples': (16, warmup),
  'warmup.learning_rate': (1e-4, warmup_rule),
  'plan.floor': (0.9, plan),
  'curriculum.decay': (0.5, plan),
  'curriculum.explore': (0.9, plan),
  'curriculum.retire_at': (0.99, plan),
  'curriculum.evidence': (1e3, plan),
  'curriculum.prior': ((3.0, 1.0), plan),
  'reward_scale.decay': (0.5, credited),
  'reward_scale.floor': (2.0, credited),
  'reward_scale.power': (1, credited),
  'reward_scale.clip': (0.1, credited),
  'evaluation.slots': (8, arguments),
  'evaluation.samples': (2, arguments),
  'evaluation.temperature': (0.5, attempts),
  'evaluation.admit': (3, prefill),
  'evaluation.refill': (3, evaluation_pauses),
  'checkpoint.every': (3, saves),
  'checkpoint.keep_latest': (3, saves),
}


def keys() -> set[str]:
  """Every key that a config may have, but for further fields of a recipe."""
  found = {'recipe.name'}
  for section, checked in setup.SECTIONS.items():
    if checked is None:
      found |= {section} - {'recipe'}
      continue
    target, given = checked
    found |= {
      f'{section}.{name}' for name in inspect.signature(target).parameters
      if name not in given
    }
  return found


def configs(variants=('', 'smoke')):
  for path in sorted((ROOT / 'configs').glob('*.py')):
    for variant in variants:
      module = importlib.import_module(f'configs.{path.stem}')
      yield f'{path.stem}:{variant}', module.get_config(variant)


def test_every_key_of_a_config_has_a_case():
  fields = {f'recipe.{f.name}' for f in dataclasses.fields(recipes.Recipe)}
  used = set()
  for _, config in configs():
    if config.launcher == 'experiments.train':
      used |= set(launching.flatten(config))
  assert used <= keys() | fields
  assert keys() | used == set(CASES)


@pytest.fixture(scope='module')
def base():
  """Probe -> what it sees in the unchanged run."""
  seen = {}

  def look(probe, context):
    key = probe.__name__, str(context)
    if key not in seen:
      seen[key] = probe(build(context))
    return seen[key]

  return look


@pytest.mark.parametrize('key', CASES)
def test_every_key_changes_something(base, key):
  value, probe, *context = CASES[key]
  context = context[0] if context else {}
  assert probe(build(context | {key: value})) != base(probe, context)


def test_probes_see_nothing_where_nothing_changed(base):
  for probe in {case[1]: None for case in CASES.values()}:
    if probe not in (train, warmup_rule):  # they take their time
      assert probe(build({})) == base(probe, {}), probe


@pytest.mark.parametrize(
  ('changes', 'words'),
  [
    ({'train.rows': 3, 'mesh.data': 2}, 'rows=3 must divide over 2 .* try 2'),
    ({'mesh.data': 16}, 'needs 16 devices; there are 8'),
    ({'mesh.data': -1, 'mesh.fsdp': 3}, '8 devices do not divide by 3'),
    ({'train.rows': 0}, 'train.rows=0 must be at least 1'),
    ({'train.backend': 'ring'}, "backend='ring' must be one of"),
    ({'train.remat': 'some'}, "remat='some' must be one of"),
    ({'model.dtype': 'float8'}, "dtype='float8' must be one of"),
    ({'model.trainable': 'nothing'}, 'matches none of 8 parameters'),
    ({'model.source': 'scratch:huge'}, "No model 'huge'; known: "),
    ({'model.source': '/nowhere/x.gguf'}, '/nowhere/x.gguf'),
    ({'rollout.temperature': 0.0}, 'must be above 0'),
    ({'rollout.samples': 1}, 'every advantage would be 0'),
    ({'rollout.prompts': 0}, 'rollout.prompts=0 must be at least 1'),
    ({'rollout.admit': 9}, 'must not exceed'),
    ({'evaluation.samples': 0}, 'evaluation.samples=0 must be at least 1'),
    ({'evaluation.slots': 0}, 'evaluation.slots=0 must be at least 1'),
    ({'checkpoint.every': 0}, 'checkpoint.every=0 must be at least 1'),
    ({'domains.names': ()}, 'name one domain'),
    ({'domains.names': ('ad',)}, "No domain 'ad'; known ones: add"),
    ({'domains.form': 'bare', 'domains.num_shots': 1}, 'shows nothing'),
    ({'domains.form': 'fancy', 'domains.num_shots': 0}, 'must be one of'),
    ({'recipe.name': 'ppo', 'recipe.advantage': 'gae'}, 'needs a critic'),
    ({'recipe.name': 'grop'}, "did you mean 'grpo'"),
    ({'optimizer.warmup_steps': 99}, 'must not exceed the total_steps=8'),
    ({'optimizer.decay': 'step'}, "decay='step' must be one of"),
    ({'plan.floor': 2.0}, 'must be in'),
    ({'curriculum.explore': 0.0}, 'must be in'),
    ({'reward_scale.power': 3}, 'must be 1 or 2'),
    ({'train.row': 4}, 'config.train.row is no argument .* mean rows'),
    ({'extra': 4}, 'nothing reads config.extra'),
  ],
)
def test_bad_values_are_refused_before_anything_is_loaded(changes, words):
  with pytest.raises(errors.InputError, match=words) as caught:
    build(changes)
  assert caught.value.exit_code == 2


def test_every_config_is_whole():
  wrong = []
  for name, config in configs():
    parts = setup if config.launcher == 'experiments.train' else supervised
    launching.check_config(config, parts.SECTIONS)
    total = config.steps * config.train.get('updates', 1)
    if config.optimizer.warmup_steps > total:
      wrong.append(name)
  assert not wrong


def test_a_section_that_is_missing_is_named():
  config = quickstart.get_config()
  with config.unlocked():
    del config.steps
  with pytest.raises(errors.InputError, match='lacks steps'):
    launching.check_config(config, setup.SECTIONS)
  with config.unlocked():
    config.steps = 1
    del config.rollout
  with pytest.raises(errors.InputError, match='config.rollout lacks max_new'):
    launching.check_config(config, setup.SECTIONS)


def test_no_training_task_is_held_out():
  run = build({'domains.names': ('add', 'upper')})
  for pool in run.tasks.pools.values():
    ids = [{t.content_id for t in part}
           for part in (pool.heldout, pool.validation, pool.shots)]
    assert not ids[0] & ids[1] and not ids[0] & ids[2] and not ids[1] & ids[2]
    drawn = {pool.train_task(i, seed).content_id
             for i in range(50) for seed in (0, 1)}
    assert not drawn & set().union(*ids)
