"""Decoding as TPUs would run it: compiled ahead of time, no TPU needed.

Needs the extra `tpu-aot`; see `tests/ops/context_tpu_test.py`.
"""

import importlib.util
import json
import os
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
import json
from jax.experimental import topologies
from rlpost import sharding
from rlpost.algorithms import recipes
from rlpost.models import config
from rlpost.rollouts import engine
from rlpost.training import programs, state, step

found = topologies.get_topology_desc(platform='tpu', topology_name='v5e:2x4')
mesh = sharding.make_mesh(tensor=2, context=4, devices=list(found.devices))
model = config.ModelConfig(
    vocab_size=4096, width=1024, num_layers=12, num_heads=8, num_kv_heads=4,
    head_dim=128, hidden=2048, windows=(1024, None),
)
rollout = engine.EngineConfig(
    prompts=2, rows=4, prefix_len=0, prompt_len=2**18, width=512, admit=1,
    prefill_chunk=2048, backend='ring',
)
shapes = programs.Shapes(
    step=step.StepConfig(model, recipes.recipe('grpo'), dtype='bfloat16'),
    stacked=True, trainable='.*', optimizer=state.adamw(1.0, total_steps=2),
    rows=2, micro=1, slots=256, length=8192, rollout=rollout,
)
with sharding.use(mesh):
  made = programs.programs(shapes, mesh)
  temporary = {
      name: made[f'rollout/{name}'].compile().memory_analysis()
      .temp_size_in_bytes for name in ('run', 'admit')
  }
held = engine.cache_bytes(rollout, model, 'bfloat16', mesh)
print(json.dumps([held, temporary]))
"""


def test_no_cache_is_copied():
  """A loop over tokens, layers or pieces could hold a cache in other order."""
  env = os.environ | {
      'JAX_PLATFORMS': 'cpu', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
      'TPU_SKIP_MDS_QUERY': '1',
  }
  done = subprocess.run(
      [sys.executable, '-c', PROGRAM], check=True, text=True,
      stdout=subprocess.PIPE, env=env,
  )
  held, temporary = json.loads(done.stdout.splitlines()[-1])
  assert held['prompts'] == 2 * held['admitted'] > 2**27
  # Rings, weights in another dtype and a layer's keys are small beside it.
  assert temporary['run'] < held['prompts'] // 4
  assert temporary['admit'] < held['admitted'] * 7 // 4
