"""Attention over a sequence on several devices, against one pair at a time."""

import functools

import jax
import numpy as np
import pytest

from rlpost import errors, sharding
from rlpost.data import zigzag
from rlpost.ops import attention as ops
from rlpost.ops import context
from tests.ops import attention_oracle as oracle

LAYOUTS = oracle.layouts()
HEADS = 8, 2


def check(way, kind, names=LAYOUTS, heads=HEADS, **mesh):
  kind = oracle.KINDS[kind]
  run = oracle.program(way, kind, **mesh)
  for seed, name in enumerate(names):
    where = LAYOUTS[name]
    args = oracle.rows(seed, heads)
    got = run(*args, where, where)
    want = oracle.answer(kind, args, where, where)
    oracle.assert_near(got[0], want[0], rtol=0, atol=2e-6)
    oracle.assert_near(got[1], want[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize('kind', ['window', 'all both ways'])
@pytest.mark.parametrize('way', context.WAYS)
def test_equals_the_pairwise_oracle(way, kind):
  check(way, kind, context=4)


@pytest.mark.parametrize('mesh', [
    {'context': 1}, {'context': 2}, {'context': 8},
])
def test_ring_of_any_size(mesh):
  check('ring', 'causal', ['shared prefix', 'packed'], **mesh)


@pytest.mark.parametrize('way', ['ring', 'ulysses'])
def test_beside_other_axes(way):
  """Also the sinks: each device takes those of its heads."""
  check(way, 'sink', ['shared prefix'], context=2, tensor=2, data=2)


@pytest.mark.parametrize('way, heads', [
    ('ring', (9, 3)), ('ulysses', (8, 1)), ('ulysses', (12, 6)),
])
def test_heads_of_any_ratio(way, heads):
  check(way, 'causal', ['packed'], heads=heads, context=4)


@pytest.mark.slow
@pytest.mark.parametrize('heads', [(8, 2), (8, 8), (9, 3), (8, 1)])
@pytest.mark.parametrize('ways', [1, 2, 4, 8])
@pytest.mark.parametrize('way', context.WAYS)
@pytest.mark.parametrize('kind', oracle.KINDS)
def test_all_kinds_layouts_sizes_and_ratios(kind, way, ways, heads):
  if way == 'ulysses' and heads[0] % ways:
    pytest.skip('refused; see the test of errors')
  check(way, kind, heads=heads, context=ways)


def test_zigzag_changes_nothing_but_the_place():
  where = LAYOUTS['shared prefix']
  args = oracle.rows(3, HEADS)
  order = zigzag.places(oracle.LENGTH, 4)
  run = oracle.program('ring', context=4)
  out, grads = run(*args, where, where)
  moved = jax.tree.map(lambda x: x[:, order], (*args, where, where))
  found = run(*moved)
  oracle.assert_near(
      found, jax.tree.map(lambda x: x[:, order], (out, grads)), 1e-6, 1e-6
  )


def test_poisoned_padding_changes_nothing():
  where = LAYOUTS['packed']
  args = oracle.rows(0, HEADS)
  run = oracle.program('ring', context=4)
  want = run(*args, where, where)
  poison = where.segment < 0
  bad = [np.where(poison[..., None, None], np.nan, x) for x in args]
  oracle.assert_near(run(*bad, where, where), want, 0, 0)


def layers(way, x, w, remat=False):
  """A scan over layers whose weights are all their heads' states."""
  segment = np.zeros(x.shape[:2], np.int32)

  def layer(x, w):
    h = x * w[None, None, None]
    return x + ops.attention(h, h, h, ops.causal(segment), backend=way), None

  layer = jax.checkpoint(layer) if remat else layer
  return jax.lax.scan(layer, x, w)[0].sum()


def temp_bytes(ways, length, way='ring'):
  x = jax.ShapeDtypeStruct((1, length, 2, 16), np.float32)
  w = jax.ShapeDtypeStruct((2, 16), np.float32)
  made = sharding.make_mesh(context=ways)
  with sharding.use(made):
    place = sharding.named(made, (None, 'time', None, None))
    x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
    step = jax.jit(jax.grad(functools.partial(layers, way), argnums=(0, 1)))
    return step.lower(x, w).compile().memory_analysis().temp_size_in_bytes


def test_memory_of_a_device_goes_by_its_share_of_the_tokens():
  assert temp_bytes(8, 8 * 2048) <= 1.1 * temp_bytes(1, 2048)


@pytest.mark.parametrize('remat', [False, True])
@pytest.mark.parametrize('way', context.WAYS)
def test_no_value_inside_a_scan_over_layers_is_as_large_as_a_mask(way, remat):
  ways, length = 8, 2**14
  x = jax.ShapeDtypeStruct((1, length, 8, 4), np.float32)
  w = jax.ShapeDtypeStruct((2, 4), np.float32)
  with sharding.use(sharding.make_mesh(context=ways)):
    loss = functools.partial(layers, way, remat=remat)
    jaxpr = jax.make_jaxpr(jax.grad(loss))(x, w)
  assert max(oracle.sizes(jaxpr.jaxpr)) < length // ways * length


@pytest.mark.parametrize('way, length, heads, message', [
    ('ring', 42, (8, 2), '42 queries must divide over 4 devices.* make it 44'),
    ('ulysses', 40, (6, 2), "heads that divide over 4.*Use 'ring'"),
])
def test_what_does_not_divide_is_refused(way, length, heads, message):
  q, k, v, _ = oracle.arrays(0, 1, length, *heads, 8)
  where = oracle.documents(length)
  with sharding.use(sharding.make_mesh(context=4)):
    with pytest.raises(errors.InputError, match=message):
      ops.attention(q, k, v, where, backend=way)
