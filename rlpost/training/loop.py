"""The story of a run: evaluate, learn step by step, evaluate again.

Everything that decides the next number is in one checkpoint, so the same
command goes on after any interruption as if there had been none.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from etils import epath

from rlpost import errors, types
from rlpost.algorithms import dynamic_sampling
from rlpost.data import packing
from rlpost.evaluation import evaluator, report
from rlpost.rollouts.collect import Episode
from rlpost.training import credit, metrics, outcome, setup
from rlpost.training import programs as program_lib
from rlpost.training.checkpoint import Checkpoints
from rlpost.training.state import TrainState

# One purpose each; folded into the root key.
ROLLOUT, VALIDATION = 0, 2


@dataclasses.dataclass
class Progress:
  """Counters that are saved with the state.

  Attributes:
    step: steps completed.
    updates: updates made, the policy's version.
    groups: groups drawn so far, and the next group's id.
    tokens: tokens sampled.
    trained: content ids of the tasks drawn, in order.
  """

  step: int = 0
  updates: int = 0
  groups: int = 0
  tokens: int = 0
  trained: dict[str, None] = dataclasses.field(default_factory=dict)


class Loop:
  """A run with its workdir.

  Args:
    run: `setup.Run`.
    workdir: path or bucket.
    display: `display.Display`.
    stop_asked: says whether the run should save and end.
    events: counts events that may make a run differ from its repetition.
  """

  def __init__(self, run: setup.Run, workdir, display, stop_asked, events):
    self.run, self.display = run, display
    self.workdir = epath.Path(workdir)
    self.progress = Progress()
    self._stop_asked, self._events = stop_asked, events
    self._checkpoints = Checkpoints(
        workdir, keep_latest=run.checkpoint.keep_latest, mesh=run.mesh,
        log=display.note,
    )
    self._root = jax.random.key(run.config.seed)
    self._clock = metrics.CpuClock()
    self._first_reward_cpu_s = None
    self._saved_step = None

  # The story.

  def train(self) -> dict[str, Any]:
    """Runs to `config.steps` and returns what `summary.json` holds."""
    run, total = self.run, self.run.config.steps
    self.restore()
    writer = metrics.MetricsWriter(
        self.workdir, step=self.progress.step, clock=self._clock
    )
    self.evaluate('before')
    while self.progress.step < total:
      self._end_if_asked()
      groups = self.rollouts()
      row = self.update(groups)
      self.progress.step += 1
      row = writer.write(self.progress.step, row)
      writer.write_samples(self.progress.step, outcome.shown(groups))
      self.display.step(row)
      if self.progress.step % run.checkpoint.every == 0:
        self.save()
    if self._saved_step != self.progress.step:
      self.save()
    self.evaluate('after')
    writer.close()
    return self.finish()

  def rollouts(self) -> list[types.Group]:
    """Scored groups of one step; more of them where the recipe asks."""
    run, wanted = self.run, self.run.rollout.prompts
    groups, missing = [], wanted
    while missing:
      picks = run.plan.next(
          run.curriculum.weights(), None if missing == wanted else missing
      )
      groups += self._attempt(picks)
      if not run.recipe.dynamic_sampling:
        break
      kept = int(credit.informative(groups).sum())
      missing = dynamic_sampling.more_groups(
          kept, len(groups), wanted, max_factor=run.recipe.draw_factor
      )
    return groups

  def update(self, groups: list[types.Group]) -> dict[str, Any]:
    """Learns from groups; returns the step's metrics."""
    run = self.run
    chosen = credit.assign(
        groups, run.recipe, run.scale,
        wanted=run.train.groups or run.rollout.prompts,
        max_tokens=run.rollout.max_new,
        penalty=self._kl_penalty(groups),
    )
    outcomes = {name: [] for name in run.tasks.pools}
    for group in groups:
      outcomes[group.task.domain] += [
          t.verdict.value for t in group.trajectories if packing.trains(t)
      ]
    run.curriculum.update({k: v for k, v in outcomes.items() if v})
    learned = {}
    if chosen.groups:
      batch = self._batch(chosen)
      count = np.int32(-(-len(chosen.groups) // run.train.rows))
      with self.display.phase('learning', quiet=True):
        learned = self._learn(batch, count, np.float32(chosen.weight))
    return outcome.step_row(groups, chosen, learned, run)

  # Parts of a step.

  def _attempt(self, picks) -> list[types.Group]:
    run, rollout = self.run, self.run.rollout
    samples = tuple((r, rollout.temperature) for r in range(rollout.samples))
    episodes = []
    for name, index in picks:
      task = run.tasks.pools[name].train_task(index, run.config.seed)
      self.progress.trained[task.content_id] = None
      group = self.progress.groups
      self.progress.groups += 1
      episodes.append(
          Episode(group, task, run.tasks.environments[name], samples)
      )
    root = jax.random.fold_in(self._root, ROLLOUT)
    root = jax.random.fold_in(root, self.progress.step)
    with self.display.phase('sampling', quiet=True):
      groups = run.rollouts.collect(
          run.params, self.progress.updates, episodes, root
      )
    self._note_reward()
    self.progress.tokens += sum(
        int(t.sampled.sum()) for g in groups for t in g.trajectories
    )
    return groups

  def _rows(self, groups, advantages=None, trained=None) -> types.Batch:
    run, rollout = self.run, self.run.rollout
    shapes = run.shapes
    names = {n: i for i, n in enumerate(sorted(run.tasks.pools))}
    batch = packing.pack_groups(
        groups, prompt_len=shapes.length - shapes.slots,
        samples=rollout.samples, width=rollout.max_new,
        advantages=advantages, trained=trained, domain_ids=names,
    )
    batch = packing.pad_rows(batch, shapes.rows * shapes.micro)
    return packing.micro_batches(batch, shapes.micro)

  def _batch(self, chosen: credit.Credit) -> types.Batch:
    run = self.run
    batch = self._rows(chosen.groups, chosen.advantages, chosen.trained)
    if run.recipe.kl != 'none':
      count = np.int32(run.shapes.micro)
      ref = run.programs['score'](run.reference, batch, count)
      batch = batch._replace(ref_logp=jax.device_get(ref) * batch.mask)
    return batch

  def _kl_penalty(self, groups):
    """By (group, sample): minus the summed KL, where it is in the reward."""
    run = self.run
    if run.recipe.kl == 'none' or run.recipe.kl_place != 'reward':
      return None
    out, most = {}, run.shapes.rows * run.shapes.micro
    for i in range(0, len(groups), most):
      part = groups[i : i + most]
      batch = self._rows(part)
      ref = jax.device_get(
          run.programs['score'](run.reference, batch, batch.mask.shape[0])
      )
      gap = (batch.behavior_logp - ref) * batch.mask
      rows = gap.reshape(-1, gap.shape[-1])
      ids = batch.sequence.reshape(rows.shape)
      for b, group in enumerate(part):
        for place, t in enumerate(group.trajectories):
          total = float(rows[b][ids[b] == place].sum())
          out[t.group, t.sample] = -run.recipe.kl_coefficient * total
    return out

  def _learn(self, batch, count, weight) -> dict[str, Any]:
    """`run.train.updates` updates on one batch; the last one's report."""
    run, old = self.run, None
    if run.recipe.anchor == 'old':
      old = run.programs['score'](run.params, batch, count)
    for _ in range(run.train.updates):
      run.state, learned = run.programs['train'](
          run.state, run.frozen, batch, count, weight, old
      )
      self.progress.updates += 1
      learned = jax.device_get(learned)
      if not learned['finite']:
        self._refuse(batch, learned)
    return learned

  def _refuse(self, batch, learned):
    """Keeps the batch that gave NaN or infinity, and ends the run."""
    step = self.progress.step + 1
    bad = ~learned['sound_MB'] if not learned['sound_MB'].all() else (
        batch.mask.sum(-1) > 0
    )
    names = sorted(self.run.tasks.pools)
    ids = sorted(set(batch.domain[bad][batch.mask[bad] > 0].tolist()))
    path = self.workdir / 'nonfinite' / f'{step}.npz'
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open('wb') as file:
      np.savez(file, **batch._asdict(), bad_MB=bad)
    raise errors.NonFiniteError(
        f'step {step}: loss {learned["loss"]}, gradient norm '
        f'{learned["grad_norm"]} in domain {", ".join(names[i] for i in ids)}. '
        f'The batch is in {path}; nothing saved was changed. Lower '
        'optimizer.learning_rate and start in a new workdir, or look at the '
        'batch.'
    )

  # Evaluation.

  def evaluate(self, when: str) -> None:
    """Held-out results, written once per run and side."""
    step = 0 if when == 'before' else self.progress.step
    path = self.workdir / 'eval' / f'{step}.json'
    if path.exists():
      return
    out = outcome.heldout(
        self.run, self.run.tasks.heldout, self.progress.updates,
        self.display, f'held-out tasks {when} training', self._note_reward,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    outcome.write_json(path, {'step': step, **out})

  def _validation(self) -> dict[str, float]:
    """Mean over domains on the pool that chooses the best step."""
    run = self.run
    if not run.config.domains.validation:
      return {}
    with self.display.phase('validation tasks'):
      result = evaluator.evaluate(
          run.evaluations, run.params, self.progress.updates,
          run.tasks.validation, run.tasks.environments,
          samples=run.evaluation.samples, greedy=False,
          temperature=run.evaluation.temperature,
          root=jax.random.fold_in(self._root, VALIDATION),
      )
    mean = evaluator.to_json(result)[report.SAMPLED]['mean']['mean']
    return {} if mean is None else {'validation': mean}

  def _note_reward(self, *_):
    if self._first_reward_cpu_s is None:
      self._first_reward_cpu_s = self._clock.total_s()

  # State.

  def _items(self) -> dict[str, Any]:
    run, progress = self.run, self.progress
    return {
        'trainable': run.state.trainable,
        'opt': {'opt': run.state.opt, 'step': run.state.step},
        'plan': run.plan.state(),
        'curriculum': run.curriculum.state(),
        'scale': run.scale.state(),
        'rng': {'seed': run.config.seed},
        'counters': {
            'step': progress.step, 'updates': progress.updates,
            'groups': progress.groups, 'tokens': progress.tokens,
        },
        'trained': list(progress.trained),
        'fingerprints': {
            'model': run.model.fingerprint,
            'domains': {n: run.tasks.fingerprint(n) for n in run.tasks.pools},
        },
        'timing': {
            'cpu_s': self._clock.total_s(), 'events': self._events(),
            'first_reward_cpu_s': self._first_reward_cpu_s,
        },
    }

  def save(self, wait=False) -> None:
    """Saves everything that decides the next number."""
    scores = self._validation()
    with self.display.phase(f'saving step {self.progress.step}'):
      self._checkpoints.save(
          self.progress.step, self._items(), metrics=scores, wait=wait
      )
    self._saved_step = self.progress.step

  def restore(self) -> None:
    """Goes on from the newest whole checkpoint, or starts afresh."""
    run = self.run
    known = program_lib.abstract(run.shapes, run.mesh)
    targets = dict.fromkeys(
        ('plan', 'curriculum', 'scale', 'rng', 'counters', 'trained',
         'fingerprints', 'timing'), 'json',
    )
    targets['trainable'] = known.state.trainable
    targets['opt'] = {'opt': known.state.opt, 'step': known.state.step}
    with self.display.phase('looking for a checkpoint', quiet=True):
      found = self._checkpoints.restore(targets)
    if found is None or known.frozen or run.recipe.kl != 'none':
      with self.display.phase('loading the model'):
        setup.place(run, run.model.params())
    if found is None:
      return
    step, items = found
    self._check_fingerprints(items['fingerprints'])
    if items['rng'] != {'seed': run.config.seed}:
      raise errors.DamagedStateError(f'Saved {items["rng"]} at {step=}.')
    run.state = TrainState(
        items['trainable'], items['opt']['opt'], items['opt']['step']
    )
    run.frozen = run.frozen or {}
    run.plan.set_state(items['plan'])
    run.curriculum.set_state(items['curriculum'])
    run.scale.set_state(items['scale'])
    self.progress = Progress(
        **items['counters'], trained=dict.fromkeys(items['trained'])
    )
    timing = items['timing']
    self._clock = metrics.CpuClock(timing['cpu_s'])
    self._first_reward_cpu_s = timing['first_reward_cpu_s']
    before, events = timing['events'], self._events
    self._events = lambda: before + events()
    self._saved_step = step
    self.display.note(f'going on after step {step} of {run.config.steps}')

  def _check_fingerprints(self, saved):
    model = self.run.model.fingerprint
    if saved['model'] != model:
      raise errors.InputError(
          f'{self.workdir} was trained from {saved["model"]}, and the config '
          f'now gives {model}; take another --workdir.'
      )
    for name, value in saved['domains'].items():
      if name in self.run.tasks.pools:
        now = self.run.tasks.fingerprint(name)
        if now != value:
          raise errors.InputError(
              f'The tasks of domain {name!r} changed ({value} -> {now}); take '
              'another --workdir.'
          )

  def _end_if_asked(self):
    if not self._stop_asked():
      return
    if self._saved_step != self.progress.step:
      self.save(wait=True)
    self._checkpoints.close()
    raise errors.SavedAfterSignal(
        f'SIGTERM: saved step {self.progress.step} in {self.workdir}; the '
        'same command goes on.'
    )

  # The end.

  def finish(self) -> dict[str, Any]:
    """Summary, picture and table of a finished run."""
    self._checkpoints.close()
    step = self.progress.step
    results = report.read_results(self.workdir)
    digest = self._checkpoints.describe(step)['state_sha256']
    summary = report.write_summary(
        self.workdir / 'summary.json', before=results[0], after=results[step],
        cpu_s=self._clock.total_s(), steps=step, state_sha256=digest,
        first_reward_cpu_s=self._first_reward_cpu_s,
        peak_rss_bytes=metrics.peak_rss_bytes(),
        nondeterministic_events=self._events(),
    )
    report.curves_png(self.workdir)
    outcome.show(self.workdir, self.display)
    return summary
