"""A training run that ends itself at a chosen point.

  python -m tests.experiments.killed POINT N FLAGS...

SIGKILL reaches it inside the N-th time that the run comes to POINT; 'sigterm'
sends itself that signal and goes on.
"""

import os
import signal
import sys
import threading
import time
from unittest import mock

from experiments import launching, train
from rlpost.evaluation import report
from rlpost.rewards import scoring
from rlpost.rollouts import engine
from rlpost.training import (
  checkpoint,
  imitation,
  loop,
  metrics,
  outcome,
  programs,
  workdir,
)


def kill(*_, **__):
  os.kill(os.getpid(), signal.SIGKILL)


def terminate(*_, **__):
  os.kill(os.getpid(), signal.SIGTERM)


def at(owner, name, count, before=None, after=None):
  """Calls `before` and `after` around the `count`-th call of a function."""
  function, calls = getattr(owner, name), []

  def wrapped(*args, **keywords):
    calls.append(None)
    here = len(calls) == count
    if here and before is not None:
      before(*args, **keywords)
    result = function(*args, **keywords)
    if here and after is not None:
      after(*args, **keywords)
    return result

  mock.patch.object(owner, name, wrapped).start()


def inside(owner, name, count, inner, inner_name, **effects):
  """As `at`, for the first call of `inner` within the `count`-th of another."""
  at(owner, name, count, lambda *_, **__: at(inner, inner_name, 1, **effects))


def torn(writer, name, row):
  """Half a line, as a kill in the middle of a write leaves it."""
  writer._files[name].write(str(row)[:20])
  writer._files[name].flush()
  kill()


def unfinished(path, value):
  """The temporary file of a result, and not yet the result."""
  path.with_name(path.name + '.tmp').write_text('{"step"')
  kill()


def compiling(count, delay_s=0.3):
  """Soon after the `count`-th program of updates has been lowered."""
  lower, calls = programs.Program.lower, []

  def wrapped(program):
    lowered = lower(program)
    calls.extend([program.name] if program.name == 'train' else [])
    if len(calls) == count:
      threading.Timer(delay_s, kill).start()
    return lowered

  mock.patch.object(programs.Program, 'lower', wrapped).start()


def saving(delay_s):
  """The save has begun in the background; so much of it gets done."""
  return lambda *_, **__: (time.sleep(delay_s), kill())


PATCHES = {
  'warm-up': lambda n: at(imitation, 'learn', n, kill),
  'before': lambda n: inside(
    workdir.Workdir, 'evaluate', 1, scoring.Pending, 'result', before=kill
  ),
  'after': lambda n: inside(
    workdir.Workdir, 'evaluate', 2, scoring.Pending, 'result', before=kill
  ),
  'rollout': lambda n: inside(
    loop.Loop, 'rollouts', n, engine._Session, '_collect', before=kill
  ),
  'checking': lambda n: inside(
    loop.Loop, 'rollouts', n, scoring.Pending, 'result', before=kill
  ),
  'update': lambda n: inside(
    loop.Loop, '_learn', n, programs.Program, '__call__', after=kill
  ),
  'metrics': lambda n: at(metrics.MetricsWriter, '_append', n, torn),
  'validation': lambda n: inside(
    workdir.Workdir, '_validation', n, scoring.Pending, 'result', before=kill
  ),
  'save': lambda n: at(checkpoint.Checkpoints, 'save', n, after=saving(0)),
  'save+10ms': lambda n: at(
    checkpoint.Checkpoints, 'save', n, after=saving(0.01)
  ),
  'save+40ms': lambda n: at(
    checkpoint.Checkpoints, 'save', n, after=saving(0.04)
  ),
  'save+160ms': lambda n: at(
    checkpoint.Checkpoints, 'save', n, after=saving(0.16)
  ),
  'result': lambda n: at(outcome, 'write_json', n, unfinished),
  'compilation': compiling,
  'summary': lambda n: at(report, 'write_summary', n, kill),
  'table': lambda n: at(outcome, 'show', n, kill),
  'sigterm': lambda n: at(loop.Loop, 'update', n, terminate),
}


if __name__ == '__main__':
  point, number = sys.argv[1], int(sys.argv[2])
  del sys.argv[1:3]
  PATCHES[point](number)
  launching.run(train.main)
