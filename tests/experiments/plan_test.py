"""The launcher of plans: exit codes and what it writes; nothing compiles."""

import json
from unittest import mock

import pytest
from absl.testing import flagsaver

from configs import quickstart
from experiments import plan as launcher
from rlpost import errors
from rlpost.planning import plan, topology

FITS = {
    'fits': True, 'beside': 0, 'limit': 100, 'flops': None, 'collectives': [],
    'overlap': {'permutes': 4, 'hidden': 3},
    'bytes': dict.fromkeys(
        ('total', 'parameters', 'optimizer', 'cache', 'activations'), 2**30
    ),
    'roofline': {
        'bound': 'links', 'seconds': 36.0, 'mfu': 0.5, 'tokens_per_s': 7.0,
        'tokens': 252,
    },
}


def call(found, **flags):
  """The launcher's exit code, in this process; `found`: {program: verdict}."""
  whole = {'topology': 'v5e:2x2', 'chips': 4, 'programs': found}
  with (
      flagsaver.flagsaver(topology='v5e:2x2', **flags),
      mock.patch.object(topology, 'require_compiler', lambda: 'test'),
      mock.patch.dict('os.environ'),
      mock.patch.object(plan, 'programs', return_value=whole) as planned,
      mock.patch.object(plan, 'search', return_value=list(found.values())),
  ):
    try:
      launcher.main(quickstart.get_config('smoke'), '')
    except SystemExit as end:
      return end.code, planned
  return 0, planned


@pytest.mark.parametrize('other, code', [
    (FITS, 0), ({'fits': False, 'needed': 200, 'limit': 100}, 3),
    ({'fits': None, 'error': 'no verdict after 600 s'}, 3),
])
def test_one_program_that_does_not_fit_or_is_unknown_ends_with_three(
    other, code, tmp_path, capsys
):
  found = {'train': FITS, 'score': other}
  path = tmp_path / 'plan.json'
  got, planned = call(found, json=str(path), price=2.0, programs=['train'])
  assert got == code
  assert planned.call_args.kwargs['only'] == ('train',)
  kept = json.loads(path.read_text())
  assert kept['programs'] == found
  # 36 seconds of 4 chips at 2 an hour.
  assert kept['usd_per_update'] == pytest.approx(0.08)
  text = capsys.readouterr().out
  assert '75%' in text and 'usd_per_million_tokens' in text


def test_a_search_ends_by_its_best():
  best = FITS | {'changes': {'mesh': {'fsdp': 4}}}
  worse = {'fits': None, 'error': 'unknown', 'changes': {}}
  assert call({'a': best, 'b': worse}, search=True)[0] == 0
  assert call({'a': worse}, search=True)[0] == 3


def test_without_a_topology_the_known_ones_are_listed():
  with flagsaver.flagsaver(topology=None):
    with pytest.raises(errors.InputError, match='known: v4:2x2x1'):
      launcher.main(quickstart.get_config('smoke'), '')
