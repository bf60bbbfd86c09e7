"""Plans made with the TPU compiler, as a user makes them; needs `tpu-aot`."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

from rlpost.planning import topology

ROOT = pathlib.Path(__file__).parents[2]
VERDICTS = sorted((ROOT / 'configs/tpu/verdicts').glob('*.json'))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec('libtpu') is None,
        reason='pip install rlpost[tpu-aot]',
    ),
]
SMOKE = (
    '--config=configs/quickstart.py:smoke', '--topology=v5e:2x2',
    '--config.mesh.fsdp=2', '--config.mesh.context=2',
    '--config.train.backend=ring', '--programs=train,rollout/run',
)


def start(*flags):
  return subprocess.Popen(
      [sys.executable, '-m', 'experiments.plan', *flags], cwd=ROOT, text=True,
      stdout=subprocess.PIPE, stderr=subprocess.PIPE,
  )


def finish(child, code):
  out, err = child.communicate()
  assert child.returncode == code, err
  return out + err


def test_two_plans_at_once_and_a_second_one_from_its_verdicts(tmp_path):
  both = [
      start(*SMOKE, f'--json={tmp_path}/{i}.json', f'--cache={tmp_path}/{i}')
      for i in range(2)
  ]
  for child in both:
    assert 'train: fits,' in finish(child, 0)
  first = json.loads((tmp_path / '0.json').read_text())['programs']
  assert {'fits', 'bytes', 'limit', 'collectives', 'overlap', 'flops'} <= (
      first['train'].keys()
  )
  kinds = {c['kind'] for c in first['train']['collectives']}
  assert 'collective-permute' in kinds
  text = finish(start(*SMOKE, f'--cache={tmp_path}/0', '--price=1.5'), 0)
  assert text.count('known from before') == 2
  assert 'usd_per_update' in text


def test_what_does_not_fit_says_by_how_much_and_what_to_change(tmp_path):
  text = finish(start(
      '--config=configs/tpu/llama8b.py', '--topology=v5e:4x4',
      '--config.mesh.fsdp=2', '--config.mesh.context=8', '--programs=train',
      f'--cache={tmp_path}', '--config.train.chunk=64',
  ), 3)
  assert 'NO' in text and ' of 15.75: try ' in text


def test_an_unknown_slice_is_bad_input():
  text = finish(start('--config=configs/quickstart.py', '--topology=v5'), 2)
  assert 'known: v4:2x2x1' in text


def test_the_compiler_knows_the_slices_of_the_table():
  program = (
      'import os\n'
      'from rlpost.planning import topology\n'
      'os.environ.update(topology.ENVIRONMENT)\n'
      'for kind, shapes in topology.SLICES.items():\n'
      '  for shape in shapes:\n'
      '    chip, chips = topology.parse(f"{kind}:{shape}")\n'
      '    found = topology.devices(f"{kind}:{shape}")\n'
      '    assert len(found) == chips * chip.cores, (kind, shape)\n'
      'print("all")\n'
  )
  done = subprocess.run(
      [sys.executable, '-c', program], cwd=ROOT, text=True,
      capture_output=True,
  )
  assert done.stdout.endswith('all\n'), done.stderr
  assert topology.SLICES


@pytest.mark.parametrize('path', VERDICTS, ids=lambda p: p.stem)
def test_shipped_verdicts_hold_today(tmp_path, path):
  kept = json.loads(path.read_text())
  name = path.stem.replace('-', ':')
  config, _, variant = name.partition(':')
  spec = f'configs/tpu/{config}.py' + (variant and f':{variant}')
  finish(start(
      f'--config={spec}', f'--topology={kept["topology"]}',
      f'--cache={tmp_path}', f'--json={tmp_path}/plan.json',
  ), 0)
  found = json.loads((tmp_path / 'plan.json').read_text())
  for name, verdict in kept['programs'].items():
    assert found['programs'][name]['hash'] == verdict['hash'], name
    assert found['programs'][name]['fits']
