"""Benchmarks count this process's work, and no ratio flatters."""

import json
import subprocess
import sys
import time

import pytest

from tools.bench import measure


def spin(seconds):
  end = time.process_time() + seconds
  while time.process_time() < end:
    pass


def test_clock_counts_work_and_not_waiting():
  with measure.clock() as waiting:
    time.sleep(0.2)
  with measure.clock() as working:
    spin(0.2)
  assert waiting.wall_s >= 0.2 and waiting.cpu_s < 0.1
  assert 0.2 <= working.cpu_s < 0.4


def test_warm_up_is_not_counted():
  waits = iter([0.3, 0.0, 0.0])
  seconds = measure.repeat(lambda: spin(next(waits)), times=2)
  assert len(seconds) == 2 and max(seconds) < 0.2
  assert measure.spread([3.0, 1.0, 9.0])['median'] == 3.0


def test_a_line_is_json_and_its_ratio_a_share(capsys):
  measure.emit('case', 50.0, 'GFLOP/CPU s', 100.0, 0.5, tokens=3)
  line = json.loads(capsys.readouterr().out)
  assert (line['ratio'], line['tokens'], line['name']) == (0.5, 3, 'case')
  for ratio in (0.0, 1.01, float('nan')):
    with pytest.raises(ValueError, match=r'not in \(0, 1\]'):
      measure.emit('case', 1.0, 's', 1.0, ratio)


def test_threads_are_set_before_jax_or_not_at_all():
  with pytest.raises(RuntimeError, match='before the first import'):
    measure.use_threads(1)  # conftest has imported it
  code = (
    'from tools.bench import measure\n'
    'measure.use_threads(1)\n'
    'import os, jax\n'
    'assert len(os.sched_getaffinity(0)) == 1\n'
    'assert "multi_thread_eigen=false" in os.environ["XLA_FLAGS"]\n'
  )
  subprocess.run([sys.executable, '-c', code], check=True)
