"""The nouns that move through the system, and the legend of shape letters.

`B` sequences or rows   `G` groups        `R` samples per group
`T` time                `S` key time      `K` loss slots per row
`M` micro-batches       `D` model width   `H` query heads
`KV` key heads          `P` head width    `F` hidden width
`V` vocabulary          `N` layers        `C` vocabulary chunk

This module needs NumPy only, so that host code never starts JAX.
"""

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

TRAJECTORY_SCHEMA = 1


def tuples(value: Any) -> Any:
  """A value as configs hold it: JSON knows lists only, they tuples only."""
  if isinstance(value, dict):
    return {k: tuples(v) for k, v in value.items()}
  return tuple(map(tuples, value)) if isinstance(value, list) else value


@dataclasses.dataclass(frozen=True)
class Part:
  """A piece of a message: text, or a file or image named by its digest."""

  kind: str = 'text'
  text: str = ''
  digest: str = ''

  def __post_init__(self):
    if self.kind not in ('text', 'file', 'image'):
      raise ValueError(f'{self.kind=} must be text, file or image.')


@dataclasses.dataclass(frozen=True)
class Message:
  """One turn of a conversation: a role and a list of typed parts."""

  role: str
  parts: tuple[Part, ...]

  @classmethod
  def of(cls, role: str, text: str) -> 'Message':
    return cls(role, (Part(text=text),))

  @property
  def text(self) -> str:
    return ''.join(p.text for p in self.parts if p.kind == 'text')

  def to_json(self) -> dict:
    parts = [dataclasses.asdict(p) for p in self.parts]
    return {'role': self.role, 'parts': parts}

  @classmethod
  def from_json(cls, data: Mapping) -> 'Message':
    return cls(data['role'], tuple(Part(**p) for p in data['parts']))


def content_id(domain: str, text: str, checker: Any) -> str:
  """Digest of a task's normalised content: equal tasks share it.

  Letter case and white space do not make a task a new one.
  """
  text = re.sub(r'\s+', ' ', text).strip().casefold()
  body = json.dumps([domain, text, checker], sort_keys=True)
  return hashlib.sha256(body.encode()).hexdigest()[:20]


@dataclasses.dataclass(frozen=True)
class Task:
  """One problem: what the policy sees, and what the checker needs.

  Attributes:
    domain: name of the domain that made it.
    messages: the prompt.
    checker: JSON for the checker, never shown to the policy. `checker['name']`
      names the function; the rest are its arguments.
    difficulty: in the domain's own unit; larger is harder.
  """

  domain: str
  messages: tuple[Message, ...]
  checker: Mapping[str, Any]
  difficulty: float = 0.0

  @functools.cached_property
  def content_id(self) -> str:
    text = '\n'.join(m.text for m in self.messages)
    return content_id(self.domain, text, dict(self.checker))

  def to_json(self) -> dict:
    return {
        'domain': self.domain,
        'messages': [m.to_json() for m in self.messages],
        'checker': dict(self.checker),
        'difficulty': self.difficulty,
    }

  @classmethod
  def from_json(cls, data: Mapping) -> 'Task':
    messages = tuple(Message.from_json(m) for m in data['messages'])
    return cls(data['domain'], messages, data['checker'], data['difficulty'])


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What a checker says: a value, or why there is none.

  `value`: a number in [`low`, `high`]. An answer that the policy wrote badly
  (unparsable, empty, cut off) is a value, the lowest one.
  `invalid`: nothing could have been scored (no gold answer, an abstention).
  `infra`: our fault (a crashed checker, a deadline). Only values enter
  statistics, baselines, numerators and denominators.
  """

  status: str
  value: float = 0.0
  low: float = 0.0
  high: float = 1.0
  components: Mapping[str, float] = dataclasses.field(default_factory=dict)
  reason: str = ''

  def __post_init__(self):
    if self.status not in ('value', 'invalid', 'infra'):
      raise ValueError(f'{self.status=} must be value, invalid or infra.')
    if self.status == 'value' and not self.low <= self.value <= self.high:
      raise ValueError(f'{self.value=} is outside [{self.low}, {self.high}].')

  @property
  def valid(self) -> bool:
    return self.status == 'value'

  def to_json(self) -> dict:
    return dataclasses.asdict(self) | {'components': dict(self.components)}

  @classmethod
  def from_json(cls, data: Mapping) -> 'Verdict':
    return cls(**data)


class Span(NamedTuple):
  """A run of tokens `[start, stop)` of one role; `reward` belongs to it."""

  start: int
  stop: int
  role: str
  sampled: bool
  reward: float = 0.0


@dataclasses.dataclass(frozen=True)
class Trajectory:
  """Token ids in, token ids out, never re-tokenised.

  Attributes:
    tokens: int32 [T], the prompt and everything after it.
    spans: tokens by role, in order, covering [0, T).
    logp: fp32 [T], log-probability of each sampled token at `temperature`
      under the policy that sampled it; 0 where not sampled.
    versions: int32 [T], the policy version that sampled it; -1 elsewhere.
    stop_reason: 'stop' (an end token, included once), 'length' (the budget
      ran out) or 'overlong' (the prompt did not fit: nothing was sampled).
  """

  task: Task
  group: int
  sample: int
  tokens: np.ndarray
  spans: tuple[Span, ...]
  logp: np.ndarray
  versions: np.ndarray
  temperature: float
  stop_reason: str
  text: str = ''
  verdict: Verdict | None = None
  attempt: int = 0
  schema: int = TRAJECTORY_SCHEMA

  @functools.cached_property
  def sampled(self) -> np.ndarray:
    """Boolean [T]: tokens that the policy sampled."""
    mask = np.zeros(len(self.tokens), bool)
    for span in self.spans:
      mask[span.start : span.stop] = span.sampled
    return mask


@dataclasses.dataclass(frozen=True)
class Group:
  """The trajectories of one task under an explicit id; may be ragged."""

  id: int
  task: Task
  trajectories: tuple[Trajectory, ...]


class Batch(NamedTuple):
  """Packed rows for a training step; every array may lead with [M].

  A key is seen by a query iff its order is not later and its segment is the
  query's own or the query's parent. A negative segment is padding. Loss slots
  are the trained tokens: slot k of a row wants token `target` predicted from
  the hidden state at `predictor`, so that completions which share a prompt
  share its last hidden state too. Everything is zero where `mask` is 0.

  Attributes:
    tokens, order, position, segment, parent: int32 [B, T]; `position` is for
      RoPE and windows, `order` for visibility.
    predictor, target: int32 [B, K].
    mask: fp32 [B, K], 1 where a slot trains.
    behavior_logp, ref_logp, advantage, reward: fp32 [B, K].
    temperature: fp32 [B, K], 1 where unused.
    sequence: int32 [B, K], id of the slot's sequence inside its row, 0..K-1.
    group, domain: int32 [B, K], ids for statistics.
  """

  tokens: Any
  order: Any
  position: Any
  segment: Any
  parent: Any
  predictor: Any
  target: Any
  mask: Any
  behavior_logp: Any
  ref_logp: Any
  advantage: Any
  reward: Any
  temperature: Any
  sequence: Any
  group: Any
  domain: Any


# Fields of a `Batch` that have an entry per token, not per loss slot.
PER_TOKEN = 'tokens', 'order', 'position', 'segment', 'parent'
