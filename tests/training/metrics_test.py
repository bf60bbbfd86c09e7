"""Tests of the metrics writer."""

import json
import os
import subprocess
import sys
import types as python_types

import jax.numpy as jnp
import numpy as np
import pytest

from rlpost import types
from rlpost.training import metrics


def _row(reward=0.5, **more):
  return {
      'reward': reward,
      'entropy': np.float32(1.25),
      'tokens': np.int64(640),
      'logp_gap_max': jnp.asarray(1e-5),
      'domains': {'sort': {'reward': 0.25, 'share': 0.5}, 'add': {'reward': 1}},
  } | more


def _lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def _trajectory(domain='add', value=1.0, text='13\né'):
  task = types.Task(domain, (types.Message.of('user', '6 + 7?'),), {})
  return types.Trajectory(
      task=task, group=0, sample=1, tokens=np.arange(5),
      spans=(types.Span(0, 3, 'user', False),
             types.Span(3, 5, 'assistant', True)),
      logp=np.array([0, 0, 0, -0.5, -1 / 3], np.float32),
      versions=np.zeros(5, np.int32),
      temperature=1.0, stop_reason='stop', text=text,
      verdict=types.Verdict('value', value),
  )


def test_one_line_a_step_with_fixed_keys(tmp_path):
  writer = metrics.MetricsWriter(tmp_path, clock=metrics.CpuClock(100.0))
  writer.write(1, _row(loss=2.0))
  writer.write(2, _row(reward=0.75))
  first, second = _lines(tmp_path / 'metrics.jsonl')  # Before it is closed.
  assert list(first) == [
      'step', 'cpu_s', 'reward', 'entropy', 'tokens', 'logp_gap_max',
      'nonfinite', 'domains', 'loss',
  ]
  assert (first['step'], first['tokens'], first['entropy']) == (1, 640, 1.25)
  assert first['domains']['sort'] == {'reward': 0.25, 'share': 0.5}
  assert 100 < first['cpu_s'] <= second['cpu_s']
  assert second['reward'] == 0.75
  with pytest.raises(ValueError, match='lack entropy'):
    writer.write(3, {k: v for k, v in _row().items() if k != 'entropy'})


def test_what_is_not_finite_is_null_and_counted(tmp_path):
  writer = metrics.MetricsWriter(tmp_path)
  writer.write(1, _row(reward=float('nan'), norms=np.array([1, np.inf])))
  writer.write(2, _row(domains={'add': {'reward': -np.inf}}))
  text = (tmp_path / 'metrics.jsonl').read_text()
  assert 'NaN' not in text and 'Infinity' not in text
  first, second = _lines(tmp_path / 'metrics.jsonl')
  assert (first['reward'], first['norms']) == (None, [1, None])
  assert second['domains'] == {'add': {'reward': None}}
  assert [first['nonfinite'], second['nonfinite']] == [2, 1]
  assert writer.nonfinite == 3


@pytest.mark.parametrize('tear', [False, True])
def test_a_resumed_run_leaves_the_files_of_an_uninterrupted_one(tmp_path, tear):
  def run(name, steps, restored=0):
    writer = metrics.MetricsWriter(tmp_path / name, step=restored)
    writer._clock.total_s = lambda: 1.0
    for step in steps:
      writer.write(step, _row(reward=step / 8))
      writer.write_samples(step, [_trajectory(), _trajectory('sort', 0.0)])
    writer.close()
    return writer

  run('whole', range(1, 9))
  run('killed', range(1, 7))
  if tear:
    for file in ('metrics.jsonl', 'samples.jsonl'):
      path = tmp_path / 'killed' / file
      path.write_bytes(path.read_bytes()[:-30])
  resumed = run('killed', range(5, 9), restored=4)
  for file in ('metrics.jsonl', 'samples.jsonl'):
    whole = (tmp_path / 'whole' / file).read_bytes()
    assert (tmp_path / 'killed' / file).read_bytes() == whole
  assert resumed.torn == 2 * tear
  assert sorted(os.listdir(tmp_path / 'killed'))[-2:] == [
      'metrics.jsonl', 'samples.jsonl'
  ]


def test_a_torn_line_inside_the_kept_part_is_dropped(tmp_path):
  writer = metrics.MetricsWriter(tmp_path)
  writer.write(1, _row())
  writer.close()
  with (tmp_path / 'metrics.jsonl').open('a') as file:
    file.write('{"step": 2, "rew')
  again = metrics.MetricsWriter(tmp_path, step=2)
  again.write(3, _row())
  assert [row['step'] for row in _lines(tmp_path / 'metrics.jsonl')] == [1, 3]
  assert again.torn == 1


def test_samples_can_be_read(tmp_path):
  writer = metrics.MetricsWriter(tmp_path)
  writer.write_samples(3, [_trajectory()])
  (row,) = _lines(tmp_path / 'samples.jsonl')
  assert row['step'] == 3
  assert row['prompt'] == [{'role': 'user', 'text': '6 + 7?'}]
  assert row['answer'] == '13\né'
  assert 'é' in (tmp_path / 'samples.jsonl').read_text()
  assert (row['tokens'], row['verdict']['value']) == (2, 1.0)
  assert row['token_ids'] == [3, 4]  # what was sampled, without the prompt
  assert row['logp'] == [-0.5, -0.33333]


def test_tensorboard_where_it_is_installed(tmp_path, monkeypatch):
  written, purged = {}, []

  class SummaryWriter:
    def __init__(self, folder, purge_step):
      purged.append(purge_step)

    def add_scalar(self, tag, value, step):
      written[tag, step] = value

    def close(self):
      written['closed'] = True

  module = python_types.ModuleType('tensorboardX')
  module.SummaryWriter = SummaryWriter
  monkeypatch.setitem(sys.modules, 'tensorboardX', module)
  writer = metrics.MetricsWriter(tmp_path, step=4)
  writer.write(5, _row(reward=float('nan')))
  writer.close()
  assert purged == [5]
  assert written['domains/sort/share', 5] == 0.5
  assert ('reward', 5) not in written and written['closed']
  # And without it nothing is missing but its files.
  monkeypatch.setitem(sys.modules, 'tensorboardX', None)
  metrics.MetricsWriter(tmp_path, step=5).write(6, _row())
  assert [row['step'] for row in _lines(tmp_path / 'metrics.jsonl')] == [5, 6]
  assert purged == [5]


@pytest.mark.parametrize('depth', [1, 2])
def test_cpu_seconds_count_children_alive_and_ended(depth):
  clock = metrics.CpuClock(5.0)
  before = clock.total_s()
  assert before == pytest.approx(5 + sum(os.times()[:4]), abs=0.1)
  burn = (
      'import time\nwhile time.process_time() < 0.3: pass\n'
      'print(flush=True)\ninput()\n'
  )
  if depth == 2:
    burn = (
        'import subprocess, sys\n'
        f'subprocess.run([sys.executable, "-c", {burn!r}])'
    )
  child = subprocess.Popen(
      [sys.executable, '-c', burn], stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
  )
  child.stdout.readline()
  alive = clock.total_s()
  assert alive - before >= 0.25  # The system counts in hundredths.
  child.communicate(b'\n')
  assert alive - 0.02 <= clock.total_s() < alive + 2


def test_peak_memory_is_this_process_own():
  before = metrics.peak_rss_bytes()
  block = np.ones(32 << 20, np.uint8)
  assert before >= 10 << 20
  assert metrics.peak_rss_bytes() >= block.nbytes
