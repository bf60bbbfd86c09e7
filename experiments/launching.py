"""What launchers share: flags, configs, the workdir's config, exit codes.

A launcher is a docstring, a `main(config, workdir)` and `launching.run(main)`.
Jax is imported inside `main`, so that `--help` answers at once.

`python -m experiments.launching configs/NAME.py[:VARIANT]` prints the launcher
that a config names and where its model comes from; `tools/run` reads that.
"""

import difflib
import errno
import faulthandler
import functools
import importlib.util
import inspect
import json
import os
import pathlib
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import ml_collections
from absl import flags
from ml_collections import config_flags

from rlpost import errors

flags.disclaim_key_flags()  # they belong to the launcher that calls `run`

HELP_FLAGS = {'-h', '-help', '--help'}


def run(main: Callable[[ml_collections.ConfigDict, str], Any]) -> NoReturn:
  """Parses the flags, calls `main(config, workdir)` and ends the process.

  A `RunError` becomes one message on stderr and its exit code; `--traceback`
  shows where it came from. Any other exception keeps its traceback: exit 1.

  Without `--config`, the config is that of the `--workdir`.
  """
  faulthandler.enable()
  program = inspect.getmodule(main)
  _define_flags()
  if HELP_FLAGS & set(sys.argv[1:]):
    print(f'{inspect.getdoc(program) or ""}\n{flags.FLAGS.main_module_help()}')
    sys.exit(0)
  try:
    config, workdir = _parse(sys.argv)
    main(config, workdir)
  except errors.RunError as error:
    _end(error, error.exit_code)
  except OSError as error:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
      raise
    cure = 'Free some space; the same command goes on from the last save.'
    _end(f'the disk is full: {error}. {cure}', 3)
  except KeyboardInterrupt:
    _end('interrupted.', 130)
  sys.exit(0)


@functools.cache
def step_flag() -> flags.FlagHolder:
  """`--step`, of the launchers that look at a checkpoint."""
  return flags.DEFINE_integer('step', None, 'Which step; default the latest.')


def _define_flags() -> None:
  config_flags.DEFINE_config_file(
    'config', None, 'Path of a config, configs/NAME.py[:VARIANT].'
  )
  flags.DEFINE_string(
    'workdir', None, 'Where the run lives; default runs/NAME[-VARIANT].'
  )
  flags.DEFINE_bool('traceback', False, 'Show where an error came from.')


def _end(message: object, code: int) -> NoReturn:
  """Says why the process ends, and ends it."""
  sys.stdout.flush()
  if '--traceback' in sys.argv:
    traceback.print_exc()
  word = 'stopped' if code in (75, 130) else 'error'
  print(f'{word}: {message}', file=sys.stderr, flush=True)
  sys.exit(code)


def _parse(argv: list[str]) -> tuple[ml_collections.ConfigDict, str]:
  spec = _flag_value(argv, 'config')
  if spec is not None:
    check_overrides(argv, read_config(spec))
  try:
    extra = flags.FLAGS(argv)[1:]
  except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as e:
    raise errors.InputError(' '.join(str(e).split())) from e
  if extra:
    raise errors.InputError(f'{extra[0]!r} is not a flag; flags start with --.')
  workdir = flags.FLAGS.workdir
  if spec is None:
    return _workdir_config(workdir), workdir
  changed = config_flags.get_override_values(flags.FLAGS['config'])
  for key, value in changed.items():
    print(f'config: {key} = {value!r}', flush=True)
  return flags.FLAGS.config, workdir or default_workdir(spec)


def _flag_value(argv: Iterable[str], name: str) -> str | None:
  """The last `--name=value` or `--name value`, before absl sees it."""
  argv, found = list(argv), None
  for i, arg in enumerate(argv):
    flag, equals, value = arg.partition('=')
    if flag in (f'-{name}', f'--{name}'):
      found = value if equals else (argv[i + 1 : i + 2] or [''])[0]
  return found


def _workdir_config(workdir: str | None) -> ml_collections.ConfigDict:
  stored = load_config(workdir) if workdir else None
  if stored is None:
    raise errors.InputError(
      '--config=configs/NAME.py[:VARIANT] is needed, or the --workdir of a run'
      f' that has one. {_known_configs("configs")}'
    )
  return stored


