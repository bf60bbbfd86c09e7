"""Notebooks are stored without outputs, and run from top to bottom."""

import base64
import json
import math
import os
import pathlib
import re
import subprocess
import sys

import pytest

from rlpost.data import tokenizer as tokenizers
from rlpost.evaluation import report

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / 'notebooks').glob('*.ipynb'))
HOSTILE = '<script>a&b</script>\u202e"\n'


def _lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.name)
def test_nothing_that_was_run_is_stored(path):
  cells = json.loads(path.read_text())['cells']
  code = [cell for cell in cells if cell['cell_type'] == 'code']
  assert code and all(cell['outputs'] == [] for cell in code)
  assert all(cell['execution_count'] is None for cell in code)
  assert all(cell['metadata'] == {} for cell in cells)


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  """Of a finished smoke run."""
  folder = tmp_path_factory.mktemp('quickstart-smoke')
  command = [sys.executable, '-m', 'experiments.train']
  command += ['--config=configs/quickstart.py:smoke', f'--workdir={folder}']
  subprocess.run(command, cwd=ROOT, check=True)
  return folder


def _execute(name, workdir, monkeypatch):
  """{cell id: outputs} of a notebook, run where Jupyter would run it."""
  reason = "needs the extra 'notebook': pip install -e '.[notebook]'"
  pytest.importorskip('ipykernel', reason=reason)
  nbclient = pytest.importorskip('nbclient', reason=reason)
  nbformat = pytest.importorskip('nbformat', reason=reason)
  monkeypatch.setenv('PYTHONPATH', str(ROOT))
  monkeypatch.setenv('RLPOST_WORKDIR', os.fspath(workdir))
  notebook = nbformat.read(ROOT / 'notebooks' / name, as_version=4)
  nbformat.validate(notebook)
  where = {'metadata': {'path': str(ROOT / 'notebooks')}}
  nbclient.NotebookClient(notebook, timeout=600, resources=where).execute()
  return {cell.id: cell.get('outputs', []) for cell in notebook.cells}


@pytest.mark.slow
def test_samples_hold_what_was_sampled(workdir):
  tokenizer = tokenizers.bytes_tokenizer()
  samples = _lines(workdir / 'samples.jsonl')
  assert len(samples) == 12  # one for each of two domains in six steps
  for row in samples:
    assert row['tokens'] == len(row['token_ids']) == len(row['logp']) > 0
    assert max(row['logp']) < 0
    text = tokenizer.decode(row['token_ids'], skip_special=True)
    assert text == row['answer']


@pytest.mark.slow
def test_quickstart_shows_a_run_and_escapes_its_text(workdir, monkeypatch):
  path = workdir / 'samples.jsonl'
  hostile = _lines(path)[-1] | {
    'domain': HOSTILE,
    'prompt': [{'role': 'user', 'text': HOSTILE}],
    'token_ids': list(HOSTILE.encode()),
    'logp': [-0.01 * (i + 1) for i in range(len(HOSTILE.encode()))],
    'verdict': {'status': 'value', 'value': 0.25, 'reason': HOSTILE},
  }
  with path.open('a') as file:
    file.write(json.dumps(hostile) + '\n')
  outputs = _execute('quickstart.ipynb', workdir, monkeypatch)
  (image,) = outputs['curves']
  png = base64.b64decode(image.data['image/png'])
  assert png == (workdir / 'curves.png').read_bytes()
  assert png.startswith(b'\x89PNG') and len(png) > 20_000
  (table,) = outputs['heldout']
  results = report.read_results(workdir)
  assert list(results) == [0, 6]
  assert report.heldout_table(results[0], results[6]) in table.text
  (tokens,) = outputs['tokens']
  shown = tokens.data['text/html']
  assert '<script' not in shown and '\u202e' not in shown
  escaped = '&lt;script&gt;a&amp;b&lt;/script&gt;\\u202e&quot;'
  assert shown.count(escaped) == 3  # the domain, the prompt, the reason
  assert 'value 0.25' in shown
  cells = r'<code>(.*?)</code></td><td>(.*?)</td><td>(.*?)</td>'
  rows = re.findall(cells, shown)
  assert rows[:2] == [('&lt;', '0.990', '-0.010'), ('s', '0.980', '-0.020')]
  for (_, probability, _), logp in zip(rows, hostile['logp'], strict=True):
    assert float(probability) == pytest.approx(math.exp(logp), abs=6e-4)
