"""What this machine can do at best with JAX, per CPU second: one line a limit.

  python tools/bench/machine.py [--threads=1]
"""

import argparse

from tools.bench import measure


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--threads', type=int, default=1)
  parser.add_argument('--times', type=int, default=9)
  args = parser.parse_args()
  measure.use_threads(args.threads)
  best = measure.limits(args.times)
  extra = {'threads': args.threads, 'n': args.times}
  for name, value, unit in (
    ('gemm_f32_1024', best.gemm, 'GFLOP/CPU s'),
    ('weight_stream_f32', best.stream, 'GB/CPU s'),
  ):
    measure.emit(name, value, unit, value, 1.0, **extra)


if __name__ == '__main__':
  main()
