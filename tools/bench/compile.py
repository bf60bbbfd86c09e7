"""What it costs to have all programs of a run: anew, and from the cache.

  python -m tools.bench.compile

Every program of `configs/quickstart.py` is traced, lowered and compiled in a
fresh process with an empty cache, and again in a second one that finds the
executables there and loads them. Weights are no part of it, nor are imports.

The limit is the same for a model of one layer, measured beside it: what it
would cost if work on equal layers were done once.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

from tools.bench import measure

PARTS = ('trace', 'lower', 'compile')


def _arguments(argv):
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    '--shape', choices=('smollm2', 'small'), default='smollm2'
  )
  parser.add_argument('--prefix_len', type=int, default=48)
  parser.add_argument('--prompt_len', type=int, default=16)
  parser.add_argument(
    '--layers',
    type=int,
    default=0,
    help='print the parts for so many layers, and no more',
  )
  parser.add_argument('--threads', type=int, default=1)
  return parser.parse_args(argv)


def _quickstart(args, workload):
  """`programs.Shapes` of the config, without its tasks and weights."""
  import dataclasses

  from configs import quickstart
  from rlpost.ops.attention import SharedPrefix
  from rlpost.rollouts.engine import EngineConfig
  from rlpost.training import programs, sections, setup, state

  config = quickstart.get_config()
  rollout = sections.Rollout(**config.rollout)
  train = sections.Train(**config.train)
  prompt, slots = (
    args.prefix_len + args.prompt_len,
    (rollout.samples * rollout.max_new),
  )
  model = dataclasses.replace(
    workload.model(args.shape), num_layers=args.layers
  )
  step = workload.step_config(
    model,
    recipe=setup.make_recipe(**config.recipe),
    layout=SharedPrefix(prompt, rollout.samples, rollout.max_new),
    backend=train.backend,
    remat=train.remat,
    chunk=train.chunk,
    clip_norm=train.clip_norm,
  )
  return programs.Shapes(
    step=step,
    stacked=config.model.stacked,
    trainable=config.model.trainable,
    optimizer=state.adamw(total_steps=config.steps, **config.optimizer),
    rows=train.rows,
    micro=-(-(train.groups or rollout.prompts) // train.rows),
    slots=slots,
    length=prompt + slots,
    rollout=EngineConfig(
      prompts=rollout.slots,
      rows=rollout.rows,
      admit=rollout.admit,
      refill=rollout.refill,
      prefix_len=args.prefix_len,
      prompt_len=args.prompt_len,
      width=rollout.max_new,
      prefixes=len(config.domains.names),
    ),
    scored=step.recipe.kl != 'none' or step.recipe.anchor == 'old',
  )


def _child(args) -> None:
  """Prints {program: {part: CPU seconds}}."""
  measure.use_threads(args.threads)
  from rlpost.training import compilation
  from rlpost.training import programs as program_lib
  from tools.bench import workload

  compilation.use_cache()
  found = {}
  known = program_lib.programs(_quickstart(args, workload), workload.mesh())
  for name, program in known.items():
    with measure.clock() as trace:
      traced = program.trace()
    with measure.clock() as lower:
      lowered = traced.lower()
    with measure.clock() as compiling:
      lowered.compile(program_lib.CPU_OPTIONS)
    clocks = trace, lower, compiling
    found[name] = {
      part: clock.cpu_s for part, clock in zip(PARTS, clocks, strict=True)
    }
  print(json.dumps(found))


def _in_child(args, layers: int, cache: str) -> dict:
  command = [
    sys.executable,
    '-m',
    'tools.bench.compile',
    f'--layers={layers}',
    f'--shape={args.shape}',
    f'--prefix_len={args.prefix_len}',
    f'--prompt_len={args.prompt_len}',
    f'--threads={args.threads}',
  ]
  done = subprocess.run(
    command,
    env=os.environ | {'RLPOST_CACHE': cache},
    check=True,
    text=True,
    stdout=subprocess.PIPE,
  )
  return json.loads(done.stdout)


def _total(parts: dict) -> float:
  return sum(sum(program.values()) for program in parts.values())


def main(argv=None) -> None:
  """Prints one line for the first run and one for the second."""
  args = _arguments(argv)
  if args.layers:
    _child(args)
    return
  from rlpost.models import config as model_configs
  from tools.bench.workload import SHAPES

  layers = model_configs.named(SHAPES[args.shape]).num_layers
  with (
    tempfile.TemporaryDirectory() as whole,
    tempfile.TemporaryDirectory() as single,
  ):
    for run in ('first', 'second'):
      parts = _in_child(args, layers, whole)
      limit = _total(_in_child(args, 1, single))
      total = _total(parts)
      measure.emit(
        f'compile_{args.shape}_{run}_run',
        total,
        'CPU s',
        limit,
        limit / total,
        limit_is='the same programs with one layer',
        **{
          f'{part}_cpu_s': sum(program[part] for program in parts.values())
          for part in PARTS
        },
        programs={name: sum(p.values()) for name, p in parts.items()},
        prompt_tokens=0,
        sampled_tokens=0,
        trained_tokens=0,
        model_flops=0,
        threads=args.threads,
      )


if __name__ == '__main__':
  main()
