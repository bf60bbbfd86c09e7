"""Tests of the display."""

import io
import math
import os
import re
import subprocess
import sys

import pytest

from rlpost.training import display


def _row(step, reward=0.5, domains=None, **more):
  domains = domains or {'add': {'reward': reward, 'share': 0.5}}
  return {'step': step, 'reward': reward, 'entropy': 1.25, 'tokens': 640,
          'domains': domains} | more


class _Clock:
  """Time that moves when told to."""

  def __init__(self, monkeypatch):
    self.now = 1000.0
    monkeypatch.setattr(display.time, 'monotonic', lambda: self.now)


@pytest.mark.parametrize('seconds, text', [
    (0.04, '0.0 s'), (9.74, '9.7 s'), (99.94, '99.9 s'), (125.0, '2:05'),
    (179.6, '3:00'), (3723, '1:02:03'),
])
def test_durations(seconds, text):
  assert display.duration(seconds) == text


def test_sparkline_is_monotone_and_leaves_gaps():
  line = display.sparkline([0, 0.5, 1, None, math.nan, -3, 7])
  assert line == '▁▅█  ▁█'
  levels = display.sparkline([i / 8 for i in range(8)])
  assert levels == display.BLOCKS


def test_a_pipe_gets_plain_lines_in_order(monkeypatch):
  clock = _Clock(monkeypatch)
  out = io.StringIO()
  with display.Display(60, out) as view:
    with view.phase('compiling decode') as phase:
      assert out.getvalue().endswith('compiling decode ...\n')  # At once.
      clock.now += 9.7
    assert phase.seconds == pytest.approx(9.7)
    with view.phase('sampling', quiet=True):
      clock.now += 2
    view.step(_row(1))
    clock.now += 4
    view.step(_row(2, reward=0.75))
    view.note('saved step 2')
    view.step(_row(4, reward=math.nan, tokens_per_s=99.6))
  lines = out.getvalue().splitlines()
  assert lines == [
      '[    0.0 s] compiling decode ...',
      '[    9.7 s] compiling decode: 9.7 s',
      '[   11.7 s] step 1 of 60  reward 0.500  entropy 1.250  tokens/s -  '
      'left -',
      '[   15.7 s] step 2 of 60  reward 0.750  entropy 1.250  tokens/s 160  '
      'left 3:52',
      '[   15.7 s] saved step 2',
      '[   15.7 s] step 4 of 60  reward -  entropy 1.250  tokens/s 100  '
      'left 3:44',
  ]
  assert '\x1b' not in out.getvalue()


def test_a_phase_that_fails_ends(monkeypatch):
  clock = _Clock(monkeypatch)
  out = io.StringIO()
  view = display.Display(1, out)
  with pytest.raises(KeyError), view.phase('loading'):
    clock.now += 5
    raise KeyError
  assert 'loading: 5.0 s' in out.getvalue()
  assert not view._phases


def test_tables_align():
  rows = [
      {'domain': 'add', 'before': 0.25, 'after': 1.0, 'n': 64},
      {'domain': 'sort_numbers', 'before': None, 'after': 0.5, 'n': 128},
  ]
  out = io.StringIO()
  display.Display(1, out).table(rows, 'Held-out')
  assert out.getvalue().splitlines()[1:5] == [
      'domain        before  after    n',
      '------------  ------  -----  ---',
      'add            0.250  1.000   64',
      'sort_numbers       -  0.500  128',
  ]


def test_a_terminal_shows_phase_progress_and_domains():
  out = io.StringIO()
  view = display.Display(10, out, live=True)
  domains = {f'd{i}': {'reward': i / 30} for i in range(25)}
  with view.phase('compiling train step'):
    for step in range(1, 5):
      view.step(_row(step, domains=domains))
    view.note('[bold]saved[/bold]')
    view._live.refresh()
  view.close()
  view.close()  # Twice is once.
  plain = re.sub(r'\x1b\[[0-9;?]*[A-Za-z]', '', out.getvalue())
  for part in ('compiling train step', 'step 4 of 10', 'reward 0.500',
               'entropy 1.250', 'd7', 'and 5 more', '[bold]saved[/bold]'):
    assert part in plain
  assert 'd21' not in plain
  assert '\x1b[?25h' in out.getvalue()  # The cursor is back.


def test_a_pseudo_terminal_is_live_and_a_pipe_is_not():
  script = (
      'import sys\nfrom rlpost.training import display\n'
      'with display.Display(2) as view:\n'
      '  with view.phase("loading"): pass\n'
      '  view.step({"step": 1, "reward": 0.5, "domains": {}})\n'
      'assert "jax" not in sys.modules\n'
  )
  leader, follower = os.openpty()
  for stdout in (follower, subprocess.PIPE):
    child = subprocess.run(
        [sys.executable, '-c', script], stdout=stdout, check=True,
        env=os.environ | {'TERM': 'xterm-256color', 'COLUMNS': '80'},
    )
  os.close(follower)
  assert b'\x1b[?25l' in os.read(leader, 1 << 16)
  os.close(leader)
  assert b'\x1b' not in child.stdout
  assert b'step 1 of 2  reward 0.500' in child.stdout
