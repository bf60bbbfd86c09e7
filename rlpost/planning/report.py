"""What a compiled program says of itself, and the table of a plan."""

from collections.abc import Mapping
from typing import Any

from rlpost.planning import cost, hlo, topology
from rlpost.planning import roofline as rooflines

# What to change when the bytes of a kind are most of what does not fit.
CURES = {
    'parameters': 'more chips, or a larger mesh.fsdp or mesh.tensor',
    'optimizer': 'train.offload=True, or a larger mesh.fsdp',
    'cache': 'fewer rollout.slots, a shorter max_new, or a larger mesh.context',
    'batch': 'fewer train.rows',
    'beside': 'more chips, or a larger mesh.fsdp or mesh.context',
    'activations': "train.remat='full', fewer train.rows, a smaller "
                   'train.chunk, or a larger mesh.context',
}


def of(compiled, program, shapes, mesh, name, topology_name) -> dict[str, Any]:
  """The verdict on a program that compiled, as JSON."""
  memory = compiled.memory_analysis()
  total = (
      memory.argument_size_in_bytes + memory.output_size_in_bytes
      - memory.alias_size_in_bytes + memory.temp_size_in_bytes
  )
  layouts = cost.taken(program, compiled)
  all_bytes, read = (
      sum(cost.argument_bytes(program, which).values())
      for which in (None, dict.fromkeys(layouts))
  )
  kinds = cost.argument_bytes(program, layouts)
  host = kinds.pop('host')
  kinds |= {
      'activations': memory.temp_size_in_bytes,
      'outputs': memory.output_size_in_bytes - memory.alias_size_in_bytes,
  }
  text = compiled.as_text()
  loops = shapes.micro if name in ('train', 'score') else 1
  found = hlo.collectives(text, dict(mesh.shape), loops)
  chip, chips = topology.parse(topology_name)
  out = {
      'fits': True, 'bytes': {**kinds, 'total': total, 'host': host},
      'unread': all_bytes - read,
      'limit': int(chip.hbm_bytes / chip.cores),
      'collectives': hlo.totals(found), 'overlap': hlo.overlap(text, loops),
      'flops': None, 'roofline': None,
  }
  work = cost.work(shapes, name)
  if work is not None:
    limit = rooflines.roofline(
        work, chip, chips, collectives=found,
        hbm_bytes=chip.cores * _hbm_bytes(shapes, mesh, name, kinds),
    )
    out['flops'] = {'model': work.flops, 'again': work.again}
    out['roofline'] = {
        'unit': work.unit, 'tokens': work.tokens, 'seconds': limit.seconds,
        'bound': limit.bound, 'compute_s': limit.compute_s,
        'memory_s': limit.memory_s, 'links_s': limit.links_s,
        'mfu': limit.mfu, 'tokens_per_s': limit.tokens_per_s,
    }
  return out


def asked(program, needed: float | None) -> dict[str, int]:
  """Bytes by kind of a program that the compiler found no room for."""
  kinds = cost.argument_bytes(program)
  rest = (needed or 0) - sum(v for k, v in kinds.items() if k != 'host')
  return kinds | {'activations': int(max(0, rest))}


def judged(verdict, beside: int, limit: float) -> dict[str, Any]:
  """A verdict on a program among what the trainer holds beside it.

  That is also what the program is given and does not read.

  Args:
    beside: bytes, see `cost.beside`.
    limit: bytes of a device.
  """
  verdict = {**verdict, 'beside': beside + verdict.get('unread', 0)}
  if verdict['fits']:
    needed = verdict['bytes']['total'] + verdict['beside']
    verdict |= {'limit': int(limit), 'fits': needed <= limit}
    if not verdict['fits']:
      verdict['needed'] = needed
  return verdict


def _hbm_bytes(shapes, mesh, name, kinds) -> float:
  """That a device moves at least: arguments once, optimizer and parameters
  back again, and gathered weights in each pass of each micro-batch."""
  moved = sum(kinds[k] for k in ('parameters', 'optimizer', 'cache', 'batch'))
  if name in ('train', 'score'):
    passes = 1
    if name == 'train':
      moved += kinds['parameters'] + kinds['optimizer']
      passes = 3 if shapes.step.remat == 'full' else 2
    weights = cost.weight_bytes(shapes, mesh.shape['tensor'])
    moved += passes * shapes.micro * weights
  return moved


def cure(verdict: Mapping[str, Any]) -> str:
  """What to change about a program that does not fit."""
  kinds = {**verdict.get('bytes', {}), 'beside': verdict.get('beside', 0)}
  kinds = {k: v for k, v in kinds.items() if k in CURES}
  most = max(kinds, key=kinds.get) if any(kinds.values()) else 'activations'
  return CURES[most]


def table(plan: Mapping[str, Any]) -> str:
  """A plan as text."""
  lines = [
      f'{"program":20s} {"fits":8s} {"GiB":>7s} {"params":>7s} {"optim":>7s} '
      f'{"cache":>7s} {"activ.":>7s} {"beside":>7s} {"bound":>8s} '
      f'{"seconds":>9s} {"MFU":>5s} {"tokens/s":>11s} {"hidden":>7s}'
  ]
  lines += [f'{n:20s} {line(v)}' for n, v in plan['programs'].items()]
  for key in ('usd_per_update', 'usd_per_million_tokens'):
    if key in plan:
      lines.append(f'{key}: {plan[key]:.4g}')
  return '\n'.join(lines)


def line(v: Mapping[str, Any]) -> str:
  """One verdict, without its name."""
  out = f'{ {True: "yes", False: "NO", None: "unknown"}[v["fits"]]:8s} '
  if v['fits']:
    b, r, o = v['bytes'], v['roofline'], v['overlap']
    out += ' '.join(
        f'{b[k] / 2**30:7.2f}'
        for k in ('total', 'parameters', 'optimizer', 'cache', 'activations')
    ) + f' {v["beside"] / 2**30:7.2f}'
    if r:
      out += (f' {r["bound"]:>8s} {r["seconds"]:9.3g} {r["mfu"]:5.2f} '
              f'{r["tokens_per_s"]:11,.0f}')
    if o['permutes']:
      out += f' {o["hidden"] / o["permutes"]:7.0%}'
  elif v.get('needed'):
    out += (f'{v["needed"] / 2**30:7.2f} of {v["limit"] / 2**30:.2f}: '
            f'try {cure(v)}')
  else:
    out += v.get('error', '')
  return out.rstrip()
