"""The picture of a run, `curves.png`: rewards, held-out results, health."""

import io
import math
import os
from collections.abc import Mapping, Sequence

from etils import epath

from rlpost.evaluation import report

# Okabe and Ito's palette, which colour-blind readers tell apart: what is
# trained on is blue, what is held out is vermilion, in every panel.
TRAINED, TRAINED_RAW, HELD_OUT = '#0072B2', '#BBD3E4', '#D55E00'
INK, QUIET, RULE = '#222222', '#6B6B6B', '#E3E3E3'

_STYLE = {
    'font.family': 'sans-serif',
    'font.sans-serif': ['DejaVu Sans'],
    'font.size': 8.5,
    'text.color': INK,
    'axes.edgecolor': '#9A9A9A',
    'axes.labelcolor': QUIET,
    'axes.linewidth': 0.6,
    'axes.spines.right': False,
    'axes.spines.top': False,
    'axes.grid': True,
    'axes.grid.axis': 'y',
    'axes.axisbelow': True,
    'axes.titlelocation': 'left',
    'axes.titlesize': 9.5,
    'axes.titlepad': 7,
    'grid.color': RULE,
    'grid.linewidth': 0.6,
    'xtick.color': '#9A9A9A',
    'ytick.color': '#9A9A9A',
    'xtick.labelcolor': QUIET,
    'ytick.labelcolor': QUIET,
    'xtick.major.size': 2.5,
    'ytick.major.size': 0,
    'xtick.major.width': 0.6,
    'figure.facecolor': 'white',
    'savefig.facecolor': 'white',
}


def curves_png(workdir: os.PathLike | str) -> epath.Path:
  """Draws `curves.png` from `metrics.jsonl` and `eval/*.json`.

  Returns:
    Its path in the workdir. A run without steps or results gets empty axes.
  """
  import matplotlib
  from matplotlib.backends import backend_agg

  workdir = epath.Path(workdir)
  rows = report.read_rows(workdir / 'metrics.jsonl')
  results = report.read_results(workdir)
  with matplotlib.rc_context(_STYLE):
    figure = draw(rows, results, title=workdir.absolute().name)
    backend_agg.FigureCanvasAgg(figure)
    image = io.BytesIO()
    figure.savefig(image, format='png', dpi=160)
  path = workdir / 'curves.png'
  temporary = path.with_name(path.name + '.tmp')
  temporary.write_bytes(image.getvalue())
  temporary.replace(path)
  return path


