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
  """Reinforcement learning to the config's last step."""
  learn(config, workdir, _parts)


def _parts():
  from rlpost.training import loop, setup

  return setup.SECTIONS, setup.build, loop.Loop


def learn(config, workdir, parts):
  """Starts the workers, then JAX, then a loop; shows a finished run.

  Args:
    config, workdir: of the run.
    parts: `parts()` gives the sections that a config must have, what builds
      a run of it, and the loop.
  """
  from rlpost import workers
  from rlpost.rewards import scoring
  from rlpost.training import display as displays

  asked = []
  signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
  with (
      displays.Display(config.steps) as display,
      workers.WorkerPool(WORKERS) as pool,
  ):
    from etils import epath

    from rlpost import sharding
    from rlpost.training import compilation, outcome

    sections, build, loop = parts()
    launching.check_config(config, sections)
    launching.settle_config(config, workdir, write=False)
    compilation.use_cache()
    if outcome.finished(workdir, config.steps):
      outcome.show(workdir, display)
      return
    display.note(f'workdir: {os.path.abspath(workdir)}')
    scorer = scoring.Scorer(pool)
    run = build(config, scorer, display)
    constants = {}
    with display.phase('checking the checkers', quiet=True):
      for name, pools in run.tasks.pools.items():
        scoring.canary(scorer, pools.heldout)
        answer, score = scoring.best_constant(scorer, pools.heldout)
        constants[name] = {'answer': answer, 'score': score}
    launching.settle_config(config, workdir)
    outcome.write_json(epath.Path(workdir) / 'constants.json', constants)
    with sharding.use(run.mesh):
      loop(
          run, workdir, display, stop_asked=lambda: bool(asked),
          events=lambda: pool.counts['timeouts'] + pool.counts['deaths'],
      ).train()


if __name__ == '__main__':
  launching.run(main)
