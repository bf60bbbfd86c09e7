"""8B parameters, reinforcement learning on long contexts, on 64 v5p chips.

  python -m experiments.plan --config=configs/tpu/llama8b.py \\
    --topology=v5p:4x4x4
  python -m experiments.plan --config=configs/tpu/llama8b.py:1m \\
    --topology=v5p:4x4x4

128k: a row is a prompt of 122,880 tokens with 8 completions of 1,024; an update
takes 8 rows, 64 sequences, each row over 8 `context` devices. 1m: prompts of
1,047,552 tokens, so that answers end at 2^20; one row, 8 sequences, over all 64
devices. GRPO with a KL term against a frozen reference.
Products in bf16; parameters, reference and AdamW in fp32; layers scanned and
computed again in the backward pass.
"""

import ml_collections


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()
  config.launcher = 'experiments.train'
  config.seed = 0
  config.steps = 200
  config.model = {
      'source': 'hub:meta-llama/Llama-3.1-8B-Instruct',
      'shape': 'llama3.1-8b',
      'value_head': False,
      'stacked': True,
      'trainable': '.*',
      'dtype': 'bfloat16',
      'rope': {'kind': 'none', 'factor': 8.0, 'original_max_position': 2**17},
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
      'prompt_len': 121_856,
      'slots': 8,
      'rows': 8,
      'prefixes': 1,
      'admit': 8,
      'refill': 0,
      'prefill_chunk': 16_384,
      'backend': 'ring',
  }
  config.recipe = {
      'name': 'grpo',
      'kl': 'k3',
      'kl_coefficient': 0.01,
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
  if variant == '1m':
    _million(config)
  elif variant:
    raise ValueError(f'{variant=} is not 1m or empty.')
  return config.lock()


def _million(config):
  config.model.rope.kind = 'yarn'
  config.mesh.fsdp, config.mesh.context = 1, 64
  config.rollout.prompts = config.rollout.slots = config.rollout.admit = 1
  config.rollout.prompt_len = 2**20 - 1024 - config.rollout.max_new
  config.rollout.prefill_chunk = 65_536
  config.train.rows = config.train.groups = 1
