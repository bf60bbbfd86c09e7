"""70B parameters, reinforcement learning on 32k tokens, on 64 v5p chips.

  python -m experiments.plan --config=configs/tpu/llama70b_32k.py \\
    --topology=v5p:4x4x4

A row is a prompt of 24,576 tokens with 8 completions of 1,024; an update takes
8 rows, 64 sequences, each row over 8 `context` devices. Products in bf16;
parameters and AdamW in fp32; layers scanned and computed again in the backward
pass.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()
  config.launcher = 'experiments.train'
  config.seed = 0
  config.steps = 200
  config.model = {
      'source': 'hub:meta-llama/Llama-3.1-70B-Instruct',
      'shape': 'llama3.1-70b',
      'value_head': False,
      'stacked': True,
      'trainable': '.*',
      'dtype': 'bfloat16',
  }
  config.mesh = {'data': 1, 'fsdp': 8, 'tensor': 1, 'context': 8}
  config.domains = {
      'names': ('needle',),
      'heldout': 64,
      'validation': 8,
      'heldout_seed': 0,
      'num_shots': 2,
  }
  config.rollout = {
      'prompts': 8,
      'samples': 8,
      'max_new': 1024,
      'temperature': 1.0,
      'prefix_len': 1024,
      'prompt_len': 23_552,
      'slots': 8,
      'rows': 8,
      'prefixes': 1,
      'admit': 8,
      'refill': 0,
      'prefill_chunk': 8192,
      'backend': 'ring',
  }
  config.recipe = {
      'name': 'dapo',
      'advantage': 'leave_one_out',
      'overlong': 'keep',
      'dynamic_sampling': False,
  }
  config.optimizer = {
      'learning_rate': 1e-6,
      'warmup_steps': 10,
      'decay': 'linear',
      'b1': 0.9,
      'b2': 0.99,
      'weight_decay': 0.0,
  }
  config.train = {
      'rows': 8,
      'groups': 8,
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
