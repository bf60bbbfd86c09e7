"""Seventeen domains of thirteen families in one run of a real model.

  tools/run multi_domain           100 steps of SmolLM2-135M-Instruct
  tools/run multi_domain:smoke     the same program on a tiny random model

Prompts per domain follow p (1 - p) beliefs above a floor, so that domains
which are solved, or out of reach, cost little.
"""

import ml_collections


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()
  config.launcher = 'experiments.train'
  config.seed = 0
  config.steps = 100
  config.model = {
      'source': 'smollm2',
      'value_head': False,
      'stacked': False,
      'trainable': '.*',
      'dtype': 'float32',
  }
  config.mesh = {'data': 1, 'fsdp': 1, 'tensor': 1, 'context': 1}
  config.domains = {
      'names': (
          'copy_words', 'last_word', 'first_letter', 'upper', 'capitalize',
          'color_of', 'add', 'subtract', 'bigger', 'largest',
          'quote', 'choice', 'sort_numbers', 'next_number', 'count_words',
          'rg_gcd', 'rg_count_bits',
      ),
      'heldout': 64,
      'validation': 8,
      'heldout_seed': 0,
      'num_shots': 2,
  }
  config.rollout = {
      'prompts': 16,
      'samples': 8,
      'max_new': 7,
      'temperature': 1.0,
      'slots': 32,
      'rows': 4,
      'prefixes': 17,
      'admit': 8,
      'refill': 0,
  }
  config.recipe = {
      'name': 'dapo',
      'advantage': 'leave_one_out',
      'overlong': 'keep',
      'dynamic_sampling': False,
  }
  config.optimizer = {
      'learning_rate': 1.5e-5,
      'warmup_steps': 5,
      'decay': 'linear',
      'b1': 0.9,
      'b2': 0.99,
      'weight_decay': 0.0,
  }
  config.train = {
      'rows': 2,
      'groups': 8,
      'updates': 1,
      'backend': 'dense',
      'remat': 'none',
      'chunk': 128,
      'clip_norm': 1.0,
      'offload': False,
  }
  config.warmup = {'steps': 0}
  config.plan = {'floor': 0.3}
  config.curriculum = {'decay': 0.97, 'explore': 0.1}
  config.reward_scale = {'decay': 0.999, 'floor': 0.1}
  config.evaluation = {'samples': 3, 'temperature': 1.0}
  config.checkpoint = {'every': 50, 'keep_latest': 1}
  if variant == 'smoke':
    _smoke(config)
  elif variant:
    raise ValueError(f'{variant=} is not smoke or empty.')
  return config.lock()


def _smoke(config):
  config.steps = 2
  config.optimizer.warmup_steps = 1
  config.model.source = 'scratch:tiny'
  config.domains.heldout = 4
  config.domains.validation = 2
  config.rollout.prompts = 4
  config.rollout.samples = 2
  config.train.groups = 4
  config.rollout.slots = 8
  config.checkpoint.every = 2
