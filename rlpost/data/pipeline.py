"""Batches of packed rows for supervised training, carried by Grain.

  source -> shuffle (a new order every epoch) -> encode -> pack -> batches

Everything up to the packing is a Grain `MapDataset`: document i of the stream
is a function of (seed, i). A batch opens empty rows and takes documents in
stream order, first fit, until one fits no row; that one opens the next batch.
So the state is a cursor: it does not know of threads, hosts or half-packed
rows, and a resume costs the same at every step.

Nothing is cut: a document longer than a row is left out and counted.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlpost import errors, types
from rlpost.data import packing

VERSION = 1


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
    """
    if not len(source):
      raise errors.InputError('A stream needs at least one record.')
    if not 0 <= seed < 2**32:
      raise errors.InputError(f'{seed=} must be in [0, 2**32).')
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
    self._iterator = None
    self._pending = None
    self._cursor = 0
    self._overlong = 0

  def __iter__(self):
    return self

  def __next__(self) -> types.Batch:
    try:
      packer, cursor, overlong = self._fill()
    except BaseException:
      self.close()  # else the documents of this batch would be lost
      raise
    self._cursor, self._overlong = cursor, overlong
    return packer.batch()

  def _fill(self) -> tuple[packing.Packer, int, int]:
    packer = packing.Packer(**self._layout)
    cursor, overlong = self._cursor, self._overlong
    skipped = 0
    while True:
      document = self._peek()
      if not packer.fits_empty(document):
        overlong, skipped = overlong + 1, skipped + 1
        if skipped > self._size:
          raise errors.InputError(
              f'None of the {self._size} records fits a row of '
              f'{self._layout}; raise the length.'
          )
      elif packer.add(document._replace(group=cursor)):
        skipped = 0
      else:
        return packer, cursor, overlong
      self._pending = None
      cursor += 1

  def _peek(self) -> packing.Document:
    if self._iterator is None:
      self._iterator = iter(self._documents.to_iter_dataset(self._options))
      if self._cursor:
        self._iterator.set_state({'next_index': self._cursor})
    if self._pending is None:
      self._pending = next(self._iterator)
    return self._pending

  def report(self) -> dict:
    """Epochs begun (a fraction), documents taken, and those too long."""
    return {
        'epoch': self._cursor / self._size,
        'documents': self._cursor - self._overlong,
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

  def close(self):
    """Ends the threads; the stream goes on from its cursor if asked again."""
    if self._iterator is not None:
      self._iterator.close()
    self._iterator = None
    self._pending = None
