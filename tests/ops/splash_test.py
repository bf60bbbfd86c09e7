"""The TPU kernel, its steps run one by one, against one pair at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlpost import errors, sharding
from rlpost.data import zigzag
from rlpost.ops import attention as ops
from rlpost.ops import blockwise, splash
from rlpost.ops.attention import Rule, SharedPrefix, Where
from tests.ops import attention_oracle as oracle

PREFIX = SharedPrefix(10, 3, 10)
SAMPLES = oracle.batch(
    oracle.shared_prefix(10, 3, 10, real=[10, 7, 3]),
    oracle.shared_prefix(10, 3, 10, real=[1, 10, 0]),
    oracle.documents(-40),
)
HEADS = 4, 2


def run(kind, layout, where, *args):
  q, k, v, g = map(jnp.asarray, args)

  def attend(q, k, v, *sink):
    return splash.attention(
        q, k, v, where, sink_H=next(iter(sink), None), layout=layout,
        spec=blockwise.Spec(kind.rule, kind.softcap), interpret=True,
    )

  @jax.jit
  def both(q, k, v, g, *sink):
    out, pull = jax.vjp(attend, q, k, v, *sink)
    return out, pull(g)

  return jax.tree.map(
      np.asarray, both(q, k, v, g, *oracle.sinks(kind, q.shape[2]))
  )


@pytest.mark.parametrize('kind, layout', [
    ('window', None),
    (oracle.Kind(Rule(), 1.5, True), PREFIX),
    pytest.param('causal', None, marks=pytest.mark.slow),
    pytest.param('bidirectional', None, marks=pytest.mark.slow),
    pytest.param('window both ways', None, marks=pytest.mark.slow),
    pytest.param('sink', None, marks=pytest.mark.slow),
    pytest.param('softcap', None, marks=pytest.mark.slow),
    pytest.param('bidirectional', PREFIX, marks=pytest.mark.slow),
])
def test_equals_the_pairwise_oracle(kind, layout):
  kind = oracle.KINDS.get(kind, kind)
  where = SAMPLES if layout else oracle.layouts()['packed']
  args = oracle.rows(0, HEADS)
  got = run(kind, layout, where, *args)
  want = oracle.answer(kind, args, where, where)
  oracle.assert_near(got[0], want[0], rtol=0, atol=2e-6)
  oracle.assert_near(got[1], want[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize('options, message', [
    ({'rule': Rule(chunk=4)}, "no chunks or first.* Use 'blockwise'"),
    ({'rule': Rule(4, first=1)}, "no chunks or first.* Use 'blockwise'"),
    ({'rule': Rule(4), 'layout': PREFIX}, 'no windows beside Shared'),
    ({'key': SAMPLES._replace(order=SAMPLES.order + 1)}, 'own keys alone'),
])
def test_what_the_kernel_does_not_serve_is_refused(options, message):
  q, k, v, _ = oracle.rows(0, HEADS)
  attend = functools.partial(ops.attention, backend='splash')
  with pytest.raises(errors.InputError, match=message):
    attend(q, k, v, SAMPLES, **options)


@pytest.mark.slow
def test_rows_and_heads_spread_over_devices():
  """The sinks too: each device takes those of its heads."""
  kind = oracle.KINDS['sink']
  where = oracle.layouts()['packed']
  where = oracle.batch(*(type(where)(*(x[:2] for x in where)),) * 2)
  args = oracle.arrays(1, 4, oracle.LENGTH, *HEADS, 8)
  with sharding.use(sharding.make_mesh(data=2, tensor=2)):
    got = run(kind, None, where, *args)
  want = oracle.answer(kind, args, where, where)
  oracle.assert_near(got[0], want[0], rtol=0, atol=2e-6)
  oracle.assert_near(got[1], want[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize('ways, heads, softcap', [
    (2, (2, 1), None),
    pytest.param(2, (4, 4), 1.5, marks=pytest.mark.slow),
    pytest.param(4, (4, 2), None, marks=pytest.mark.slow),
])
def test_around_a_ring_it_equals_dense(ways, heads, softcap):
  """Documents and padding end anywhere; a device has half of all pairs."""
  length = 256 * ways
  where = oracle.documents(length // 3, 1, length // 2, -length)
  where = Where(*(x[:, zigzag.places(length, ways)] for x in (
      y[:, :length] for y in where)))
  args = oracle.arrays(2, 1, length, *heads, 8)

  def both(attend):
    out, pull = jax.vjp(attend, *args[:3])
    return out, pull(args[3])

  want = both(functools.partial(ops.attention, query=where, softcap=softcap))
  mesh = sharding.make_mesh(context=ways, devices=jax.devices()[:ways])
  with sharding.use(mesh):
    got = jax.jit(functools.partial(both, functools.partial(
        splash.attention, where=where, interpret=True,
        spec=blockwise.Spec(softcap=softcap),
    )))()
  oracle.assert_near(got[0], want[0], rtol=0, atol=2e-6)
  oracle.assert_near(got[1], want[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize('length, options, message', [
    (1024, {'rule': Rule(4)}, "4 devices of the context axis.*Use 'ring'"),
    (1024, {'rule': Rule(causal=False)}, "serves causal rows.*Use 'ring'"),
    (1000, {}, 'of 1000 tokens must be a multiple of 1024; make them 1024'),
])
def test_what_a_ring_of_kernels_does_not_serve_is_refused(
    length, options, message
):
  where = oracle.documents(length)
  q, k, v, _ = oracle.arrays(0, 1, length, *HEADS, 8)
  with sharding.use(sharding.make_mesh(context=4)):
    with pytest.raises(errors.InputError, match=message):
      ops.attention(q, k, v, where, backend='splash', **options)
