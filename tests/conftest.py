"""Every test sees 8 CPU devices, exact matmuls and no rank promotion.

So a sharded test is an ordinary test, and a missing axis is an error. The
settings that children should inherit (platform, compile cache) are environment
variables; the others hold in this process alone, so that a launcher started by
a test runs as a user's would.
"""

import contextlib
import os
import pathlib
import shutil

ROOT = pathlib.Path(__file__).parents[1]
CACHE_LIMIT_BYTES = 2**30

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
