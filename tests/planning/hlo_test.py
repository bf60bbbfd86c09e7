"""Collectives read from programs: written by hand, and compiled here."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from rlpost import sharding
from rlpost.planning import hlo

MESH = {'data': 1, 'fsdp': 2, 'tensor': 1, 'context': 4}
FIXTURES = pathlib.Path(__file__).parents[1] / 'fixtures'
TEXT = (FIXTURES / 'collectives.hlo').read_text()


def test_collectives_of_a_program_written_by_hand():
  found = hlo.collectives(TEXT, MESH, loops=7)
  one = hlo.Collective
  assert found == [
      one('all-gather', 32 * 8 * 4, 'context', 4, 1),
      one('reduce-scatter', 64 * 8 * 2, 'context', 4, 1),
      one('collective-permute', 256, 'context', 2, 5),
      one('collective-permute', 256, 'fsdp', 2, 5),
      one('all-reduce', 256, 'fsdp', 2, 7),
  ]
  # (n - 1) / n of the bytes, twice for a sum, all for a permute.
  assert [c.sent for c in found] == [768, 768, 1280, 1280, 256 * 7]
  assert hlo.totals(found)[0]['sent'] == 256 * 7


def test_a_permute_is_hidden_if_a_product_runs_before_it_ends():
  assert hlo.overlap(TEXT) == {'permutes': 10, 'hidden': 5}


@pytest.mark.parametrize('line, want', [
    ('replica_groups={{0,1},{2,3}}', [(0, 1), (2, 3)]),
    ('replica_groups=[2,4]<=[8]', [(0, 1, 2, 3), (4, 5, 6, 7)]),
    ('replica_groups=[4,2]<=[2,4]T(1,0)', [(0, 4), (1, 5), (2, 6), (3, 7)]),
    ("replica_groups=mesh['a'=2,'b'=2] {'a'}", [(0, 2), (1, 3)]),
    ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}",
     [(0, 1, 4, 5), (2, 3, 6, 7)]),
    ('source_target_pairs={{0,1},{1,0}}', [(0, 1), (1, 0)]),
    ('nothing', [(0, 1, 2)]),
])
def test_groups_in_every_way_of_writing(line, want):
  assert hlo.groups(line, 3) == want


@pytest.mark.parametrize('type_, want', [
    ('f32[8,8]{1,0:T(8,128)}', 256), ('bf16[3]', 6), ('pred[]', 1),
    ('(s32[2], u8[4]{0})', 12), ('token[]', 0),
])
def test_sizes_of_types(type_, want):
  assert hlo.size(type_) == want


def test_collectives_of_a_program_compiled_here():
  mesh = sharding.make_mesh(fsdp=2, context=4)

  def local(x):
    def step(carry, _):
      return jax.lax.psum(carry, 'fsdp') * 0.5, None

    x = jax.lax.all_gather(x, 'context', axis=0, tiled=True)
    return jax.lax.scan(step, x, None, length=3)[0]

  run = jax.shard_map(
      local, mesh=mesh, in_specs=PartitionSpec('context'),
      out_specs=PartitionSpec(), check_vma=False,
  )
  with sharding.use(mesh):
    compiled = jax.jit(run).lower(jnp.zeros((16, 8))).compile()
  found = hlo.collectives(compiled.as_text(), dict(mesh.shape))
  assert {(c.kind, c.bytes, c.axes, c.times) for c in found} == {
      ('all-gather', 16 * 8 * 4, 'context', 1),
      ('all-reduce', 16 * 8 * 4, 'fsdp', 3),
  }
  assert hlo.axes_of([tuple(np.arange(8))], dict(mesh.shape)) == 'fsdp+context'
