"""Tests of the table, the summary and the picture."""

import itertools
import json

import matplotlib
import numpy as np
import pytest
from matplotlib.backends import backend_agg

from rlpost.evaluation import curves, report
from rlpost.evaluation.statistics import Estimate


def _result(means, greedy=True):
  domains = {
      name: Estimate(m, m - 0.1, m + 0.05, 64, 60, 2, 1)
      for name, m in means.items()
  }
  result = {'heldout': report.result_json(domains)}
  if greedy:
    result['heldout_greedy'] = report.result_json(domains)
  return result


BEFORE = _result({'sort': 0.25, 'add': 0.5})
AFTER = _result({'sort': 0.75, 'add': 0.875})


def test_a_result_has_the_mean_of_its_domains():
  side = BEFORE['heldout']
  assert side['mean']['mean'] == pytest.approx(0.375)
  # Independent intervals: their widths add in squares.
  width = np.sqrt(2 * 0.1**2) / 2
  assert side['mean']['low'] == pytest.approx(0.375 - width)
  assert side['domains']['sort'] == {
      'mean': 0.25, 'low': 0.15, 'high': 0.3, 'n': 64, 'invalid': 2, 'infra': 1
  }


def test_the_table_says_before_and_after():
  lines = report.heldout_table(BEFORE, AFTER).splitlines()
  assert lines[0].split('  ')[0] == 'held-out'
  assert lines[2].split()[0] == 'add' and lines[3].split()[0] == 'sort'
  assert lines[3].count('0.25 [0.15, 0.30]') == 2  # Sampled and greedy.
  assert lines[3].count('0.75 [0.65, 0.80]') == 2
  assert lines[3].split()[-3:] == ['64', '2', '1']
  assert lines[-1].startswith('mean of domains  0.38 [')
  assert lines[-1].split()[-3:] == ['128', '4', '2']
  assert len({line.index('0.') for line in lines if '0.' in line}) == 1
  sampled = report.heldout_table(_result({'a': 0.5}, greedy=False), AFTER)
  assert 'greedy' not in sampled


def test_the_table_shows_a_domain_without_values():
  nothing = {'sort': Estimate(None, 0, 1, 0, 0, 9)}
  empty = {'heldout': report.result_json(nothing)}
  lines = report.heldout_table(empty, AFTER).splitlines()
  add, sort = lines[2].split(), lines[3].split()
  assert add[:2] == ['add', '-'] and sort[:2] == ['sort', '-']


def test_the_summary_has_exactly_its_keys(tmp_path):
  path = tmp_path / 'summary.json'
  written = report.write_summary(
      path, before=BEFORE, after=AFTER, cpu_s=400.5, first_reward_cpu_s=50.0,
      peak_rss_bytes=3 << 30, steps=60, nondeterministic_events=0,
      state_sha256='ab',
  )
  summary = json.loads(path.read_text())
  assert summary == written
  assert set(summary) == {
      'heldout', 'heldout_greedy', 'cpu_s', 'first_reward_cpu_s',
      'peak_rss_bytes', 'steps', 'nondeterministic_events', 'state_sha256',
      'paired',
  }
  for kind in ('heldout', 'heldout_greedy'):
    assert set(summary[kind]) == {'domains', 'mean'}
    assert set(summary[kind]['domains']) == {'sort', 'add'}
    for domain in summary[kind]['domains'].values():
      assert set(domain) == {'before', 'after'}
      for side in domain.values():
        assert set(side) == {'mean', 'low', 'high', 'n', 'invalid', 'infra'}
    assert set(summary[kind]['mean']['before']) == {'mean', 'low', 'high'}
  sort = summary['heldout']['domains']['sort']
  assert (sort['before']['mean'], sort['after']['mean']) == (0.25, 0.75)
  assert [p.name for p in tmp_path.iterdir()] == ['summary.json']


def _run(domains, steps=30, low=0.0):
  rng = np.random.default_rng(domains)
  names = [f'a_rather_long_domain_name_{i}' for i in range(domains)]
  rows = []
  for step in range(1, steps + 1):
    rewards = {n: {'reward': float(rng.uniform(low, 1))} for n in names}
    mean = sum(r['reward'] for r in rewards.values()) / max(domains, 1)
    rows.append({'step': step, 'reward': mean, 'entropy': 2 - step / 40,
                 'tokens': 600 + step, 'cpu_s': 40 + 5.0 * step,
                 'domains': rewards})
  results = {s: _result({n: 0.2 + s / 60 for n in names}) for s in (0, steps)}
  return rows, results if domains else {}


