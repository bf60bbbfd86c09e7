"""Every test sees 8 CPU devices, exact matmuls and no rank promotion.

So a sharded test is an ordinary test, and a missing axis is an error. The
settings that children should inherit (platform, compile cache) are environment
variables; the others hold in this process alone, so that a launcher started by
a test runs as a user's would.
"""

import contextlib
import gc
import itertools
import os
import pathlib
import shutil

ROOT = pathlib.Path(__file__).parents[1]
CACHE_LIMIT_BYTES = 2**30
MAPS_LIMIT = 20_000  # Linux allows a process 65,530
_ended = itertools.count(1)

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(ROOT / '.jax_cache'))
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
os.environ['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '-1'
os.environ['MPLBACKEND'] = 'Agg'

import jax  # noqa: E402
from absl import flags  # noqa: E402

jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')
jax.config.update('jax_default_matmul_precision', 'highest')
flags.FLAGS.mark_as_parsed()  # grain reads flags, and there is no launcher


def pytest_configure(config):
  """Starts the compile cache afresh once old programs have filled it."""
  if hasattr(config, 'workerinput'):  # a worker of a parallel run
    return
  cache = pathlib.Path(os.environ['JAX_COMPILATION_CACHE_DIR'])
  with contextlib.suppress(FileNotFoundError):  # another run cleans up
    if sum(f.stat().st_size for f in cache.glob('*')) > CACHE_LIMIT_BYTES:
      shutil.rmtree(cache, ignore_errors=True)


def pytest_runtest_teardown():
  """Drops compiled programs before their memory maps run out.

  A program for 8 CPU devices holds some hundred; past the limit the compiler
  ends the process with a segmentation fault.
  """
  if next(_ended) % 20:  # reading the maps takes 15 ms
    return
  with contextlib.suppress(FileNotFoundError):  # not Linux
    if MAPS_LIMIT < pathlib.Path('/proc/self/maps').read_bytes().count(b'\n'):
      jax.clear_caches()
      gc.collect()
