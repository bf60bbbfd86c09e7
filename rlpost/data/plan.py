"""Which domain gets how many prompts at each step, and which tasks they are.

A plan is decided before anything is sampled, so it does not depend on hosts,
workers or the order in which rows end. With weights w_d over D domains and a
floor f (a fraction of the uniform share) the share of a domain is

  s_d = max(f / D, c w_d),   c such that sum_d s_d = 1.

Each step of P prompts adds P s_d to the *carry* of every domain and then hands
out P prompts one by one to the largest carry, which pays 1 each: the largest
remainder method on cumulative quotas. Rounding is owed, never lost: a domain
with a share of 1/300 gets a prompt about every 300 prompts. That greedy rule
is the cup game, in which no debt exceeds the harmonic number of D.

Draws come from Philox (Salmon et al., 2011) keyed by the seed and a purpose,
with the step as counter, so a resume costs the same at every step.
"""

import hashlib
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from rlpost import errors

VERSION = 1


class Source(NamedTuple):
  """Where the tasks of a domain come from.

  Attributes:
    weight: relative share before the floor.
    size: number of distinct tasks, visited in a new order every epoch; None
      where any index makes a new task.
    fingerprint: digest of the data behind the indices.
  """

  weight: float = 1.0
  size: int | None = None
  fingerprint: str = ''


def shares(weights_D: np.ndarray, floor: float) -> np.ndarray:
  """Shares that sum to 1, none below `floor / D`, else as the weights.

  Args:
    weights_D: non-negative, finite, at least one positive.
    floor: in [0, 1], a fraction of the uniform share.

  Raises:
    errors.InputError: weights or floor out of range.
  """
  weights_D = np.asarray(weights_D, np.float64)
  if not np.isfinite(weights_D).all() or (weights_D < 0).any():
    raise errors.InputError(f'Weights must be finite and >= 0: {weights_D}.')
  if not weights_D.sum() > 0:
    raise errors.InputError('At least one weight must be positive.')
  if not 0 <= floor <= 1:
    raise errors.InputError(f'{floor=} must be in [0, 1].')
  least = floor / len(weights_D)
  free_D = np.ones(len(weights_D), bool)
  while free_D.any():
    room = 1 - least * (~free_D).sum()
    share_D = np.where(
        free_D, weights_D * (room / weights_D[free_D].sum()), least
    )
    below_D = free_D & (share_D < least)
    if not below_D.any():
      return share_D
    free_D &= ~below_D
  return np.full(len(weights_D), 1 / len(weights_D))  # floor = 1, rounded


