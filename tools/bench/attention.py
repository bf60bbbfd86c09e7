"""Attention alone: time beside what else there is, memory against length.

  python -m tools.bench.attention --part=time
  python -m tools.bench.attention --part=memory --plot=memory.png

Time: the forward pass over 8k tokens on 8 simulated devices (ring, plain, and
the package `ringattention` where it is installed), then forward and backward
over 2k tokens on one (blockwise and `jax.nn.dot_product_attention`). A limit
is the measured GEMM; operations are those of visible pairs alone.

Memory: what forward and backward of each back end need beside their arguments
and results, on each device, as compiled. Nothing runs. The limit is what the
arguments and results take; the ratio is their share of the whole.
"""

import argparse
import functools
import importlib
import importlib.util
import json
import statistics

from tools.bench import measure

WAYS = 8
LENGTHS = 4096, 8192, 16384, 32768
# Back ends and on how many devices their tokens are spread.
SPREAD = {'dense': WAYS, 'blockwise': 1, 'all_gather': WAYS, 'ulysses': WAYS,
          'ring': WAYS}
HEADS, KV_HEADS, WIDTH = 8, 2, 64


def _arguments(argv):
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--part', choices=('time', 'memory'), default='time')
  parser.add_argument('--plot', help='where to draw the memory (PNG)')
  parser.add_argument('--times', type=int, default=5)
  parser.add_argument('--threads', type=int, default=1)
  return parser.parse_args(argv)


def _mesh(ways):
  import jax

  from rlpost import sharding

  return sharding.make_mesh(context=ways, devices=jax.devices()[:ways])


def _attend(backend, q, k, v, *, ways=1, block=128):
  """Causal attention of one document, its tokens spread in zigzag order."""
  from rlpost.data import zigzag
  from rlpost.ops import attention

  order = zigzag.places(q.shape[1], ways)[None]
  where = attention.Where(order, order, 0 * order, 0 * order - 2)
  return attention.attention(q, k, v, where, backend=backend, block=block)


def _gradient(attend):
  """(q, k, v, g) -> output and gradients."""
  import jax

  def run(q, k, v, g):
    out, pull = jax.vjp(attend, q, k, v)
    return out, pull(g)

  return run


def _states(mesh, length, heads, random=True):
  """q, k, v and a cotangent, or their shapes, spread over the context axis."""
  import jax
  import numpy as np

  from rlpost import sharding

  place = sharding.named(mesh, (None, 'time', None, None))
  shapes = [(1, length, h, WIDTH) for h in (HEADS, heads, heads, HEADS)]
  if not random:
    return [
        jax.ShapeDtypeStruct(s, np.float32, sharding=place) for s in shapes
    ]
  rng = np.random.default_rng(0)
  return [
      jax.device_put(rng.normal(size=s).astype(np.float32), place)
      for s in shapes
  ]


def _flops(length, products):
  """Of causal attention: `products` of 2 P operations a pair and head."""
  return 2 * products * WIDTH * HEADS * length * (length + 1) // 2


def _emit_time(name, seconds, flops, limits, **extra):
  rate = flops / statistics.median(seconds) / 1e9
  measure.emit(
      name, rate, 'GFLOP/CPU s', limits.gemm, rate / limits.gemm,
      cpu_s=measure.spread(seconds), model_flops=flops, **extra,
  )


def _ringattention(mesh):
  """The package's causal attention over the mesh; None if not installed."""
  import jax
  import jax.extend.backend
  import jax.lib
  import jax.numpy as jnp
  from jax.sharding import PartitionSpec

  if importlib.util.find_spec('ringattention') is None:
    return None
  jax.lib.xla_bridge = jax.extend.backend  # where the package looks for it
  package = importlib.import_module('ringattention')
  settings = {
      'causal_block_size': 1, 'query_chunk_size': 128, 'key_chunk_size': 128,
      'deterministic': True, 'dropout_rng': None, 'attn_pdrop': 0.0,
      'dtype': jnp.float32, 'policy': jax.checkpoint_policies.nothing_saveable,
      'precision': None, 'prevent_cse': False,
  }

  def attend(q, k, v):
    return package.ringattention_jax(
        q, k, v, None, None, None, 'context', True, settings
    )

  states = PartitionSpec(None, 'context', None, None)
  return jax.shard_map(
      attend, mesh=mesh, in_specs=(states,) * 3, out_specs=states,
      check_vma=False,
  )


