"""Decoding alone: tokens per CPU second, the prefill not counted.

  python -m tools.bench.decode --batch=1,8,32

Batch b is b prompts of 64 tokens with one row each. The first token of a row
comes from the prefill and is not counted; its sampling is. The limit is

  tokens / max(operations / measured GEMM, weights read / measured stream)

with both terms perfectly overlapped, which no program does; `added_limit` has
their sum instead.
"""

import argparse
import statistics

from tools.bench import measure


def _arguments(argv):
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    '--shape', choices=('smollm2', 'small'), default='smollm2'
  )
  parser.add_argument('--batch', default='1,8,32', help='with commas between')
  parser.add_argument('--prompt_len', type=int, default=64)
  parser.add_argument('--new', type=int, default=64)
  parser.add_argument('--times', type=int, default=5)
  parser.add_argument('--threads', type=int, default=1)
  args = parser.parse_args(argv)
  args.batch = [int(part) for part in args.batch.split(',')]
  return args


def main(argv=None) -> None:
  """Prints one line per batch size."""
  args = _arguments(argv)
  measure.use_threads(args.threads)
  from rlpost.training import programs as program_lib
  from tools.bench import workload

  config, mesh = workload.model(args.shape), workload.mesh()
  params = None
  for batch in args.batch:
    size = workload.Step(batch, 1, args.prompt_len, args.new, batch)
    shapes = workload.step_shapes(config, size)
    programs = program_lib.programs(shapes, mesh)
    if params is None:
      params = workload.random_params(shapes, mesh)
    seconds = workload.decode_seconds(
      config,
      size,
      program_lib.decoding(programs, 'rollout'),
      params,
      args.times,
    )
    peak, limits = measure.peak_rss_bytes(), measure.limits()
    cost = workload.decode_cost(config, batch, args.prompt_len, args.new)
    tokens = batch * (args.new - 1)
    rate = tokens / statistics.median(seconds)
    limit = tokens / cost.overlapped_seconds(limits)
    measure.emit(
      f'decode_{args.shape}_{batch}',
      rate,
      'tokens/CPU s',
      limit,
      rate / limit,
      cpu_s=measure.spread(seconds),
      prompt_tokens=batch * args.prompt_len,
      sampled_tokens=tokens,
      trained_tokens=0,
      model_flops=cost.flops,
      streamed_bytes=cost.bytes,
      limit_is='tokens / max(model_flops / gemm, streamed_bytes / stream)',
      added_limit=tokens / cost.seconds(limits),
      gemm_gflop_per_cpu_s=limits.gemm,
      stream_gb_per_cpu_s=limits.stream,
      threads=args.threads,
      peak_rss_bytes=peak,
    )


if __name__ == '__main__':
  main()
