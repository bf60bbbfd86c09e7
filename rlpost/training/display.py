"""What the run is doing, at every moment.

In a terminal a live view: the phase and how long it has lasted, progress, the
numbers of the last step, a row per domain. In a pipe plain lines, one for each
change of phase and one a step, flushed.
"""

import collections
import contextlib
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

TREND = 24  # Steps in a trend line, and cells of a bar.
ROWS = 20  # Domains in the live view.
BLOCKS = '▁▂▃▄▅▆▇█'
REPORT_S = 1.0  # A phase that lasted longer says so when it ends.


def duration(seconds: float) -> str:
  """`9.7 s`, `4:05`, `1:02:03`."""
  if seconds < 100:
    return f'{seconds:.1f} s'
  minutes, s = divmod(round(seconds), 60)
  hours, m = divmod(minutes, 60)
  return f'{hours}:{m:02d}:{s:02d}' if hours else f'{m}:{s:02d}'


def number(value: Any, digits: int = 3) -> str:
  """A number of a step; a dash where there is none."""
  if not isinstance(value, int | float) or not math.isfinite(value):
    return '-'
  return f'{value:.{digits}f}'


def sparkline(values: Iterable[float | None], low=0.0, high=1.0) -> str:
  """One block a value, `low` to `high`; a space where there is none."""
  out = ''
  for value in values:
    if not isinstance(value, int | float) or not math.isfinite(value):
      out += ' '
    else:
      part = (value - low) / (high - low)
      out += BLOCKS[min(max(int(part * len(BLOCKS)), 0), len(BLOCKS) - 1)]
  return out


def text_table(rows: Sequence[Mapping[str, Any]]) -> str:
  """Rows of equal keys as aligned text: words left, numbers right."""
  names = list(rows[0])
  cells = [[_cell(row.get(name, '')) for name in names] for row in rows]
  numeric = [
      all(isinstance(row.get(name), int | float | None) for row in rows)
      for name in names
  ]
  widths = [
      max(len(line[i]) for line in [names, *cells]) for i in range(len(names))
  ]
  lines = []
  for line in [names, ['-' * w for w in widths], *cells]:
    padded = [
        text.rjust(width) if right else text.ljust(width)
        for text, width, right in zip(line, widths, numeric, strict=True)
    ]
    lines.append('  '.join(padded).rstrip())
  return '\n'.join(lines)


def _cell(value) -> str:
  if value is None:
    return '-'
  return number(value) if isinstance(value, float) else str(value)


class Phase:
  """A phase in progress; `seconds` is how long it has lasted, or lasted."""

  def __init__(self, text: str):
    self.text = text
    self._start = time.monotonic()
    self._end = None

  @property
  def seconds(self) -> float:
    return (self._end or time.monotonic()) - self._start

  def end(self) -> None:
    self._end = time.monotonic()


