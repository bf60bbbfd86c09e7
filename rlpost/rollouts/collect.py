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


class Collector:
  """Runs episodes of one turn on an engine.

  Args:
    engine: decodes.
    tokenizer: `data.tokenizer.Tokenizer`.
    scorer: `rewards.scoring.Scorer`.
  """

  def __init__(self, engine: Engine, tokenizer, scorer):
    self._engine, self._tokenizer, self._scorer = engine, tokenizer, scorer
    self._prefixes = {}

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
    """
    return asyncio.run(
        self._collect(params, version, episodes, root, budget, progress)
    )

  async def _collect(
      self, params, version, episodes, root, budget, progress
  ):
    by_group = {e.group: e for e in episodes}
    if len(by_group) != len(episodes):
      raise errors.InputError('Two episodes have the same group id.')
    states = {
        e.group: await e.environment.reset(e.task, e.group) for e in episodes
    }
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
    for e in episodes:
      await e.environment.close(states[e.group])
    return [
        types.Group(
            e.group, e.task,
            tuple(sorted(found[e.group], key=lambda t: t.sample)),
        )
        for e in episodes
    ]

  def _request(self, episode, state) -> Request:
    if state.messages:
      messages = [types.Message.from_json(m) for m in state.messages]
      tokens = chat.encode_chat(self._tokenizer, messages, True)
      prefix, suffix = (), tuple(int(i) for i in tokens.ids)
    else:
      if state.prefix not in self._prefixes:
        self._prefixes[state.prefix] = tuple(
            self._tokenizer.encode(state.prefix)
        )
      prefix = self._prefixes[state.prefix]
      suffix = tuple(self._tokenizer.encode(state.suffix))
    return Request(episode.group, prefix, suffix, episode.samples)


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
