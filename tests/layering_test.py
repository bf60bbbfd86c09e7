"""Who may import whom: read from the source, and tried in a fresh process."""

import ast
import importlib.metadata
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# A room imports from rows above its own, and from itself.
RANKS = (
  ('errors',),
  ('types', 'workers', 'sharding', 'distributed'),
  ('ops',),
  ('models', 'algorithms', 'data', 'rewards', 'sandbox'),
  ('weights', 'environments'),
  ('domains',),
  ('rollouts',),
  ('evaluation',),
  ('training',),
  ('planning',),
)
RANK_OF = {room: i for i, row in enumerate(RANKS) for room in row}

HOST = (
  'errors',
  'types',
  'workers',
  'data',
  'rewards',
  'sandbox',
  'environments',
  'domains',
)
PURE = (
  'ops',
  'models',
  'algorithms',
  'training/step.py',
  'rollouts/cache.py',
  'rollouts/decode.py',
  'rollouts/prefill.py',
)
EFFECTS = {'absl', 'io', 'logging', 'os', 'pathlib', 'subprocess', 'time'}
EFFECTS |= {'etils', 'random', 'threading'}


def sources(*folders):
  """Python files under the folders (or the file itself), in order."""
  found = []
  for folder in folders:
    path = ROOT / folder
    found += [path] if path.is_file() else sorted(path.rglob('*.py'))
  return found


def imports(path):
  """(line, dotted name) of everything that a file imports, at any depth.

  `from a import b` gives `a.b`: b may be a module.
  """
  found = []
  for node in ast.walk(ast.parse(path.read_text(), str(path))):
    if isinstance(node, ast.Import):
      found += [(node.lineno, alias.name) for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{path}:{node.lineno}: a relative import.'
      found += [(node.lineno, f'{node.module}.{a.name}') for a in node.names]
  return found


def where(path, line):
  return f'{path.relative_to(ROOT)}:{line}'


def room_of(path):
  """`rlpost/ops/rope.py` -> 'ops', `rlpost/types.py` -> 'types'."""
  return path.relative_to(ROOT / 'rlpost').parts[0].removesuffix('.py')


def test_rooms_import_from_ranks_below_only():
  wrong = []
  for path in sources('rlpost'):
    room = room_of(path)
    if room == '__init__':
      continue
    assert room in RANK_OF, f'{path} is in no rank: add it to RANKS.'
    for line, name in imports(path):
      parts = name.split('.')
      if parts[0] != 'rlpost' or parts[1] == room:
        continue
      if parts[1] not in RANK_OF or RANK_OF[parts[1]] >= RANK_OF[room]:
        wrong.append(f'{where(path, line)}: {room} imports {name}')
  assert not wrong, '\n'.join(wrong)


def test_nothing_imports_the_outside():
  wrong = [
    f'{where(path, line)}: {name}'
    for path in sources('rlpost', 'configs')
    for line, name in imports(path)
    if name.split('.')[0] in ('experiments', 'tools', 'tests', 'configs')
  ]
  wrong += [
    f'{where(path, line)}: {name}'
    for path in sources('experiments')
    for line, name in imports(path)
    if name.split('.')[0] in ('tools', 'tests')
  ]
  assert not wrong, '\n'.join(wrong)


def test_configs_import_ml_collections_only():
  wrong = [
    f'{where(path, line)}: {name}'
    for path in sources('configs')
    for line, name in imports(path)
    if name.split('.')[0] != 'ml_collections'
  ]
  assert not wrong, '\n'.join(wrong)


def test_pure_rooms_have_no_effects():
  wrong = [
    f'{where(path, line)}: {name}'
    for folder in PURE
    if (ROOT / 'rlpost' / folder).exists()
    for path in sources(f'rlpost/{folder}')
    for line, name in imports(path)
    if name.split('.')[0] in EFFECTS
  ]
  assert not wrong, '\n'.join(wrong)


def test_only_experiments_define_flags():
  wrong = [
    f'{where(path, line)}: {name}'
    for path in sources('rlpost', 'configs', 'tools')
    for line, name in imports(path)
    if name.startswith('absl.flags') or 'config_flags' in name
  ]
  assert not wrong, '\n'.join(wrong)


@pytest.mark.parametrize('room', HOST)
def test_importing_a_host_room_never_imports_jax(room):
  modules = [
    '.'.join(p.relative_to(ROOT).with_suffix('').parts)
    for p in sources('rlpost')
    if room_of(p) == room
  ]
  code = (
    f'import importlib, sys\n'
    f'for name in {modules!r}:\n'
    f'  importlib.import_module(name.removesuffix(".__init__"))\n'
    f'  if "jax" in sys.modules:\n'
    f'    sys.exit(f"{{name}} imports jax")\n'
  )
  subprocess.run([sys.executable, '-c', code], cwd=ROOT, check=True)


def test_every_import_is_a_declared_dependency():
  setup = ast.parse((ROOT / 'setup.py').read_text())
  lists = [
    ast.literal_eval(keyword.value)
    for node in ast.walk(setup)
    if isinstance(node, ast.Call)
    for keyword in node.keywords
    if keyword.arg in ('install_requires', 'extras_require')
  ]
  required = set(lists[0]).union(*lists[1].values())
  for cut in '[=<>':
    required = {line.partition(cut)[0] for line in required}
  declared = {_canonical(name) for name in required}
  owners = importlib.metadata.packages_distributions()
  ours = {'rlpost', 'experiments', 'tools', 'tests', 'configs'}
  wrong = []
  for path in sources('rlpost', 'experiments', 'tools'):
    siblings = {p.stem for p in path.parent.glob('*.py')}
    for line, name in imports(path):
      top = name.split('.')[0]
      if top in sys.stdlib_module_names | ours | siblings:
        continue
      if not declared & {_canonical(d) for d in owners.get(top, [top])}:
        wrong.append(f'{where(path, line)}: {top} is not in setup.py')
  assert not wrong, '\n'.join(wrong)


def _canonical(name):
  return name.lower().replace('_', '-').replace('.', '-')