class Display:
  """Shows phases and steps; use it as a context manager, or close it.

  Args:
    total_steps: of the whole run.
    file: where to; default stdout. Live if it is a terminal.
    live: force one mode or the other.
  """

  def __init__(
      self,
      total_steps: int,
      file: TextIO | None = None,
      *,
      live: bool | None = None,
  ):
    self._file = file or sys.stdout
    self._total = total_steps
    self._begin = time.monotonic()
    self._phases: list[Phase] = []
    self._row: dict[str, Any] = {}
    self._trends = collections.defaultdict(
        lambda: collections.deque(maxlen=TREND)
    )
    self._last_step: tuple[int, float] | None = None
    self._step_s = collections.deque(maxlen=10)
    self._live = None
    if self._file.isatty() if live is None else live:
      self._live = _start_live(self._file, self._render)

  def __enter__(self) -> 'Display':
    return self

  def __exit__(self, *_) -> None:
    self.close()

  @contextlib.contextmanager
  def phase(self, text: str, *, quiet: bool = False) -> Iterator[Phase]:
    """Says what goes on inside the `with`, and how long it took at the end.

    Args:
      text: such as 'compiling train step'.
      quiet: without lines in a pipe, for the parts of a step.
    """
    phase = Phase(text)
    self._phases.append(phase)
    if not self._live and not quiet:
      self._line(f'{text} ...')
    try:
      yield phase
    finally:
      phase.end()
      self._phases.remove(phase)
      if not quiet and phase.seconds >= REPORT_S:
        self.note(f'{text}: {duration(phase.seconds)}')

  def step(self, metrics: Mapping[str, Any]) -> None:
    """Shows a step: `step, reward, entropy, tokens, domains` of its metrics.

    Tokens/s and the time left come from the time between calls, unless
    `tokens_per_s` is given.
    """
    now = time.monotonic()
    step = metrics['step']
    if self._last_step:
      before, then = self._last_step
      self._step_s.append((now - then) / max(step - before, 1))
    self._last_step = (step, now)
    rate = metrics.get('tokens_per_s')
    if rate is None and self._step_s and metrics.get('tokens') is not None:
      rate = metrics['tokens'] / max(self._step_s[-1], 1e-9)
    self._row = dict(metrics) | {'tokens_per_s': rate}
    for name, values in metrics.get('domains', {}).items():
      self._trends[name].append(values.get('reward'))
    if not self._live:
      self._line(self._step_text())

  def note(self, text: str) -> None:
    """Prints a line, or several, that stay."""
    if self._live:
      self._live.console.print(text, markup=False, highlight=False)
    else:
      self._line(text)

  def table(self, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Prints rows of equal keys as a titled table that stays."""
    self.note(f'{title}\n{text_table(rows)}\n' if rows else f'{title}: none')

  def close(self) -> None:
    """Ends the live view, leaving its last state on the screen."""
    if self._live:
      self._live.stop()
      self._live = None

  def _line(self, text):
    elapsed = time.monotonic() - self._begin
    print(f'[{elapsed:7.1f} s] {text}', file=self._file, flush=True)

  def _left_s(self) -> float | None:
    if not self._step_s:
      return None
    median = sorted(self._step_s)[len(self._step_s) // 2]
    return median * max(self._total - self._row['step'], 0)

  def _numbers(self) -> list[tuple[str, str]]:
    row, left_s = self._row, self._left_s()
    rate = row['tokens_per_s']
    # Supervised steps have no reward.
    supervised = row.get('reward') is None and row.get('loss') is not None
    first = 'loss' if supervised else 'reward'
    return [
        (first, number(row.get(first))),
        ('entropy', number(row.get('entropy'))),
        ('tokens/s', number(rate, 0)),
        ('left', '-' if left_s is None else duration(left_s)),
    ]

  def _step_text(self) -> str:
    parts = [f'step {self._row["step"]} of {self._total}']
    return '  '.join(parts + [f'{k} {v}' for k, v in self._numbers()])

  def _render(self):
    """The live view; called by the refresh thread, so it only reads."""
    from rich import console, progress_bar, table, text

    done = self._row.get('step', 0)
    head = table.Table.grid(expand=True)
    head.add_column(ratio=1)
    head.add_column(justify='right')
    elapsed = duration(time.monotonic() - self._begin)
    phases = list(self._phases)
    doing = text.Text('  '.join(p.text for p in phases[-1:]), style='bold')
    if phases and phases[-1].seconds >= REPORT_S:
      doing.append(f'  {duration(phases[-1].seconds)}', style='dim')
    head.add_row(doing, text.Text(f'{elapsed} elapsed', style='dim'))
    bar = progress_bar.ProgressBar(
        total=max(self._total, 1), completed=done, complete_style='cyan',
        finished_style='cyan',
    )
    whole = table.Table.grid(expand=True)  # A bar alone does not end its line.
    whole.add_row(bar)
    parts = [head, whole]
    if self._row:
      line = text.Text(f'step {done} of {self._total}')
      for name, value in self._numbers():
        line.append(f'   {name} ', style='dim')
        line.append(value, style='bold' if name == 'reward' else '')
      parts += [line, self._domains()]
    return console.Group(*parts)

  def _domains(self):
    from rich import box, table, text

    grid = table.Table(box=box.SIMPLE_HEAD, header_style='dim', pad_edge=False)
    grid.add_column('domain')
    grid.add_column('reward', justify='right')
    grid.add_column('', width=TREND // 2)
    grid.add_column(f'last {TREND} steps', width=TREND)
    domains = self._row.get('domains', {})
    extra = [
        key for key in ('share', 'belief')
        if any(key in v for v in domains.values())
    ]
    for key in extra:
      grid.add_column(key, justify='right')
    for name, values in list(domains.items())[:ROWS]:
      reward = values.get('reward')
      known = isinstance(reward, int | float) and math.isfinite(reward)
      cells = round((reward if known else 0) * (TREND // 2))
      grid.add_row(
          name, number(reward), text.Text('━' * cells, style='cyan'),
          text.Text(sparkline(list(self._trends[name])), style='cyan'),
          *(number(values.get(key)) for key in extra),
      )
    if len(domains) > ROWS:
      grid.add_row(text.Text(f'and {len(domains) - ROWS} more', style='dim'))
    return grid


def _start_live(file, render):
  from rich import console, live

  screen = console.Console(file=file, force_terminal=True)
  view = live.Live(
      get_renderable=render, console=screen, refresh_per_second=4
  )
  view.start()
  return view
