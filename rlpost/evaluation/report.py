"""What a finished run shows: a picture, a table, a summary.

A *result* is `{'heldout': {'domains': {name: {mean, low, high, n, invalid,
infra}}, 'mean': {mean, low, high}}, 'heldout_greedy': ...}`: held-out means
with 95 % intervals, sampled at temperature 1 and greedy. `eval/<step>.json` in
the workdir is one, with its `step`.
"""

import io
import json
import os
from collections.abc import Mapping
from typing import Any

from etils import epath

from rlpost import types
from rlpost.evaluation import curves, statistics

SAMPLED, GREEDY = curves.SAMPLED, curves.GREEDY
_DOMAIN_KEYS = ('mean', 'low', 'high', 'n', 'invalid', 'infra')
_MEAN_KEYS = ('mean', 'low', 'high')


def result_json(estimates: Mapping[str, statistics.Estimate]) -> dict[str, Any]:
  """One side of a result: estimates by domain, and their mean."""
  mean = statistics.macro_mean(estimates.values())
  return {
      'domains': {
          name: {key: getattr(e, key) for key in _DOMAIN_KEYS}
          for name, e in estimates.items()
      },
      'mean': {key: getattr(mean, key) for key in _MEAN_KEYS},
  }


def read_rows(path: os.PathLike | str) -> list[dict[str, Any]]:
  """The JSON objects of a .jsonl file; a line that a kill tore is left out."""
  path = epath.Path(path)
  rows = []
  for line in path.read_text().splitlines() if path.exists() else ():
    try:
      rows.append(json.loads(line))
    except ValueError:
      continue
  return rows


def read_results(workdir: os.PathLike | str) -> dict[int, dict[str, Any]]:
  """The results in `eval/` by step, in increasing order."""
  folder = epath.Path(workdir) / 'eval'
  found = {}
  for path in folder.glob('*.json') if folder.exists() else ():
    if path.stem.isdigit():
      found[int(path.stem)] = json.loads(path.read_text())
  return dict(sorted(found.items()))


def curves_png(workdir: os.PathLike | str) -> epath.Path:
  """Draws `curves.png` from `metrics.jsonl` and `eval/*.json`.

  Returns:
    Its path in the workdir. A run without steps or results gets empty axes.
  """
  import matplotlib
  from matplotlib.backends import backend_agg

  workdir = epath.Path(workdir)
  rows = read_rows(workdir / 'metrics.jsonl')
  results = read_results(workdir)
  with matplotlib.rc_context(curves.STYLE):
    figure = curves.draw(rows, results, title=workdir.absolute().name)
    backend_agg.FigureCanvasAgg(figure)
    image = io.BytesIO()
    figure.savefig(image, format='png', dpi=160)
  path = workdir / 'curves.png'
  temporary = path.with_name(path.name + '.tmp')
  temporary.write_bytes(image.getvalue())
  temporary.replace(path)
  return path


def _interval(e: Mapping | None) -> str:
  if not e or e['mean'] is None:
    return '-'
  return f'{e["mean"]:.2f} [{e["low"]:.2f}, {e["high"]:.2f}]'


def result_rows(result: Mapping) -> list[dict[str, Any]]:
  """One result as rows of a table: a row per domain, then their mean."""
  kinds = [(SAMPLED, 'T = 1'), (GREEDY, 'greedy')]
  kinds = [k for k in kinds if k[0] in result]
  counts = result[SAMPLED]['domains']
  sides = {
      name: (
          [result[kind]['domains'].get(name) for kind, _ in kinds],
          {k: own[k] for k in ('n', 'invalid', 'infra')},
      )
      for name, own in counts.items()
  }
  sides['mean of domains'] = (
      [result[kind]['mean'] for kind, _ in kinds],
      {k: sum(own[k] for own in counts.values())
       for k in ('n', 'invalid', 'infra')},
  )
  labels = [label for _, label in kinds]
  return [
      {'held-out': name}
      | dict(zip(labels, map(_interval, found), strict=True)) | own
      for name, (found, own) in sides.items()
  ]


def paired(before: Mapping, after: Mapping) -> dict[str, dict[str, Any]]:
  """What changed on the same tasks, sampled at T = 1, by domain.

  Returns:
    {domain: {mean, low, high, p, p_holm, tasks}}: after minus before, with
    the sign-flip test of `statistics.compare` and its p-value corrected over
    domains (Holm, 1979). Empty where a result has no `tasks`.
  """
  sides = [r[SAMPLED].get('tasks', {}) for r in (before, after)]
  found = {
      name: statistics.compare(*(_verdicts(side[name]) for side in sides))
      for name in sorted(set(sides[0]) & set(sides[1]))
  }
  holm = statistics.holm({name: c.p for name, c in found.items()})
  keys = ('mean', 'low', 'high', 'p', 'tasks')
  return {
      name: {k: getattr(c, k) for k in keys} | {'p_holm': holm[name]}
      for name, c in found.items()
  }


