"""A running scale per domain, so that no domain shouts the others down.

Rewards are centred per prompt first; their spread then differs between domains
by orders of magnitude. Each domain keeps a decayed q-th absolute moment of its
centred rewards c_1, c_2, ... and the decayed count beside it,

  S <- g^n S + sum_i |c_i|^q,   W <- g^n W + n   (n new values, decay g)

  scale = max((S / W)^(1/q), floor),   advantage = clip(c / scale, +-clip).

q = 2 divides by a running standard deviation, as PopArt (van Hasselt et al.,
2016, arXiv:1602.07714) and per-task advantage scales do; q = 1 gives every
domain the same mean |advantage| whatever the shape of its rewards. Dividing
both sums by the same decay leaves no start-up bias.
"""

from collections.abc import Mapping

import numpy as np

from rlpost import errors

VERSION = 1


class RewardScale:
  """Running scales, by domain name; a domain that is new joins by itself."""

  def __init__(
      self,
      *,
      decay: float = 0.999,
      floor: float = 1e-5,
      power: int = 2,
      clip: float = 5.0,
  ):
    """Scales that have seen nothing.

    Args:
      decay: per value of a domain; 0.999 remembers about 1000 of them. A
        domain that is not sampled forgets nothing.
      floor: least scale, in reward units.
      power: 2 (standard deviation) or 1 (mean absolute value).
      clip: bound on |advantage|, after scaling.
    """
    if not 0 < decay <= 1:
      raise errors.InputError(f'{decay=} must be in (0, 1].')
    if not floor > 0:
      raise errors.InputError(f'{floor=} must be positive.')
    if power not in (1, 2):
      raise errors.InputError(f'{power=} must be 1 or 2.')
    if not clip > 0:
      raise errors.InputError(f'{clip=} must be positive.')
    self._decay = decay
    self._floor = floor
    self._power = power
    self._clip = clip
    self._domains = {}

  def update(
      self,
      domain: str,
      centred: np.ndarray,
      valid: np.ndarray | None = None,
  ) -> np.ndarray:
    """Adds the centred rewards of one or more groups of a domain.

    Pass the groups that train: a group without spread would only dilute the
    scale of those that have some.

    Args:
      domain: the domain's name.
      centred: any shape; what the policy gradient is to be weighted with.
      valid: boolean like `centred`; False where there is no verdict.

    Returns:
      Boolean like `centred`: the entries used. A valid entry that is not
      finite is left out and counted in `nonfinite`.
    """
    centred, usable = _usable(centred, valid)
    entry = self._domains.setdefault(
        domain, {'moment': 0.0, 'weight': 0.0, 'count': 0, 'nonfinite': 0}
    )
    values = np.abs(centred[usable]) ** self._power
    if values.size:
      keep = self._decay**values.size
      entry['moment'] = keep * entry['moment'] + float(values.sum())
      entry['weight'] = keep * entry['weight'] + values.size
      entry['count'] += values.size
    asked = centred.size if valid is None else int(np.sum(valid))
    entry['nonfinite'] += asked - int(usable.sum())
    return usable

  def scale(self, domain: str) -> float:
    """What to divide by, in reward units; 1 for a domain not yet seen."""
    entry = self._domains.get(domain)
    if entry is None or not entry['count']:
      return 1.0
    spread = (entry['moment'] / entry['weight']) ** (1 / self._power)
    return max(spread, self._floor)

  def advantage(
      self,
      domain: str,
      centred: np.ndarray,
      valid: np.ndarray | None = None,
  ) -> np.ndarray:
    """Scaled and clipped advantages, fp32; 0 where there is no number."""
    centred, usable = _usable(centred, valid)
    scaled = np.where(usable, centred, 0.0) / self.scale(domain)
    return np.clip(scaled, -self._clip, self._clip).astype(np.float32)

  def report(self) -> dict[str, dict]:
    """Per domain: `scale`, `count` of values, `nonfinite` left out."""
    return {
        name: {
            'scale': self.scale(name),
            'count': entry['count'],
            'nonfinite': entry['nonfinite'],
        }
        for name, entry in sorted(self._domains.items())
    }

  def state(self) -> dict:
    """All that decides the next scale, as JSON keyed by domain name."""
    return {
        'version': VERSION,
        'power': self._power,
        'domains': {k: dict(v) for k, v in sorted(self._domains.items())},
    }

  def set_state(self, state: Mapping):
    """Continues from `state`.

    Raises:
      errors.InputError: the state was kept with another power.
    """
    found = state['version'], state['power']
    if found != (VERSION, self._power):
      raise errors.InputError(
          f'The state has (version, power) {found}; this scale needs '
          f'{(VERSION, self._power)}.'
      )
    self._domains = {k: dict(v) for k, v in state['domains'].items()}


def _usable(centred, valid):
  centred = np.asarray(centred, np.float64)
  usable = np.isfinite(centred)
  if valid is not None:
    valid = np.asarray(valid, bool)
    if valid.shape != centred.shape:
      raise ValueError(f'{valid.shape=} must equal {centred.shape=}.')
    usable &= valid
  return centred, usable
