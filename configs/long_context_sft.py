"""Supervised tuning on long rows, and what RoPE extension does beyond them.

  tools/run long_context_sft
  tools/run long_context_sft:smoke
"""

import ml_collections


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()
  config.launcher = 'experiments.sft'
  config.seed = 0
  config.steps = 600
  config.export = True
  config.model = {
      'source': 'scratch:tiny',
      'value_head': False,
      'stacked': False,
      'trainable': '.*',
      'dtype': 'float32',
      'rope': {'kind': 'none', 'factor': 4.0, 'original_max_position': 256},
  }
  config.mesh = {'data': 1, 'fsdp': 1, 'tensor': 1, 'context': 1}
  config.domains = {
      'names': ('recall_64_many', 'recall_256', 'recall_256_many'),
      'unseen': ('recall_256_new', 'recall_1024_new'),
      'heldout': 64,
      'validation': 8,
      'heldout_seed': 0,
  }
  config.data = {'examples': 8192, 'threads': 0}
  config.optimizer = {
      'learning_rate': 2e-3,
      'warmup_steps': 50,
      'decay': 'cosine',
      'b1': 0.9,
      'b2': 0.99,
      'weight_decay': 0.0,
  }
  config.train = {
      'rows': 8,
      'micro': 1,
      'length': 256,
      'slots': 128,
      'backend': 'dense',
      'remat': 'none',
      'chunk': 1024,
      'clip_norm': 1.0,
      'offload': False,
  }
  config.evaluation = {
      'slots': 32, 'samples': 1, 'temperature': 1.0, 'admit': 8,
  }
  config.checkpoint = {'every': 200, 'keep_latest': 1}
  if variant == 'smoke':
    _smoke(config)
  elif variant:
    raise ValueError(f'{variant=} is not smoke or empty.')
  return config.lock()


def _smoke(config):
  config.steps = 4
  config.domains.names = ('recall_64', 'recall_64_many')
  config.domains.unseen = ('recall_256_new',)
  config.domains.heldout = 8
  config.data.examples = 64
  config.optimizer.warmup_steps = 1
  config.evaluation.slots = 8
  config.checkpoint.every = 2
