"""What a run would need of a TPU slice, compiled for it without one.

  python -m experiments.plan --config=configs/tpu/NAME.py --topology=v5p:4x4x4

Compiles the programs that the trainer would run and shows, for each, whether
it fits, its bytes by kind, its collectives and the least time it can take.
Needs the extra 'tpu-aot'. Exit codes: 0 all programs fit, 3 one does not or is
unknown, 2 bad input.
"""

import json
import os
import pathlib
import sys

from absl import flags

from experiments import launching
from rlpost.planning import topology

TOPOLOGY = flags.DEFINE_string('topology', None, 'A slice, such as v5e:4x4.')
JSON = flags.DEFINE_string(
  # Another launcher has one of this name; a process has one launcher.
  'json', None, 'Where to write the plan.', allow_override=True
)
ONLY = flags.DEFINE_list('programs', [], 'Names of programs; default all.')
PRICE = flags.DEFINE_float('price', None, 'USD of a chip for an hour.')
SEARCH = flags.DEFINE_bool('search', False, 'Rank meshes, remat and offload.')
CACHE = flags.DEFINE_string('cache', None, 'Folder of verdicts.')


def main(config, workdir):
  """Compiles, prints and exits."""
  del workdir
  from rlpost import errors

  if not TOPOLOGY.value:
    raise errors.InputError(
      f'--topology is needed; known: {topology.known()}.'
    )
  topology.parse(TOPOLOGY.value)
  topology.require_compiler()
  os.environ.update(topology.ENVIRONMENT)

  from rlpost.planning import plan, report
  from rlpost.training import setup, supervised

  stage = supervised if config.launcher == 'experiments.sft' else setup
  launching.check_config(config, stage.SECTIONS)
  cache = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  cache = pathlib.Path(CACHE.value or pathlib.Path(cache) / 'rlpost/verdicts')
  if SEARCH.value:
    found = plan.search(config, TOPOLOGY.value, cache, _say)
    for v in found:
      _say(f'{report.line(v)}  {json.dumps(v["changes"])}')
    good = found[0]['fits']
    found = {'topology': TOPOLOGY.value, 'search': found}
  else:
    found = plan.programs(
      config, TOPOLOGY.value, cache, only=tuple(ONLY.value), say=_say
    )
    if PRICE.value is not None:
      plan.price(found, PRICE.value)
    print(report.table(found))
    good = plan.fits(found)
  if JSON.value:
    pathlib.Path(JSON.value).write_text(json.dumps(found, indent=1))
  if not good:
    sys.exit(errors.DoesNotFitError.exit_code)


def _say(text):
  print(text, flush=True)


if __name__ == '__main__':
  launching.run(main)
