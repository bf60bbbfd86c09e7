"""Supervised fine-tuning on solved training tasks, from one config.

  python -m experiments.sft --config=configs/sft.py[:VARIANT]

The same command again goes on where the run stopped, in the middle of an
epoch, or prints the table of a finished one. With `export` in the config the
model is in WORKDIR/model at the end, and reinforcement learning starts from it
with --config.model.source=WORKDIR/model. Exit codes: as experiments.train.
"""

from experiments import launching, train


def main(config, workdir):
  """Supervised updates to the config's last step."""
  train.learn(config, workdir, _parts)


def _parts():
  from rlpost.training import supervised

  return supervised.SECTIONS, supervised.build, supervised.Loop


if __name__ == '__main__':
  launching.run(main)
