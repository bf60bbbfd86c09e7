"""What every benchmark shares: CPU seconds, this machine's limits, one line.

On a shared machine wall time says more about the neighbours than about the
program, so times are CPU seconds of the process (user and system, all its
threads), and limits are measured in the same run. Import this before jax and
call `use_threads` first:

  measure.use_threads(args.threads)
  limits = measure.limits()
  seconds = measure.repeat(lambda: step().block_until_ready())
  rate = flops / statistics.median(seconds) / 1e9
  measure.emit('step', rate, 'GFLOP/CPU s', limits.gemm, rate / limits.gemm)
"""

import contextlib
import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

GEMM_EDGE = 1024
STREAM_SHAPE = (9216, 9216)  # 340 MB of fp32: far more than any cache


class Limits(NamedTuple):
  """The best that JAX reached here, per CPU second."""

  gemm: float  # GFLOP, square fp32 products
  stream: float  # GB of fp32 weights read by a matrix-vector product


class Clock:
  """Filled when the block ends: `cpu_s` of this process, and `wall_s`."""

  cpu_s: float = 0.0
  wall_s: float = 0.0


@contextlib.contextmanager
def clock() -> Iterator[Clock]:
  """Times a block; what runs in it must be finished when it ends."""
  found = Clock()
  wall, cpu = time.perf_counter(), time.process_time()
  yield found
  found.cpu_s = time.process_time() - cpu
  found.wall_s = time.perf_counter() - wall


def use_threads(threads: int = 1) -> None:
  """Confines this process to `threads` cores, and its libraries to as many.

  Raises:
    RuntimeError: jax was imported already: it would not notice.
    ValueError: there are fewer cores.
  """
  if 'jax' in sys.modules:
    raise RuntimeError('use_threads must come before the first import of jax.')
  cores = sorted(os.sched_getaffinity(0))
  if not 1 <= threads <= len(cores):
    raise ValueError(f'{threads=} must be 1 to {len(cores)}, the cores here.')
  # The last cores: the first one serves most interrupts.
  os.sched_setaffinity(0, set(cores[-threads:]))
  for name in ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'NPROC'):
    os.environ[name] = str(threads)
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  if threads == 1:
    flags = os.environ.get('XLA_FLAGS', '')
    flags += ' --xla_cpu_multi_thread_eigen=false'
    os.environ['XLA_FLAGS'] = flags.strip()


def repeat(
  function: Callable[[], Any], *, times: int = 5, warm_up: int = 1
) -> list[float]:
  """CPU seconds of each of `times` calls, after `warm_up` that do not count.

  `function` must wait for its result.
  """
  for _ in range(warm_up):
    function()
  seconds = []
  for _ in range(times):
    with clock() as found:
      function()
    seconds.append(found.cpu_s)
  return seconds


def limits(times: int = 9) -> Limits:
  """Measures the limits; the best of `times`, so that no ratio flatters."""
  import jax
  import jax.numpy as jnp

  product = jax.jit(jnp.matmul)
  square = jnp.full((GEMM_EDGE, GEMM_EDGE), 0.5)
  # Several at a time: the process clock is coarse beside one product.
  seconds = repeat(
    lambda: [product(square, square).block_until_ready() for _ in range(4)],
    times=times,
    warm_up=2,
  )
  gemm = 4 * 2 * GEMM_EDGE**3 / min(seconds) / 1e9
  weights = jnp.full(STREAM_SHAPE, 0.5)
  # The back end reads one orientation faster than the other: take the best.
  row, column = jnp.ones((1, len(weights))), jnp.ones((len(weights), 1))
  seconds = [
    *repeat(lambda: product(row, weights).block_until_ready(), times=times),
    *repeat(lambda: product(weights, column).block_until_ready(), times=times),
  ]
  return Limits(gemm=gemm, stream=weights.nbytes / min(seconds) / 1e9)


def peak_rss_bytes() -> int:
  """The most memory that this process has held."""
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def spread(values: list[float]) -> dict[str, float]:
  """Median, extremes and count, for a report's extras."""
  return {
    'median': statistics.median(values),
    'min': min(values),
    'max': max(values),
    'n': len(values),
  }


def emit(
  name: str, value: float, unit: str, limit: float, ratio: float, **extra: Any
) -> None:
  """Prints one case as one JSON line.

  Args:
    name: of the case.
    value: what was reached, a median.
    unit: of `value` and `limit`.
    limit: what the machine allows at best, measured in the same run.
    ratio: achieved share of the limit, in (0, 1]; higher is better.
    **extra: whatever the reader needs to judge it.

  Raises:
    ValueError: a ratio outside (0, 1]: the limit is not one.
  """
  if not 0 < ratio <= 1:
    raise ValueError(f'{name}: {ratio=} of {limit=} {unit} is not in (0, 1].')
  line = {'name': name, 'value': value, 'unit': unit}
  line |= {'limit': limit, 'ratio': ratio}
  # A peak that was read before the limits were measured replaces this one.
  line |= {'peak_rss_bytes': peak_rss_bytes()} | extra
  line |= {
    'load': os.getloadavg()[0],
    'cores': len(os.sched_getaffinity(0)),
    'machine': processor(),
  }
  print(json.dumps(_rounded(line)), flush=True)


def processor() -> str:
  """The processor's name."""
  with contextlib.suppress(OSError), open('/proc/cpuinfo') as lines:
    for line in lines:
      if line.startswith('model name'):
        return line.partition(':')[2].strip()
  return platform.machine()


def _rounded(value: Any) -> Any:
  if isinstance(value, dict):
    return {k: _rounded(v) for k, v in value.items()}
  return float(f'{value:.4g}') if isinstance(value, float) else value
