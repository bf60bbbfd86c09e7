"""The least time that a program can take, by three limits.

  time = max(operations / peak, bytes of memory / bandwidth, bytes sent / links)

per chip; each limit alone, as if the others were hidden behind it. Memory
counts what a program is called with and returns, once, and the weights once
per pass where each device reads them whole. Links: what runs along a mesh axis
has one dimension of the torus, in both directions for a gather, a scatter or
a sum, in one for a permute.
"""

import dataclasses

from rlpost.planning import cost, hlo
from rlpost.planning.topology import Chip


@dataclasses.dataclass(frozen=True)
class Roofline:
  """Seconds by limit, and what follows of the largest.

  Attributes:
    mfu: operations of the model, nothing repeated, over peak times seconds.
  """

  compute_s: float
  memory_s: float
  links_s: float
  mfu: float
  tokens_per_s: float

  @property
  def seconds(self) -> float:
    return max(self.compute_s, self.memory_s, self.links_s)

  @property
  def bound(self) -> str:
    limits = {
        'compute': self.compute_s, 'memory': self.memory_s,
        'links': self.links_s,
    }
    return max(limits, key=limits.get)


def roofline(
    work: cost.Work, chip: Chip, chips: int, *, hbm_bytes: float,
    collectives: list[hlo.Collective] = (),
) -> Roofline:
  """Of one call.

  Args:
    work: on all devices together.
    hbm_bytes: that one chip reads and writes.
    collectives: of one device.
  """
  compute = (work.flops + work.again) / chips / chip.flops
  memory = hbm_bytes / chip.hbm_bandwidth
  links = sum(
      c.sent / chip.link_bandwidth
      / (1 if c.kind == 'collective-permute' else 2)
      for c in collectives
  )
  seconds = max(compute, memory, links)
  return Roofline(
      compute, memory, links, work.flops / chips / chip.flops / seconds,
      work.tokens / seconds,
  )
