"""Seven kinds of task at once, on a real pretrained model of 135M parameters.

  tools/run                        full fine-tuning of SmolLM2-135M-Instruct
  tools/run quickstart:smoke       the same program on a tiny random model
"""

import ml_collections


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()
  config.launcher = 'experiments.train'
  config.seed = 0
  config.steps = 34
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
          'copy_words', 'last_word', 'first_letter', 'capitalize', 'color_of',
          'add', 'bigger',
      ),
      'heldout': 64,
      'validation': 8,
      'heldout_seed': 0,
      'num_shots': 2,
  }
  config.rollout = {
      'prompts': 12,
      'samples': 8,
      'max_new': 6,
      'temperature': 1.0,
      # Four rows fit a held-out task's attempts: one set of programs.
      'slots': 24,
      'rows': 4,
      'prefixes': 16,
      'admit': 6,
      'refill': 0,
  }
  config.recipe = {
      'name': 'dapo',
      'advantage': 'leave_one_out',
      'overlong': 'keep',
      'dynamic_sampling': False,
  }
  config.optimizer = {
      'learning_rate': 2.5e-5,
      'warmup_steps': 3,
      'decay': 'linear',
      'b1': 0.9,
      'b2': 0.99,
      'weight_decay': 0.0,
  }
  config.train = {
      'rows': 4,
      'groups': 8,
      'updates': 1,
      'backend': 'dense',
      'remat': 'none',
      'chunk': 128,
      'clip_norm': 1.0,
      'offload': False,
  }
  config.warmup = {
      'steps': 0, 'rows': 4, 'length': 128, 'slots': 64, 'examples': 512,
      'learning_rate': 3e-3,
  }
  config.plan = {'floor': 0.5}
  config.curriculum = {'decay': 0.9, 'explore': 0.2}
  config.reward_scale = {'decay': 0.999, 'floor': 0.1}
  config.evaluation = {'samples': 3, 'temperature': 1.0}
  config.checkpoint = {'every': 17, 'keep_latest': 1}
  if variant == 'smoke':
    _smoke(config)
  elif variant:
    raise ValueError(f'{variant=} is not smoke or empty.')
  return config.lock()


def _smoke(config):
  config.steps = 6
  config.model.source = 'scratch:tiny'
  config.domains.names = ('tiny_first', 'tiny_sort')
  config.domains.heldout = 8
  config.domains.validation = 4
  config.domains.num_shots = 0
  config.rollout.prompts = 4
  config.rollout.max_new = 6
  config.rollout.slots = 8
  config.rollout.admit = 8
  config.train.groups = 4
  config.warmup.steps = 36
  config.optimizer.learning_rate = 3e-4
  config.checkpoint.every = 2
