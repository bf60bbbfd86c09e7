"""The environment protocol: what a rollout talks to.

    state = await env.reset(task, seed)
    while True:
      step = await env.step(state, Action(text, span, stop_reason))
      state = step.state
      if step.verdict is not None or step.stop_reason is not None: break
    await env.close(state)                      # always runs

It is async so that tools, sandboxes and checkers overlap with decoding, and
`State` is JSON so that a rollout can be saved, moved and resumed. A single turn
is the trivial case: one step ends it. An environment of several turns returns
`messages` (a tool's answer, the next question) and no `stop_reason`; the caller
appends their tokens to the trajectory as a span that is not sampled, decodes
again, and calls `step` with the new text. Rewards of a step belong to the token
span of its action.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from rlpost import types


class Action(NamedTuple):
  """What the policy did: its text without the stop, and where its tokens are.

  `stop_reason` is as in `Trajectory`: 'stop', 'length' or 'overlong'.
  """

  text: str
  token_span: tuple[int, int] = (0, 0)
  stop_reason: str = 'stop'


@dataclasses.dataclass(frozen=True)
class State:
  """Where an episode stands; everything in it is JSON.

  Attributes:
    task: the task as JSON.
    seed: the episode's seed.
    prefix: text that all tasks of the domain share, so its cache can be too.
    suffix: text after the prefix, up to where the policy goes on.
    stop: texts that end an answer, beside the model's end token.
    messages: the conversation for a chat template; empty in plain form, as
      `prefix` and `suffix` are in chat form.
    turn: steps taken.
  """

  task: Mapping[str, Any]
  seed: int
  prefix: str = ''
  suffix: str = ''
  stop: tuple[str, ...] = ()
  messages: tuple[Mapping[str, Any], ...] = ()
  turn: int = 0

  def to_json(self) -> dict:
    return dataclasses.asdict(self)

  @classmethod
  def from_json(cls, data: Mapping) -> 'State':
    lists = {k: tuple(data[k]) for k in ('stop', 'messages')}
    return cls(**{**data, **lists})


@dataclasses.dataclass(frozen=True)
class Step:
  """What an action led to.

  Attributes:
    state: where the episode stands now.
    messages: new turns that the policy has not written.
    rewards: by component, for this action's token span.
    verdict: the end's verdict, or None while it is open or scored elsewhere.
    stop_reason: why the episode ended, or None while it goes on.
    artifacts: JSON for logs and for whoever scores.
  """

  state: State
  messages: tuple[types.Message, ...] = ()
  rewards: Mapping[str, float] = dataclasses.field(default_factory=dict)
  verdict: types.Verdict | None = None
  stop_reason: str | None = None
  artifacts: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Environment(Protocol):
  """Anything that can reset, step and close."""

  async def reset(self, task: types.Task, seed: int) -> State: ...

  async def step(self, state: State, action: Action) -> Step: ...

  async def close(self, state: State) -> None: ...
