"""The persistent compilation cache: a second run compiles nothing anew."""

import os
import pathlib

import jax


def use_cache() -> pathlib.Path:
  """Caches executables under `$RLPOST_CACHE`, else `~/.cache/rlpost`."""
  root = os.environ.get('RLPOST_CACHE') or '~/.cache/rlpost'
  path = pathlib.Path(root).expanduser() / 'jax'
  jax.config.update('jax_compilation_cache_dir', str(path))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
  jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)
  return path
