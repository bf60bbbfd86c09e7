"""What README.md and CONTRIBUTING.md name exists, and the commands can start.

Words in capitals (`configs/NAME.py`) and names that begin with `my_` are read
as placeholders.
"""

import ast
import pathlib
import re
import shlex

import pytest

from experiments import launching

ROOT = pathlib.Path(__file__).parents[1]
PAGES = ('README.md', 'CONTRIBUTING.md')
ROOMS = r'(?:\.ci|\.github|configs|experiments|notebooks|rlpost|tests|tools)'
PATH = re.compile(rf'(?<![\w/.~$-]){ROOMS}/[\w./*-]*[\w/*]')
PLACEHOLDER = re.compile(r'\b[A-Z]{2,}\b|\bmy_|\*')
FENCE = re.compile(r'^```(\w*)\n(.*?)^```', re.M | re.S)
LINK = re.compile(r'\]\(([^)#:\s]+)(?:#[^)]*)?\)')


@pytest.fixture(params=PAGES)
def text(request):
  return (ROOT / request.param).read_text()


def commands(text):
  """Words of each shell command in the page's code blocks."""
  for language, body in FENCE.findall(text):
    if language in ('', 'sh', 'bash', 'shell', 'console'):
      for line in body.replace('\\\n', ' ').splitlines():
        line = line.strip().removeprefix('$ ')
        if re.match(r'(\S*/)?(python3?|tools/\w+|\.ci/run)\b', line):
          yield shlex.split(line, comments=True)


def check_config(spec, words):
  """The config, its variant and the keys that a command sets must exist."""
  if not PLACEHOLDER.search(' '.join(words)):
    config = launching.read_config(str(ROOT / spec))
    launching.check_overrides(words, config)


def test_readme_names_the_two_commands():
  text = (ROOT / 'README.md').read_text()
  words = [command[0] for command in commands(text)]
  assert 'tools/run' in words and 'tools/test' in words


def test_paths_exist(text):
  missing = {
    path
    for path in PATH.findall(text)
    if not PLACEHOLDER.search(path) and not (ROOT / path).exists()
  }
  assert not missing, sorted(missing)


def test_links_lead_somewhere(text):
  missing = {link for link in LINK.findall(text) if not (ROOT / link).exists()}
  assert not missing, sorted(missing)


def test_commands_can_start(text):
  for words in commands(text):
    if words[0] == 'tools/run':
      spec = [*words[1:], '-'][0]
      name, colon, variant = spec.partition(':')
      name = 'quickstart' if name.startswith('-') else name
      check_config(f'configs/{name}.py{colon}{variant}', words)
    if '-m' in words:
      module = words[words.index('-m') + 1]
      if module.split('.')[0] in ('experiments', 'rlpost', 'tools'):
        path = ROOT / f'{module.replace(".", "/")}.py'
        assert PLACEHOLDER.search(module) or path.is_file(), words
    for word in words:
      if word.startswith('--config='):
        check_config(word.removeprefix('--config='), words)


def test_python_blocks_are_python(text):
  for language, body in FENCE.findall(text):
    if language == 'python':
      ast.parse(body)
