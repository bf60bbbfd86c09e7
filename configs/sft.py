"""Supervised fine-tuning of a real pretrained model on solved tasks.

  tools/run sft                    SmolLM2-135M-Instruct
  tools/run sft:smoke              the same program on a tiny random model

It learns to answer as the checkers of six domains want it. Measured with seed
0 on two CPU cores, 320 CPU seconds and 6.4 GB with a save in flight: the mean
over the domains' held-out tasks goes from 0.30 [0.27, 0.33] to 0.74
[0.70, 0.77] at T = 1, and from 0.56 to 0.81 greedy. To go on with
reinforcement learning from there:

  tools/run quickstart --config.model.source=runs/sft/model \\
    --workdir=runs/quickstart-after-sft
"""

import ml_collections


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()
  config.launcher = 'experiments.sft'
  config.seed = 0
  config.steps = 24
  config.export = True
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
          'copy_words', 'first_letter', 'upper', 'color_of', 'add', 'bigger',
      ),
      'heldout': 64,
      'validation': 8,
      'heldout_seed': 0,
      'form': 'plain',
      'num_shots': 2,
  }
  config.data = {'examples': 256, 'threads': 0}
  config.optimizer = {
      'learning_rate': 2e-5,
      'warmup_steps': 3,
      'decay': 'cosine',
      'b1': 0.9,
      'b2': 0.99,
      'weight_decay': 0.0,
  }
  config.train = {
      'rows': 4,
      'micro': 1,
      'length': 192,
      'slots': 24,
      'backend': 'dense',
      'remat': 'none',
      'chunk': 128,
      'clip_norm': 1.0,
      'offload': False,
  }
  config.evaluation = {
      'slots': 24, 'samples': 3, 'temperature': 1.0, 'admit': 6,
  }
  config.checkpoint = {'every': 12, 'keep_latest': 1}
  if variant == 'smoke':
    _smoke(config)
  elif variant:
    raise ValueError(f'{variant=} is not smoke or empty.')
  return config.lock()


def _smoke(config):
  config.steps = 24
  config.model.source = 'scratch:tiny'
  config.domains.names = ('tiny_first', 'tiny_sort')
  config.domains.form = 'bare'
  config.domains.heldout = 16
  config.domains.validation = 4
  config.domains.num_shots = 0
  config.optimizer.learning_rate = 3e-3
  config.train.length = 128
  config.train.slots = 64
  config.evaluation.slots = 8
  config.evaluation.admit = 8
  config.checkpoint.every = 8