def default_workdir(spec: str) -> str:
  """`configs/x.py:smoke` runs in `runs/x-smoke`."""
  path, _, variant = spec.partition(':')
  stem = pathlib.Path(path).stem
  return f'runs/{stem}-{variant}' if variant else f'runs/{stem}'


def load_module(path: str) -> types.ModuleType:
  """The config file at `path` as a module.

  Raises:
    InputError: there is no such file, or it cannot be imported.
  """
  if not os.path.isfile(path):
    known = _known_configs(os.path.dirname(path) or 'configs')
    raise errors.InputError(f'there is no config {path!r}. {known}')
  spec = importlib.util.spec_from_file_location('rlpost_config', path)
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
  except Exception as e:
    raise errors.InputError(f'{path} cannot be read: {e!r}') from e
  return module


def read_config(spec: str) -> ml_collections.ConfigDict:
  """The locked config that `path[:variant]` names.

  Raises:
    InputError: no such file, no such variant, or a broken config.
  """
  path, _, variant = spec.partition(':')
  module = load_module(path)
  try:
    # A config without variants may take no argument.
    config = module.get_config(*([variant] if variant else []))
  except Exception as e:
    raise errors.InputError(f'{path} has no variant {variant!r}: {e}') from e
  return config.lock()


def _known_configs(folder: str) -> str:
  names = sorted(p.name for p in pathlib.Path(folder).glob('*.py'))
  return f'In {folder}/ there are: {", ".join(names) or "none"}.'


def check_overrides(argv: Iterable[str], config: Mapping) -> None:
  """Refuses `--config.KEY` for a key that the config does not have.

  Raises:
    InputError: with the key that may have been meant.
  """
  known = set(flatten(config))
  sections = {k.rpartition('.')[0] for k in known}
  for arg in argv:
    flag = arg.partition('=')[0].lstrip('-')
    flag = flag.removeprefix('no') if flag.startswith('noconfig.') else flag
    if not arg.startswith('-') or not flag.startswith('config.'):
      continue
    key = flag.removeprefix('config.')
    if key.partition('[')[0] not in known | sections:
      raise errors.InputError(
        f'the config has no key {key!r}.{_suggestion(key, known)}'
      )


def _suggestion(word: str, known: Iterable[str]) -> str:
  known = sorted(known)
  close = difflib.get_close_matches(word, known, n=1)
  # The right name in the wrong section is the other common slip.
  tail = word.rpartition('.')[2]
  close += [k for k in known if k.rpartition('.')[2] == tail and k not in close]
  if close:
    return f' Did you mean {" or ".join(close)}?'
  return f' It has: {", ".join(known)}.'


def flatten(config: Mapping, prefix: str = '') -> dict[str, Any]:
  """A nested mapping as one of dotted keys: `{'optimizer.b1': 0.9, ...}`."""
  flat = {}
  for key, value in config.items():
    if isinstance(value, Mapping | ml_collections.ConfigDict) and value:
      flat |= flatten(value, f'{prefix}{key}.')
    else:
      flat[f'{prefix}{key}'] = value
  return flat


def check_config(
  config: ml_collections.ConfigDict,
  sections: Mapping[str, tuple[Callable, Iterable[str]] | None],
) -> None:
  """Refuses a config that has more or less than what is read of it.

  Args:
    config: whole.
    sections: (target, given) of each section, as `check_section` takes them;
      None for a key that whoever reads it checks. A section may be left out
      where its target has a default for everything.

  Raises:
    InputError: with what is wrong, and what may have been meant.
  """
  for name in config:
    if name not in sections:
      raise errors.InputError(
        f'nothing reads config.{name}.{_suggestion(name, sections)}'
      )
  for name, checked in sections.items():
    if checked is not None:
      target, given = checked
      check_section(config.get(name, {}), target, name, given=given)
    elif name not in config:
      raise errors.InputError(f'the config lacks {name}.')