def _seconds(function, args, times):
  """CPU seconds of calls of the jitted function, compiled before."""
  import jax

  jitted = jax.jit(function)
  return measure.repeat(
      lambda: jax.block_until_ready(jitted(*args)), times=times
  )


def forward(times):
  """{case: CPU seconds} of 8k tokens forward; as many key heads as queries."""
  from rlpost import sharding

  mesh = _mesh(WAYS)
  with sharding.use(mesh):
    q, k, v, _ = _states(mesh, 8192, HEADS)
    cases = {
        'ring': functools.partial(_attend, 'ring', ways=WAYS),
        'plain': functools.partial(_attend, 'dense'),
        'ringattention': _ringattention(mesh),
    }
    return {
        name: function and _seconds(function, (q, k, v), times)
        for name, function in cases.items()
    }


def both(times):
  """{case: (CPU seconds, temporary bytes)} of 2k tokens there and back."""
  import jax

  args = _states(_mesh(1), 2048, KV_HEADS)
  theirs = functools.partial(jax.nn.dot_product_attention, is_causal=True)
  cases = {
      'blockwise': functools.partial(_attend, 'blockwise'),
      'dot_product': theirs,
  }
  return {
      name: (_seconds(_gradient(attend), args, times),
             _temp_bytes(_gradient(attend), args))
      for name, attend in cases.items()
  }


def _temp_bytes(function, args):
  import jax

  compiled = jax.jit(function).lower(*args).compile()
  return compiled.memory_analysis().temp_size_in_bytes


def time(times):
  """Prints a line per case of `forward` and `both`."""
  ahead, around = forward(times), both(times)
  limits = measure.limits()
  best = statistics.median(ahead['ring'])
  for name, seconds in ahead.items():
    line = f'attention_forward_8k_{name}'
    if seconds is None:
      print(json.dumps({'name': line, 'skipped': 'not installed'}))
      continue
    _emit_time(
        line, seconds, _flops(8192, 2), limits,
        times_ring=statistics.median(seconds) / best,
    )
  seconds, size = around['dot_product']
  for name, (own, temp) in around.items():
    _emit_time(
        f'attention_both_2k_{name}', own, _flops(2048, 7), limits,
        temp_mib=temp / 2**20, part_of_their_memory=temp / size,
        part_of_their_time=statistics.median(own) / statistics.median(seconds),
    )


def memory(path):
  """Prints temporary MiB a device, and draws them against the length."""
  from rlpost import sharding

  found = {backend: [] for backend in SPREAD}
  for backend, ways in SPREAD.items():
    mesh = _mesh(ways)
    for length in LENGTHS:
      with sharding.use(mesh):
        args = _states(mesh, length, KV_HEADS, random=False)
        attend = functools.partial(_attend, backend, ways=WAYS)
        temp = _temp_bytes(_gradient(attend), args) / 2**20
      found[backend].append(temp)
      own = 2 * (HEADS + KV_HEADS) * 2 * WIDTH * 4 * length / ways / 2**20
      measure.emit(
          f'attention_memory_{backend}_{length}', temp, 'MiB', own,
          own / (own + temp), devices=ways,
      )
  if path:
    _draw(found, path)


def _draw(found, path):
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(figsize=(7, 4.5), layout='constrained')
  for (backend, sizes), marker in zip(found.items(), 'osv^D', strict=True):
    ways = SPREAD[backend]
    spread = f'{ways} devices' if ways > 1 else 'one device'
    axes.loglog(
        LENGTHS, sizes, marker=marker, label=f'{backend}, {spread}', base=2
    )
  axes.set_xticks(LENGTHS, [f'{n // 1024}k' for n in LENGTHS])
  axes.set_yticks([2**n for n in range(3, 16, 2)],
                  [str(2**n) for n in range(3, 16, 2)])
  axes.set_xlabel('tokens')
  axes.set_ylabel('temporary MiB on each device')
  axes.set_title('Attention, forward and backward (fp32, 8 heads of 64, 2 of '
                 'keys)', fontsize='medium')
  axes.grid(which='major', alpha=0.3)
  axes.legend()
  figure.savefig(path, dpi=150)


def main(argv=None) -> None:
  args = _arguments(argv)
  measure.use_threads(args.threads)
  import jax

  jax.config.update('jax_num_cpu_devices', WAYS)
  if args.part == 'time':
    time(args.times)
  else:
    memory(args.plot)


if __name__ == '__main__':
  main()
