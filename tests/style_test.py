"""Rules of style that a program can check."""

import ast
import functools
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 75
MAX_BYTES = 2**20

TOP_LEVEL = {
  'CONTRIBUTING.md',
  'LICENSE',
  'README.md',
  'configs',
  'experiments',
  'notebooks',
  'pyproject.toml',
  'rlpost',
  'setup.py',
  'tests',
  'tools',
}
UNSAFE_CALLS = {'__import__', 'compile', 'eval', 'exec'}
UNSAFE_MODULES = {'cloudpickle', 'dill', 'marshal', 'pickle', 'shelve'}
# The product speaks of itself alone: no folder of one machine, no tracker.
FOREIGN = re.compile(
  r'(?<![\w.$}])/(?:work|root|home)/\w|\bissue #?\d|\bT[O]DO\b|\bF[I]XME\b'
)


@functools.cache
def files(tracked=False):
  """Paths of the project relative to its root: what git would hold.

  Args:
    tracked: only what it holds already, if anything.
  """
  command = ['git', 'ls-files', '-z', '--cached']
  command += [] if tracked else ['--others', '--exclude-standard']
  listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  names = listed.stdout.split('\0')[:-1]
  if listed.returncode:  # an archive without its history
    names = [str(p.relative_to(ROOT)) for p in ROOT.rglob('*')]
  skip = {'.venv', '.git', '.jax_cache', '__pycache__', 'runs'}
  return sorted(
    name
    for name in names
    if (ROOT / name).is_file() and not skip & set(name.split('/'))
  )


@functools.cache
def sources():
  """{path: text} of the Python files, scripts without an ending included."""
  found = {}
  for name in files():
    path = ROOT / name
    if name.endswith('.py'):
      found[name] = path.read_text()
    elif '.' not in path.name and path.parent.name == 'tools':
      text = path.read_text()
      if re.match('#!.*python', text):
        found[name] = text
  return found


@functools.cache
def trees():
  return {name: ast.parse(text, name) for name, text in sources().items()}


def nodes(*kinds, tests=True):
  """(path, node) of every syntax node of the kinds; `tests`: of tests too."""
  for name, tree in trees().items():
    if tests or not name.startswith('tests/'):
      for node in ast.walk(tree):
        if isinstance(node, kinds):
          yield name, node


def refuse(wrong):
  wrong = list(wrong)
  assert not wrong, '\n'.join(wrong)


def test_lines_fit_80_columns():
  refuse(
    f'{name}:{i}: {len(line)} columns'
    for name, text in sources().items()
    for i, line in enumerate(text.splitlines(), 1)
    if len(line) > 80
  )


def test_files_are_short():
  refuse(
    f'{name}: {text.count(chr(10))} lines, more than {MAX_FILE_LINES}'
    for name, text in sources().items()
    if text.count('\n') > MAX_FILE_LINES
  )


def test_functions_are_short():
  refuse(
    f'{name}:{node.lineno}: {node.name} has '
    f'{node.end_lineno - node.lineno + 1} lines, more than {MAX_FUNCTION_LINES}'
    for name, node in nodes(ast.FunctionDef, ast.AsyncFunctionDef)
    if node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
  )


def test_public_things_have_docstrings():
  wrong = []
  for name, tree in trees().items():
    if not name.startswith(('rlpost/', 'experiments/')):
      continue
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    public = [
      n
      for n in tree.body
      if isinstance(n, kinds) and not n.name.startswith('_')
    ]
    if name.startswith('experiments/'):  # a launcher's is the module's own
      public = [n for n in public if n.name != 'main']
    for node in [tree, *public]:
      doc = ast.get_docstring(node)
      if not doc or doc == 'TBD.':
        line = getattr(node, 'lineno', 1)
        wrong.append(f'{name}:{line}: {getattr(node, "name", "module")}')
  refuse(wrong)


def test_no_exception_is_swallowed():
  wrong = []
  for name, node in nodes(ast.ExceptHandler):
    kind = node.type.id if isinstance(node.type, ast.Name) else node.type
    silent = all(isinstance(n, ast.Pass | ast.Continue) for n in node.body)
    broad = kind in (None, 'Exception', 'BaseException')
    if kind is None or (broad and silent):
      wrong.append(f'{name}:{node.lineno}')
  refuse(wrong)


def test_nothing_evaluates_text():
  wrong = [
    f'{name}:{node.lineno}: {node.func.id}'
    for name, node in nodes(ast.Call, tests=False)
    if isinstance(node.func, ast.Name) and node.func.id in UNSAFE_CALLS
  ]
  wrong += [
    f'{name}:{node.value.lineno}: allow_pickle'
    for name, node in nodes(ast.keyword, tests=False)
    if node.arg == 'allow_pickle'
  ]
  for name, node in nodes(ast.Import, ast.ImportFrom, tests=False):
    modules = [getattr(node, 'module', None) or a.name for a in node.names]
    if UNSAFE_MODULES & {m.split('.')[0] for m in modules}:
      wrong.append(f'{name}:{node.lineno}: {modules}')
  refuse(wrong)


def test_no_file_is_a_drawer_for_anything():
  drawers = {'common', 'helpers', 'misc', 'util', 'utils'}
  refuse(name for name in sources() if pathlib.Path(name).stem in drawers)


def test_text_speaks_of_the_product_alone():
  endings = ('.py', '.md', '.toml', '.yml', '.sh', '.ipynb', '')
  refuse(
    f'{name}:{i}: {match.group()}'
    for name in files()
    if pathlib.Path(name).suffix in endings
    for i, line in enumerate((ROOT / name).read_text().splitlines(), 1)
    if (match := FOREIGN.search(line))
  )


def test_tracked_files_are_small():
  refuse(
    f'{name}: {(ROOT / name).stat().st_size} bytes'
    for name in files(tracked=True)
    if (ROOT / name).stat().st_size > MAX_BYTES
  )


def test_top_level_holds_the_agreed_entries():
  entries = {name.split('/')[0] for name in files(tracked=True)}
  extra = {e for e in entries if not e.startswith('.')} - TOP_LEVEL
  assert not extra, f'{sorted(extra)}: move them into a room.'


def test_scripts_can_be_executed():
  refuse(
    name
    for name in files()
    if (ROOT / name).read_bytes()[:2] == b'#!'
    and not os.access(ROOT / name, os.X_OK)
  )


@pytest.mark.skipif(
  importlib.util.find_spec('ruff') is None, reason='extra dev: ruff'
)
def test_ruff_is_content():
  result = subprocess.run(
    [sys.executable, '-m', 'ruff', 'check', '--no-cache', *sorted(sources())],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert not result.returncode, result.stdout + result.stderr
