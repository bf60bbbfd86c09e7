"""The supervised loop: resume in mid-epoch, the schedule, export, bad numbers.

Held-out evaluation and the picture are taken out: they are tested elsewhere,
and take longer than all of this.
"""

import contextlib
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import launching
from rlpost import errors, sharding
from rlpost.data import tokenizer as tokenizers
from rlpost.evaluation import statistics
from rlpost.models import config as model_configs
from rlpost.models import transformer
from rlpost.training import checkpoint, outcome, setup, supervised
from rlpost.training import display as displays
from rlpost.weights import load as weights

ROOT = pathlib.Path(__file__).parents[2]
NANO = model_configs.ModelConfig(
    vocab_size=384, width=16, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=8, hidden=32,
)


@pytest.fixture
def config(monkeypatch):
  """`configs/sft.py:smoke` with a nano model; an epoch is 5.3 steps."""
  monkeypatch.setitem(model_configs.CONFIGS, 'nano', NANO)
  estimate = statistics.Estimate(0.5, 0.4, 0.6, 8, 0, 0)
  sides = {
      kind: outcome.report.result_json({'tiny_first': estimate})
      for kind in (outcome.report.SAMPLED, outcome.report.GREEDY)
  }
  monkeypatch.setattr(outcome, 'heldout', lambda *_: sides)
  monkeypatch.setattr(outcome.report, 'curves_png', lambda _: None)
  config = launching.read_config(str(ROOT / 'configs' / 'sft.py') + ':smoke')
  with config.unlocked():
    config.update({
        'steps': 8,
        'model': {'source': 'scratch:nano'},
        'domains': {'validation': 0, 'heldout': 8},
        'data': {'examples': 53},
        'optimizer': {'warmup_steps': 2},
        'train': {'rows': 1, 'micro': 2, 'length': 128, 'slots': 64},
        'checkpoint': {'every': 2},
    })
  return config


def loop(config, workdir, asked=lambda: False):
  display = displays.Display(config.steps, io.StringIO(), live=False)
  run = supervised.build(config, None, display)
  return supervised.Loop(run, workdir, display, asked, lambda: 0)


def train(config, workdir, asked=lambda: False):
  with sharding.use(sharding.make_mesh(**config.mesh)):
    return loop(config, workdir, asked).train()


def rows(workdir):
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  return [
      {k: v for k, v in json.loads(x).items() if k != 'cpu_s'} for x in lines
  ]


class Stop:
  """Asks a run to end once it was asked that often whether it should."""

  def __init__(self, after):
    self.left = after

  def __call__(self):
    self.left -= 1
    return self.left < 0


def test_a_resumed_run_is_the_uninterrupted_one(
    config, tmp_path, monkeypatch
):
  whole = train(config, tmp_path / 'whole')
  for stop in (3, 4):  # in the middle of the first and of the second epoch
    with pytest.raises(errors.SavedAfterSignal) as caught:
      train(config, tmp_path / 'parts', Stop(stop))
    assert caught.value.exit_code == 75
  parts = train(config, tmp_path / 'parts')
  assert parts['state_sha256'] == whole['state_sha256']
  assert parts['steps'] == whole['steps'] == 8
  found = rows(tmp_path / 'whole')
  assert rows(tmp_path / 'parts') == found
  assert [r['step'] for r in found] == list(range(1, 9))
  assert found[4]['epoch'] % 1 and found[-1]['epoch'] > 1
  assert found[-1]['loss'] < found[0]['loss']
  saved = checkpoint.Checkpoints(tmp_path / 'parts', read_only=True)
  items = saved.restore({'trained': 'json', 'counters': 'json'})[1]
  assert len(set(items['trained'])) == 106
  assert items['counters']['tokens'] == sum(r['tokens'] for r in found)
  # Without its cursor it is another one.
  with pytest.raises(errors.SavedAfterSignal):
    train(config, tmp_path / 'control', Stop(3))
  stream = supervised.pipeline.Stream
  monkeypatch.setattr(stream, 'set_state', lambda self, state: None)
  control = train(config, tmp_path / 'control')
  assert control['state_sha256'] != whole['state_sha256']


