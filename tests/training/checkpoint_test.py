"""Tests of saving and restoring the whole state."""

import gc
import json
import os
import resource
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlpost import errors
from rlpost.training import checkpoint, digest

# A read that fails leaves coroutines behind, which say so when collected.
pytestmark = pytest.mark.filterwarnings(
    'ignore::pytest.PytestUnraisableExceptionWarning'
)

OPTIMIZER = optax.adamw(1e-2)


def _params(step=0):
  return {
      'layers/0/attn/qkv': jnp.arange(64.0).reshape(8, 8) + step,
      'layers/0': jnp.full((8, 4), step, jnp.bfloat16),
      'norm/scale': jnp.linspace(-1, 1, 7) * (step + 1),
  }


def _items(step=0, params=None):
  params = _params(step) if params is None else params
  return {
      'trainable': params,
      'opt': jax.jit(OPTIMIZER.init)(params),
      'plan': {'cursor': {'add': 3 + step, 'sort': 5}, 'weights': [0.5, 0.5]},
      'timing': {'cpu_s': 1.5},
  }


def _targets(shapes=None):
  shapes = shapes or jax.eval_shape(_params)
  return {
      'trainable': shapes,
      'opt': jax.eval_shape(OPTIMIZER.init, shapes),
      'plan': 'json',
      'timing': 'json',
  }


def _sha(items):
  return digest.state_sha256(items)[0]


def _saved(workdir, steps=(2, 4), **kwargs):
  saved = checkpoint.Checkpoints(workdir, **kwargs)
  for step in steps:
    saved.save(step, _items(step))
  saved.wait()
  return saved


def _update(params, opt):
  grads = jax.tree.map(jnp.ones_like, params)
  updates, opt = OPTIMIZER.update(grads, opt, params)
  return optax.apply_updates(params, updates), opt


def test_restored_is_what_was_saved(tmp_path):
  saved = _saved(tmp_path)
  step, items = checkpoint.Checkpoints(tmp_path).restore(_targets())
  assert step == 4
  assert items['plan'] == _items(4)['plan']
  assert items['timing'] == {'cpu_s': 1.5}
  wanted, found = jax.tree.flatten(_items(4)), jax.tree.flatten(items)
  assert wanted[1] == found[1]
  for x, y in zip(wanted[0], found[0], strict=True):
    np.testing.assert_array_equal(x, y)
    assert getattr(x, 'dtype', None) == getattr(y, 'dtype', None)
  assert _sha(items) == _sha(_items(4)) == saved.describe(4)['state_sha256']
  assert digest.state_sha256(items)[1] == saved.describe(4)['items']
  # The next update is that of the uninterrupted run, bit for bit.
  after = _update(items['trainable'], items['opt'])
  uninterrupted = _update(_items(4)['trainable'], _items(4)['opt'])
  assert _sha({'a': after}) == _sha({'a': uninterrupted})


def test_nothing_was_ever_saved(tmp_path):
  saved = checkpoint.Checkpoints(tmp_path)
  assert saved.restore(_targets()) is None
  assert saved.best_step() is None
  # What a kill during the first save leaves, in a folder of its own: two
  # managers of one folder would race to clean it.
  torn = tmp_path / 'torn' / 'checkpoints' / '2.orbax-checkpoint-tmp-1'
  torn.mkdir(parents=True)
  again = checkpoint.Checkpoints(tmp_path / 'torn')
  assert again.restore(_targets()) is None
  again.save(2, _items(2), wait=True)
  assert again.restore(_targets())[0] == 2


def test_latest_and_best_are_kept(tmp_path):
  saved = checkpoint.Checkpoints(tmp_path, keep_latest=2)
  scores = [0.2, np.float32(0.9), 0.4, None, np.nan, 0.5, None]
  for step, score in enumerate(scores):
    metrics = None if score is None else {'validation': score}
    saved.save(step, {'plan': {'n': step}}, metrics=metrics)
  saved.wait()
  assert saved.steps() == [1, 5, 6]
  assert saved.best_step() == 1
  # The best is remembered by the next process, and beaten by a better one.
  again = checkpoint.Checkpoints(tmp_path, keep_latest=1)
  again.save(7, {'plan': {}}, wait=True)
  assert again.steps() == [1, 7]
  again.save(8, {'plan': {}}, metrics={'validation': 0.95}, wait=True)
  assert again.steps() == [8]