@pytest.fixture
def style():
  with matplotlib.rc_context(curves.STYLE):
    yield


@pytest.mark.usefixtures('style')
@pytest.mark.parametrize('domains', [2, 6, 12, 20, 29])
def test_no_text_of_the_picture_covers_another(domains):
  rows, results = _run(domains)
  figure = curves.draw(rows, results, 'a-name-that-does-not-end' * 3)
  canvas = backend_agg.FigureCanvasAgg(figure)
  canvas.draw()
  texts = list(figure.texts) + list(figure.legends[0].get_texts())
  for axes in figure.axes:
    texts += [axes.title, axes._left_title, axes._right_title, *axes.texts]
    for axis in (axes.xaxis, axes.yaxis):
      texts += [tick.label1 for tick in axis._update_ticks()] + [axis.label]
  boxes = [
      (t.get_text(), t.get_window_extent(canvas.get_renderer()))
      for t in texts if t.get_text() and t.get_visible()
  ]
  page = figure.bbox
  for text, box in boxes:
    assert page.x0 <= box.x0 and box.x1 <= page.x1, text
    assert page.y0 <= box.y0 and box.y1 <= page.y1, text
  for (a, box), (b, other) in itertools.combinations(boxes, 2):
    assert not box.overlaps(other), (a, b)
  assert len(figure.axes) == 3 + domains


@pytest.mark.usefixtures('style')
def test_the_picture_shows_the_numbers():
  rows, results = _run(6, low=-1.0)
  figure = curves.draw(rows, results, 'run')
  mean, entropy, speed, *small = figure.axes
  raw = mean.lines[0]
  np.testing.assert_allclose(raw.get_ydata(), [r['reward'] for r in rows])
  np.testing.assert_array_equal(raw.get_xdata(), range(1, 31))
  np.testing.assert_allclose(speed.lines[0].get_ydata()[0], 602 / 5)
  np.testing.assert_allclose(
      entropy.lines[0].get_ydata(), [2 - s / 40 for s in range(1, 31)]
  )
  for axes in small:
    assert axes.texts[0].get_text() == '0.20 → 0.70'
    low, high = axes.get_ylim()
    for line in axes.lines:
      assert low <= np.min(line.get_ydata()) <= np.max(line.get_ydata()) <= high
  sampled = mean.containers[1].lines[0].get_ydata().astype(float)
  np.testing.assert_allclose(sampled, [0.2, 0.7])
  bars = np.array(mean.containers[1].lines[2][0].get_segments(), float)
  interval = results[30]['heldout']['mean']
  np.testing.assert_allclose(bars[1][:, 1], [interval['low'], interval['high']])


def test_smoothing_keeps_a_constant_and_the_ends():
  pairs = [(i, 0.5) for i in range(40)]
  np.testing.assert_allclose(curves._smooth(pairs), 0.5)
  short = [(1, 0.0), (2, 1.0), (3, 0.5)]
  assert curves._smooth(short) == [0.0, 1.0, 0.5]


@pytest.mark.parametrize('steps', [0, 1, 30])
def test_the_picture_of_a_workdir(tmp_path, steps):
  rows, results = _run(3 if steps else 0, steps)
  (tmp_path / 'metrics.jsonl').write_text(
      ''.join(json.dumps(r) + '\n' for r in rows) + '{"step": 31, "rew'
  )
  (tmp_path / 'eval').mkdir()
  for step, result in results.items():
    (tmp_path / 'eval' / f'{step}.json').write_text(json.dumps(result))
  assert list(report.read_results(tmp_path)) == list(results)
  assert report.read_rows(tmp_path / 'metrics.jsonl') == rows
  path = report.curves_png(tmp_path)
  assert path == type(path)(tmp_path / 'curves.png')
  data = path.read_bytes()
  assert data.startswith(b'\x89PNG') and len(data) > 10_000
  assert not list(tmp_path.glob('*.tmp'))
