"""What devices send each other, read from a compiled program."""

import math
import re

_KINDS = 'all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter'
# `%x = (f32[2,3]{1,0}, s32[]) all-reduce-start(`
_LINE = re.compile(rf' = (.*?) ({_KINDS})(?:-start)?\(')
_ARRAY = re.compile(r'\w+\[([\d,]*)\]')


def found(compiled) -> list[tuple[str, int]]:
  """(kind, elements of the largest array) of each collective."""
  out = []
  for line in compiled.as_text().splitlines():
    if match := _LINE.search(line):
      sizes = [
          math.prod(int(n) for n in dims.split(',') if n)
          for dims in _ARRAY.findall(match.group(1))
      ]
      out.append((match.group(2), max(sizes)))
  return out


def largest(compiled, *kinds) -> int:
  """Elements of the largest array in a collective of these kinds, or any."""
  return max(
      (size for kind, size in found(compiled) if not kinds or kind in kinds),
      default=0,
  )