def test_a_rollback_deletes_before_it_saves(tmp_path):
  saved = _saved(tmp_path, steps=(2, 4, 6), keep_latest=3)
  with pytest.raises(errors.InputError, match=r'delete_after\(3\)'):
    saved.save(4, _items(40))
  assert saved.restore(_targets(), step=4)[1]['plan'] == _items(4)['plan']
  saved.delete_after(2)
  assert saved.steps() == [2]
  saved.save(4, _items(40), wait=True)
  again = checkpoint.Checkpoints(tmp_path)
  assert again.restore(_targets(), step=4)[1]['plan'] == _items(40)['plan']


def test_what_is_saved_is_the_state_at_the_call(tmp_path):
  saved = checkpoint.Checkpoints(tmp_path)
  params = {'w': jnp.zeros((512, 1024))}
  items = _items(params=params)
  sha = _sha(items)
  update = jax.jit(_update, donate_argnums=(0, 1))
  saved.save(1, items)
  state = update(items['trainable'], items['opt'])
  items['plan']['cursor']['add'] = -1
  jax.block_until_ready(state)
  saved.wait()
  shapes = jax.eval_shape(lambda: {'w': jnp.zeros((512, 1024))})
  step, found = saved.restore(_targets(shapes))
  assert (step, _sha(found)) == (1, sha)
  assert found['plan']['cursor']['add'] == 3


def test_an_optimizer_without_state(tmp_path):
  saved = checkpoint.Checkpoints(tmp_path)
  items = {'opt': (optax.EmptyState(), optax.EmptyState()), 'plan': {}}
  saved.save(1, items, wait=True)
  step, found = saved.restore({'opt': items['opt'], 'plan': 'json'})
  assert found == items
  assert _sha(found) == saved.describe(step)['state_sha256']


# Damage.


