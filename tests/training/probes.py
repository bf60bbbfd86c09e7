"""Probes: what a run is, or does, seen from one side; for `setup_test`."""

import dataclasses
import io
import types as simple
from unittest import mock

import jax
import numpy as np
import pytest

from configs import quickstart
from experiments import launching
from rlpost import sharding, types
from rlpost.rollouts import engine as engines
from rlpost.training import credit, imitation, loop, outcome, setup
from rlpost.training import display as displays
from tests.training import runs

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
  'rollout.slots': 0,
  'rollout.rows': 0,
  'rollout.admit': 0,
  'evaluation.slots': 6,
}


def build(changes):
  config = quickstart.get_config()
  with config.unlocked():
    for key, value in (BASE | changes).items():
      section, _, name = key.rpartition('.')
      if section and section not in config:
        config[section] = {}
      part = config[section] if section else config
      part[name] = value
  launching.check_config(config, setup.SECTIONS)
  display = displays.Display(1, io.StringIO(), live=False)
  return setup.build(config, runs.Parity(), display)


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


def lengths(run):
  """What is drawn over two stages while every task fails."""
  drawn = []
  for step in range(6):
    picks = run.plan.next(only=run.lengths.open(step))
    drawn.append(run.lengths.again(picks, step))
    run.lengths.note(drawn[-1], [0.3] * len(picks), step)
  return drawn


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

  def learn(programs, state, frozen, batch):
    seen.append((look(programs), jax.tree.map(lambda x: x.tolist(), batch)))
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
