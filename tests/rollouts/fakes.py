"""Decoding programs of NumPy, and slow oracles, for tests of the scheduling.

The fake policy's next token is a function of (root, group, sample, index,
prompt), so an answer that got the wrong slot, prompt, prefix or sample shows.
Arguments are kept, not copied: as a program may, results are computed when
they are asked for.
"""

import hashlib
from typing import NamedTuple

import numpy as np

from rlpost.rollouts import engine as engines

VOCAB = 16
STOP = np.arange(VOCAB) < 2


def token(version, root, group, sample, index, prompt, temperature):
  text = repr((version, root, group, sample, index, prompt, temperature))
  return hashlib.sha256(text.encode()).digest()[0] % VOCAB


def answer(version, root, group, sample, prompt, temperature, budget):
  """What the policy says, one token after the other."""
  tokens = []
  while len(tokens) < budget:
    tokens.append(
        token(version, root, group, sample, len(tokens), prompt, temperature)
    )
    if STOP[tokens[-1]]:
      break
  return tokens


class Slots(NamedTuple):
  live: np.ndarray
  count: np.ndarray
  tokens: np.ndarray
  logp: np.ndarray
  prompts: list


class Fake:
  """`programs` for an engine; counts calls and checks what it is given."""

  def __init__(self, config: engines.EngineConfig):
    self.config = config
    self.prefills = []  # (version, prefixes) of each call of `shared`
    self.admitted = 0
    self.starts = []  # (start as passed, start as it was then)
    self.runs = 0

  @property
  def programs(self):
    return engines.Programs(self.shared, self.admit, self.run, self.empty)

  def empty(self):
    B, W = self.config.batch, self.config.width
    return Slots(
        np.zeros(B, bool), np.zeros(B, int), np.zeros((B, W), int),
        np.zeros((B, W), np.float32), [None] * self.config.prompts,
    )

  def shared(self, version, tokens, length):
    assert tokens.shape == (self.config.prefixes, self.config.prefix_len)
    prefixes = [tuple(t[:n].tolist()) for t, n in zip(tokens, length)]
    self.prefills.append((version, prefixes))
    return version, prefixes

  def admit(self, version, slots, cache, which, tokens, length, source):
    admit = self.config.admit or self.config.prompts
    assert tokens.shape == (admit, self.config.prompt_len)
    assert cache[0] == version, 'a cache of other weights'
    live = slots.live.reshape(self.config.prompts, -1).any(1)
    prompts = list(slots.prompts)
    assert source.shape == (self.config.prompts,) and source.max() < admit
    for q, i in enumerate(source):
      if i >= 0:
        assert not live[q], 'the rows of this prompt still run'
        assert length[i] > 0
        prompts[q] = cache[1][which[i]] + tuple(tokens[i, : length[i]].tolist())
    self.admitted += len({i for i in source if i >= 0})
    return slots._replace(prompts=prompts)

  def run(self, version, slots, start, stop, root, pause):
    self.runs += 1
    copy = type(start)(*(np.copy(x) for x in start))
    self.starts.append((start, copy))
    live, count = slots.live.copy(), slots.count.copy()
    tokens, logp = slots.tokens.copy(), slots.logp.copy()
    assert not (live & start.fresh).any(), 'a running row is started again'
    count[start.fresh] = 0
    R = self.config.rows

    def draw(b):
      index = count[b]
      prompt = slots.prompts[b // R]
      tokens[b, index] = token(
          version, root, int(start.group[b]), int(start.sample[b]), int(index),
          prompt, float(start.temperature[b]),
      )
      logp[b, index] = -float(index)
      count[b] += 1
      live[b] = not stop[tokens[b, index]] and count[b] < start.budget[b]

    for b in np.flatnonzero(start.fresh):
      draw(b)
    before = live.copy()
    while (
        live.sum() > pause[0]
        and live.reshape(-1, R).any(1).sum() > pause[1]
    ):
      for b in np.flatnonzero(live):
        draw(b)
    assert (live != before).any() or start.fresh.any(), 'nothing was done'
    return Slots(live, count, tokens, logp, slots.prompts)
