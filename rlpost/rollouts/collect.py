"""Episodes in, scored trajectories out.

Answers are handed to the scorer as soon as their rows end, so checking in the
worker processes overlaps with decoding the others.
"""

import asyncio
import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlpost import errors, types
from rlpost.data import chat
from rlpost.environments.environment import Action
from rlpost.rewards import scoring
from rlpost.rollouts.engine import Completion, Engine, Request


class Episode(NamedTuple):
  """A task to attempt: its group id, environment and wanted samples."""

  group: int
  task: types.Task
  environment: Any
  samples: tuple[tuple[int, float], ...]


class NonFiniteSamples(errors.NonFiniteError):
  """Answers of a policy that is broken: `trajectories` are the guilty ones."""

  def __init__(self, trajectories: Sequence[types.Trajectory]):
    self.trajectories = trajectories
    domains = sorted({t.task.domain for t in trajectories})
    super().__init__(
        f'{len(trajectories)} answers in domain {", ".join(domains)} have '
        'log-probabilities that are NaN or infinite.'
    )


class Collector:
  """Runs episodes of one turn on an engine.

  Args:
    engine: decodes.
    tokenizer: `data.tokenizer.Tokenizer`.
    scorer: `rewards.scoring.Scorer`.
  """

  def __init__(self, engine: Engine, tokenizer, scorer):
    self._engine, self._tokenizer, self._scorer = engine, tokenizer, scorer

  def collect(
      self, params, version: int, episodes: Sequence[Episode], root,
      budget: int | None = None,
      progress: Callable[[int, int, float], None] | None = None,
  ) -> list[types.Group]:
    """One group per episode, samples in order, every verdict present.

    Args:
      params, version, root, budget: see `Engine.generate`.
      episodes: with distinct group ids.
      progress: called as `progress(scored, wanted, mean reward so far)`.

    Raises:
      NonFiniteSamples: a log-probability is NaN or infinite.
    """
    groups = asyncio.run(
        self._collect(params, version, episodes, root, budget, progress)
    )
    bad = [
        t for group in groups for t in group.trajectories
        if not np.isfinite(t.logp).all()
    ]
    if bad:
      raise NonFiniteSamples(bad)
    return groups

  async def _collect(
      self, params, version, episodes, root, budget, progress
  ):
    if len({e.group for e in episodes}) != len(episodes):
      raise errors.InputError('Two episodes have the same group id.')
    states = {}
    try:
      for e in episodes:
        states[e.group] = await e.environment.reset(e.task, e.group)
      found = await self._attempt(
          params, version, episodes, states, root, budget, progress
      )
    finally:
      for e in episodes:
        if e.group in states:
          await e.environment.close(states[e.group])
    return [
        types.Group(
            e.group, e.task,
            tuple(sorted(found[e.group], key=lambda t: t.sample)),
        )
        for e in episodes
    ]

  async def _attempt(
      self, params, version, episodes, states, root, budget, progress
  ):
    """Scored trajectories by group id."""
    by_group = {e.group: e for e in episodes}
    requests = [self._request(e, states[e.group]) for e in episodes]
    prompts = {r.group: r.prefix + r.suffix for r in requests}
    found = collections.defaultdict(list)
    pending = collections.deque()
    batches = self._engine.generate(params, version, requests, root, budget)
    wanted = sum(len(e.samples) for e in episodes)

    def settle(keep):
      """Takes the verdicts of all batches but the last `keep`."""
      while len(pending) > keep:
        trajectories, verdicts = pending.popleft()
        for t, verdict in zip(trajectories, verdicts.result(), strict=True):
          found[t.group].append(dataclasses.replace(t, verdict=verdict))
      if progress is not None and found:
        values = [t.verdict for ts in found.values() for t in ts]
        good = [v.value for v in values if v.valid]
        progress(len(values), wanted, sum(good) / max(len(good), 1))

    for batch in batches:
      trajectories, items = [], []
      for done in batch:
        episode = by_group[done.group]
        text = self._tokenizer.decode(done.tokens.tolist(), skip_special=True)
        length = len(prompts[done.group])
        span = length, length + len(done.tokens)
        action = Action(text, span, done.stop_reason)
        step = await episode.environment.step(states[done.group], action)
        trajectories.append(
            _trajectory(episode, prompts[done.group], done, version, text)
        )
        items.append(scoring.Item(**step.artifacts['item']))
      pending.append((trajectories, self._scorer.submit(items)))
      settle(1)
    settle(0)
    return found

  def _request(self, episode, state) -> Request:
    prompt = prompt_tokens(self._tokenizer, state)
    return Request(episode.group, *prompt, episode.samples)


def prompt_tokens(tokenizer, state) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """Token ids (shared by the tasks of a domain, own) of a state's prompt."""
  if not state.messages:
    return tuple(
        tuple(tokenizer.encode(t)) for t in (state.prefix, state.suffix)
    )
  messages = [types.Message.from_json(m) for m in state.messages]
  return (), tuple(chat.encode_chat(tokenizer, messages, True).ids.tolist())


def _trajectory(episode, prompt, done: Completion, version, text):
  length, total = len(prompt), len(prompt) + len(done.tokens)
  logp = np.zeros(total, np.float32)
  logp[length:] = done.logp
  versions = np.full(total, -1, np.int32)
  versions[length:] = version
  spans = (types.Span(0, length, 'user', False),)
  if len(done.tokens):
    spans += (types.Span(length, total, 'assistant', True),)
  return types.Trajectory(
      task=episode.task, group=episode.group, sample=done.sample,
      tokens=np.concatenate([np.asarray(prompt, np.int32), done.tokens]),
      spans=spans, logp=logp, versions=versions,
      temperature=done.temperature, stop_reason=done.stop_reason, text=text,
  )