@pytest.mark.parametrize('decay', ['cosine', 'linear', 'constant'])
def test_the_schedule_is_as_long_as_the_planned_updates(config, decay):
  total, warmup, peak = 40, 4, 3e-3
  with config.unlocked():
    config.update({
        'steps': total,
        'optimizer': {'warmup_steps': warmup, 'decay': decay},
    })
  display = displays.Display(total, io.StringIO(), live=False)
  optimizer = supervised.build(config, None, display).shapes.optimizer
  # With a constant gradient, AdamW moves by the rate at every update.
  params = {'w': jnp.zeros(1)}
  state, rates = optimizer.init(params), []
  update = jax.jit(lambda s: optimizer.update({'w': jnp.ones(1)}, s, params))
  for _ in range(total):
    updates, state = update(state)
    rates.append(-float(updates['w'][0]))
  part = (total // 2 - 1 - warmup) / (total - 1 - warmup)
  half, last = {
      'cosine': (0.1 + 0.9 * (1 + np.cos(np.pi * part)) / 2, 0.1),
      'linear': (1 - 0.9 * part, 0.1),
      'constant': (1.0, 1.0),
  }[decay]
  assert rates[0] == pytest.approx(peak / warmup, rel=1e-3)
  assert rates[total // 10 - 1] == pytest.approx(peak, rel=1e-3)
  assert rates[total // 2 - 1] == pytest.approx(half * peak, rel=1e-3)
  assert rates[total - 1] == pytest.approx(last * peak, rel=1e-3)


@pytest.mark.parametrize('stacked', [False, True])
def test_what_is_exported_can_be_trained_on(config, tmp_path, stacked):
  with config.unlocked():
    config.model.stacked = stacked
  display = displays.Display(1, io.StringIO(), live=False)
  run = supervised.build(config, None, display)
  params = transformer.init(NANO, jax.random.key(1))
  given = transformer.stack(params) if stacked else params
  run.state = supervised.states.TrainState(given, None, None)
  run.frozen = {}
  supervised.export(run, tmp_path / 'model')
  model = setup.load_model(source=str(tmp_path / 'model'), seed=0)
  assert model.config == NANO
  for name, array in model.params().items():
    np.testing.assert_array_equal(array, params[name])
  mine, text = tokenizers.bytes_tokenizer(), 'ab<|im_end|>\n\t é€ \x00'
  assert model.tokenizer.encode(text) == mine.encode(text)
  assert model.tokenizer.decode(mine.encode(text)) == text
  assert model.tokenizer.chat_template == mine.chat_template
  stops = [t.stop_ids(['\n']) for t in (model.tokenizer, mine)]
  np.testing.assert_array_equal(*stops)
  assert weights.load(tmp_path / 'model')[0] == NANO


def test_numbers_that_are_not_finite_end_the_run(config, tmp_path):
  with sharding.use(sharding.make_mesh(**config.mesh)):
    one = loop(config, tmp_path)
    one.restore()
    one.update()
    one.save(wait=True)
    one.run.state.trainable['norm/scale'] = jnp.full(16, jnp.nan)
    with contextlib.closing(one.stream):
      with pytest.raises(errors.NonFiniteError, match='step 2') as caught:
        one.update()
  assert caught.value.exit_code == 4
  with np.load(tmp_path / 'nonfinite' / '2.npz') as kept:
    assert kept['bad_MB'].all() and kept['mask'].sum() > 50
  assert checkpoint.Checkpoints(tmp_path, read_only=True).steps() == [1]


def test_examples_too_long_are_counted_and_none_is_cut(config, tmp_path):
  with config.unlocked():
    config.train.length = 12  # 'first ab=' and its answer have 11 tokens
    config.train.slots = 12
  with sharding.use(sharding.make_mesh(**config.mesh)):
    one = loop(config, tmp_path)
    found = [next(one.stream) for _ in range(8)]
    one.stream.close()
  report = one.stream.report()
  assert report['overlong'] > 0 and report['documents'] > 0
  used = sum(int((b.segment >= 0).any(1).sum()) for b in found)
  assert used == report['documents'] == 16
  text = one.run.model.tokenizer.decode(found[0].tokens[0].tolist())
  assert text.startswith(('first ', 'sort ')) and '=' in text


@pytest.mark.slow
def test_a_killed_command_goes_on_as_if_nothing_had_happened(tmp_path):
  def command(name):
    return [
        sys.executable, '-m', 'experiments.sft',
        '--config=configs/sft.py:smoke', f'--workdir={tmp_path / name}',
    ]

  subprocess.run(command('whole'), check=True, cwd=ROOT)
  running = subprocess.Popen(command('parts'), cwd=ROOT)
  lines = tmp_path / 'parts' / 'metrics.jsonl'
  deadline = time.monotonic() + 300
  while time.monotonic() < deadline and running.poll() is None:
    if lines.exists() and lines.read_text().count('\n') >= 11:
      break
    time.sleep(0.005)
  running.send_signal(signal.SIGKILL)
  assert running.wait() == -signal.SIGKILL
  subprocess.run(command('parts'), check=True, cwd=ROOT)
  summaries = [
      json.loads((tmp_path / name / 'summary.json').read_text())
      for name in ('whole', 'parts')
  ]
  for key in ('state_sha256', 'heldout', 'heldout_greedy', 'steps'):
    assert summaries[0][key] == summaries[1][key], key
  mean = summaries[0]['heldout']['mean']
  assert mean['after']['mean'] > mean['before']['mean'] + 0.05
  assert rows(tmp_path / 'whole') == rows(tmp_path / 'parts')
  done = subprocess.run(
      command('parts'), check=True, cwd=ROOT, capture_output=True, text=True,
      env=os.environ,
  )
  assert 'mean of domains' in done.stdout
