"""An update as TPUs would run it: compiled ahead of time, no TPU needed.

Needs the extra `tpu-aot`; see `tests/ops/context_tpu_test.py`.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

from rlpost.planning import topology

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec('libtpu') is None,
        reason='pip install rlpost[tpu-aot]',
    ),
]
PROGRAM = """
import json
from jax.experimental import topologies
from rlpost import sharding
from rlpost.algorithms import recipes
from rlpost.models import config
from rlpost.training import programs, state, step

found = topologies.get_topology_desc(platform='tpu', topology_name='v5e:2x4')
mesh = sharding.make_mesh(fsdp=FSDP, context=8 // FSDP, devices=found.devices)
model = config.ModelConfig(
    vocab_size=4096, width=1024, num_layers=3, num_heads=8, num_kv_heads=4,
    head_dim=128, hidden=2048, tied=MICRO == 1,
)
shapes = programs.Shapes(
    step=step.StepConfig(
        model, recipes.recipe('grpo'), backend='ring', remat='full',
        dtype='bfloat16',
    ),
    stacked=True, trainable='.*', optimizer=state.adamw(1.0, total_steps=2),
    rows=2, micro=MICRO, slots=256, length=8192,
)
with sharding.use(mesh):
  train = programs.programs(shapes, mesh)['train']
  print(json.dumps(train.compile().as_text()))
"""


def compiled(micro, fsdp):
  """The update's HLO; with several micro-batches, of a model with a head."""
  program = PROGRAM.replace('MICRO', str(micro)).replace('FSDP', str(fsdp))
  done = subprocess.run(
      [sys.executable, '-c', program], check=True, text=True,
      stdout=subprocess.PIPE, env=os.environ | topology.ENVIRONMENT,
  )
  return json.loads(done.stdout.splitlines()[-1])


def moved(text):
  """Sizes of matrices that devices gather, scatter and sum, three sets."""
  scattered, summed, gathered = set(), set(), set()
  for body in re.split(r'\n(?=(?:ENTRY )?%?[\w.\-]+ \()', text):
    fused = body.startswith('%all-reduce-scatter')
    for shape, kind in re.findall(
        r'= bf16\[([\d,]+)\]\S* (all-reduce|all-gather)\(', body
    ):
      into = gathered if kind == 'all-gather' else summed
      size = tuple(int(n) for n in shape.split(',') if n != '1')
      (scattered if fused else into).add(size)
  return gathered, scattered, summed


@pytest.mark.parametrize('micro, fsdp', [(1, 2), (2, 1)])
def test_matrices_are_gathered_and_their_gradients_scattered_one_axis_a_time(
    micro, fsdp
):
  """Also where gradients of micro-batches are summed in a loop, whence XLA
  would move the sum over devices, and fails at a head of its own."""
  gathered, scattered, summed = moved(compiled(micro, fsdp))
  # qkv, out, gate_up, down: the width is 1024.
  matrices = {(2048, 1024), (1024, 1024), (4096, 1024), (1024, 2048)}
  assert matrices <= gathered
  if micro == 1:  # else XLA may scatter some by permutes beside the products
    assert matrices <= scattered
  assert not matrices & summed, 'every device sums a whole matrix'
