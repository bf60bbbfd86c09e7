"""The figure of a run: rewards, held-out results, health."""

import math
from collections.abc import Mapping, Sequence

# Okabe and Ito's palette, which colour-blind readers tell apart: what is
# trained on is blue, what is held out is vermilion, in every panel.
TRAINED, TRAINED_RAW, HELD_OUT = '#0072B2', '#BBD3E4', '#D55E00'
INK, QUIET, RULE = '#222222', '#6B6B6B', '#E3E3E3'
SAMPLED, GREEDY = 'heldout', 'heldout_greedy'  # The keys of a result.
LEFT, RIGHT = 0.055, 0.985  # Margins of the page.

STYLE = {
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


def draw(rows: Sequence[Mapping], results: Mapping[int, Mapping], title: str):
  """The figure: a headline, the mean, two health panels, a panel per domain.

  To be called, and the figure to be saved, with matplotlib in `STYLE`.

  Args:
    rows: lines of `metrics.jsonl`.
    results: by step, as in `eval/<step>.json`.
    title: of the whole.
  """
  from matplotlib import figure as figures

  names = sorted(
      set().union(
          *(r.get('domains', {}) for r in rows),
          *(r[SAMPLED]['domains'] for r in results.values()),
      )
  )
  columns = _columns(len(names))
  lines = math.ceil(len(names) / columns)
  small = 0.95 + (0.55 if columns > 4 else 0.45)  # With its title.
  height = 3.65 + (0.6 + small * lines) * bool(lines)
  figure = figures.Figure(figsize=(10, height))

  def up(inches):
    """A distance from the top, as matplotlib counts."""
    return 1 - inches / height

  _headline(figure, rows, results, title, up)
  grid = figure.add_gridspec(
      2, 3, left=LEFT, right=RIGHT, bottom=up(3.25), top=up(1.0),
      wspace=0.22, hspace=0.55,
  )
  last = max([r['step'] for r in rows] + list(results) + [1])
  limits = _reward_limits(rows, results)
  mean = figure.add_subplot(grid[:, :2])
  mean.set_title('Mean reward', fontweight='bold')
  _reward_panel(
      mean, _series(rows, lambda r: r.get('reward')),
      _points(results, lambda kind: kind['mean']), last, limits, large=True,
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
    figure.text(LEFT, up(3.9), 'By domain', fontsize=9.5, fontweight='bold')
    cells = figure.add_gridspec(
        lines, columns, left=LEFT, right=RIGHT, bottom=0.35 / height,
        top=up(4.25 + (0.12 if columns > 4 else 0)), wspace=0.14,
        hspace=0.55 if columns > 4 else 0.45,
    )
  for i, name in enumerate(names):
    axes = figure.add_subplot(cells[i // columns, i % columns])
    _domain_panel(axes, name, rows, results, last, limits, columns)
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


def _short(text: str, room: int) -> str:
  return text if len(text) <= room else text[: room - 1].rstrip() + '…'


def _headline(figure, rows, results, title, up):
  from matplotlib import lines

  figure.text(LEFT, up(0.34), _short(title, 32), fontsize=14, fontweight='bold')
  facts = []
  if len(results) > 1:
    first, *_, final = (r[SAMPLED]['mean'] for r in results.values())
    if None not in (first['mean'], final['mean']):
      facts.append(
          f'held-out mean {first["mean"]:.2f} → {final["mean"]:.2f} '
          f'(95 % interval {final["low"]:.2f} to {final["high"]:.2f})'
      )
  if rows:
    facts.append(f'{rows[-1]["step"]} steps')
    facts.append(f'{rows[-1].get("cpu_s") or 0:,.0f} CPU s')
  figure.text(LEFT, up(0.6), '   ·   '.join(facts), color=QUIET, fontsize=9)
  handles = [
      lines.Line2D([], [], color=TRAINED, lw=1.8, label='training tasks'),
      lines.Line2D([], [], color=HELD_OUT, marker='o', ms=5, lw=0,
                   label='held-out, T = 1, with 95 % interval'),
      lines.Line2D([], [], color=HELD_OUT, marker='o', ms=5, lw=0,
                   mfc='white', label='held-out, greedy'),
  ]
  figure.legend(
      handles=handles, loc='upper right', ncols=3, frameon=False, fontsize=8.5,
      bbox_to_anchor=(0.99, up(0.12)), handletextpad=0.5,
      columnspacing=1.4,
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
  for kind in (SAMPLED, GREEDY):
    pairs = [(s, get(r[kind])) for s, r in results.items() if kind in r]
    found[kind] = [(s, e) for s, e in pairs if e and e['mean'] is not None]
  return found


def _reward_limits(rows, results) -> tuple[float, float]:
  """[0, 1], or wider where rewards are."""
  values = [0.0, 1.0]
  for row in rows:
    values += [d.get('reward') for d in row.get('domains', {}).values()]
  for result in results.values():
    for e in result[SAMPLED]['domains'].values():
      values += [e['low'], e['high']]
  values = [v for v in values if isinstance(v, int | float)]
  return min(values), max(values)


def _smooth(pairs) -> list[float]:
  """Centred means over about a tenth of the run, one-sided at its ends."""
  half = max(len(pairs) // 20, 1) if len(pairs) >= 8 else 0
  out = []
  for i in range(len(pairs)):
    near = [v for _, v in pairs[max(i - half, 0) : i + half + 1]]
    out.append(sum(near) / len(near))
  return out


def _trend(axes, pairs, width):
  steps = [s for s, _ in pairs]
  axes.plot(steps, [v for _, v in pairs], color=TRAINED_RAW, lw=width * 0.55)
  axes.plot(
      steps, _smooth(pairs), color=TRAINED, lw=width, solid_capstyle='round'
  )


def _reward_panel(axes, pairs, points, last, limits, *, large):
  _trend(axes, pairs, 1.9 if large else 1.2)
  # Side by side, since the two results of a step are often nearly equal.
  shift = last * (0.007 if large else 0.02)
  sides = [(GREEDY, shift, 'white'), (SAMPLED, -shift, HELD_OUT)]
  for kind, offset, face in sides:
    found = [e for _, e in points[kind]]
    axes.errorbar(
        [s + offset for s, _ in points[kind]],
        [e['mean'] for e in found],
        yerr=[
            [max(e['mean'] - e['low'], 0) for e in found],
            [max(e['high'] - e['mean'], 0) for e in found],
        ],
        fmt='o', color=HELD_OUT, mfc=face, mew=1.1, lw=1.1,
        ms=5.5 if large else 4, clip_on=False, zorder=4,
    )
  low, high = limits
  axes.set_ylim(low - 0.02 * (high - low), high + 0.04 * (high - low))
  if limits == (0.0, 1.0):
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1] if large else [0, 0.5, 1])
  _steps_axis(axes, last, margin=0.03 if large else 0.06, all_ticks=large)


def _steps_axis(axes, last, margin=0.03, all_ticks=False):
  axes.set_xlim(-margin * last, (1 + margin) * last)
  if all_ticks:
    axes.xaxis.get_major_locator().set_params(nbins=8, integer=True)
  else:
    axes.set_xticks(sorted({0, last // 2, last}))


def _health_panel(axes, title, unit, pairs, last):
  axes.set_title(title, fontweight='bold')
  axes.set_title(unit, loc='right', color=QUIET, fontsize=8)
  _trend(axes, pairs, 1.4)
  _steps_axis(axes, last)
  axes.set_ylim(0, 1.15 * (max((v for _, v in pairs), default=0) or 1))
  axes.yaxis.get_major_locator().set_params(nbins=3)


def _domain_panel(axes, name, rows, results, last, limits, columns):
  pairs = _series(
      rows, lambda r: r.get('domains', {}).get(name, {}).get('reward')
  )
  points = _points(results, lambda kind: kind['domains'].get(name))
  # Before and after only: there is no room for what lies between.
  points = {k: p if len(p) < 3 else [p[0], p[-1]] for k, p in points.items()}
  _reward_panel(axes, pairs, points, last, limits, large=False)
  narrow = columns > 4  # The change goes under the name, not beside it.
  room = {1: 80, 2: 60, 3: 32, 4: 20, 5: 26, 6: 21}[columns]
  axes.set_title(
      _short(name.replace('_', ' '), room), fontsize=8.5,
      pad=15 if narrow else 5,
  )
  found = points[SAMPLED]
  if len(found) > 1:
    change = f'{found[0][1]["mean"]:.2f} → {found[-1][1]["mean"]:.2f}'
    axes.annotate(
        change, (0 if narrow else 1, 1), (0, 5), fontsize=8 if narrow else 8.5,
        xycoords='axes fraction', textcoords='offset points', color=HELD_OUT,
        ha='left' if narrow else 'right', va='baseline',
    )
