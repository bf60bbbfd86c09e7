"""A digest of the whole training state, the same however it is laid out.

A leaf is (item, path, dtype, shape, SHA-256 of its bytes); the digest of an
item, and of the state, is the SHA-256 over its sorted leaves. So it does not
depend on the order of a dict, on the mesh or on the sharding, and a leaf that
differs can be named.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

# Wall-clock values: saved with the state, and no part of it.
TIMING = 'timing'
SCHEMA = 1


class Leaf(NamedTuple):
  """One leaf of the state; `sha256` is the digest of its bytes alone."""

  item: str
  path: str
  dtype: str
  shape: tuple[int, ...]
  sha256: str


def is_arrays(value: Any) -> bool:
  """Whether an item is a pytree of arrays, and not JSON."""
  leaves = jax.tree.leaves(value)
  return any(isinstance(x, (jax.Array, np.ndarray)) for x in leaves)


def flatten(tree: Any) -> dict[str, Any]:
  """Leaves of a pytree by their path, such as `0/mu/layers/0/attn/qkv`."""
  pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
  flat = {}
  for keys, leaf in pairs:
    path = jax.tree_util.keystr(keys, simple=True, separator='/')
    if path in flat:
      raise ValueError(f'two leaves are called {path!r}; rename one.')
    flat[path] = leaf
  return flat


def canonical_json(value: Any) -> str:
  """The one text of a JSON value: sorted keys, no spaces, no NaN.

  Raises:
    TypeError: not JSON (an array, a set).
    ValueError: NaN or infinite.
  """
  # Keys become strings first: 2 sorts before 10, '10' before '2'.
  plain = json.loads(json.dumps(value, allow_nan=False))
  return json.dumps(plain, sort_keys=True, separators=(',', ':'))


def to_host(array: Any) -> np.ndarray:
  """An array's values on the host, without a lasting copy of them.

  `np.asarray` of a sharded array keeps its copy as long as the array lives,
  which would double the memory of a state. On a CPU this is a view where the
  array has one device or is replicated.
  """
  if not isinstance(array, jax.Array):
    return np.asarray(array)
  if not array.is_fully_addressable:
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
  if array.is_fully_replicated:
    return np.asarray(array.addressable_data(0))
  whole = np.empty(array.shape, array.dtype)
  for shard in array.addressable_shards:
    if shard.replica_id == 0:
      whole[shard.index] = np.asarray(shard.data)
  return whole


def _sha256(array: Any) -> str:
  # As bytes, since bfloat16 does not export a buffer of its own.
  flat = np.ascontiguousarray(to_host(array)).reshape(-1)
  return hashlib.sha256(flat.view(np.uint8)).hexdigest()


def leaves_of(item: str, value: Any) -> list[Leaf]:
  """The leaves of one item; JSON is one leaf without a path.

  Arrays are read one by one, so the extra memory is one leaf at most.

  Raises:
    TypeError: a leaf that is neither an array nor JSON.
    ValueError: NaN or infinity in JSON; two leaves of one path.
  """
  if not is_arrays(value):
    try:
      text = canonical_json(value).encode()
    except (TypeError, ValueError) as error:
      raise type(error)(f'item {item!r} cannot be saved: {error}') from error
    return [Leaf(item, '', 'json', (), hashlib.sha256(text).hexdigest())]
  out = []
  for path, array in sorted(flatten(value).items()):
    if not isinstance(array, (jax.Array, np.ndarray, np.generic)):
      raise TypeError(
          f'{item}/{path} is a {type(array).__name__} beside arrays; make it '
          'an array, or keep it in a JSON item.'
      )
    out.append(
        Leaf(item, path, str(array.dtype), tuple(array.shape), _sha256(array))
    )
  return out


def combine(leaves: list[Leaf]) -> str:
  """SHA-256 over the sorted leaves."""
  sha = hashlib.sha256()
  for leaf in sorted(leaves):
    record = json.dumps([*leaf[:3], list(leaf.shape), leaf.sha256])
    sha.update(record.encode() + b'\n')
  return sha.hexdigest()


def combine_items(
    leaves: Mapping[str, list[Leaf]],
) -> tuple[str, dict[str, str]]:
  """Digests (whole, per item) from leaves by item, `timing` excluded."""
  items = {k: combine(v) for k, v in sorted(leaves.items()) if k != TIMING}
  whole = combine([x for k in items for x in leaves[k]])
  return whole, items


def state_sha256(items: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
  """Digest of a state, whole and per item; `timing` is left out.

  Args:
    items: item name -> pytree of arrays of any sharding, or a JSON value.

  Returns:
    (hex of the whole, {item: hex}).
  """
  return combine_items({k: leaves_of(k, v) for k, v in items.items()})


def seal(body: Mapping, leaves: Mapping[str, list[Leaf]]) -> dict:
  """`body` with every leaf's record and the digests, under one more digest."""
  whole, items = combine_items(leaves)
  body = dict(body) | {
      'schema': SCHEMA,
      'state_sha256': whole,
      'items': items,
      'leaves': [list(leaf) for k in sorted(leaves) for leaf in leaves[k]],
  }
  text = canonical_json(body)
  return {'sha256': hashlib.sha256(text.encode()).hexdigest(), 'body': body}


def unseal(text: str) -> dict:
  """The body of a sealed record.

  Raises:
    ValueError: it is damaged, or of another schema.
  """
  record = json.loads(text)
  try:
    body, sha256 = record['body'], record['sha256']
  except (KeyError, TypeError) as error:
    raise ValueError(f'it lacks {error}') from error
  found = hashlib.sha256(canonical_json(body).encode()).hexdigest()
  if found != sha256:
    raise ValueError('it does not match its own digest')
  if body['schema'] != SCHEMA:
    raise ValueError(f'its schema is {body["schema"]}, this is {SCHEMA}')
  return body


def leaves_in(body: Mapping) -> dict[str, list[Leaf]]:
  """The leaves in an unsealed body, by item."""
  out: dict[str, list[Leaf]] = {}
  for item, path, dtype, shape, sha256 in body['leaves']:
    out.setdefault(item, []).append(
        Leaf(item, path, dtype, tuple(shape), sha256)
    )
  return out