class Plan:
  """Draws the prompts of each step; its state is JSON keyed by domain name.

  `step` counts the draws and names the randomness of what is sampled from
  them. Cursors move by what was drawn, whatever the caller does with it: a
  reused batch draws nothing, a refused prompt is replaced by `redraw`.
  """

  def __init__(
      self,
      sources: Mapping[str, Source],
      *,
      prompts: int,
      seed: int,
      floor: float = 0.1,
  ):
    """A plan at step 0.

    Args:
      sources: by domain name, in any order.
      prompts: prompts per step.
      seed: in [0, 2**64).
      floor: least share of a domain, as a fraction of the uniform share.
    """
    if not sources:
      raise errors.InputError('A plan needs at least one domain.')
    if prompts < 1:
      raise errors.InputError(f'{prompts=} must be at least 1.')
    if not 0 <= seed < 2**64:
      raise errors.InputError(f'{seed=} must be in [0, 2**64).')
    for name, source in sources.items():
      if source.size is not None and source.size < 1:
        raise errors.InputError(
            f'Domain {name!r} has {source.size} tasks; give it at least one '
            'or drop it.'
        )
    self.names = tuple(sorted(sources))
    self.step = 0
    self._sources = {name: sources[name] for name in self.names}
    self._prompts = prompts
    self._seed = seed
    self._floor = floor
    self._domains = {
        name: _entry(source) for name, source in self._sources.items()
    }
    self._order_cache = {}
    self.shares()

  def shares(self, only: Collection[str] | None = None) -> dict[str, float]:
    """The share of each domain, of `only` these, under the last weights."""
    names = self.names if only is None else tuple(sorted(only))
    weights_D = [self._domains[name]['weight'] for name in names]
    return dict(
        zip(names, shares(weights_D, self._floor).tolist(), strict=True)
    )

  def next(
      self,
      weights: Mapping[str, float] | None = None,
      prompts: int | None = None,
      only: Collection[str] | None = None,
  ) -> list[tuple[str, int]]:
    """Draws one step: `prompts` pairs of domain and task index, shuffled.

    Args:
      weights: by name, for every domain; kept until the next change.
      prompts: instead of the plan's own number, for example to fill up a
        step whose groups taught nothing.
      only: the domains to draw from, all if None. The others are owed nothing
        for this step.
    """
    if weights is not None:
      self._set_weights(weights)
    prompts = self._prompts if prompts is None else prompts
    if prompts < 1:
      raise errors.InputError(f'{prompts=} must be at least 1.')
    names = tuple(sorted(self.names if only is None else only))
    size = len(names)
    draws = _draws(self._seed, 'step', self.step, size + prompts)
    tie_D = np.argsort(draws[:size], kind='stable')
    share_D = np.array(list(self.shares(names).values()))[tie_D]
    carry_D = np.array([self._domains[n]['carry'] for n in names])[tie_D]
    carry_D += prompts * share_D
    chosen = []
    for _ in range(prompts):
      most = int(np.argmax(carry_D))  # the first, so ties fall by the draw
      carry_D[most] -= 1
      chosen.append(names[tie_D[most]])
    for index, carry in zip(tie_D, carry_D.tolist(), strict=True):
      self._domains[names[index]]['carry'] = carry
    # Names are taken in order, so that cursors do not depend on ties.
    tasks = [self.redraw(name) for name in sorted(chosen)]
    self.step += 1
    return [tasks[i] for i in np.argsort(draws[size:], kind='stable')]

  def redraw(self, domain: str) -> tuple[str, int]:
    """The next task of a domain, in place of one that was refused.

    The domain's share is not charged again, its cursor is.
    """
    entry = self._domains[domain]
    cursor, size = entry['cursor'], self._sources[domain].size
    entry['cursor'] += 1
    if size is None:
      return domain, cursor
    epoch, offset = divmod(cursor, size)
    return domain, int(self._order(domain, epoch, size)[offset])

  def _order(self, domain: str, epoch: int, size: int) -> np.ndarray:
    cached = self._order_cache.get(domain)
    if cached is None or cached[0] != epoch:
      draws = _draws(self._seed, f'order/{domain}', epoch, size)
      cached = epoch, np.argsort(draws, kind='stable')
      self._order_cache[domain] = cached
    return cached[1]

  def _set_weights(self, weights: Mapping[str, float]):
    if set(weights) != set(self.names):
      raise errors.InputError(
          'Weights must name every domain and no other; missing '
          f'{sorted(set(self.names) - set(weights))}, unknown '
          f'{sorted(set(weights) - set(self.names))}.'
      )
    shares(np.array([weights[n] for n in self.names]), self._floor)
    for name in self.names:
      self._domains[name]['weight'] = float(weights[name])

  def state(self) -> dict:
    """All that decides the next draw, as JSON."""
    return {
        'version': VERSION,
        'seed': self._seed,
        'step': self.step,
        'domains': {k: dict(v) for k, v in sorted(self._domains.items())},
    }

  def set_state(self, state: Mapping):
    """Continues from `state`; domains that it lacks join at cursor 0.

    Domains that only the state knows keep their cursor for a later return.

    Raises:
      errors.InputError: another seed, or other data under a domain's name.
    """
    if state['version'] != VERSION:
      raise errors.InputError(
          f'The plan has version {state["version"]}, this code reads {VERSION}.'
      )
    if state['seed'] != self._seed:
      raise errors.InputError(
          f'The plan was drawn with seed {state["seed"]}, not {self._seed}; '
          'use that seed or a new workdir.'
      )
    domains = {name: dict(entry) for name, entry in state['domains'].items()}
    for name, source in self._sources.items():
      entry = domains.setdefault(name, _entry(source))
      for key in ('fingerprint', 'size'):
        if entry[key] != getattr(source, key):
          raise errors.InputError(
              f'The data of domain {name!r} changed: its {key} was '
              f'{entry[key]!r} and is {getattr(source, key)!r}. Restore the '
              'data, or give the new data a new domain name.'
          )
    # What the domains that left were owed goes to those that stay.
    for name in sorted(set(domains) - set(self.names)):
      for heir in self.names:
        domains[heir]['carry'] += domains[name]['carry'] / len(self.names)
      domains[name]['carry'] = 0.0
    self._domains = domains
    self._order_cache = {}
    self.step = state['step']


def _entry(source: Source) -> dict:
  return {
      'cursor': 0,
      'carry': 0.0,
      'weight': float(source.weight),
      'size': source.size,
      'fingerprint': source.fingerprint,
  }


def _draws(seed: int, purpose: str, counter: int, size: int) -> np.ndarray:
  """Raw uint64 draws: unlike a Generator's, fixed for every NumPy version."""
  digest = hashlib.sha256(purpose.encode()).digest()
  key = [seed, int.from_bytes(digest[:8], 'little')]
  philox = np.random.Philox(
      key=np.array(key, np.uint64),
      counter=np.array([0, counter, 0, 0], np.uint64),
  )
  return philox.random_raw(size)
