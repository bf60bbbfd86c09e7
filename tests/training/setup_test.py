"""From a config to a run: every field of it matters, or is refused.

`CASES` holds another value for every key that a config may have, the probe
that must see the difference and, if need be, what else that takes. A new key
fails the test until it has a case.
"""

import dataclasses
import functools
import importlib
import inspect
import pathlib
from unittest import mock

import pytest

from configs import quickstart
from experiments import launching
from rlpost import errors
from rlpost.algorithms import recipes
from rlpost.domains import domain as domain_lib
from rlpost.models import config as model_configs
from rlpost.training import setup, supervised
from tests.training import probes

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope='module', autouse=True)
def models():
  probed = functools.cache(domain_lib._few_items)
  with (
    mock.patch.dict(model_configs.CONFIGS, probes.MODELS),
    mock.patch.object(domain_lib, '_few_items', probed),
  ):
    yield


STAGES = ((0, 7), (3, 100))  # of the difficulties of `upper` and `add`
CARRY = {'lengths.stages': STAGES, 'lengths.carry': 0.5}
CASES = {
  'launcher': ('experiments.sft', probes.launcher),
  'seed': (1, probes.attempts),
  'steps': (9, probes.saves),
  'model.source': ('scratch:other', probes.arguments),
  'model.value_head': (True, probes.arguments),
  'model.stacked': (True, probes.arguments),
  'model.trainable': ('layers/.*', probes.arguments),
  'model.dtype': ('bfloat16', probes.prefill),
  'model.rope': (
    {'kind': 'ntk', 'factor': 2.0, 'original_max_position': 64}, probes.train,
  ),
  'model.shape': ('small', probes.train),
  'domains.unseen': (('copy_words',), probes.tasks),
  'mesh.data': (2, probes.arguments),
  'mesh.fsdp': (2, probes.arguments),
  'mesh.tensor': (2, probes.arguments),
  'mesh.context': (2, probes.arguments, {'train.backend': 'ring'}),
  'domains.names': (('upper', 'quote'), probes.tasks),
  'domains.heldout': (5, probes.tasks),
  'domains.validation': (3, probes.tasks),
  'domains.heldout_seed': (1, probes.tasks),
  'domains.form': ('bare', probes.tasks, {'domains.num_shots': 0}),
  'domains.num_shots': (3, probes.tasks),
  'rollout.prompts': (6, probes.attempts),
  'rollout.samples': (6, probes.attempts),
  'rollout.max_new': (7, probes.rollout),
  'rollout.temperature': (0.5, probes.attempts),
  'rollout.prefix_len': (160, probes.prefill),
  'rollout.prompt_len': (40, probes.prefill),
  'rollout.slots': (2, probes.rollout),
  'rollout.rows': (4, probes.rollout),
  'rollout.prefixes': (1, probes.prefill),
  'rollout.admit': (2, probes.admit),
  'rollout.refill': (3, probes.rollout_pauses),
  'rollout.prefill_chunk': (8, probes.prefill),
  'rollout.backend': ('blockwise', probes.prefill),
  'recipe.name': ('gspo', probes.train),
  'recipe.advantage': ('group_centered', probes.credited),
  'recipe.overlong': ('mask', probes.credited),
  'recipe.dynamic_sampling': (True, probes.attempts),
  'optimizer.learning_rate': (1e-3, probes.train),
  'optimizer.warmup_steps': (2, probes.optimizer),
  'optimizer.decay': ('cosine', probes.optimizer),
  'optimizer.b1': (0.8, probes.optimizer),
  'optimizer.b2': (0.9, probes.optimizer),
  'optimizer.eps': (1e-6, probes.optimizer),
  'optimizer.weight_decay': (0.1, probes.optimizer),
  'train.rows': (4, probes.arguments),
  'train.groups': (2, probes.updates),
  'train.updates': (2, probes.updates),
  'train.backend': ('blockwise', probes.train),
  'train.block': (8, probes.train, {'train.backend': 'blockwise'}),
  'train.remat': ('full', probes.train),
  'train.chunk': (8, probes.train),
  'train.offload': (True, probes.train),
  'train.clip_norm': (0.5, probes.train),
  'warmup.steps': (5, probes.warmup_rule),
  'warmup.rows': (2, probes.warmup),
  'warmup.length': (256, probes.warmup),
  'warmup.slots': (32, probes.warmup),
  'warmup.examples': (16, probes.warmup),
  'warmup.learning_rate': (1e-4, probes.warmup_rule),
  'plan.floor': (0.9, probes.plan),
  'curriculum.decay': (0.5, probes.plan),
  'curriculum.explore': (0.9, probes.plan),
  'curriculum.retire_at': (0.99, probes.plan),
  'curriculum.evidence': (1e3, probes.plan),
  'curriculum.prior': ((3.0, 1.0), probes.plan),
  'lengths.stages': (STAGES, probes.lengths),
  'lengths.carry': (0.5, probes.lengths, {'lengths.stages': STAGES}),
  'lengths.below': (0.1, probes.lengths, CARRY),
  'lengths.keep': (1, probes.lengths, CARRY),
  'reward_scale.decay': (0.5, probes.credited),
  'reward_scale.floor': (2.0, probes.credited),
  'reward_scale.power': (1, probes.credited),
  'reward_scale.clip': (0.1, probes.credited),
  'evaluation.slots': (8, probes.arguments),
  'evaluation.samples': (2, probes.arguments),
  'evaluation.temperature': (0.5, probes.attempts),
  'evaluation.admit': (3, probes.prefill),
  'evaluation.refill': (3, probes.evaluation_pauses),
  'checkpoint.every': (3, probes.saves),
  'checkpoint.keep_latest': (3, probes.saves),
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
      seen[key] = probe(probes.build(context))
    return seen[key]

  return look


@pytest.mark.parametrize('key', CASES)
def test_every_key_changes_something(base, key):
  value, probe, *context = CASES[key]
  context = context[0] if context else {}
  assert probe(probes.build(context | {key: value})) != base(probe, context)


def test_probes_see_nothing_where_nothing_changed(base):
  for probe in {case[1]: None for case in CASES.values()}:
    if probe not in (probes.train, probes.warmup_rule):  # they take their time
      assert probe(probes.build({})) == base(probe, {}), probe


@pytest.mark.parametrize(
  ('changes', 'words'),
  [
    ({'train.rows': 3, 'mesh.data': 2}, 'rows=3 must divide over 2 .* try 2'),
    ({'mesh.data': 16}, 'needs 16 devices; there are 8'),
    ({'mesh.data': -1, 'mesh.fsdp': 3}, '8 devices do not divide by 3'),
    ({'train.rows': 0}, 'train.rows=0 must be at least 1'),
    ({'mesh.context': 5}, "each of the 5 devices.*choose one of .'ring'"),
    ({'train.backend': 'rings'}, "backend='rings' must be one of"),
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
    ({'evaluation.slots': 0, 'evaluation.admit': 1}, 'need evaluation.slots'),
    ({'checkpoint.every': 0}, 'checkpoint.every=0 must be at least 1'),
    ({'train.backend': 'splash'}, "kernel for TPUs, these devices are cpu"),
    ({'model.rope': {'kind': 'yarn', 'factor': 2.0,
                     'original_max_position': 8}, 'rollout.prompt_len': 4096},
     'the model reaches'),
    ({'domains.names': ('add',), 'domains.unseen': ('add',)}, 'named once'),
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
    ({'lengths.stages': ((0, 1),)}, 'opens no domain at step 0'),
    ({'reward_scale.power': 3}, 'must be 1 or 2'),
    ({'train.row': 4}, 'config.train.row is no argument .* mean rows'),
    ({'extra': 4}, 'nothing reads config.extra'),
  ],
)
def test_bad_values_are_refused_before_anything_is_loaded(changes, words):
  with pytest.raises(errors.InputError, match=words) as caught:
    probes.build(changes)
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
  run = probes.build({'domains.names': ('add', 'upper')})
  for pool in run.tasks.pools.values():
    ids = [{t.content_id for t in part}
           for part in (pool.heldout, pool.validation, pool.shots)]
    assert not ids[0] & ids[1] and not ids[0] & ids[2] and not ids[1] & ids[2]
    drawn = {pool.train_task(i, seed).content_id
             for i in range(50) for seed in (0, 1)}
    assert not drawn & set().union(*ids)
