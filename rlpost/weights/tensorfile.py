"""The safetensors file format: read without copying, write as a stream.

Layout: 8 bytes (little-endian length of the header), a JSON header
`{name: {dtype, shape, data_offsets}, '__metadata__': {...}}`, then the data.
Own code because the package's NumPy reader turns bfloat16 into float32.
"""

import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from rlpost import errors

DTYPES = {
    'F64': np.dtype('<f8'),
    'F32': np.dtype('<f4'),
    'F16': np.dtype('<f2'),
    'BF16': np.dtype(ml_dtypes.bfloat16),
    'I64': np.dtype('<i8'),
    'I32': np.dtype('<i4'),
    'I16': np.dtype('<i2'),
    'I8': np.dtype('i1'),
    'U8': np.dtype('u1'),
    'BOOL': np.dtype('?'),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000


class Source(NamedTuple):
  """A tensor to write; `make` is called when its turn comes."""

  name: str
  shape: tuple[int, ...]
  make: Callable[[], Any]


def _unique(pairs):
  result = dict(pairs)
  if len(result) != len(pairs):
    names = [k for k, _ in pairs]
    twice = sorted({k for k in names if names.count(k) > 1})
    raise ValueError(f'key {twice[0]!r} is there twice')
  return result


def read(path: str | os.PathLike) -> dict[str, np.ndarray]:
  """Read-only memory maps of every tensor in a safetensors file, by name.

  Raises:
    InputError: the file is missing, not safetensors, damaged or cut off.
  """
  try:
    data = np.memmap(path, np.uint8, 'r')
  except (OSError, ValueError) as error:
    raise errors.InputError(f'Cannot read {path}: {error}.') from error
  try:
    length = int(data[:8].view('<u8')[0]) if len(data) >= 8 else 0
    if not 2 <= length <= min(_MAX_HEADER, len(data) - 8):
      raise ValueError(f'its header would take {length} bytes')
    header = json.loads(
        data[8 : 8 + length].tobytes(), object_pairs_hook=_unique
    )
    header.pop('__metadata__', None)
    body = data[8 + length :]
    tensors, end = {}, 0
    entries = sorted(header.items(), key=lambda kv: kv[1]['data_offsets'])
    for name, entry in entries:
      tensors[name] = _view(body, name, entry, end)
      end = entry['data_offsets'][1]
    if end != len(body):
      raise ValueError(f'{len(body)} bytes of data where {end} are described')
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise errors.InputError(
        f'{path} is not a whole safetensors file: {error}.'
    ) from error
  return tensors


def _view(body, name, entry, expected_start):
  """One tensor of the data; raises ValueError if its entry cannot be true."""
  if entry['dtype'] not in DTYPES:
    raise ValueError(
        f'{name} has type {entry["dtype"]!r}; supported: {sorted(DTYPES)}'
    )
  dtype, shape = DTYPES[entry['dtype']], tuple(entry['shape'])
  start, stop = entry['data_offsets']
  if start != expected_start or stop - start != (
      math.prod(shape) * dtype.itemsize
  ):
    raise ValueError(
        f'{name} {entry["dtype"]} {shape} cannot be bytes {start} to {stop}'
    )
  if stop > len(body):
    raise ValueError(f'{name} ends at byte {stop} of {len(body)}: cut off')
  return np.asarray(body[start:stop]).view(dtype).reshape(shape)


def write(
    path: str | os.PathLike, sources: Iterable[Source], dtype
) -> None:
  """Writes tensors as `dtype`, one in memory at a time, then renames.

  Args:
    path: the file; it appears only when whole.
    sources: what to write, in order; names must differ.
    dtype: one of DTYPES' values; values are rounded to nearest even.
  """
  sources, dtype = list(sources), np.dtype(dtype)
  if dtype not in _NAMES:
    raise errors.InputError(f'{dtype=} must be one of {list(_NAMES)}.')
  header, end = {'__metadata__': {'format': 'pt'}}, 0
  for source in sources:
    start, end = end, end + math.prod(source.shape) * dtype.itemsize
    if source.name in header:
      raise ValueError(f'{source.name} would be written twice.')
    header[source.name] = {
        'dtype': _NAMES[dtype],
        'shape': list(source.shape),
        'data_offsets': [start, end],
    }
  raw = json.dumps(header, separators=(',', ':')).encode()
  raw += b' ' * (-len(raw) % 8)  # so that the data is aligned
  temporary = pathlib.Path(f'{path}.part-{os.getpid()}')
  try:
    with open(temporary, 'wb') as file:
      file.write(len(raw).to_bytes(8, 'little') + raw)
      for source in sources:
        array = np.asarray(source.make())
        if array.shape != source.shape:
          raise ValueError(
              f'{source.name} has {array.shape=}, expected {source.shape}.'
          )
        array = np.ascontiguousarray(array.astype(dtype, copy=False))
        file.write(array.view(np.uint8).reshape(-1).data)
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)
