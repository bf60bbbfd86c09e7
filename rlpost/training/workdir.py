"""What every loop does beside learning: evaluate, save, go on, stop, finish.

A loop says what it learns from and which items of its state are its own; the
parameters, the optimizer, the seed, the fingerprints and the clock are here.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from rlpost import errors
from rlpost.evaluation import evaluator, report
from rlpost.rollouts import collect
from rlpost.training import digest, metrics, outcome
from rlpost.training import programs as program_lib
from rlpost.training.checkpoint import Checkpoints
from rlpost.training.state import TrainState

VALIDATION = 2  # the purpose folded into the root key; see `loop`


class _Stopped(Exception):
  """SIGTERM came during an evaluation."""


class Workdir:
  """The folder of a run, with its checkpoints and its clock.

  Args:
    run: `setup.Run` or `supervised.Run`.
    path: local or a bucket.
    display: `display.Display`.
    stop_asked: says whether the run should save and end.
    events: counts events that may make a run differ from its repetition.

  Attributes:
    saved_step: the step saved or restored last, or None.
  """

  def __init__(
      self, run, path, display, stop_asked: Callable[[], bool],
      events: Callable[[], int],
  ):
    self.path = epath.Path(path)
    self.saved_step = None
    self._run, self._display = run, display
    self._stop_asked, self._events = stop_asked, events
    self._checkpoints = Checkpoints(
        path, keep_latest=run.checkpoint.keep_latest, mesh=run.mesh,
        log=display.note,
    )
    self._clock, self._spent_s = metrics.CpuClock(), 0.0
    self._first_reward_cpu_s = None

  def writer(self, step: int) -> metrics.MetricsWriter:
    """Metrics and samples, cut back to `step`; the clock is not."""
    rows = report.read_rows(self.path / 'metrics.jsonl')
    spent_s = max((row.get('cpu_s', 0) for row in rows), default=0)
    self._clock = metrics.CpuClock(max(spent_s, self._spent_s))
    return metrics.MetricsWriter(self.path, step=step, clock=self._clock)

  # Evaluation.

  def evaluate(
      self, when: str, step: int, version: int, save: Callable[..., None]
  ) -> None:
    """Held-out results, written once per run and side.

    Args:
      when: 'before' or 'after' training.
      step: of the run; what stands before is step 0.
      version: of the policy.
      save: see `end_if_asked`; SIGTERM does not wait for the last answer.
    """
    at = 0 if when == 'before' else step
    path = self.path / 'eval' / f'{at}.json'
    if path.exists():
      return

    def note():
      self.note_reward()
      if self._stop_asked():
        raise _Stopped

    try:
      out = outcome.heldout(
          self._run, self._run.tasks.heldout, version, self._display,
          f'held-out tasks {when} training', note,
      )
    except _Stopped:
      self.end_if_asked(step, save)
    path.parent.mkdir(parents=True, exist_ok=True)
    outcome.write_json(path, {'step': at, **out})

  def _validation(self, version) -> dict[str, float]:
    """Mean over domains on the pool that chooses the best step."""
    run = self._run
    if not run.config.domains.validation:
      return {}
    root = jax.random.key(run.config.seed)
    with self._display.phase('validation tasks'):
      result = evaluator.evaluate(
          run.evaluations, run.policy, version, run.tasks.validation,
          run.tasks.environments, samples=run.evaluation.samples,
          greedy=False, temperature=run.evaluation.temperature,
          root=jax.random.fold_in(root, VALIDATION),
      )
    mean = evaluator.to_json(result)[report.SAMPLED]['mean']['mean']
    return {} if mean is None else {'validation': mean}

  def note_reward(self) -> None:
    """Remembers when the first reward was there."""
    if self._first_reward_cpu_s is None:
      self._first_reward_cpu_s = self._clock.total_s()

  # State.

  def save(
      self, step: int, version: int, items: Mapping[str, Any], wait=False
  ) -> None:
    """Saves everything that decides the next number.

    Args:
      step: of the run.
      version: of the policy.
      items: what the loop has beside parameters and optimizer, as JSON.
      wait: return when it is on disk; no time for the validation tasks then.

    Raises:
      NonFiniteError: a parameter is NaN or infinite; nothing is saved.
    """
    run = self._run
    self._check_finite(step, run.state.trainable)
    scores = {} if wait else self._validation(version)
    items = {
        **items,
        'trainable': run.state.trainable,
        'opt': {'opt': run.state.opt, 'step': run.state.step},
        'rng': {'seed': run.config.seed},
        'fingerprints': {
            'model': run.model.fingerprint,
            'domains': {n: run.tasks.fingerprint(n) for n in run.tasks.pools},
        },
        'timing': {
            'cpu_s': self._clock.total_s(), 'events': self._events(),
            'first_reward_cpu_s': self._first_reward_cpu_s,
        },
    }
    with self._display.phase(f'saving step {step}'):
      self._checkpoints.save(step, items, metrics=scores, wait=wait)
    self.saved_step = step

  def restore(self, names: tuple[str, ...]) -> dict[str, Any] | None:
    """Puts the newest whole checkpoint into the run.

    Args:
      names: of the loop's own items.

    Returns:
      These items, or None where nothing was ever saved.
    """
    run = self._run
    known = program_lib.abstract(run.shapes, run.mesh)
    targets = dict.fromkeys((*names, 'rng', 'fingerprints', 'timing'), 'json')
    targets['trainable'] = known.state.trainable
    targets['opt'] = {'opt': known.state.opt, 'step': known.state.step}
    with self._display.phase('looking for a checkpoint', quiet=True):
      found = self._checkpoints.restore(targets)
    if found is None:
      return None
    step, items = found
    self._check_fingerprints(items['fingerprints'])
    if items['rng'] != {'seed': run.config.seed}:
      raise errors.DamagedStateError(f'Saved {items["rng"]} at {step=}.')
    run.state = TrainState(
        items['trainable'], items['opt']['opt'], items['opt']['step']
    )
    run.frozen = run.frozen or {}
    timing = items['timing']
    self._spent_s = timing['cpu_s']
    self._first_reward_cpu_s = timing['first_reward_cpu_s']
    before, events = timing['events'], self._events
    self._events = lambda: before + events()
    self.saved_step = step
    self._display.note(f'going on after step {step} of {run.config.steps}')
    return {name: items[name] for name in names}

  def _check_finite(self, step, trainable):
    bad = [
        name for name, x in trainable.items()
        if not np.isfinite(digest.to_host(x)).all()
    ]
    if bad:
      raise errors.NonFiniteError(
          f'step {step}: {len(bad)} of {len(trainable)} parameters are not '
          f'finite, such as {bad[0]}. They are not saved; the last saved step '
          f'is {self.saved_step}. Lower optimizer.learning_rate and start in a '
          'new workdir.'
      )

  def _check_fingerprints(self, saved):
    model = self._run.model.fingerprint
    if saved['model'] != model:
      raise errors.InputError(
          f'{self.path} was trained from {saved["model"]}, and the config '
          f'now gives {model}; take another --workdir.'
      )
    for name, value in saved['domains'].items():
      if name in self._run.tasks.pools:
        now = self._run.tasks.fingerprint(name)
        if now != value:
          raise errors.InputError(
              f'The tasks of domain {name!r} changed ({value} -> {now}); take '
              'another --workdir.'
          )

  # Ends, bad and good.

  def end_if_asked(self, step: int, save: Callable[..., None]) -> None:
    """Ends the run where SIGTERM came; calls `save(wait=True)` if need be.

    Raises:
      SavedAfterSignal: it was asked for.
    """
    if not self._stop_asked():
      return
    if self.saved_step != step:
      save(wait=True)
    self._checkpoints.close()
    raise errors.SavedAfterSignal(
        f'SIGTERM: saved step {step} in {self.path}; the same command goes on.'
    )

  def refuse(self, step: int, batch, learned: Mapping[str, Any]) -> None:
    """Keeps the batch of a step that gave NaN or infinity, and ends the run.

    Args:
      step: that was not completed.
      batch: `types.Batch` [M, B, ...]; domain ids are places in sorted names.
      learned: what `step.train_step` reports.

    Raises:
      NonFiniteError: always.
    """
    bad = ~learned['sound_MB'] if not learned['sound_MB'].all() else (
        batch.mask.sum(-1) > 0
    )
    names = sorted(self._run.tasks.pools)
    ids = sorted(set(batch.domain[bad][batch.mask[bad] > 0].tolist()))
    path = self._nonfinite(step)
    with path.open('wb') as file:
      np.savez(file, **batch._asdict(), bad_MB=bad)
    raise errors.NonFiniteError(
        f'step {step}: loss {learned["loss"]}, gradient norm '
        f'{learned["grad_norm"]} in domain {", ".join(names[i] for i in ids)}. '
        f'The batch is in {path}; nothing saved was changed. Lower '
        'optimizer.learning_rate and start in a new workdir, or look at the '
        'batch.'
    )

  def refuse_samples(self, step: int, error: collect.NonFiniteSamples) -> None:
    """As `refuse`, for answers whose log-probabilities are not finite.

    Raises:
      NonFiniteError: always.
    """
    path = self._nonfinite(step)
    arrays = {
        f'{key}_{i}': getattr(t, key) for i, t in enumerate(error.trajectories)
        for key in ('tokens', 'logp')
    }
    with path.open('wb') as file:
      np.savez(file, **arrays)
    raise errors.NonFiniteError(
        f'step {step}: {error} They are in {path}; nothing saved was changed. '
        'Lower optimizer.learning_rate and start in a new workdir, or look at '
        'the weights that the run began with.'
    ) from error

  def _nonfinite(self, step):
    self._checkpoints.wait()  # What was being saved is whole.
    path = self.path / 'nonfinite' / f'{step}.npz'
    path.parent.mkdir(parents=True, exist_ok=True)
    return path

  def finish(self, step: int) -> dict[str, Any]:
    """Summary, picture and table of a finished run."""
    self._checkpoints.close()
    results = report.read_results(self.path)
    saved = self._checkpoints.describe(step)
    # The summary comes last: it says that the run is finished.
    report.curves_png(self.path)
    summary = report.write_summary(
        self.path / 'summary.json', before=results[0], after=results[step],
        cpu_s=self._clock.total_s(), steps=step,
        state_sha256=saved['state_sha256'],
        first_reward_cpu_s=self._first_reward_cpu_s,
        peak_rss_bytes=metrics.peak_rss_bytes(),
        nondeterministic_events=self._events(),
    )
    outcome.show(self.path, self._display)
    return summary
