"""What a run says of itself: a step's numbers, held-out results, the end."""

import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from rlpost.data import packing
from rlpost.evaluation import evaluator, report
from rlpost.training import credit

HELDOUT = 1  # the purpose folded into the root key; see `loop`


def heldout(run, tasks, version, display, title, note=lambda *_: None) -> dict:
  """Evaluates tasks {domain: tasks}; a result as `report` reads it."""
  settings = run.evaluation
  told = [-1]

  def progress(scored, wanted, mean):
    note()
    if 5 * scored // wanted > told[0]:
      told[0] = 5 * scored // wanted
      display.note(f'{title}: {scored} of {wanted} answers, reward {mean:.3f}')

  with display.phase(title):
    result = evaluator.evaluate(
        run.evaluations, run.policy, version, tasks, run.tasks.environments,
        samples=settings.samples, temperature=settings.temperature,
        root=jax.random.fold_in(jax.random.key(run.config.seed), HELDOUT),
        progress=progress,
    )
  return evaluator.to_json(result)


def finished(workdir, steps: int) -> bool:
  """Whether the workdir holds a run of so many steps, to its end."""
  path = epath.Path(workdir) / 'summary.json'
  return path.exists() and json.loads(path.read_text())['steps'] >= steps


def show(workdir, display) -> None:
  """Prints the table of a finished run."""
  workdir = epath.Path(workdir)
  results, constants = report.read_results(workdir), None
  if (workdir / 'constants.json').exists():
    constants = json.loads((workdir / 'constants.json').read_text())
  table = report.heldout_table(
      results[min(results)], results[max(results)], constants
  )
  display.note(f'{table}\ncurves: {workdir / "curves.png"}')


def write_json(path: epath.Path, value) -> None:
  """Writes a file whole or not at all."""
  part = path.with_name(path.name + '.tmp')
  part.write_text(json.dumps(value, indent=1, sort_keys=True) + '\n')
  part.replace(path)


def shown(groups):
  """One transcript per domain."""
  first = {}
  for group in groups:
    first.setdefault(group.task.domain, group.trajectories[0])
  return list(first.values())


def step_row(
    groups, chosen: credit.Credit, learned, run, shares: Mapping[str, float]
) -> dict[str, Any]:
  """What `metrics.jsonl` says of a step; `shares` are of open domains."""
  domains = {}
  scales, waiting = run.scale.report(), run.lengths.report()
  beliefs = run.curriculum.report()['domains']
  kept = {g.id for g in chosen.groups}
  for name in sorted(run.tasks.trained):
    own = [g for g in groups if g.task.domain == name]
    verdicts = [t.verdict for g in own for t in g.trajectories]
    values = [v.value for v in verdicts if v.valid]
    domains[name] = {
        'reward': float(np.mean(values)) if values else None,
        'groups': len(own), 'trained_groups': sum(g.id in kept for g in own),
        'answers': len(verdicts),
        'invalid': sum(v.status == 'invalid' for v in verdicts),
        'infra': sum(v.status == 'infra' for v in verdicts),
        'share': shares.get(name, 0.0), 'waiting': waiting.get(name, 0),
        'belief': beliefs[name]['p'],
        'scale': scales[name]['scale'] if name in scales else 1.0,
    }
  trajectories = [t for g in groups for t in g.trajectories]
  values = [t.verdict.value for t in trajectories if t.verdict.valid]
  status = packing.status_counts(groups)
  zero = {'entropy': None, 'logp_gap_max': 0.0}
  learned = {
      k: float(v) for k, v in (zero | learned).items()
      if k not in ('finite', 'sound_MB') and v is not None
  }
  return {
      'reward': float(np.mean(values)) if values else None,
      'entropy': None,
      'tokens': sum(int(t.sampled.sum()) for t in trajectories),
      'domains': domains, 'trained_groups': len(chosen.groups),
      'drawn_groups': len(groups), 'update_weight': chosen.weight, **status,
      **learned,
  }
