"""135M parameters, reinforcement learning on 32k tokens, on 16 v5e chips.

  python -m experiments.plan --config=configs/tpu/smollm2_32k.py \\
    --topology=v5e:4x4
  python -m experiments.train --config=configs/tpu/smollm2_32k.py

A row is one prompt of 30,720 tokens with 8 completions of 256. An update takes
4 rows, 32 sequences, one row to each of 4 `fsdp` devices, each row over 4
`context` devices. Products in bf16; parameters and AdamW in fp32; layers
scanned and computed again in the backward pass.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()
  config.launcher = 'experiments.train'
  config.seed = 0
  config.steps = 200
  config.model = {
      'source': 'smollm2',
      'shape': 'smollm2-135m',
      'value_head': False,
      'stacked': True,
      'trainable': '.*',
      'dtype': 'bfloat16',
      'rope': {
          'kind': 'yarn', 'factor': 4.0, 'original_max_position': 8192,
      },
  }
  config.mesh = {'data': 1, 'fsdp': 4, 'tensor': 1, 'context': 4}
  config.domains = {
      'names': ('needle',),
      'heldout': 64,
      'validation': 8,
      'heldout_seed': 0,
      'num_shots': 2,
  }
  config.rollout = {
      'prompts': 4,
      'samples': 8,
      'max_new': 256,
      'temperature': 1.0,
      'prefix_len': 1024,
      'prompt_len': 29696,
      'slots': 4,
      'rows': 8,
      'prefixes': 1,
      'admit': 4,
      'refill': 0,
      'prefill_chunk': 4096,
      'backend': 'ring',
  }
  config.recipe = {
      'name': 'dapo',
      'advantage': 'leave_one_out',
      'overlong': 'keep',
      'dynamic_sampling': False,
  }
  config.optimizer = {
      'learning_rate': 1e-5,
      'warmup_steps': 10,
      'decay': 'linear',
      'b1': 0.9,
      'b2': 0.99,
      'weight_decay': 0.0,
  }
  config.train = {
      'rows': 4,
      'groups': 4,
      'updates': 1,
      'backend': 'ring',
      'block': 256,
      'remat': 'full',
      'chunk': 512,
      'clip_norm': 1.0,
      'offload': False,
  }
  config.warmup = {'steps': 0}
  config.plan = {'floor': 0.5}
  config.curriculum = {'decay': 0.9, 'explore': 0.2}
  config.reward_scale = {'decay': 0.999, 'floor': 0.1}
  config.evaluation = {'samples': 3, 'temperature': 1.0}
  config.checkpoint = {'every': 50, 'keep_latest': 2}
  return config.lock()