def _truncate(path):
  data = path.read_bytes()
  path.write_bytes(data[: len(data) // 2])


def _flip(path):
  data = bytearray(path.read_bytes())
  for at in (len(data) // 3, len(data) // 2):
    if data:
      data[at] ^= 0x10
  path.write_bytes(data)


def _empty(path):
  path.write_bytes(b'')


DAMAGES = {
    'truncated': _truncate,
    'flipped': _flip,
    'emptied': _empty,
    'deleted': os.remove,
}


@pytest.mark.parametrize('damage', DAMAGES)
def test_a_damaged_file_is_harmless_or_named(tmp_path, damage):
  step_dir = tmp_path / checkpoint.DIRECTORY / '4'
  _saved(tmp_path)
  sha = {step: _sha(_items(step)) for step in (2, 4)}
  named = set()
  for path in sorted(p for p in step_dir.rglob('*') if p.is_file()):
    whole = path.read_bytes()
    DAMAGES[damage](path)
    lines = []
    saved = checkpoint.Checkpoints(tmp_path, read_only=True, log=lines.append)
    step, items = saved.restore(_targets())
    assert _sha(items) == sha[step], path
    assert [s for s, _ in saved.damaged] == [4] * (step == 2), path
    assert len(lines) == 2 * (step == 2)
    if step == 2:
      assert 'checkpoint 4 in' in lines[0] and 'checkpoint 2 is' in lines[1]
      named.add('/'.join(path.relative_to(step_dir).parts[:2]))
    path.write_bytes(whole)
  # These hold state, so their damage must be found.
  assert named >= {'digest/metadata', 'plan/metadata', 'timing/metadata'}
  assert named >= {'opt/manifest.ocdbt', 'trainable/manifest.ocdbt'}
  assert named & {'opt/d', 'opt/ocdbt.process_0'}
  assert named & {'trainable/d', 'trainable/ocdbt.process_0'}
  gc.collect()


def test_one_flipped_bit_of_a_weight_is_found(tmp_path):
  saved = checkpoint.Checkpoints(tmp_path, keep_latest=3)
  w = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
  for step in (1, 2):
    saved.save(step, {'trainable': {'w': jnp.asarray(w)}}, wait=True)
  files = [p for p in tmp_path.rglob('2/**/*') if p.is_file()]
  data = next(p for p in files if w.tobytes()[400:500] in p.read_bytes())
  raw = bytearray(data.read_bytes())
  raw[raw.index(w.tobytes()[400:500])] ^= 1
  data.write_bytes(raw)
  target = {'trainable': {'w': jax.ShapeDtypeStruct(w.shape, w.dtype)}}
  step, items = saved.restore(target)
  assert step == 1
  np.testing.assert_array_equal(items['trainable']['w'], w)
  assert saved.damaged == [(2, 'trainable/w does not match its digest')]


@pytest.mark.parametrize('item', ['trainable', 'opt', 'plan', 'digest'])
def test_a_missing_item_is_never_fresh(tmp_path, item):
  saved = _saved(tmp_path)
  (saved.directory / '4' / item).rmtree()
  step, items = saved.restore(_targets())
  assert (step, _sha(items)) == (2, _sha(_items(2)))
  (saved.directory / '2' / item).rmtree()
  for _ in range(2):  # Nor when the command is given again.
    with pytest.raises(errors.DamagedStateError, match='step 2: it is'):
      checkpoint.Checkpoints(tmp_path).restore(_targets())


def test_an_item_that_no_step_has_is_an_error(tmp_path):
  _saved(tmp_path)
  targets = _targets() | {'curriculum': 'json'}
  with pytest.raises(errors.DamagedStateError, match="no item 'curriculum'"):
    checkpoint.Checkpoints(tmp_path).restore(targets)


def test_a_name_is_not_a_checkpoint(tmp_path):
  saved = _saved(tmp_path)
  (saved.directory / '9').mkdir()
  shutil.copytree(saved.directory / '2', saved.directory / '11')
  (saved.directory / 'notes').mkdir()
  again = checkpoint.Checkpoints(tmp_path)
  step, items = again.restore(_targets())
  assert (step, _sha(items)) == (4, _sha(_items(4)))
  assert [s for s, _ in again.damaged] == [11, 9]
  assert 'step 2 in a folder called 11' in again.damaged[0][1]
  assert (saved.directory / 'damaged-9').exists()
  again.save(6, _items(6), wait=True)
  assert checkpoint.Checkpoints(tmp_path).restore(_targets())[0] == 6


def test_reading_only_touches_nothing(tmp_path):
  saved = _saved(tmp_path)
  (saved.directory / '9').mkdir()
  (saved.directory / '4' / 'opt').rmtree()
  before = sorted(tmp_path.rglob('*'))
  reader = checkpoint.Checkpoints(tmp_path, read_only=True)
  # The optimizer is not asked for, so its loss does not matter.
  step, items = reader.restore_arrays(None, ['trainable'])
  assert step == 4
  assert _sha(items) == _sha({'trainable': _params(4)})
  assert reader.restore(_targets())[0] == 2
  assert sorted(tmp_path.rglob('*')) == before
  with pytest.raises(errors.InputError, match=r'no step 3; it has \[2, 4, 9\]'):
    reader.restore_arrays(3, ['trainable'])
  empty = checkpoint.Checkpoints(tmp_path / 'none', read_only=True)
  assert empty.restore_arrays(None, ['trainable']) is None
  assert not (tmp_path / 'none').exists()


# A full disk.


def test_what_does_not_fit_is_not_begun(tmp_path, monkeypatch):
  saved = _saved(tmp_path)
  before = sorted(tmp_path.rglob('*'))
  usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
  with monkeypatch.context() as patch:
    patch.setattr(shutil, 'disk_usage', lambda _: usage)
    with pytest.raises(errors.DoesNotFitError, match='1 MB free') as caught:
      saved.save(6, _items(6))
  assert caught.value.exit_code == 3
  assert sorted(tmp_path.rglob('*')) == before
  saved.save(6, _items(6), wait=True)
  assert saved.steps() == [4, 6]


def test_a_failed_write_leaves_the_earlier_steps(tmp_path):
  saved = _saved(tmp_path)
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  items = _items(6) | {'trainable': {'w': jnp.zeros((1024, 1024))}}
  try:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    with pytest.raises(errors.RunError, match='saving step 6 .*Earlier steps'):
      saved.save(6, items, wait=True)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  again = checkpoint.Checkpoints(tmp_path)
  assert again.restore(_targets())[0] == 4
  again.save(6, items, wait=True)
  assert again.steps() == [4, 6]


# Kills. The child counts the file operations of a save, and dies at each of
# some of them; it forks before JAX has started.

_CHILD = '''
import json, os, pathlib, signal, sys
import jax, numpy as np
from rlpost.training import checkpoint

def items(step):
  w = np.random.default_rng(step).normal(size=(256, 1024)).astype(np.float32)
  return {'trainable': {'w': jax.numpy.asarray(w)}, 'plan': {'step': step}}

count, last, events = -1, None, []

def hook(name, args):
  global count
  if count < 0 or not name.startswith(('open', 'os.', 'shutil.')):
    return
  if not any(isinstance(a, str) and workdir + '/' in a for a in args):
    return
  if count == last:
    os.kill(os.getpid(), signal.SIGKILL)
  count += 1
  events.append(name)

def run(first):
  global count
  saved = checkpoint.Checkpoints(workdir, keep_latest=1)
  if not first:
    saved.save(2, items(2), wait=True)
  count = 0
  saved.save(4, items(4), wait=True)
  count = -1

root, points = sys.argv[1], int(sys.argv[2])
sys.addaudithook(hook)
for first in (True, False):
  last, workdir = None, f'{root}/{first}-all'
  if os.fork() == 0:
    run(first)
    pathlib.Path(f'{workdir}.json').write_text(json.dumps(events))
    os._exit(0)
  os.wait()
  total = len(json.loads(pathlib.Path(f'{workdir}.json').read_text()))
  for last in sorted({int(x) for x in np.linspace(0, total - 1, points)}):
    workdir = f'{root}/{first}-{last}'
    if os.fork() == 0:
      run(first)
      os._exit(0)
    print(first, last, os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
'''


def test_a_kill_at_any_point_leaves_a_whole_step(tmp_path):
  points = 8
  out = subprocess.run(
      [sys.executable, '-c', _CHILD, str(tmp_path), str(points)],
      check=True, capture_output=True, text=True, timeout=120,
  )
  runs = [line.split() for line in out.stdout.splitlines()]
  assert len(runs) >= 2 * points - 2
  target = {'trainable': {'w': jax.ShapeDtypeStruct((256, 1024), jnp.float32)},
            'plan': 'json'}
  seen = set()
  for first, last, code in runs:
    assert int(code) == -signal.SIGKILL
    saved = checkpoint.Checkpoints(tmp_path / f'{first}-{last}')
    found = saved.restore(target)
    step = found and found[0]
    assert step in ((None, 4) if first == 'True' else (2, 4))
    if found:
      w = np.random.default_rng(step).normal(size=(256, 1024))
      np.testing.assert_array_equal(
          found[1]['trainable']['w'], w.astype(np.float32)
      )
      assert found[1]['plan'] == {'step': step}
    seen.add(step)
    # And the same command goes on.
    saved.save(6, {'plan': {}}, wait=True)
    assert saved.restore({'plan': 'json'})[0] == 6
    assert not saved.damaged
  assert {None, 2} <= seen


def test_the_record_of_a_step(tmp_path):
  saved = _saved(tmp_path)
  record = saved.describe(4)
  assert json.loads(json.dumps(record)) == record
  assert record['step'] == 4
  names = {item for item, *_ in record['leaves']}
  assert names == {'trainable', 'opt', 'plan', 'timing'}
  with pytest.raises(errors.DamagedStateError, match='incomplete'):
    saved.describe(3)
