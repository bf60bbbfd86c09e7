"""Which domains teach most now: adaptive weights on posteriors of p(1 - p).

The policy gradient of a 0/1 reward has variance p(1 - p): a domain that always
or never succeeds teaches nothing. Every domain keeps a Beta posterior of its
success rate p with prior (a0, b0); each step forgets, then counts:

  a <- a0 + g (a - a0) + successes,   b <- b0 + g (b - b0) + failures

  u = E[p (1 - p)] = a b / ((a + b) (a + b + 1))

  weight = e / D + (1 - e) u / sum(u)

with decay g per step and exploration e over D domains. A domain whose posterior
mean is at least `retire_at`, on at least `evidence` recent outcomes, has u = 0:
exploration alone revisits it, and forgetting brings it back. A domain not
sampled drifts to its prior for the same reason.

The names can be anything that shares a budget: for buckets of difficulty inside
a domain, use one more `Curriculum` over the buckets.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from rlpost import errors

VERSION = 1


class Curriculum:
  """Beta posteriors by name; host only, its state is JSON."""

  def __init__(
      self,
      names: Iterable[str],
      *,
      decay: float = 0.97,
      explore: float = 0.1,
      retire_at: float = 0.9,
      evidence: float = 16.0,
      prior: tuple[float, float] = (1.0, 1.0),
  ):
    """Posteriors at the prior.

    Args:
      names: the domains.
      decay: per step; 0.97 remembers about 33 steps.
      explore: part of the budget that is shared uniformly.
      retire_at: success rate from which a domain is only revisited; above 1
        nothing retires.
      evidence: recent outcomes needed to retire.
      prior: pseudo-counts of success and failure, both positive.
    """
    self.names = tuple(sorted(set(names)))
    if not self.names:
      raise errors.InputError('A curriculum needs at least one domain.')
    if not 0 <= decay <= 1:
      raise errors.InputError(f'{decay=} must be in [0, 1].')
    if not 0 < explore <= 1:
      raise errors.InputError(
          f'{explore=} must be in (0, 1]: at 0 a retired domain is lost.'
      )
    if min(prior) <= 0:
      raise errors.InputError(f'{prior=} must be positive.')
    self._decay = decay
    self._explore = explore
    self._retire_at = retire_at
    self._evidence = evidence
    self._prior = tuple(map(float, prior))
    self._domains = {name: self._entry() for name in self.names}

  def update(self, outcomes: Mapping[str, Iterable[float]]):
    """Ends a step: forgets a little everywhere, then counts what was seen.

    Args:
      outcomes: by name, the raw task scores of this step in [0, 1], before
        any shaping; only verdicts that are values. A score between 0 and 1
        counts as part success, part failure.

    Raises:
      errors.InputError: an unknown name, or a score outside [0, 1].
    """
    seen = {k: np.asarray(list(v), np.float64) for k, v in outcomes.items()}
    for name, values in seen.items():
      if name not in self._domains:
        raise errors.InputError(
            f'Unknown domain {name!r}; the curriculum has {self.names}.'
        )
      if not ((values >= 0) & (values <= 1)).all():
        raise errors.InputError(
            f'Scores of {name!r} must be in [0, 1]; rescale {values} by the '
            "verdicts' low and high, and leave out what is not a value."
        )
    for name in self.names:
      entry, values = self._domains[name], seen.get(name, np.zeros(0))
      success = float(values.sum())
      entry['success'] = self._decay * entry['success'] + success
      entry['failure'] = (
          self._decay * entry['failure'] + values.size - success
      )
      entry['count'] += values.size
      entry['total'] += success

  def weights(self) -> dict[str, float]:
    """Shares by name, summing to 1, none below `explore / D`."""
    worth = {name: self._worth(name) for name in self.names}
    total, size = sum(worth.values()), len(self.names)
    if not total:  # everything retired
      return dict.fromkeys(self.names, 1 / size)
    rest = 1 - self._explore
    return {
        name: self._explore / size + rest * u / total
        for name, u in worth.items()
    }

  def report(self) -> dict:
    """Numbers for the log, corrected for what was sampled.

    Returns:
      `domains`: by name, `p` (posterior mean), `share` (of the next step),
      `effective_share` (of all outcomes so far), `count`, `retired`.
      `p_uniform`: mean of `p` over domains, as if all were sampled equally;
      `p_sampled`: mean score of all outcomes so far, which adaptive sampling
      biases towards p = 0.5 (None before the first).
    """
    share = self.weights()
    count = sum(e['count'] for e in self._domains.values())
    domains = {}
    for name in self.names:
      entry, (a, b) = self._domains[name], self._posterior(name)
      domains[name] = {
          'p': a / (a + b),
          'share': share[name],
          'effective_share': entry['count'] / count if count else 0.0,
          'count': entry['count'],
          'retired': self._retired(name),
      }
    total = sum(e['total'] for e in self._domains.values())
    return {
        'domains': domains,
        'p_uniform': sum(d['p'] for d in domains.values()) / len(domains),
        'p_sampled': total / count if count else None,
    }

  def state(self) -> dict:
    """All that decides the next weights, as JSON keyed by name."""
    return {
        'version': VERSION,
        'domains': {k: dict(v) for k, v in sorted(self._domains.items())},
    }

  def set_state(self, state: Mapping):
    """Continues from `state`; a domain that it lacks joins at the prior."""
    if state['version'] != VERSION:
      raise errors.InputError(
          f'The curriculum has version {state["version"]}, this code reads '
          f'{VERSION}.'
      )
    self._domains = {
        name: dict(state['domains'].get(name, self._entry()))
        for name in self.names
    }

  def _entry(self) -> dict:
    return {'success': 0.0, 'failure': 0.0, 'count': 0, 'total': 0.0}

  def _posterior(self, name: str) -> tuple[float, float]:
    entry = self._domains[name]
    return (
        self._prior[0] + entry['success'],
        self._prior[1] + entry['failure'],
    )

  def _retired(self, name: str) -> bool:
    entry, (a, b) = self._domains[name], self._posterior(name)
    recent = entry['success'] + entry['failure']
    return recent >= self._evidence and a / (a + b) >= self._retire_at

  def _worth(self, name: str) -> float:
    if self._retired(name):
      return 0.0
    a, b = self._posterior(name)
    return a * b / ((a + b) * (a + b + 1))
