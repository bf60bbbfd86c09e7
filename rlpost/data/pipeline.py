"""Batches of packed rows for supervised training, carried by Grain.

  source -> shuffle (a new order every epoch) -> encode -> pack -> batches

Everything up to the packing is a Grain `MapDataset`: document i of the stream
is a function of (seed, i). `look_ahead` documents wait for a place. A batch
opens empty rows; the document that has waited longest goes first, so none waits
for ever, then always the longest one that some row has room for, first fit,
and the next of the stream takes its place among the waiting. When none of them
fits, the batch is full. With one that waits, that is the order of the stream.

So the state is a cursor and the numbers of those that wait: it does not know of
threads, hosts or half-packed rows, and a resume costs the same at every step.

Nothing is cut: a document longer than a row is left out and counted.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlpost import errors, types
from rlpost.data import packing

VERSION = 2


class Stream:
  """An endless iterator of `types.Batch`, resumable between any two.

  Close it when done, or use `contextlib.closing`: it may own threads.
  """

  def __init__(
      self,
      source: Sequence[Any],
      encode: Callable[[Any], packing.Document],
      *,
      rows: int,
      length: int,
      seed: int,
      fingerprint: str,
      slots: int | None = None,
      threads: int = 0,
      look_ahead: int = 1,
  ):
    """A stream at its beginning.

    Args:
      source: records at random, such as a TFDS data source.
      encode: a record as token ids and the mask of what is trained; pure.
      rows: B, rows per batch.
      length: T, tokens per row.
      seed: of the orders, in [0, 2**32).
      fingerprint: digest of the data behind `source`.
      slots: K, trained tokens per row; `length` if left out.
      threads: that read and encode ahead; 0 does it in line.
      look_ahead: documents to choose from; more of them leave less padding.
    """
    if not len(source):
      raise errors.InputError('A stream needs at least one record.')
    if not 0 <= seed < 2**32:
      raise errors.InputError(f'{seed=} must be in [0, 2**32).')
    if look_ahead < 1:
      raise errors.InputError(f'{look_ahead=} must be at least 1.')
    # Grain imports JAX, which host code must not do just by being imported.
    import grain

    self._size = len(source)
    self._layout = {'rows': rows, 'length': length, 'slots': slots}
    self._seed = seed
    self._fingerprint = fingerprint
    self._options = grain.ReadOptions(
        num_threads=threads, prefetch_buffer_size=8 * threads
    )
    self._documents = (
        grain.MapDataset.source(source)
        .shuffle(seed=seed)
        .repeat(None)
        .map(encode)
    )
    self._look_ahead = look_ahead
    self._iterator = None
    self._waiting = []
    self._cursor = 0
    self._overlong = 0

  def __iter__(self):
    return self

  def __next__(self) -> types.Batch:
    before = self._cursor, self._overlong, list(self._waiting)
    try:
      return self._fill().batch()
    except BaseException:
      # Else the documents of this batch would be lost.
      self.close()
      self._cursor, self._overlong, self._waiting = before
      raise

  def _fill(self) -> packing.Packer:
    packer = packing.Packer(**self._layout)
    self._wait(packer)
    packer.add(self._waiting.pop(0))
    while True:
      self._wait(packer)
      fitting = [i for i, d in enumerate(self._waiting) if packer.has_room(d)]
      if not fitting:
        return packer
      sizes = [len(self._waiting[i].tokens) for i in fitting]
      packer.add(self._waiting.pop(fitting[int(np.argmax(sizes))]))

  def _wait(self, packer: packing.Packer):
    """Reads on until `look_ahead` documents wait that fit an empty row."""
    skipped = 0
    while len(self._waiting) < self._look_ahead:
      document = self._read()._replace(group=self._cursor)
      self._cursor += 1
      if packer.fits_empty(document):
        self._waiting.append(document)
        skipped = 0
        continue
      self._overlong, skipped = self._overlong + 1, skipped + 1
      if skipped > self._size:
        raise errors.InputError(
            f'None of the {self._size} records fits a row of {self._layout}; '
            'raise the length.'
        )

  def _read(self) -> packing.Document:
    if self._iterator is None:
      self._iterator = iter(self._documents.to_iter_dataset(self._options))
      if self._cursor:
        self._iterator.set_state({'next_index': self._cursor})
    return next(self._iterator)

  def report(self) -> dict:
    """Epochs begun (a fraction), documents taken, and those too long."""
    taken = self._cursor - len(self._waiting)
    return {
        'epoch': taken / self._size,
        'documents': taken - self._overlong,
        'overlong': self._overlong,
    }

  def get_state(self) -> dict:
    """All that decides the next batch, as JSON."""
    return {
        'version': VERSION,
        'seed': self._seed,
        'fingerprint': self._fingerprint,
        'size': self._size,
        'cursor': self._cursor,
        'overlong': self._overlong,
        'waiting': [document.group for document in self._waiting],
    }

  def set_state(self, state: Mapping):
    """Continues from `state`, which any number of threads may have written.

    Raises:
      errors.InputError: it belongs to other data or another seed.
    """
    mine = self.get_state()
    for key in ('version', 'seed', 'fingerprint', 'size'):
      if state[key] != mine[key]:
        raise errors.InputError(
            f'The saved stream has {key} {state[key]!r}, this one '
            f'{mine[key]!r}: its cursor means nothing here. Restore the data '
            'and seed it was saved with, or use a new workdir.'
        )
    self.close()
    self._cursor = state['cursor']
    self._overlong = state['overlong']
    self._waiting = [
        self._documents[i]._replace(group=i) for i in state['waiting']
    ]

  def close(self):
    """Ends the threads; the stream goes on from its cursor if asked again."""
    if self._iterator is not None:
      self._iterator.close()
    self._iterator = None
