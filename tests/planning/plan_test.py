"""Plans: the trainer's own programs, refusals before any compile, verdicts."""

import contextlib
import importlib
import io
import json
import pathlib
import subprocess
import sys
from unittest import mock

import jax
import pytest

from configs import quickstart
from experiments import launching
from rlpost import errors, sharding
from rlpost.planning import compilation, cost, plan, report, topology
from rlpost.training import display as displays
from rlpost.training import setup, supervised
from tests.training import runs

ROOT = pathlib.Path(__file__).parents[2]
TPU_CONFIGS = sorted(p.stem for p in (ROOT / 'configs/tpu').glob('*.py'))


def tpu_config(name, *variant):
  return importlib.import_module(f'configs.tpu.{name}').get_config(*variant)


@contextlib.contextmanager
def cpu_devices(count=8):
  """Every topology has devices of this machine."""
  devices = jax.devices()[:count]
  with mock.patch.object(topology, 'devices', lambda name: devices):
    yield


@pytest.mark.parametrize('launcher, changes', [
    ('quickstart', {}),
    ('quickstart', {'mesh.context': 2, 'train.backend': 'ring',
                    'mesh.fsdp': 2, 'model.stacked': True}),
    ('sft', {'mesh.fsdp': 2}),
])
def test_planned_programs_are_those_that_the_trainer_runs(launcher, changes):
  config = importlib.import_module(f'configs.{launcher}').get_config('smoke')
  config = plan.changed(config, changes)
  stage = supervised if launcher == 'sft' else setup
  display = displays.Display(1, io.StringIO(), live=False)
  run = stage.build(config, runs.Parity(), display)
  with cpu_devices(run.mesh.size):
    shapes, mesh, planned = compilation.programs_of(config, 'v5e:2x2')
  assert planned.keys() == run.programs.keys()
  assert mesh.shape == run.mesh.shape
  with sharding.use(run.mesh):
    for name, program in planned.items():
      theirs = run.programs[name].lower().as_text()
      assert program.lower().as_text() == theirs, name


def test_a_config_that_states_everything_reads_no_file():
  config = tpu_config('llama8b')
  mesh = sharding.abstract_mesh(**config.mesh)
  with mock.patch.object(setup, 'load_model', side_effect=AssertionError):
    shapes = compilation.shapes_of(config, mesh)
  assert shapes.step.model.num_params == 8_030_261_248
  assert shapes.length >= 2**17 and shapes.scored


@pytest.mark.parametrize('name', TPU_CONFIGS)
def test_configs_for_slices_are_whole_and_update_on_enough_sequences(name):
  for variant in ((), ('1m',)) if name == 'llama8b' else ((),):
    config = tpu_config(name, *variant)
    launching.check_config(config, setup.SECTIONS)
    mesh = sharding.abstract_mesh(**config.mesh)
    shapes = compilation.shapes_of(config, mesh)
    sequences = shapes.rows * shapes.micro * config.rollout.samples
    assert sequences >= 8
    assert shapes.stacked and shapes.step.remat == 'full'
    assert not shapes.rows % sharding.batch_ways(mesh)
    assert not shapes.length % (2 * mesh.shape['context'])


@pytest.mark.parametrize('name, words', [
    ('v5e', "no topology 'v5e'; known: v4:2x2x1"),
    ('v7x:2x2', "no topology 'v7x:2x2'"),
    ('v5e:1x1', 'hosts of four chips'),
    ('v5p:4x4', 'v5p has 3 dimensions'),
    ('v5e:axb', "no topology 'v5e:axb'"),
])
def test_topologies_that_do_not_exist_are_refused(name, words):
  with pytest.raises(errors.InputError, match=words):
    topology.parse(name)


def test_slices_have_as_many_chips_as_they_say():
  assert topology.parse('v5e:4x4')[1] == 16
  assert topology.parse('v5p:8x16x16')[1] == 2048
  for kind, names in topology.SLICES.items():
    for shape in names:
      topology.parse(f'{kind}:{shape}')


def test_a_missing_compiler_is_named_with_its_extra():
  with mock.patch.object(topology.importlib.util, 'find_spec', lambda _: None):
    with pytest.raises(errors.InputError, match=r'\[tpu-aot\]'):
      topology.require_compiler()


