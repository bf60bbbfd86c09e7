"""Forward and backward pass with the update: share of what a GEMM reaches.

  python -m tools.bench.train_step --batch=8 --length=256 [--remat]

Rows are plain causal documents that train every token but the first. The
program is the product's update, with log-probabilities in chunks, the gradient
of the loss, its norm, and AdamW. The value is model operations per CPU second:
forward and backward, each once, whatever is computed again not counted, the
update's own time included. The limit is the measured GEMM.
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
  parser.add_argument('--batch', type=int, default=8)
  parser.add_argument('--length', type=int, default=256)
  parser.add_argument('--rows', type=int, default=2, help='of a micro-batch')
  parser.add_argument('--chunk', type=int, default=512)
  parser.add_argument('--remat', nargs='?', const='full', default='none')
  parser.add_argument('--times', type=int, default=3)
  parser.add_argument('--threads', type=int, default=1)
  args = parser.parse_args(argv)
  if args.batch % args.rows:
    parser.error(f'--batch={args.batch} must divide by {args.rows=}.')
  return args


def main(argv=None) -> None:
  """Prints one line."""
  args = _arguments(argv)
  measure.use_threads(args.threads)
  from rlpost.planning import cost as planned
  from rlpost.planning import roofline, topology
  from rlpost.training import programs as program_lib
  from tools.bench import workload

  config, mesh = workload.model(args.shape), workload.mesh()
  shapes = workload.document_shapes(
    config,
    args.batch,
    args.length,
    args.rows,
    chunk=args.chunk,
    remat=args.remat,
  )
  programs = program_lib.programs(shapes, mesh)
  with measure.clock() as compiling:
    program = programs['train'].compile()
  state = workload.random_state(shapes, programs['init'], mesh)
  documents = workload.documents(config, args.batch, args.length, args.rows)
  seconds = workload.train_seconds(program, state, documents, args.times)
  peak, limits = measure.peak_rss_bytes(), measure.limits()
  trained = args.batch * (args.length - 1)
  cost = workload.train_cost(
    config,
    tokens=args.batch * args.length,
    pairs=args.batch * workload.causal_pairs(args.length),
    logits=trained,
  )
  rate = cost.flops / statistics.median(seconds[1:]) / 1e9
  # What the planner would say of a chip with this machine's limits.
  chip = topology.Chip(1, limits.gemm * 1e9, 0, limits.stream * 1e9, 1, 1)
  bound = roofline.roofline(
    planned.work(shapes, 'train'), chip, 1,
    hbm_bytes=shapes.micro * planned.weight_bytes(shapes, 1) * 2 + cost.bytes,
  )
  name = f'train_{args.shape}_{args.batch}x{args.length}'
  measure.emit(
    name + ('' if args.remat == 'none' else f'_remat_{args.remat}'),
    rate,
    'GFLOP/CPU s',
    limits.gemm,
    rate / limits.gemm,
    cpu_s=measure.spread(seconds[1:]),
    first_cpu_s=seconds[0],
    compile_cpu_s=compiling.cpu_s,
    prompt_tokens=0,
    sampled_tokens=0,
    trained_tokens=trained,
    model_flops=cost.flops,
    limit_is='gemm',
    planned_cpu_s=bound.seconds,
    measured_over_planned=statistics.median(seconds[1:]) / bound.seconds,
    rows_per_micro_batch=args.rows,
    temporary_bytes=program.memory_analysis().temp_size_in_bytes,
    gemm_gflop_per_cpu_s=limits.gemm,
    stream_gb_per_cpu_s=limits.stream,
    threads=args.threads,
    peak_rss_bytes=peak,
  )


if __name__ == '__main__':
  main()
