"""The story of a run: evaluate, learn step by step, evaluate again.

Everything that decides the next number is in one checkpoint, so the same
command goes on after any interruption as if there had been none.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from rlpost import types
from rlpost.algorithms import dynamic_sampling
from rlpost.data import packing
from rlpost.rollouts import collect
from rlpost.training import alarms, credit, imitation, outcome, setup
from rlpost.training import programs as program_lib
from rlpost.training.workdir import Workdir

# The purpose folded into the root key; `outcome` and `workdir` have others.
ROLLOUT = 0


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
    self.workdir = Workdir(run, workdir, display, stop_asked, events)
    self.progress = Progress()
    self._root = jax.random.key(run.config.seed)

  # The story.

  def train(self) -> dict[str, Any]:
    """Runs to `config.steps` and returns what `summary.json` holds."""
    try:
      return self._train()
    except collect.NonFiniteSamples as error:
      self.workdir.refuse_samples(self.progress.step + 1, error)

  def _train(self):
    run, total = self.run, self.run.config.steps
    self.restore()
    writer = self.workdir.writer(self.progress.step)
    watch = alarms.Alarms(self.display.note)
    self.evaluate('before')
    while self.progress.step < total:
      self.workdir.end_if_asked(self.progress.step, self.save)
      groups = self.rollouts()
      row = self.update(groups)
      self.progress.step += 1
      row = writer.write(self.progress.step, row)
      writer.write_samples(self.progress.step, outcome.shown(groups))
      self.display.step(row)
      watch.look(row)
      if self.progress.step % run.checkpoint.every == 0:
        self.save()
    if self.workdir.saved_step != self.progress.step:
      self.save()
    self.evaluate('after')
    writer.close()
    return self.workdir.finish(self.progress.step)

  def rollouts(self) -> list[types.Group]:
    """Scored groups of one step; more of them where the recipe asks."""
    run, wanted = self.run, self.run.rollout.prompts
    groups, missing = [], wanted
    while missing:
      picks = run.plan.next(
          run.curriculum.weights(), None if missing == wanted else missing,
          run.lengths.open(self.progress.step),
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
    outcomes = {name: [] for name in run.tasks.trained}
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
    shares = run.plan.shares(run.lengths.open(self.progress.step))
    return outcome.step_row(groups, chosen, learned, run, shares)

  # Parts of a step.

  def _attempt(self, picks) -> list[types.Group]:
    run, rollout = self.run, self.run.rollout
    samples = tuple((r, rollout.temperature) for r in range(rollout.samples))
    picks = run.lengths.again(picks, self.progress.step)
    episodes = []
    for name, index in picks:
      task = run.tasks.pools[name].train_task(index, run.config.seed)
      self.progress.trained[task.content_id] = None
      group = self.progress.groups
      self.progress.groups += 1
      episodes.append(
          collect.Episode(
              group, task, run.tasks.environments[name], samples
          )
      )
    root = jax.random.fold_in(self._root, ROLLOUT)
    root = jax.random.fold_in(root, self.progress.step)
    with self.display.phase('sampling', quiet=True):
      groups = run.rollouts.collect(
          run.policy, self.progress.updates, episodes, root
      )
    run.lengths.note(picks, list(map(_score, groups)), self.progress.step)
    self.workdir.note_reward()
    self.progress.tokens += sum(
        int(t.sampled.sum()) for g in groups for t in g.trajectories
    )
    return groups

  def _rows(self, groups, advantages=None, trained=None) -> types.Batch:
    run, rollout = self.run, self.run.rollout
    decoding = run.shapes.rollout
    names = {n: i for i, n in enumerate(sorted(run.tasks.pools))}
    batch = packing.pack_groups(
        groups, prompt_len=decoding.prefix_len + decoding.prompt_len,
        samples=rollout.samples, width=rollout.max_new,
        advantages=advantages, trained=trained, domain_ids=names,
    )
    return program_lib.batch_of(run.shapes, run.mesh, batch)

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
        self.workdir.refuse(self.progress.step + 1, batch, learned)
    return learned

  def evaluate(self, when: str) -> None:
    """Held-out results 'before' or 'after' training."""
    progress = self.progress
    self.workdir.evaluate(when, progress.step, progress.updates, self.save)

  # State.

  def save(self, wait=False) -> None:
    """Saves everything that decides the next number."""
    run, progress = self.run, self.progress
    items = {
        'plan': run.plan.state(),
        'curriculum': run.curriculum.state(),
        'scale': run.scale.state(),
        'lengths': run.lengths.state(),
        'counters': {
            'step': progress.step, 'updates': progress.updates,
            'groups': progress.groups, 'tokens': progress.tokens,
        },
        'trained': list(progress.trained),
    }
    self.workdir.save(progress.step, progress.updates, items, wait)

  def restore(self) -> None:
    """Goes on from the newest whole checkpoint, or starts afresh."""
    run = self.run
    items = self.workdir.restore(
        ('plan', 'curriculum', 'scale', 'lengths', 'counters', 'trained')
    )
    shown = self._load(fresh=items is None)
    if items is None:
      self.progress.trained |= dict.fromkeys(shown)
      return
    run.plan.set_state(items['plan'])
    run.curriculum.set_state(items['curriculum'])
    run.scale.set_state(items['scale'])
    run.lengths.set_state(items['lengths'])
    self.progress = Progress(
        **items['counters'], trained=dict.fromkeys(items['trained'])
    )

  def _load(self, fresh: bool) -> list[str]:
    """Reads what no checkpoint holds; content ids of a warm-up's examples."""
    run, shown = self.run, []
    frozen = program_lib.abstract(run.shapes, run.mesh).frozen
    if not fresh and not frozen and run.recipe.kl == 'none':
      return shown
    with self.display.phase('loading the model'):
      params = setup.on_mesh(run, run.model.params())
    if run.warmup.steps and (fresh or run.recipe.kl != 'none'):
      # A reference is the policy as reinforcement learning found it.
      params, shown = imitation.warm_up(run, params, self.display)
    setup.place(run, params)
    return shown


def _score(group: types.Group) -> float | None:
  """The mean reward of what could be scored."""
  values = [t.verdict.value for t in group.trajectories if t.verdict.valid]
  return float(np.mean(values)) if values else None