def draw(rows: Sequence[Mapping], results: Mapping[int, Mapping], title: str):
  """The figure: a headline, the mean, two health panels, a panel per domain.

  Args:
    rows: lines of `metrics.jsonl`.
    results: by step, as `report.read_results` gives them.
    title: of the whole.
  """
  from matplotlib import figure as figures

  names = sorted(
      set().union(
          *(r.get('domains', {}) for r in rows),
          *(r[report.SAMPLED]['domains'] for r in results.values()),
      )
  )
  columns = _columns(len(names))
  lines = math.ceil(len(names) / columns)
  heights = [0.78, 2.75] + [0.5, 1.35 * lines] * bool(lines)
  figure = figures.Figure(figsize=(10, sum(heights) + 0.35))
  top = 1.0
  bands = []
  for height in heights:
    bottom = top - height / figure.get_figheight()
    bands.append((bottom, top))
    top = bottom
  _headline(figure, rows, results, title)
  grid = figure.add_gridspec(
      2, 3, left=0.055, right=0.985, bottom=bands[1][0] + 0.02,
      top=bands[1][1] - 0.02, wspace=0.22, hspace=0.55,
  )
  last = max([r['step'] for r in rows] + list(results) + [1])
  low, high = _reward_limits(rows, results)
  mean = figure.add_subplot(grid[:, :2])
  mean.set_title('Mean reward', fontweight='bold')
  _reward_panel(
      mean, _series(rows, lambda r: r.get('reward')),
      _points(results, lambda kind: kind['mean']), last, (low, high), 5.5,
  )
  mean.set_xlabel('step', loc='right')
  _health_panel(
      figure.add_subplot(grid[0, 2]), 'Entropy', 'nats per token',
      _series(rows, lambda r: r.get('entropy')), last,
  )
  _health_panel(
      figure.add_subplot(grid[1, 2]), 'Speed', 'tokens per CPU second',
      _speed(rows), last,
  )
  if lines:
    figure.text(
        0.055, bands[2][0] + 0.012, 'By domain', fontsize=9.5,
        fontweight='bold', va='bottom',
    )
    small = figure.add_gridspec(
        lines, columns, left=0.055, right=0.985,
        bottom=0.42 / figure.get_figheight(), top=bands[3][1] - 0.035,
        wspace=0.14, hspace=0.55,
    )
  for i, name in enumerate(names):
    axes = figure.add_subplot(small[i // columns, i % columns])
    _domain_panel(axes, name, rows, results, last, (low, high))
    axes.tick_params(
        labelleft=i % columns == 0, labelbottom=i + columns >= len(names)
    )
  return figure


def _columns(count: int) -> int:
  """Columns of small panels, so that few are left empty."""
  if count <= 4:
    return max(count, 1)
  choices = (3, 4) if count <= 8 else (4, 5) if count <= 20 else (6,)
  return min(choices, key=lambda c: (-count % c, -c))


def _headline(figure, rows, results, title):
  inch = 1 / figure.get_figheight()
  figure.text(
      0.055, 1 - 0.34 * inch, title, fontsize=14, fontweight='bold',
      va='baseline',
  )
  facts = []
  if len(results) > 1:
    first, *_, final = (r[report.SAMPLED]['mean'] for r in results.values())
    if None not in (first['mean'], final['mean']):
      facts.append(
          f'held-out mean {first["mean"]:.2f} → {final["mean"]:.2f} '
          f'(95 % interval {final["low"]:.2f} to {final["high"]:.2f})'
      )
  if rows:
    facts.append(f'{rows[-1]["step"]} steps')
    facts.append(f'{rows[-1].get("cpu_s") or 0:,.0f} CPU s')
  figure.text(
      0.055, 1 - 0.58 * inch, '   ·   '.join(facts), color=QUIET, fontsize=9,
      va='baseline',
  )
  from matplotlib import lines

  handles = [
      lines.Line2D([], [], color=TRAINED, lw=1.8, label='training tasks'),
      lines.Line2D([], [], color=HELD_OUT, marker='o', ms=5, lw=1,
                   label='held-out, T = 1'),
      lines.Line2D([], [], color=HELD_OUT, marker='o', ms=5, lw=0,
                   mfc='white', label='held-out, greedy'),
  ]
  figure.legend(
      handles=handles, loc='upper right', ncols=3, frameon=False, fontsize=8.5,
      bbox_to_anchor=(0.99, 1 - 0.12 * inch), handletextpad=0.6,
      columnspacing=1.6,
  )


def _series(rows, get) -> list[tuple[int, float]]:
  pairs = [(row['step'], get(row)) for row in rows]
  return [(s, v) for s, v in pairs if isinstance(v, int | float)]


def _speed(rows) -> list[tuple[int, float]]:
  """Tokens per CPU second; a step after a restart is left out."""
  out = []
  for before, row in zip(rows, rows[1:], strict=False):
    spent = (row.get('cpu_s') or 0) - (before.get('cpu_s') or 0)
    if row['step'] == before['step'] + 1 and spent > 0 and row.get('tokens'):
      out.append((row['step'], row['tokens'] / spent))
  return out


def _points(results, get) -> dict[str, list[tuple[int, Mapping]]]:
  """(step, estimate) of the sampled and the greedy results."""
  found = {}
  for kind in (report.SAMPLED, report.GREEDY):
    pairs = [(s, get(r[kind])) for s, r in results.items() if kind in r]
    found[kind] = [(s, e) for s, e in pairs if e and e['mean'] is not None]
  return found


def _reward_limits(rows, results) -> tuple[float, float]:
  """[0, 1], or wider where rewards are."""
  values = [0.0, 1.0]
  for row in rows:
    values += [d.get('reward') for d in row.get('domains', {}).values()]
  for result in results.values():
    for e in result[report.SAMPLED]['domains'].values():
      values += [e['low'], e['high']]
  values = [v for v in values if isinstance(v, int | float)]
  return min(values), max(values)


def _smooth(pairs) -> list[float]:
  """Centred means over about a tenth of the run, shorter at the ends."""
  half = max(len(pairs) // 20, 1) if len(pairs) >= 8 else 0
  out = []
  for i in range(len(pairs)):
    reach = min(half, i, len(pairs) - 1 - i)
    near = [v for _, v in pairs[i - reach : i + reach + 1]]
    out.append(sum(near) / len(near))
  return out


def _trend(axes, pairs, width):
  steps = [s for s, _ in pairs]
  axes.plot(steps, [v for _, v in pairs], color=TRAINED_RAW, lw=width * 0.55)
  axes.plot(
      steps, _smooth(pairs), color=TRAINED, lw=width, solid_capstyle='round'
  )


def _reward_panel(axes, pairs, points, last, limits, size):
  _trend(axes, pairs, 1.9 if size > 5 else 1.2)
  shift = last * (0.007 if size > 5 else 0.02)
  for kind, offset, face in (
      (report.GREEDY, shift, 'white'), (report.SAMPLED, -shift, HELD_OUT),
  ):
    found = points[kind]
    if not found:
      continue
    means = [e['mean'] for _, e in found]
    axes.errorbar(
        [s + offset for s, _ in found], means,
        yerr=[
            [max(m - e['low'], 0) for m, (_, e) in zip(means, found, strict=True)],
            [max(e['high'] - m, 0) for m, (_, e) in zip(means, found, strict=True)],
        ],
        fmt='o', color=HELD_OUT, mfc=face, mew=1.1, ms=size, lw=1.1,
        clip_on=False, zorder=4,
    )
  low, high = limits
  pad = 0.04 * (high - low)
  axes.set_ylim(low - pad * 0.5, high + pad)
  axes.set_xlim(-0.03 * last, 1.03 * last)
  if limits == (0.0, 1.0):
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1] if size > 5 else [0, 0.5, 1])
  axes.xaxis.get_major_locator().set_params(
      nbins=8 if size > 5 else 3, integer=True
  )


def _health_panel(axes, title, unit, pairs, last):
  axes.set_title(title, fontweight='bold')
  axes.set_title(unit, loc='right', color=QUIET, fontsize=8)
  _trend(axes, pairs, 1.4)
  axes.set_xlim(-0.03 * last, 1.03 * last)
  axes.set_ylim(0, 1.15 * max([v for _, v in pairs] + [1e-9]))
  axes.yaxis.get_major_locator().set_params(nbins=3)
  axes.xaxis.get_major_locator().set_params(nbins=5, integer=True)


def _domain_panel(axes, name, rows, results, last, limits):
  pairs = _series(
      rows, lambda r: r.get('domains', {}).get(name, {}).get('reward')
  )
  points = _points(results, lambda kind: kind['domains'].get(name))
  _reward_panel(axes, pairs, points, last, limits, 4)
  axes.set_title(name.replace('_', ' '), fontsize=8.5, pad=5)
  found = points[report.SAMPLED]
  if len(found) > 1:
    change = f'{found[0][1]["mean"]:.2f} → {found[-1][1]["mean"]:.2f}'
    axes.set_title(change, loc='right', fontsize=8.5, color=HELD_OUT, pad=5)