@pytest.mark.parametrize('changes, error, words', [
    ({'mesh.fsdp': 2}, errors.InputError, 'uses 2 of the 8 devices'),
    ({'mesh.fsdp': 16}, errors.InputError, 'needs 16 devices'),
    ({'mesh.context': 8}, errors.InputError, 'choose one of'),
    ({'mesh.fsdp': 8, 'train.rows': 4}, errors.InputError, 'divide over 8'),
    ({'mesh.fsdp': 8, 'train.rows': 8, 'rollout.slots': 2**22},
     errors.DoesNotFitError, 'fewer rollout.slots'),
    ({'mesh.fsdp': 8, 'train.rows': 8, 'rollout.prompt_len': 2**20,
      'rollout.prefix_len': 8}, errors.InputError, 'the model reaches 2048'),
])
def test_what_cannot_run_is_refused_before_any_compile(
    tmp_path, changes, error, words
):
  config = plan.changed(quickstart.get_config('smoke'), changes)
  with (
      cpu_devices(),
      mock.patch.object(plan, '_compile', side_effect=AssertionError),
      pytest.raises(error, match=words),
  ):
    plan.programs(config, 'v5e:2x4', tmp_path)


def test_an_unknown_program_is_refused_with_the_known_ones(tmp_path):
  config = plan.changed(
      quickstart.get_config('smoke'), {'mesh.fsdp': 8, 'train.rows': 8}
  )
  with cpu_devices(), pytest.raises(errors.InputError, match='has train, init'):
    plan.programs(config, 'v5e:2x4', tmp_path, only=('trian',))


def test_a_verdict_is_kept_by_the_hash_of_the_program(tmp_path):
  """Compiled for this machine: the whole way but the TPU compiler."""
  config = plan.changed(
      quickstart.get_config('smoke'), {'mesh.fsdp': 2, 'train.rows': 4}
  )
  with cpu_devices(2), mock.patch.object(
      topology, 'require_compiler', lambda: 'test'
  ):
    first = compilation.verdict(config, 'v5e:2x2', 'train', tmp_path)
    again = compilation.verdict(config, 'v5e:2x2', 'train', tmp_path)
    other = compilation.verdict(config, 'v5e:2x4', 'train', tmp_path)
    lower = plan.changed(config, {'train.clip_norm': 0.5})
    changed = compilation.verdict(lower, 'v5e:2x2', 'train', tmp_path)
  assert again == {**first, 'cached': True}
  assert len({first['hash'], other['hash'], changed['hash']}) == 3
  assert first['fits'] and first['roofline']['mfu'] <= 1
  kinds = dict(first['bytes'])
  total = kinds.pop('total')
  kinds.pop('host')
  assert sum(kinds.values()) == pytest.approx(total, rel=0.02)


@pytest.mark.parametrize('message, needed, limit', [
    ('RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required '
     'for HLO temporaries (45.50G) exceeds available HBM (15.75G).',
     45.5, 15.75),
    ('RESOURCE_EXHAUSTED: ... Used 26.50G of 15.75G hbm. Exceeded hbm '
     'capacity by 10.75G.', 26.5, 15.75),
])
def test_an_overflow_is_a_verdict_with_its_numbers(message, needed, limit):
  found = compilation.overflow(message)
  assert found['fits'] is False
  assert found['needed'] == needed * 2**30
  assert found['limit'] == limit * 2**30
  assert compilation.overflow('INTERNAL: a bug') is None


def test_an_overflow_is_split_by_kind_and_the_largest_decides(tmp_path):
  """Each kind as the program is called with it; the rest are activations."""
  config = plan.changed(
      quickstart.get_config('smoke'), {'mesh.fsdp': 2, 'train.rows': 4}
  )
  message = 'RESOURCE_EXHAUSTED: Used %dG of 15.75G hbm.'
  found = {}
  with cpu_devices(2), mock.patch.object(
      topology, 'require_compiler', lambda: 'test'
  ):
    for name in ('train', 'rollout/run'):
      program = compilation.programs_of(config, 'v5e:2x2')[2][name]
      with mock.patch.object(
          jax.stages.Lowered, 'compile',
          side_effect=RuntimeError(message % 20),
      ):
        found[name] = compilation.verdict(config, 'v5e:2x2', name, tmp_path)
      kinds = found[name]['bytes']
      handed = cost.argument_bytes(program)
      assert {k: kinds[k] for k in handed} == handed
      assert sum(kinds.values()) == found[name]['needed'] == 20 * 2**30
  assert 'remat' in report.cure(found['train'])
  small = report.asked(program, needed=0)
  assert small['activations'] == 0
  assert 'mesh.fsdp or mesh.tensor' in report.cure({'bytes': small})


