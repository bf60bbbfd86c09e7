"""Held-out results of a checkpoint, per domain, with 95 % intervals.

  python -m experiments.evaluate --workdir=runs/NAME [--step=N]
      [--heldout_seed=M] [--config=configs/NAME.py[:VARIANT]]

Another seed draws new held-out tasks, without any that the run trained on.
Writes eval/<step>.json, or eval/<step>-seed<M>.json for another seed, and
prints the table. Exit codes: 2 there is no such run or step, 5 it is damaged.
"""

from absl import flags

from experiments import launching
from rlpost import errors

STEP = launching.step_flag()
SEED = flags.DEFINE_integer(
  'heldout_seed', None, 'Draws the held-out tasks; default that of the run.'
)


def main(config, workdir):
  """Starts the workers, then JAX, then evaluates."""
  from etils import epath

  from rlpost import workers
  from rlpost.training import display as displays

  if not launching.settle_config(config, workdir, write=False):
    raise errors.InputError(f'{workdir} holds no run; which --workdir does?')
  with displays.Display(config.steps) as display, workers.WorkerPool(2) as pool:
    from rlpost.evaluation import report
    from rlpost.training import checkpoint, compilation, outcome

    compilation.use_cache()
    saved = checkpoint.Checkpoints(workdir, read_only=True, log=display.note)
    found = saved.restore({'trained': 'json'}, STEP.value)
    if found is None:
      raise errors.InputError(f'{saved.directory} holds no checkpoint yet.')
    step, trained = found[0], found[1]['trained']
    own = config.domains.heldout_seed
    seed = own if SEED.value is None else SEED.value
    result = evaluate(config, saved, step, seed, trained, pool, display)
    name = f'{step}.json' if seed == own else f'{step}-seed{seed}.json'
    path = epath.Path(workdir) / 'eval' / name
    if seed != own or not path.exists():
      path.parent.mkdir(exist_ok=True)
      outcome.write_json(path, {'step': step, **result})
    title = f'step {step}, held-out seed {seed}: {path}'
    display.table(report.result_rows(result), title)


def evaluate(config, saved, step, seed, trained, pool, display) -> dict:
  """A result of the parameters of `step`; `trained` tasks are left out."""
  from rlpost import sharding
  from rlpost.rewards import scoring
  from rlpost.training import outcome, programs, setup, state, supervised

  changes = {}
  if seed != config.domains.heldout_seed:
    pools = setup.make_tasks(**config.domains).pools
    shots = {name: pool.shots for name, pool in pools.items()}
    changes = {'heldout_seed': seed, 'shots': shots, 'trained': trained}
  stage = supervised if config.launcher == 'experiments.sft' else setup
  run = stage.build(config, scoring.Scorer(pool), display, changes)
  with sharding.use(run.mesh):
    known = programs.abstract(run.shapes, run.mesh)
    with display.phase(f'loading step {step}'):
      items = saved.restore({'trainable': known.state.trainable}, step)[1]
      run.state = state.TrainState(items['trainable'], None, None)
      run.frozen = {}
      if known.frozen:
        params = setup.on_mesh(run, run.model.params())
        run.frozen = {name: params[name] for name in known.frozen}
    return outcome.heldout(
      run, run.tasks.heldout, step, display, f'held-out tasks at step {step}'
    )


if __name__ == '__main__':
  launching.run(main)
