"""Runs of a tiny random model inside the test process."""

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import types as simple
from unittest import mock

from configs import quickstart
from rlpost import sharding, types
from rlpost.domains import tiny
from rlpost.evaluation import report
from rlpost.models import config as model_configs
from rlpost.rewards import scoring
from rlpost.training import digest, loop, programs, setup
from rlpost.training import display as displays
from rlpost.training.checkpoint import Checkpoints

# No warm-up: `Parity` rewards a model that knows nothing.
MODEL = model_configs.ModelConfig(
  vocab_size=384, width=32, num_layers=2, num_heads=4, num_kv_heads=2,
  head_dim=8, hidden=64, max_position=2048,
)
SMALL = {
  'steps': 4,
  'model.source': 'scratch:test',
  'warmup.steps': 0,
  'optimizer.warmup_steps': 1,
  'domains.heldout': 4,
  'domains.validation': 2,
  'rollout.samples': 4,
  'evaluation.samples': 1,
  'rollout.slots': 0,
  'rollout.rows': 0,
  'rollout.admit': 0,
  'evaluation.slots': 4,
  'evaluation.admit': 4,
  'checkpoint.keep_latest': 2,
}
LONG = dataclasses.replace(
  tiny.FIRST, generate=functools.partial(tiny.first, size=14)
)
FAULTS = 'tests.rewards.faults:check_with_faults'
_programs = {}


class Parity:
  """A scorer in this process: 1 where an answer's bytes have an even sum."""

  def submit(self, items):
    verdicts = [self.verdict(item) for item in items]
    return simple.SimpleNamespace(result=lambda: verdicts)

  def verdict(self, item) -> types.Verdict:
    if item.stop_reason == 'overlong':
      return types.Verdict('invalid', reason='overlong')
    return types.Verdict('value', float(sum(item.text.encode()) % 2 == 0))


class Faulty:
  """A scorer in workers; of 8 answers one hangs its check, and one kills it.

  Attributes:
    guilty, innocent: answers so far.
  """

  def __init__(self, pool):
    self._scorer = scoring.Scorer(pool, cpu_s=0.1, function=FAULTS)
    self.guilty = self.innocent = 0

  def submit(self, items):
    texts = ('HANG', 'DIE', *'abcdef')
    items = [
      item._replace(text=texts[i % 8], stop_reason='stop')
      for i, item in enumerate(items)
    ]
    guilty = sum(item.text in texts[:2] for item in items)
    self.guilty += guilty
    self.innocent += len(items) - guilty
    return self._scorer.submit(items)


class Never(Parity):
  """A scorer that no answer to a 'tiny_first' task satisfies."""

  def verdict(self, item):
    if len(item.checker['gold']) == 1:
      return types.Verdict('value', 0.0)
    return super().verdict(item)


class Broken(Parity):
  """A scorer that cannot score 'tiny_first' tasks."""

  def verdict(self, item):
    if len(item.checker['gold']) == 1:
      return types.Verdict('infra', reason='it died')
    return super().verdict(item)


def config(**changes):
  """`quickstart:smoke`, smaller still; `changes` by dotted key."""
  config = quickstart.get_config('smoke')
  with config.unlocked():
    for key, value in (SMALL | changes).items():
      section, _, name = key.rpartition('.')
      part = config[section] if section else config
      part[name] = value
  return config


@contextlib.contextmanager
def quick(settings):
  """Runs inside it have the model `test`, compiled once and in little time."""
  make = programs.programs

  def once(shapes, mesh, say=None):
    """One compiled program for all runs that are alike."""
    del say
    made = make(shapes, mesh)
    alike = repr((dataclasses.replace(shapes, optimizer=None), mesh.shape))
    optimizer = f'{settings.optimizer} {settings.train.updates}'
    if settings.optimizer.decay != 'constant':
      optimizer += str(settings.steps)
    for name, program in made.items():
      own = optimizer if name in ('init', 'train') else ''
      made[name] = _programs.setdefault((name, alike, own), program)
    return made

  fast = {'xla_backend_optimization_level': 0}
  with (
    mock.patch.object(programs, 'programs', once),
    mock.patch.object(programs, 'CPU_OPTIONS', fast),
    mock.patch.dict(model_configs.CONFIGS, {'test': MODEL}),
  ):
    yield


@contextlib.contextmanager
def started(workdir, scorer=None, stop_asked=lambda: False, **changes):
  """A loop over a workdir; `text` of it is what the display said."""
  settings = config(**changes)
  text = io.StringIO()
  display = displays.Display(settings.steps, text, live=False)
  with quick(settings):
    run = setup.build(settings, scorer or Parity(), display)
    with sharding.use(run.mesh):
      story = loop.Loop(run, workdir, display, stop_asked, lambda: 0)
      story.text = text
      yield story


def train(workdir, **keywords):
  """Runs to the end; returns the summary and what the display said."""
  picture = mock.patch.object(report, 'curves_png')  # it takes a second
  with started(workdir, **keywords) as story, picture:
    return story.train(), story.text.getvalue()


def go(story, steps: int):
  """So many steps without evaluations and saves."""
  for _ in range(steps):
    story.update(story.rollouts())
    story.progress.step += 1


def items(story) -> dict:
  """What a checkpoint of this moment would hold."""
  with mock.patch.object(Checkpoints, 'save') as save:
    story.save(wait=True)
  return save.call_args.args[1]


def digests(items) -> dict[str, str]:
  """Digest by item; wall-clock values are none."""
  return digest.state_sha256(items)[1]


def results(workdir) -> dict:
  """All that a run leaves and that its repetition must leave too."""
  out = {}
  for name in ('metrics', 'samples'):
    lines = (workdir / f'{name}.jsonl').read_text().splitlines()
    out[name] = [json.loads(line) for line in lines]
    for row in out[name]:
      row.pop('cpu_s', None)
  for path in sorted((workdir / 'eval').glob('*')):
    out[path.name] = path.read_text()
  summary = json.loads((workdir / 'summary.json').read_text())
  timing = ('cpu_s', 'first_reward_cpu_s', 'peak_rss_bytes')
  out['summary'] = {k: v for k, v in summary.items() if k not in timing}
  folder = workdir / 'checkpoints'
  for step in sorted(folder.iterdir()):
    record = json.loads((step / 'digest/metadata').read_text())['body']
    out[f'checkpoint {step.name}'] = record['metrics'], record['items']
  return out


def same(found: dict, wanted: dict):
  """Asserts that two `results` are equal, and names what is not."""
  assert found.keys() == wanted.keys()
  for name in wanted:
    pairs = itertools.zip_longest(found[name], wanted[name])
    for i, (a, b) in enumerate(pairs if name in ('metrics', 'samples') else ()):
      assert a == b, f'{name}, line {i}'
    assert found[name] == wanted[name], name
