"""The list of faults applies to today's code, and the tests notice them."""

import collections
import pathlib
import subprocess
import sys

import pytest

from tools import mutants_list

ROOT = pathlib.Path(__file__).parents[2]


def mutants(*flags, **kwargs):
  return subprocess.run(
    [sys.executable, ROOT / 'tools/mutants', *flags], text=True, **kwargs
  )


def test_each_fault_applies_and_names_its_tests():
  for mutant in mutants_list.MUTANTS:
    text = (ROOT / mutant.file).read_text()
    assert text.count(mutant.old) == 1, mutant
    assert mutant.new != mutant.old and '\n' not in mutant.old, mutant
    assert mutant.tests, mutant
    for test in mutant.tests:
      path, *names = test.split('::')
      tested = (ROOT / path).read_text()
      assert all(f' {n.partition("[")[0]}' in tested for n in names), test
  says = collections.Counter(m.says for m in mutants_list.MUTANTS)
  assert max(says.values()) == 1, says.most_common(1)


def test_there_are_enough_of_them():
  assert len(mutants_list.MUTANTS) >= 30


@pytest.mark.slow
def test_a_fault_without_a_test_survives():
  """The tool itself can fail: the wrong tests notice nothing."""
  blind = 'tests/style_test.py::test_scripts_can_be_executed'
  code = (
    'import runpy, sys\n'
    'from tools import mutants_list\n'
    'one = mutants_list.MUTANTS[0]\n'
    f'mutants_list.MUTANTS = (one._replace(tests=("{blind}",)),)\n'
    'sys.argv = ["mutants"]\n'
    'runpy.run_path("mutants", run_name="__main__")\n'
  )
  done = subprocess.run(
    [sys.executable, '-c', code],
    cwd=ROOT / 'tools',
    capture_output=True,
    text=True,
  )
  assert done.returncode == 1, done.stderr
  assert 'SURVIVED' in done.stdout
  assert mutants_list.MUTANTS[0].says in done.stderr


@pytest.mark.slow
def test_every_fault_is_noticed():
  assert mutants().returncode == 0
