"""Reinforcement learning with every row spread over four devices.

  XLA_FLAGS=--xla_force_host_platform_device_count=4 tools/run long_context_rl
  tools/run long_context_rl --config.mesh.context=1      one device, same curve
  tools/run long_context_rl:smoke --config.mesh.context=1

The program of `tiny`, a byte model that learns four kinds of small task, with
keys and values of the update on the ring and the cache of decoding spread over
the context. On a laptop XLA simulates the devices; on a TPU they are there.
"""

import ml_collections


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()
  config.launcher = 'experiments.train'
  config.seed = 0
  config.steps = 60
  config.model = {
      'source': 'scratch:tiny',
      'value_head': False,
      'stacked': False,
      'trainable': '.*',
      'dtype': 'float32',
  }
  config.mesh = {'data': 1, 'fsdp': 1, 'tensor': 1, 'context': 4}
  config.domains = {
      'names': ('tiny_copy', 'tiny_first', 'tiny_reverse', 'tiny_sort'),
      'heldout': 64,
      'validation': 16,
      'heldout_seed': 0,
  }
  config.warmup = {
      'steps': 60, 'rows': 8, 'length': 128, 'slots': 64, 'examples': 2048,
      'learning_rate': 3e-3,
  }
  config.rollout = {
      'prompts': 48,
      'samples': 8,
      'max_new': 6,
      'temperature': 1.0,
      'slots': 96,
      'rows': 4,
      'prefixes': 1,
      'admit': 48,
      'refill': 0,
      'prefill_chunk': 0,
      'backend': 'dense',
  }
  config.recipe = {
      'name': 'dapo',
      'overlong': 'keep',
      'dynamic_sampling': False,
  }
  config.optimizer = {
      'learning_rate': 5e-4,
      'warmup_steps': 5,
      'decay': 'linear',
      'b1': 0.9,
      'b2': 0.99,
      'weight_decay': 0.0,
  }
  config.train = {
      'rows': 8,
      'groups': 40,
      'updates': 1,
      'backend': 'ring',
      'block': 128,
      'remat': 'none',
      'chunk': 512,
      'clip_norm': 1.0,
      'offload': False,
  }
  config.plan = {'floor': 0.5}
  config.curriculum = {'decay': 0.9, 'explore': 0.2}
  config.reward_scale = {'decay': 0.999, 'floor': 0.1}
  config.evaluation = {'samples': 3, 'temperature': 1.0}
  config.checkpoint = {'every': 20, 'keep_latest': 1}
  if variant == 'smoke':
    _smoke(config)
  elif variant:
    raise ValueError(f'{variant=} is not smoke or empty.')
  return config.lock()


def _smoke(config):
  config.steps = 2
  config.optimizer.warmup_steps = 1
  config.domains.heldout = 8
  config.domains.validation = 4
  config.warmup.steps = 4
  config.rollout.prompts = 4
  config.train.groups = 4
  config.train.rows = 4
  config.rollout.slots = 8
  config.rollout.admit = 8
  config.checkpoint.every = 1
