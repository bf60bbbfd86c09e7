"""One set of sequences, laid out in rows in many ways.

Tokens live in flat arrays [N], so that objectives and gradients of different
layouts can be compared token by token.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from rlpost.algorithms import recipes
from rlpost.types import Batch

LENGTHS = (3, 5, 1, 7, 4, 2)
SLOTS = 16
ROWS = 4


class Data(NamedTuple):
  """fp32 [N] arrays, and which sequence each token is of."""

  logp: np.ndarray
  behavior: np.ndarray
  ref: np.ndarray
  old: np.ndarray
  advantage: np.ndarray
  entropy: np.ndarray
  value: np.ndarray
  old_value: np.ndarray
  target: np.ndarray
  owner: np.ndarray


def data(seed=0, lengths=LENGTHS, spread=0.3) -> Data:
  rng = np.random.default_rng(seed)
  owner = np.repeat(np.arange(len(lengths)), lengths)
  logp = -rng.exponential(1.0, len(owner)) - 0.05

  def near(x):
    return x + spread * rng.normal(size=len(owner))

  value = rng.normal(size=len(owner))
  fields = (
      logp,
      near(logp),
      near(logp),
      near(logp),
      rng.normal(size=len(lengths))[owner],
      rng.exponential(size=len(owner)),
      value,
      near(value),
      near(value),
  )
  return Data(*(np.float32(x) for x in fields), owner)


class Part(NamedTuple):
  """Rows of one micro-batch; `index` is the token of each slot, -1 on padding.

  `poison` is what padding holds.
  """

  batch: Batch
  critic: recipes.Critic
  old_logp: np.ndarray
  index: np.ndarray
  poison: np.ndarray


def lay_out(source, rows, *, poison=0.0, scatter=None, num_rows=ROWS) -> Part:
  """Puts sequences into rows.

  Args:
    source: Data.
    rows: for each row, the ids of the sequences in it.
    poison: what every field holds on padding.
    scatter: a Generator that strews a row's tokens over its slots.
    num_rows: rows without sequences are padding.
  """
  index = np.full((num_rows, SLOTS), -1)
  sequence = np.full((num_rows, SLOTS), int(min(np.nan_to_num(poison), 1e9)))
  for b, row in enumerate(rows):
    at = [np.flatnonzero(source.owner == i) for i in row]
    tokens = np.array([t for own in at for t in own], int)
    local = np.repeat(np.arange(len(row)), [len(own) for own in at])
    where = np.arange(len(tokens))
    if scatter is not None:
      where = scatter.permutation(SLOTS)[: len(tokens)]
    index[b, where], sequence[b, where] = tokens, local

  def field(values):
    return np.where(index >= 0, values[index], np.float32(poison))

  zeros = np.zeros_like(sequence)
  batch = Batch(
      *[None] * 5,
      predictor=zeros,
      target=zeros,
      mask=np.float32(index >= 0),
      behavior_logp=field(source.behavior),
      ref_logp=field(source.ref),
      advantage=field(source.advantage),
      reward=field(source.advantage),
      temperature=np.ones(index.shape, np.float32),
      sequence=np.int32(sequence),
      group=zeros,
      domain=zeros,
  )
  critic = recipes.Critic(field(source.old_value), field(source.target))
  return Part(batch, critic, field(source.old), index, np.float32(poison))


def theta(source) -> dict:
  """What is differentiated: [N] outputs of a model that is all table."""
  return {name: jnp.asarray(getattr(source, name))
          for name in ('logp', 'entropy', 'value')}


def outputs(theta, part) -> recipes.Outputs:
  """Padding reads token 0 plus the poison: a leaking gradient lands there."""
  padding = part.index < 0
  rows = {
      name: jnp.where(padding, 0, x[jnp.maximum(part.index, 0)])
      + jnp.where(padding, x[0] + part.poison, 0)
      for name, x in theta.items()
  }
  return recipes.Outputs(
      rows['logp'], rows['entropy'], rows['value'], part.old_logp
  )


# The same six sequences, as micro-batches of [ROWS, SLOTS].
LAYOUTS = {
    'packed': [[[0, 1, 2], [3, 4], [5]]],
    'one a row': [[[0], [1], [2], [3]], [[4], [5]]],
    'row order': [[[5], [], [4, 3], [2, 0, 1]]],
    'pad rows': [[[], [0, 1, 2], [], [3, 4]], [[], [], [], []], [[5]]],
    'micro-batches': [[[i]] for i in range(6)],
    'all in two': [[[0, 5, 3], [4, 1, 2]]],
}
