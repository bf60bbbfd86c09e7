"""What a mean would hide, said once: when it begins, not at every step."""

from collections.abc import Callable, Mapping
from typing import Any

SILENT_ANSWERS = 64  # answers of a domain without a reward
CUT_OFF = 0.5  # share of answers that the token budget ends


class Alarms:
  """Watches the metrics of a run.

  Args:
    say: called with a line for each trouble that begins.
  """

  def __init__(self, say: Callable[[str], Any]):
    self._say = say
    self._active: set[str] = set()
    self._silent: dict[str, int] = {}

  def look(self, row: Mapping[str, Any]) -> None:
    """Takes in what `metrics.jsonl` says of a step."""
    found = {}
    answers = row['stop'] + row['length']
    if row['length'] > CUT_OFF * max(answers, 1):
      found['cut off'] = (
          f'{row["length"]} of {answers} answers are cut off at '
          'rollout.max_new tokens and score 0; raise it.'
      )
    for name, domain in row['domains'].items():
      found |= self._domain(name, domain)
    for key, text in found.items():
      if key not in self._active:
        self._say(f'alarm at step {row["step"]}: {text}')
    self._active = set(found)

  def _domain(self, name, domain) -> dict[str, str]:
    lost = {k: domain[k] for k in ('infra', 'invalid') if domain[k]}
    text = ', '.join(f'{n} {status}' for status, n in lost.items())
    if domain['groups'] and domain['reward'] is None:
      return {f'{name} none': f'{name}: no answer could be scored ({text}).'}
    found = {}
    if lost:
      found[f'{name} lost'] = f'{name}: some answers have no score ({text}).'
    if domain['reward']:
      self._silent[name] = 0
    else:
      self._silent[name] = self._silent.get(name, 0) + domain['answers']
    if self._silent[name] >= SILENT_ANSWERS:
      found[f'{name} silent'] = (
          f'{name}: no reward in {self._silent[name]} answers; it teaches '
          'nothing until one succeeds.'
      )
    return found
