"""Reinforcement learning over several domains, from one config.

  python -m experiments.train --config=configs/quickstart.py[:VARIANT]

The same command again goes on where the run stopped, or prints the table of a
finished one. Exit codes: 0 done, 2 bad input, 3 does not fit, 4 numbers that
are not finite, 5 a lost worker or damaged state, 75 saved after SIGTERM.
"""

import os
import signal

from experiments import launching

# A step checks short answers: two workers keep up with any decoding.
WORKERS = 2


def main(config, workdir):
  """Starts the workers, then JAX, then the loop."""
  from rlpost import workers
  from rlpost.rewards import scoring
  from rlpost.training import display as displays

  asked = []
  signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
  with (
      displays.Display(config.steps) as display,
      workers.WorkerPool(WORKERS) as pool,
  ):
    from rlpost import sharding
    from rlpost.training import compilation, loop, outcome, setup

    for name, (target, given) in setup.SECTIONS.items():
      launching.check_section(config[name], target, name, given=given)
    compilation.use_cache()
    launching.settle_config(config, workdir)
    if outcome.finished(workdir, config.steps):
      outcome.show(workdir, display)
      return
    display.note(f'workdir: {os.path.abspath(workdir)}')
    scorer = scoring.Scorer(pool)
    run = setup.build(config, scorer, display)
    with display.phase('checking the checkers', quiet=True):
      for pools in run.tasks.pools.values():
        scoring.canary(scorer, pools.heldout)
    with sharding.use(run.mesh):
      events = lambda: pool.counts['timeouts'] + pool.counts['deaths']  # noqa: E731
      loop.Loop(run, workdir, display, lambda: bool(asked), events).train()


if __name__ == '__main__':
  launching.run(main)
