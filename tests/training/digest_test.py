"""Tests of the state digest."""

import hashlib
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlpost.training import digest


def _state():
  return {
      'trainable': {
          'layers/0/out': np.arange(64, dtype=np.float32).reshape(8, 8),
          'half': np.arange(8).astype(ml_dtypes.bfloat16),
          'count': np.asarray(3, np.int32),
      },
      'plan': {'weights': {'a': 0.25, 'b': 0.75}, 'cursor': [1, 2]},
      'timing': {'cpu_s': 1.0},
  }


def _oracle(items):
  """The digest from its definition, with NumPy arrays in flat dicts only."""
  lines = {}
  for item, value in items.items():
    if item == 'timing':
      continue
    if item == 'plan':
      text = json.dumps(value, sort_keys=True, separators=(',', ':'))
      leaves = [('', 'json', (), text.encode())]
    else:
      leaves = [
          (k, v.dtype.name, v.shape, v.tobytes()) for k, v in value.items()
      ]
    for path, dtype, shape, data in leaves:
      sha = hashlib.sha256(data).hexdigest()
      lines[item, path] = json.dumps([item, path, dtype, list(shape), sha])
  text = ''.join(lines[key] + '\n' for key in sorted(lines))
  return hashlib.sha256(text.encode()).hexdigest()


def test_equals_its_definition():
  items = _state()
  whole, parts = digest.state_sha256(items)
  assert whole == _oracle(items)
  assert sorted(parts) == ['plan', 'trainable']
  assert parts['plan'] == _oracle({'plan': items['plan']})
  assert parts['trainable'] == _oracle({'trainable': items['trainable']})


def _set(path, change):
  def apply(items):
    *head, last = path
    for key in head:
      items = items[key]
    items[last] = change(items[last])

  return apply


def _bump(x):
  x = x.copy()
  x[0, 1] = np.nextafter(x[0, 1], 9)
  return x


CHANGES = {
    'one bit of one leaf': _set(('trainable', 'layers/0/out'), _bump),
    'dtype': _set(('trainable', 'count'), lambda x: x.astype(np.uint32)),
    'shape': _set(('trainable', 'layers/0/out'), lambda x: x.reshape(4, 16)),
    'scalar to vector': _set(('trainable', 'count'), lambda x: x.reshape(1)),
    'bfloat16': _set(('trainable', 'half'), lambda x: x + x.dtype.type(1)),
    'leaf name': _set(('trainable',), lambda t: {
        ('b' if k == 'half' else k): v for k, v in t.items()
    }),
    'lost leaf': _set(('trainable',), lambda t: {'half': t['half']}),
    'json value': _set(('plan', 'weights', 'a'), lambda x: x + 1e-16),
    'json key': _set(('plan', 'weights'), lambda w: {'a': .25, 'c': .75}),
    'json order of a list': _set(('plan', 'cursor'), lambda x: x[::-1]),
}


@pytest.mark.parametrize('name', CHANGES)
def test_any_one_change_shows(name):
  items = _state()
  whole, parts = digest.state_sha256(items)
  CHANGES[name](items)
  changed, changed_parts = digest.state_sha256(items)
  assert changed != whole
  wrong = [k for k in parts if parts[k] != changed_parts[k]]
  expected = 'plan' if name.startswith('json') else 'trainable'
  assert wrong == [expected]


def test_negative_zero_is_another_state():
  a = digest.state_sha256({'x': {'w': np.zeros(2, np.float32)}})
  b = digest.state_sha256({'x': {'w': -np.zeros(2, np.float32)}})
  assert a != b


def test_order_of_dicts_and_timing_do_not_show():
  items = _state()
  other = _state()
  other['trainable'] = dict(reversed(other['trainable'].items()))
  other['plan'] = dict(reversed(other['plan'].items()))
  other['timing'] = {'cpu_s': 99.0}
  other = dict(reversed(other.items()))
  assert digest.state_sha256(items) == digest.state_sha256(other)


def test_leaves_may_not_move_between_items():
  x = np.ones(3, np.float32)
  a, _ = digest.state_sha256({'a': {'w': x}, 'b': {'v': x}})
  b, _ = digest.state_sha256({'a': {'v': x}, 'b': {'w': x}})
  assert a != b


def test_json_is_what_a_file_gives_back():
  value = {2: (1, 2), 10: None, 3: 0.1}
  back = json.loads(json.dumps(value))
  assert digest.state_sha256({'p': value}) == digest.state_sha256({'p': back})


@pytest.mark.parametrize('spec', [(), ('x',), (None, 'x'), ('x', 'y')])
def test_sharding_does_not_show(spec):
  items = _state()
  mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ('x', 'y'))
  sharded = dict(items)
  sharded['trainable'] = {
      k: jax.device_put(
          v, NamedSharding(mesh, PartitionSpec(*spec[: v.ndim]))
      )
      for k, v in items['trainable'].items()
  }
  assert digest.state_sha256(sharded) == digest.state_sha256(items)
  # And no copy of the gathered array stays behind with the sharded one.
  assert sharded['trainable']['layers/0/out']._npy_value is None


def test_column_major_values_digest_as_their_rows():
  x = np.arange(6, dtype=np.float32).reshape(2, 3)
  y = np.asfortranarray(x)
  assert digest.state_sha256({'a': {'w': x}}) == digest.state_sha256(
      {'a': {'w': y}}
  )


def test_what_cannot_be_saved_is_named():
  with pytest.raises(ValueError, match="'plan'"):
    digest.state_sha256({'plan': {'x': float('nan')}})
  with pytest.raises(TypeError, match="'plan'"):
    digest.state_sha256({'plan': {'x': {1, 2}}})
  with pytest.raises(TypeError, match='opt/1 is a float'):
    digest.state_sha256({'opt': (jnp.ones(2), 0.5)})
  with pytest.raises(ValueError, match='two leaves'):
    x = np.ones(1)
    digest.state_sha256({'t': {'a/b': x, 'a': {'b': x}}})


def test_a_sealed_record_shows_any_change():
  leaves = {k: digest.leaves_of(k, v) for k, v in _state().items()}
  sealed = json.dumps(digest.seal({'step': 3}, leaves))
  body = digest.unseal(sealed)
  assert digest.leaves_in(body) == leaves
  assert body['state_sha256'] == digest.state_sha256(_state())[0]
  for old, new in [('"step": 3', '"step": 4'), ('float32', 'float64'),
                   ('"sha256"', '"sha255"')]:
    assert old in sealed
    with pytest.raises(ValueError, match='digest|lacks'):
      digest.unseal(sealed.replace(old, new))
