"""The header of a GGUF file: metadata and the table of tensors.

Reads the layout of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
(versions 2 and 3, little-endian) with bounds on every length, since a file may
be cut off or damaged. The reader of the `gguf` package gives the same, but
spends two CPU seconds on the vocabulary of a small model.
"""

import dataclasses
import mmap
import os
import struct
from typing import Any, NamedTuple

import gguf
import numpy as np

from rlpost import errors

_MAGIC = b'GGUF'
_VERSIONS = (2, 3)
_SCALARS = {
    gguf.GGUFValueType.UINT8: '<u1',
    gguf.GGUFValueType.INT8: '<i1',
    gguf.GGUFValueType.UINT16: '<u2',
    gguf.GGUFValueType.INT16: '<i2',
    gguf.GGUFValueType.UINT32: '<u4',
    gguf.GGUFValueType.INT32: '<i4',
    gguf.GGUFValueType.FLOAT32: '<f4',
    gguf.GGUFValueType.BOOL: '|b1',
    gguf.GGUFValueType.UINT64: '<u8',
    gguf.GGUFValueType.INT64: '<i8',
    gguf.GGUFValueType.FLOAT64: '<f8',
}
_MAX_DIMS = 4


class Tensor(NamedTuple):
  """An entry of the table: `shape` is [out, in], `offset` is from byte 0."""

  name: str
  shape: tuple[int, ...]
  type_id: int
  offset: int


@dataclasses.dataclass(frozen=True)
class Header:
  """What a GGUF file says before its data."""

  path: str
  size: int
  metadata: dict[str, Any]
  tensors: dict[str, Tensor]


class _Cursor:
  """Reads little-endian values from a buffer and refuses to pass its end."""

  def __init__(self, buffer, path):
    self.buffer, self.path, self.at = buffer, path, 0

  def fail(self, what):
    raise errors.InputError(
        f'{self.path} is not a whole GGUF file: {what} at byte {self.at} of '
        f'{len(self.buffer)}. Download it again.'
    )

  def take(self, count):
    if count > len(self.buffer) - self.at:
      self.fail(f'{count} more bytes are promised')
    self.at += count
    return self.buffer[self.at - count : self.at]

  def number(self, code):
    return struct.unpack('<' + code, self.take(struct.calcsize(code)))[0]

  def text(self):
    raw = self.take(self.number('Q'))
    try:
      return raw.decode('utf-8')
    except UnicodeDecodeError:
      return self.fail('a string that is not UTF-8 ends')

  def value(self, kind):
    if kind == gguf.GGUFValueType.STRING:
      return self.text()
    if kind in _SCALARS:
      return self.array(kind, 1)[0]
    if kind == gguf.GGUFValueType.ARRAY:
      item, count = self.number('I'), self.number('Q')
      if item in _SCALARS:
        return self.array(item, count)
      if count > len(self.buffer):
        self.fail(f'an array of {count} items')
      if item != gguf.GGUFValueType.STRING:
        self.fail(f'an array of items of type {item}')
      return [self.text() for _ in range(count)]
    return self.fail(f'a value of unknown type {kind}')

  def array(self, kind, count):
    dtype = np.dtype(_SCALARS[kind])
    return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()


def read(path: str | os.PathLike) -> Header:
  """Metadata and tensor table of the GGUF file at `path`.

  Raises:
    InputError: the file is missing, not GGUF, of another version, or cut off.
  """
  path = os.fspath(path)
  try:
    with open(path, 'rb') as file:
      if file.read(4) != _MAGIC:
        raise errors.InputError(f'{path} is not a GGUF file: wrong magic.')
      with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
        return _parse(_Cursor(buffer, path))
  except OSError as error:
    raise errors.InputError(f'Cannot read {path}: {error}.') from error


def _parse(cursor: _Cursor) -> Header:
  cursor.take(4)
  version = cursor.number('I')
  if version not in _VERSIONS:
    raise errors.InputError(
        f'{cursor.path} is GGUF version {version}; supported: {_VERSIONS}, '
        'little-endian.'
    )
  num_tensors, num_keys = cursor.number('Q'), cursor.number('Q')
  metadata = {}
  for _ in range(num_keys):
    key = cursor.text()
    if key in metadata:
      cursor.fail(f'key {key!r} is there twice')
    metadata[key] = cursor.value(cursor.number('I'))
  entries = []
  for _ in range(num_tensors):
    name, dims = cursor.text(), cursor.number('I')
    if dims > _MAX_DIMS:
      cursor.fail(f'tensor {name!r} with {dims} dimensions')
    # The file lists the fastest axis first.
    shape = tuple(cursor.number('Q') for _ in range(dims))[::-1]
    entries.append((name, shape, cursor.number('I'), cursor.number('Q')))
  align = metadata.get('general.alignment', gguf.GGUF_DEFAULT_ALIGNMENT)
  if not isinstance(align, int) or align <= 0:
    cursor.fail(f'general.alignment is {align}')
  start = -(-cursor.at // align) * align
  tensors = {
      name: Tensor(name, shape, kind, start + offset)
      for name, shape, kind, offset in entries
  }
  if len(tensors) != len(entries):
    cursor.fail('a tensor is there twice')
  return Header(cursor.path, len(cursor.buffer), metadata, tensors)
