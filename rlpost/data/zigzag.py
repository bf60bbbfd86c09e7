"""Rows laid out for tokens that are split over devices.

Under a causal mask late tokens see more than early ones, so a plain split
would leave the first device idle. The order is applied once, here, to all that
rows hold per token; the visibility rule reads orders and segments, which move
with the tokens, so attention needs to know nothing of it.
"""

import numpy as np

from rlpost import types
from rlpost.data import packing


def places(length: int, ways: int) -> np.ndarray:
  """int [length]: the token in each place, so that devices work alike.

  The sequence is cut into 2 `ways` chunks; device i holds chunks i and
  2 `ways` - 1 - i, so under a causal mask each has the same number of visible
  pairs. `length` divides by 2 `ways`.
  """
  chunks = np.arange(length).reshape(2 * ways, -1)
  order = [c for i in range(ways) for c in (i, 2 * ways - 1 - i)]
  return chunks[order].reshape(-1)


def padded(length: int, ways: int) -> int:
  """Tokens of a row that `spread` has padded."""
  return length if ways == 1 else -(-length // (2 * ways)) * 2 * ways


def spread(batch: types.Batch, ways: int) -> types.Batch:
  """Rows whose tokens are about to be split over `ways` devices.

  Pads rows at the end and puts tokens in zigzag order, with everything that
  says where they stand; loss slots stay, and find their predictors in the new
  places. So what a program says of slots needs no way back.
  """
  length = batch.tokens.shape[1]
  total = padded(length, ways)
  if ways == 1:
    return batch
  tail = packing.blank(len(batch.tokens), total, 0)
  order = places(total, ways)
  moved = {}
  for name in types.PER_TOKEN:
    x = np.concatenate(
        [getattr(batch, name), getattr(tail, name)[:, length:]], axis=1
    )
    moved[name] = x[:, order]
  place = np.argsort(order).astype(np.int32)
  used = batch.mask > 0
  moved['predictor'] = np.where(used, place[batch.predictor], 0)
  return batch._replace(**moved)