def test_what_fits_alone_may_not_fit_beside_what_the_run_holds():
  kinds = {'total': 10, 'activations': 4, 'cache': 6}
  alone = {'fits': True, 'bytes': kinds}
  assert report.judged(alone, 5, 15)['fits']
  found = report.judged(alone, 7, 16)
  assert (found['fits'], found['needed'], found['limit']) == (False, 17, 16)
  assert 'more chips' in report.cure(found)
  found = report.judged({**alone, 'unread': 2}, 5, 16)
  assert (found['fits'], found['beside']) == (False, 7)
  assert not report.judged({'fits': None, 'error': 'x'}, 0, 16)['fits']
  assert alone == {'fits': True, 'bytes': kinds}


def test_a_program_that_takes_too_long_is_unknown_and_its_compiler_ended(
    tmp_path
):
  said = []
  sleeper = [sys.executable, '-c', 'import time; time.sleep(600)']
  started = []

  real = subprocess.Popen

  def popen(command, **options):
    del command
    started.append(real(sleeper, **options))
    return started[-1]

  with mock.patch.object(plan.subprocess, 'Popen', popen):
    found = plan._compile(
        quickstart.get_config('smoke'), 'v5e:2x2', 'train', tmp_path,
        said.append, limit_s=0.5,
    )
  assert found['fits'] is None and 'unknown' in said[-1]
  assert started[0].returncode is not None
  whole = {'programs': {'train': found, 'score': {'fits': True}}}
  assert not plan.fits(whole)


def test_a_price_is_that_of_the_time_on_all_chips():
  found = {
      'chips': 16,
      'programs': {'train': {'roofline': {'seconds': 90.0, 'tokens': 500}}},
  }
  plan.price(found, 2.0)
  assert found['usd_per_update'] == pytest.approx(16 * 2.0 * 90 / 3600)
  assert found['usd_per_million_tokens'] == pytest.approx(0.8 / 500 * 1e6)


def test_the_search_screens_by_arithmetic_and_compiles_at_most_six(tmp_path):
  config = tpu_config('llama8b')
  ranked = list(plan.candidates(config, 'v5p:4x4x4'))
  assert len(ranked) > plan.MOST_COMPILED
  for seconds, changes in ranked:
    mesh = changes['mesh']
    assert mesh['fsdp'] * mesh['tensor'] * mesh['context'] == 64
    assert 8 % mesh['tensor'] == 0 and config.train.rows % mesh['fsdp'] == 0
    assert seconds > 0
  tried = []

  def programs(config, *_, only, say):
    del say
    tried.append(config.mesh.to_dict())
    good = len(tried) in (2, 5)
    limit = {'seconds': float(len(tried))} if good else None
    return {'programs': {'train': {'fits': good, 'roofline': limit}}}

  with mock.patch.object(plan, 'programs', programs):
    found = plan.search(config, 'v5p:4x4x4', tmp_path, lambda _: None)
  assert len(tried) == plan.MOST_COMPILED
  assert [v['fits'] for v in found[:3]] == [True, True, False]
  assert found[0]['roofline']['seconds'] == 2
  with pytest.raises(errors.DoesNotFitError, match='larger slice'):
    plan.search(tpu_config('llama70b_32k'), 'v5e:2x2', tmp_path, print)


def test_the_cure_follows_the_largest_kind_of_bytes():
  kinds = {'parameters': 1, 'optimizer': 5, 'cache': 2, 'activations': 3}
  assert 'offload' in report.cure({'bytes': kinds})
  assert 'remat' in report.cure({})
  text = report.table({'programs': {
      'train': {'fits': False, 'needed': 2**34, 'limit': 2**33},
      'score': {'fits': None, 'error': 'no verdict after 600 s'},
  }})
  assert 'NO' in text and '16.00 of 8.00' in text and 'unknown' in text


@pytest.mark.parametrize('name', [*TPU_CONFIGS, 'llama8b:1m'])
def test_verdicts_of_shipped_configs_are_of_whole_plans(name):
  """Their hashes are proved again where the compiler is: `plan_tpu_test`."""
  path = ROOT / f'configs/tpu/verdicts/{name.replace(":", "-")}.json'
  kept = json.loads(path.read_text())
  config = tpu_config(*name.split(':'))
  shapes = compilation.shapes_of(config, sharding.abstract_mesh(**config.mesh))
  names = {'train', 'init', 'publish'} | {
      f'rollout/{k}' for k in ('empty', 'shared', 'admit', 'run')
  }
  names |= {'score'} if shapes.scored else set()
  assert kept['programs'].keys() == names
  for verdict in kept['programs'].values():
    assert verdict['fits'] and len(verdict['hash']) == 24
    total = verdict['bytes']['total']
    kinds = {k: v for k, v in verdict['bytes'].items() if k != 'host'}
    assert sum(kinds.values()) == pytest.approx(2 * total, rel=0.01)
    assert total <= verdict['limit']
