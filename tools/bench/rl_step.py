"""A whole step of GRPO: prompts in, new parameters out.

  python -m tools.bench.rl_step --shape=smollm2 --prompts=2 --group=4 \
      --prompt_len=64 --new=32 --threads=1

One engine prefills each prompt once and samples its group, the reward is the
share of even ids, advantages are normalised per group, a group is one packed
row, and one program computes the gradient and the update. Nothing is saved.

The limit of a step, in CPU seconds, is

  (prefill + decoding + training operations) / measured GEMM
  + (weights read in decoding + the update's numbers) / measured stream

as `workload` counts them. The parts have their own limits of the same form.
"""

import argparse
import statistics

from tools.bench import measure


def _arguments(argv):
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--shape', choices=('smollm2', 'small'), default='small')
  parser.add_argument('--prompts', type=int, default=8)
  parser.add_argument('--group', type=int, default=4)
  parser.add_argument('--prompt_len', type=int, default=64)
  parser.add_argument('--new', type=int, default=64)
  parser.add_argument('--rows', type=int, default=2, help='of a micro-batch')
  parser.add_argument('--chunk', type=int, default=512)
  parser.add_argument('--remat', default='none')
  parser.add_argument('--steps', type=int, default=5, help='warm ones')
  parser.add_argument('--threads', type=int, default=1)
  args = parser.parse_args(argv)
  if args.prompts % args.rows:
    parser.error(f'--prompts={args.prompts} must divide by {args.rows=}.')
  return args


def main(argv=None) -> None:
  """Prints one line for the step and one for each of its two large parts."""
  args = _arguments(argv)
  measure.use_threads(args.threads)
  from rlpost.rollouts.engine import Engine
  from rlpost.training import programs as program_lib
  from tools.bench import workload

  config, mesh = workload.model(args.shape), workload.mesh()
  size = workload.Step(
    args.prompts, args.group, args.prompt_len, args.new, args.rows
  )
  shapes = workload.step_shapes(
    config, size, chunk=args.chunk, remat=args.remat
  )
  programs = program_lib.programs(shapes, mesh)
  with measure.clock() as compiling:
    for program in programs.values():
      program.compile()
  state = workload.random_state(shapes, programs['init'], mesh)
  decoding = program_lib.decoding(programs, 'rollout')
  engine = Engine(shapes.rollout, decoding, workload.no_stop(config))
  steps = []
  for number in range(args.steps + 1):
    state, parts = workload.run_step(
      config, size, engine, programs['train'], state, number
    )
    steps.append(parts)
  _report(args, workload.step_costs(config, size), steps, compiling.cpu_s)


def _report(args, costs, steps, compile_cpu_s) -> None:
  peak = measure.peak_rss_bytes()
  limits = measure.limits()
  first, *warm = steps
  sampled = args.prompts * args.group * args.new
  work = f'{args.shape}_{args.prompts}x{args.group}'
  work += f'_{args.prompt_len}+{args.new}'
  for part, cost in costs.items():
    seconds = [parts[part] for parts in warm]
    middle, floor = statistics.median(seconds), cost.seconds(limits)
    extra = {
      'cpu_s': measure.spread(seconds),
      'first_cpu_s': first[part],
      'prompt_tokens': args.prompts * args.prompt_len,
      'sampled_tokens': sampled,
      'trained_tokens': sampled,
      'model_flops': cost.flops,
      'streamed_bytes': cost.bytes,
      'limit_is': 'model_flops / gemm + streamed_bytes / stream',
      'gemm_gflop_per_cpu_s': limits.gemm,
      'stream_gb_per_cpu_s': limits.stream,
      'threads': args.threads,
      'peak_rss_bytes': peak,
    }
    if part == 'rollout':
      extra['tokens_per_cpu_s'] = sampled / middle
    if part == 'step':
      extra['credit_cpu_s'] = statistics.median(p['credit'] for p in warm)
      extra['compile_cpu_s'] = compile_cpu_s
      extra['logp_gap_max'] = max(p['logp_gap_max'] for p in steps)
      extra['rows_per_micro_batch'] = args.rows
    measure.emit(
      f'rl_{part}_{work}', middle, 'CPU s', floor, floor / middle, **extra
    )


if __name__ == '__main__':
  main()
