"""The ring and the kernel as a TPU runs them: compiled ahead of time.

No TPU is needed.

Needs the extra `tpu-aot`. In a process of its own: a compiler for TPUs must
know of it before JAX starts.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec('libtpu') is None,
        reason='pip install rlpost[tpu-aot]',
    ),
]
PROGRAM = """
import functools, json
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from rlpost import sharding
from rlpost.ops import attention

def ring(q, k, v, segment):
  where = attention.causal(segment)
  return attention.attention(
      q, k, v, where, backend='ring', block=512
  ).astype(jnp.float32).sum()

found = topologies.get_topology_desc(platform='tpu', topology_name='v5e:2x4')
mesh = sharding.make_mesh(context=8, devices=list(found.devices))
with sharding.use(mesh):
  def shape(heads):
    place = sharding.named(mesh, (None, 'time', None, None))
    return jax.ShapeDtypeStruct(
        (1, 2**15, heads, 128), jnp.bfloat16, sharding=place
    )

  place = sharding.named(mesh, (None, 'time'))
  segment = jax.ShapeDtypeStruct((1, 2**15), jnp.int32, sharding=place)
  args = shape(8), shape(2), shape(2), segment
  gradient = jax.grad(ring, argnums=(0, 1, 2))
  texts = [
      jax.jit(f).lower(*args).compile().as_text() for f in (ring, gradient)
  ]
print(json.dumps(texts))
"""
SPLASH = """
import functools, json
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from rlpost import sharding
from rlpost.ops import attention

def loss(layout, q, k, v, sink, segment):
  where = attention.causal(segment)
  out = attention.attention(
      q, k, v, where, backend='splash', block=512, layout=layout,
      softcap=30.0, sink_H=sink,
  )
  return out.astype(jnp.float32).sum()

found = topologies.get_topology_desc(platform='tpu', topology_name='v5e:2x4')
mesh = sharding.make_mesh(data=4, tensor=2, devices=list(found.devices))
texts = []
with sharding.use(mesh):
  def shape(dtype, axes, *size):
    place = sharding.named(mesh, axes)
    return jax.ShapeDtypeStruct(size, dtype, sharding=place)

  axes = 'batch', None, 'heads', None
  for layout, width in (None, 128), (attention.SharedPrefix(1000, 3, 512), 64):
    q, k = (shape(jnp.bfloat16, axes, 4, 2536, h, width) for h in (8, 2))
    sink = shape(jnp.float32, ('heads',), 8)
    segment = shape(jnp.int32, ('batch', None), 4, 2536)
    step = jax.jit(jax.grad(functools.partial(loss, layout), (0, 1, 2, 3)))
    texts.append(step.lower(q, k, k, sink, segment).compile().as_text())
print(json.dumps(texts))
"""


def compiled(program):
  """The texts that a program prints, compiled in a process of its own."""
  env = os.environ | {
      'JAX_PLATFORMS': 'cpu', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
      'TPU_SKIP_MDS_QUERY': '1',
  }
  done = subprocess.run(
      [sys.executable, '-c', program], check=True, text=True,
      stdout=subprocess.PIPE, env=env,
  )
  return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope='module')
def texts():
  """Scheduled programs of the output and of the gradient."""
  return compiled(PROGRAM)


def hops(text):
  """(permutes, those on their way while a loop runs) of each ring's body."""
  for body in re.split(r'\n(?=(?:ENTRY )?%?[\w.\-]+ \()', text):
    if body.startswith('ENTRY') or 'collective-permute-start' not in body:
      continue
    events = re.findall(
        r'(%[\w.\-]+) = .*? (collective-permute-start|collective-permute-done|'
        r'while|conditional)\((%?[\w.\-]*)', body,
    )
    loop = next(
        i for i, e in enumerate(events) if e[1] in ('while', 'conditional')
    )
    started = {e[0] for e in events[:loop] if e[1].endswith('start')}
    ended = {e[2] for e in events[:loop] if e[1].endswith('done')}
    total = sum(e[1].endswith('start') for e in events)
    yield total, len(started - ended)


def test_all_that_travels_forward_does_so_while_a_hop_is_computed(texts):
  (found,) = hops(texts[0])
  assert found == (3, 3)  # keys, values, where they stand


def test_all_that_travels_backward_does_so_too_but_for_the_way_home(texts):
  forward, tour, hop = sorted(hops(texts[1]))
  assert forward == (3, 3)
  assert tour == (5, 3)  # two gradients, once a tour of eight hops
  assert hop == (5, 5)


def test_around_a_ring_the_kernel_hides_what_travels():
  program = PROGRAM.replace("backend='ring'", "backend='splash'")
  forward, both = compiled(program)
  assert list(hops(forward)) == [(3, 3)]
  assert sorted(hops(both)) == [(3, 3), (5, 5)]
  assert forward.count('custom_call_target="tpu_custom_call"') == 5
  assert both.count('custom_call_target="tpu_custom_call"') == 11


def test_the_kernel_compiles_with_its_own_gradient():
  """One kernel for the output, two for the gradients; nothing is gathered."""
  for text in compiled(SPLASH):
    assert text.count('custom_call_target="tpu_custom_call"') == 3
    assert 'all-gather' not in text and 'all-to-all' not in text