def _verdicts(tasks) -> dict[str, list[types.Verdict]]:
  return {
      key: [
          types.Verdict(v) if isinstance(v, str) else types.Verdict('value', v)
          for v in found
      ]
      for key, found in tasks.items()
  }


def heldout_table(
    before: Mapping, after: Mapping, constants: Mapping | None = None
) -> str:
  """Held-out results per domain, before and after, as text.

  Means with 95 % intervals, sampled at T = 1 and greedy, the tasks behind them,
  and the verdicts that are no value.

  Args:
    before, after: results.
    constants: {domain: {'answer', 'score'}}, the best answer that never reads
      the question.

  `change` is that at T = 1, with a star where it is significant at 5 % after
  Holm's correction over domains.
  """
  changes = paired(before, after)
  kinds = [(SAMPLED, 'T = 1'), (GREEDY, 'greedy')]
  kinds = [k for k in kinds if k[0] in before and k[0] in after]
  head = ['held-out'] + ['constant'] * bool(constants)
  left = len(head) + 2 * len(kinds)
  for _, label in kinds:
    head += [f'{label} before', f'{label} after']
  head += ['change'] * bool(changes) + ['n', 'invalid', 'infra']
  lines = [head]
  sides = after[SAMPLED]['domains'], before[SAMPLED]['domains']
  for name in sorted(sides[0] | sides[1]):
    cells = [name]
    if constants:
      cells += [f'{constants[name]["score"]:.2f}' if name in constants else '-']
    for kind, _ in kinds:
      parts = (r[kind]['domains'].get(name) for r in (before, after))
      cells += [_interval(part) for part in parts]
    cells += [_change(changes.get(name))] * bool(changes)
    counts = sides[0].get(name) or sides[1][name]
    lines.append(cells + [str(counts[k]) for k in ('n', 'invalid', 'infra')])
  mean = ['mean of domains'] + [''] * bool(constants)
  for kind, _ in kinds:
    mean += [_interval(r[kind]['mean']) for r in (before, after)]
  mean += [''] * bool(changes)
  counts = after[SAMPLED]['domains'].values()
  lines.append(
      mean + [str(sum(c[k] for c in counts)) for k in ('n', 'invalid', 'infra')]
  )
  widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
  texts = [
      '  '.join(
          cell.ljust(w) if i < left else cell.rjust(w)
          for i, (cell, w) in enumerate(zip(line, widths, strict=True))
      ).rstrip()
      for line in lines
  ]
  rule = '-' * max(map(len, texts))
  return '\n'.join([texts[0], rule, *texts[1:-1], rule, texts[-1]])


def _change(found) -> str:
  if not found or found['mean'] is None:
    return '-'
  star = '*' if found['p_holm'] < 0.05 else ' '
  return f'{found["mean"]:+.2f}{star}'


def _pairs(kind, before, after) -> dict:
  """`{'domains': {name: {before, after}}, 'mean': {before, after}}`."""
  sides = {'before': before[kind], 'after': after[kind]}
  names = sorted(set().union(*(s['domains'] for s in sides.values())))
  return {
      'domains': {
          name: {
              k: {key: s['domains'][name][key] for key in _DOMAIN_KEYS}
              for k, s in sides.items()
              if name in s['domains']
          }
          for name in names
      },
      'mean': {
          k: {key: s['mean'][key] for key in _MEAN_KEYS}
          for k, s in sides.items()
      },
  }


def write_summary(
    path: os.PathLike | str,
    *,
    before: Mapping,
    after: Mapping,
    cpu_s: float,
    first_reward_cpu_s: float,
    peak_rss_bytes: int,
    steps: int,
    nondeterministic_events: int,
    state_sha256: str,
) -> dict[str, Any]:
  """Writes `summary.json` in one rename, and returns what it holds.

  Args:
    path: of the file.
    before, after: results of the first and the last step.
    cpu_s: of the run and its children, over all restarts.
    first_reward_cpu_s: when the first reward was on the screen.
    peak_rss_bytes: of the run's own process.
    steps: that were trained.
    nondeterministic_events: such as a checker that was retried.
    state_sha256: of the last checkpoint.
  """
  summary = {
      kind: _pairs(kind, before, after)
      for kind in (SAMPLED, GREEDY)
      if kind in before and kind in after
  }
  summary |= {
      'paired': paired(before, after),
      'cpu_s': cpu_s,
      'first_reward_cpu_s': first_reward_cpu_s,
      'peak_rss_bytes': peak_rss_bytes,
      'steps': steps,
      'nondeterministic_events': nondeterministic_events,
      'state_sha256': state_sha256,
  }
  path = epath.Path(path)
  temporary = path.with_name(path.name + '.tmp')
  temporary.write_text(json.dumps(summary, indent=2, allow_nan=False) + '\n')
  temporary.replace(path)
  return summary