def check_section(
  section: Mapping[str, Any],
  target: Callable,
  name: str,
  *,
  given: Iterable[str] = (),
) -> None:
  """Refuses a config section unless it is keyword arguments of `target`.

  Args:
    section: the part of the config that `target` is called with.
    target: a function or a class.
    name: the section's dotted name, for the message.
    given: arguments that the caller supplies itself, no business of configs.

  Raises:
    InputError: a key that `target` does not take, or one that it lacks.
  """
  keywords, needed = set(), set()
  for parameter in inspect.signature(target).parameters.values():
    if parameter.kind is parameter.VAR_KEYWORD:
      raise TypeError(f'{target.__name__} takes any keyword: uncheckable.')
    if parameter.kind in (
      parameter.POSITIONAL_OR_KEYWORD,
      parameter.KEYWORD_ONLY,
    ):
      keywords.add(parameter.name)
      if parameter.default is parameter.empty:
        needed.add(parameter.name)
  keywords, needed = keywords - set(given), needed - set(given)
  for key in section:
    if key not in keywords:
      raise errors.InputError(
        f'config.{name}.{key} is no argument of {target.__name__}.'
        f'{_suggestion(key, keywords)}'
      )
  if missing := sorted(needed - set(section)):
    raise errors.InputError(
      f'config.{name} lacks {", ".join(missing)}; {target.__name__} needs it.'
    )


def settle_config(
  config: ml_collections.ConfigDict,
  workdir: str,
  *,
  may_grow: Iterable[str] = ('steps',),
  may_change: Iterable[str] = ('mesh',),
  write: bool = True,
) -> bool:
  """Makes the config the workdir's own, or refuses one that differs from it.

  The first run writes `config.json`. A later one must bring an equal config,
  except that the numbers under the dotted keys in `may_grow` may have grown,
  and the sections in `may_change` (on how many devices the run goes on) may be
  others; then the file is written again.

  Args:
    config: of this run.
    workdir: of this run; may be a bucket.
    may_grow: dotted keys.
    may_change: sections.
    write: false in the processes that are not the primary one.

  Returns:
    Whether the workdir had a config: the run goes on from there.

  Raises:
    InputError: with each difference, old -> new.
  """
  may_grow, may_change = tuple(may_grow), tuple(may_change)
  stored = load_config(workdir)
  if stored is not None:
    lines = differences(stored, config, may_grow, may_change)
    if lines:
      raise errors.InputError(
        '\n'.join([f'{workdir} holds a run with another config:', *lines])
        + '\nGive the old values, or another --workdir. May grow: '
        + f'{", ".join(may_grow) or "nothing"}; may change: '
        + f'{", ".join(may_change) or "nothing"}.'
      )
  if write:
    values = json.loads(config.to_json())
    text = json.dumps(values, indent=2, sort_keys=True) + '\n'
    _write_text(workdir, 'config.json', text)
  return stored is not None


def differences(
  old: ml_collections.ConfigDict,
  new: ml_collections.ConfigDict,
  may_grow: tuple[str, ...] = (),
  may_change: tuple[str, ...] = (),
) -> list[str]:
  """One line `key: old -> new` for each value that differs and may not."""
  from rlpost.types import tuples

  old, new = (flatten(tuples(json.loads(c.to_json()))) for c in (old, new))
  lines = []
  for key in sorted(old.keys() | new.keys()):
    a, b = old.get(key, '(absent)'), new.get(key, '(absent)')
    numbers = all(isinstance(x, int | float) for x in (a, b))
    free = key in may_grow and numbers and a <= b
    free |= key.partition('.')[0] in may_change
    if (type(a), a) != (type(b), b) and not free:
      lines.append(f'  {key}: {a} -> {b}')
  return lines


def load_config(workdir: str) -> ml_collections.ConfigDict | None:
  """The config that a workdir holds, locked; None if it holds none.

  Raises:
    InputError: `config.json` is damaged.
  """
  from etils import epath

  from rlpost.types import tuples

  path = epath.Path(workdir) / 'config.json'
  if not path.exists():
    return None
  try:
    values = json.loads(path.read_text())
    return ml_collections.ConfigDict(tuples(values)).lock()
  except (AttributeError, TypeError, ValueError) as e:
    cure = 'Restore the file, or take another --workdir.'
    raise errors.InputError(f'{path} is damaged: {e}. {cure}') from e


def _write_text(workdir: str, name: str, text: str) -> None:
  """Writes a file whole or not at all."""
  from etils import epath

  folder = epath.Path(workdir)
  folder.mkdir(parents=True, exist_ok=True)
  (folder / f'{name}.tmp').write_text(text)
  (folder / f'{name}.tmp').replace(folder / name)


def _describe(spec: str) -> None:
  config = read_config(spec)
  model = config.get('model') or {}
  print(config.launcher, model.get('source') or '-')


if __name__ == '__main__':
  try:
    _describe(*sys.argv[1:])
  except errors.RunError as failure:
    _end(failure, failure.exit_code)
