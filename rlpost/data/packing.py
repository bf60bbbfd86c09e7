"""Rows of a `types.Batch` from trajectories or documents, and back.

A row of reinforcement learning holds one prompt and its completions,

  [prompt, padded to T] [sample 0, padded to N] ... [sample R - 1]

in T + R N tokens. The prompt is segment 0, sample r is segment r + 1 with the
prompt as parent, so completions share the prompt and do not see each other.
Token i of a completion has RoPE position `prompt length + i` and loss slot
r N + i; its predictor is the token before it, which for i = 0 is the *last real
token of the prompt*.

A row of supervised learning holds whole documents, each its own segment; its
loss slots are the trained tokens, moved to the front.

Masks come from the spans that the policy sampled or the template marked, never
from token ids: an end token that equals the padding token still trains.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rlpost import errors, types

PADDING = -1  # segment of a token that nobody sees
NO_PARENT = -2  # equals no segment, not even padding


class Document(NamedTuple):
  """One supervised example.

  Attributes:
    tokens: int32 [n].
    trained: boolean [n], tokens that the loss counts; never the first one,
      which nothing predicts.
    domain, group: ids for statistics.
  """

  tokens: np.ndarray
  trained: np.ndarray
  domain: int = 0
  group: int = 0


def blank(rows: int, length: int, slots: int) -> types.Batch:
  """Rows of padding: `rows` x `length` tokens with `slots` loss slots."""
  token = (rows, length)
  slot = (rows, slots)
  order_BT = np.broadcast_to(np.arange(length, dtype=np.int32), token).copy()
  return types.Batch(
      tokens=np.zeros(token, np.int32),
      order=order_BT,
      position=np.zeros(token, np.int32),
      segment=np.full(token, PADDING, np.int32),
      parent=np.full(token, NO_PARENT, np.int32),
      predictor=np.zeros(slot, np.int32),
      target=np.zeros(slot, np.int32),
      mask=np.zeros(slot, np.float32),
      behavior_logp=np.zeros(slot, np.float32),
      ref_logp=np.zeros(slot, np.float32),
      advantage=np.zeros(slot, np.float32),
      reward=np.zeros(slot, np.float32),
      temperature=np.ones(slot, np.float32),
      sequence=np.zeros(slot, np.int32),
      group=np.zeros(slot, np.int32),
      domain=np.zeros(slot, np.int32),
  )


def prompt_length(trajectory: types.Trajectory) -> int:
  """Tokens before the first sampled one; all of them where there is none."""
  starts = [span.start for span in trajectory.spans if span.sampled]
  return min(starts, default=len(trajectory.tokens))


def status_counts(groups: Iterable[types.Group]) -> dict[str, int]:
  """Trajectories by stop reason, and `invalid`, `infra` by verdict."""
  counts = collections.Counter(stop=0, length=0, overlong=0, invalid=0, infra=0)
  for group in groups:
    for trajectory in group.trajectories:
      counts[trajectory.stop_reason] += 1
      if trajectory.verdict is not None and not trajectory.verdict.valid:
        counts[trajectory.verdict.status] += 1
  return dict(counts)


def trains(trajectory: types.Trajectory) -> bool:
  """Whether it has tokens to train on and no verdict speaks against it."""
  return trajectory.stop_reason != 'overlong' and (
      trajectory.verdict is None or trajectory.verdict.valid
  )


def pack_groups(
    groups: Sequence[types.Group],
    *,
    prompt_len: int,
    samples: int,
    width: int,
    advantages: Sequence[Sequence[float]] | None = None,
    trained: Sequence[Sequence[bool]] | None = None,
    domain_ids: Mapping[str, int] | None = None,
) -> types.Batch:
  """One row per group: the prompt once, then its completions.

  A group may have fewer than `samples` trajectories. A trajectory that stopped
  as 'overlong' leaves its place empty, so a group of them is a row of padding;
  `status_counts` counts them. Verdict values stand in `reward` at the last
  sampled token, a span's reward at the last sampled token that is not after it.

  Args:
    groups: B groups; inside each, the prompts are token for token the same.
    prompt_len: T.
    samples: R.
    width: N, the room for what follows the prompt in one sample.
    advantages: per group, one number per trajectory; 0 if left out.
    trained: per group, whether each trajectory trains; if left out, those
      with a verdict that is a value, or without a verdict yet.
    domain_ids: by domain name; 0 if left out.

  Returns:
    A batch of B rows with T + R N tokens and R N loss slots; `sequence` is the
    place of a trajectory in its group. `ref_logp` is left 0.

  Raises:
    errors.InputError: something does not fit (nothing is ever cut), prompts
      differ inside a group, or a temperature is not positive.
    errors.NonFiniteError: a number that would train is not finite.
  """
  batch = blank(len(groups), prompt_len + samples * width, samples * width)
  for b, group in enumerate(groups):
    members = group.trajectories
    if len(members) > samples:
      raise errors.InputError(
          f'Group {group.id} has {len(members)} trajectories, a row has room '
          f'for {samples=}.'
      )
    count = len(members)
    adv_R = np.zeros(count) if advantages is None else advantages[b]
    train_R = [trains(m) for m in members] if trained is None else trained[b]
    if not len(adv_R) == len(train_R) == count:
      raise errors.InputError(
          f'Group {group.id} has {count} trajectories, {len(adv_R)} advantages '
          f'and {len(train_R)} flags.'
      )
    kept = [r for r in range(count) if members[r].stop_reason != 'overlong']
    if not kept:
      continue
    prompt = _shared_prompt(group, kept, prompt_len)
    size = len(prompt)
    batch.tokens[b, :size] = prompt
    batch.position[b, :size] = np.arange(size)
    batch.segment[b, :size] = 0
    domain = 0 if domain_ids is None else domain_ids[group.task.domain]
    for r in kept:
      _check_sample(group, members[r], size, width)
      start = prompt_len + r * width
      _put_tokens(batch, b, r, members[r].tokens[size:], size, start)
      if train_R[r]:
        slots = _put_slots(batch, b, r, members[r], size, start, width)
        batch.advantage[b, slots] = adv_R[r]
        batch.group[b, slots] = group.id
        batch.domain[b, slots] = domain
  _check_finite(batch, groups)
  return batch


def _shared_prompt(group, kept, prompt_len):
  first = group.trajectories[kept[0]]
  size = prompt_length(first)
  if not 0 < size <= prompt_len:
    raise errors.InputError(
        f'Group {group.id} has a prompt of {size} tokens, a row has room for '
        f"1 to {prompt_len=}; stop it as 'overlong' or raise prompt_len."
    )
  for r in kept:
    other = group.trajectories[r]
    if prompt_length(other) != size or not np.array_equal(
        other.tokens[:size], first.tokens[:size]
    ):
      raise errors.InputError(
          f'Group {group.id}: the prompts of trajectories {kept[0]} and {r} '
          'differ; a group shares one prompt.'
      )
  return first.tokens[:size]


def _check_sample(group, trajectory, size, width):
  rest = len(trajectory.tokens) - size
  if rest > width:
    raise errors.InputError(
        f'Group {group.id} sample {trajectory.sample} has {rest} tokens after '
        f'its prompt, a row has room for {width=}.'
    )
  if not trajectory.temperature > 0:
    raise errors.InputError(
        f'Group {group.id} sample {trajectory.sample} was sampled at '
        f'{trajectory.temperature=}; training needs a positive one.'
    )


def _put_tokens(batch, b, r, tokens, size, start):
  at = slice(start, start + len(tokens))
  batch.tokens[b, at] = tokens
  batch.position[b, at] = size + np.arange(len(tokens))
  batch.segment[b, at] = r + 1
  batch.parent[b, at] = 0


def _put_slots(batch, b, r, trajectory, size, start, width):
  """Fills the slots of one sample and returns the indices that train."""
  offset = np.flatnonzero(trajectory.sampled[size:])  # inside the completion
  slots = r * width + offset
  batch.predictor[b, slots] = np.where(
      offset == 0, size - 1, start + offset - 1
  )
  batch.target[b, slots] = trajectory.tokens[size + offset]
  batch.mask[b, slots] = 1
  batch.behavior_logp[b, slots] = trajectory.logp[size + offset]
  batch.temperature[b, slots] = trajectory.temperature
  batch.sequence[b, slots] = r
  if not len(slots):
    return slots
  for span in trajectory.spans:
    # An environment's reward belongs to the action before it.
    last = np.searchsorted(offset, span.stop - size) - 1
    batch.reward[b, slots[max(last, 0)]] += span.reward
  if trajectory.verdict is not None and trajectory.verdict.valid:
    batch.reward[b, slots[-1]] += trajectory.verdict.value
  return slots


def _check_finite(batch, groups):
  for name in ('behavior_logp', 'advantage', 'reward'):
    bad_B = ~np.isfinite(getattr(batch, name)).all(1)
    if bad_B.any():
      group = groups[int(np.argmax(bad_B))]
      raise errors.NonFiniteError(
          f'{name} of group {group.id} (domain {group.task.domain!r}) is not '
          'finite; mask that trajectory or look at its reward.'
      )


class Packer:
  """First-fit packing: a document goes to the first row with room for it."""

  def __init__(self, *, rows: int, length: int, slots: int | None = None):
    """Empty rows.

    Args:
      rows: B.
      length: T, tokens per row.
      slots: K, trained tokens per row; `length` if left out.
    """
    self._length = length
    self._slots = length if slots is None else slots
    self._rows = [[] for _ in range(rows)]
    self._free = [(length, self._slots)] * rows

  def fits_empty(self, document: Document) -> bool:
    """Whether a row of its own would hold the document."""
    tokens, slots = _sizes(document)
    return tokens <= self._length and slots <= self._slots

  def has_room(self, document: Document) -> bool:
    """Whether some row still has room for the document."""
    tokens, slots = _sizes(document)
    return any(
        tokens <= free_tokens and slots <= free_slots
        for free_tokens, free_slots in self._free
    )

  def add(self, document: Document) -> bool:
    """Places a document; False if no row has room.

    Raises:
      errors.InputError: it could fit no row, or trains nothing, or trains its
        first token.
    """
    tokens, slots = _sizes(document)
    if not self.fits_empty(document):
      raise errors.InputError(
          f'A document of {tokens} tokens, {slots} of them trained, fits no '
          f'row of {self._length} tokens with {self._slots} loss slots.'
      )
    if not slots or document.trained[0]:
      raise errors.InputError(
          f'A document of {tokens} tokens trains {slots}; it must train at '
          'least one, and not the first, which nothing predicts.'
      )
    for row, (free_tokens, free_slots) in enumerate(self._free):
      if tokens <= free_tokens and slots <= free_slots:
        self._rows[row].append(document)
        self._free[row] = free_tokens - tokens, free_slots - slots
        return True
    return False

  def batch(self) -> types.Batch:
    """The rows as they are; `advantage` is 1 where a token trains."""
    batch = blank(len(self._rows), self._length, self._slots)
    for b, documents in enumerate(self._rows):
      token = slot = 0
      for segment, document in enumerate(documents):
        tokens, slots = _sizes(document)
        at = slice(token, token + tokens)
        batch.tokens[b, at] = document.tokens
        batch.position[b, at] = np.arange(tokens)
        batch.segment[b, at] = segment
        index = np.flatnonzero(document.trained)
        at = slice(slot, slot + slots)
        batch.predictor[b, at] = token + index - 1
        batch.target[b, at] = document.tokens[index]
        batch.mask[b, at] = 1
        batch.advantage[b, at] = 1
        batch.sequence[b, at] = segment
        batch.group[b, at] = document.group
        batch.domain[b, at] = document.domain
        token, slot = token + tokens, slot + slots
    return batch


def _sizes(document):
  if len(document.tokens) != len(document.trained):
    raise errors.InputError(
        f'{len(document.tokens)} tokens have {len(document.trained)} flags.'
    )
  return len(document.tokens), int(np.sum(document.trained))


def pack_documents(
    documents: Sequence[Document], *, length: int, slots: int | None = None
) -> types.Batch:
  """First-fit packing of all documents, in as many rows as that takes."""
  packer = Packer(rows=len(documents), length=length, slots=slots)
  for document in documents:
    packer.add(document)
  batch = packer.batch()
  used = int((batch.segment >= 0).any(1).sum())
  return types.Batch(*(leaf[:used] for leaf in batch))


def pad_rows(batch: types.Batch, rows: int) -> types.Batch:
  """Adds rows of padding at the end, up to `rows`."""
  count, length = batch.tokens.shape
  if count > rows:
    raise errors.InputError(f'{count} rows do not fit in {rows=}.')
  tail = blank(rows - count, length, batch.mask.shape[1])
  return types.Batch(
      *(np.concatenate(pair) for pair in zip(batch, tail, strict=True))
  )


def micro_batches(batch: types.Batch, micro: int) -> types.Batch:
  """Rows [B, ...] as [M, B / M, ...], in order."""
  rows = len(batch.tokens)
  if micro < 1 or rows % micro:
    raise errors.InputError(
        f'{rows} rows do not divide into {micro=} micro-batches; pad to '
        f'{-(-rows // max(micro, 1)) * max(micro, 1)} rows.'
    )
  return types.Batch(
      *(leaf.reshape(micro, rows // micro, *leaf.shape[1:]) for leaf in batch)
  )


def separate(
    batch: types.Batch, *, first_segment: int
) -> tuple[types.Batch, np.ndarray]:
  """The inverse view: every sequence alone in a plain causal row.

  Args:
    batch: rows from `pack_groups` or `pack_documents`.
    first_segment: segment of sequence 0: 1 for groups, 0 for documents.

  Returns:
    Rows as long as the longest sequence with its prompt, all segment 0, loss
    slots in order; and int [B', 2], the (row, sequence) of each.
  """
  found = []
  for b in range(len(batch.tokens)):
    for sequence in np.unique(batch.sequence[b][batch.mask[b] > 0]):
      own = batch.segment[b] == sequence + first_segment
      parent = batch.parent[b][own][0]
      seen = np.flatnonzero(own | (batch.segment[b] == parent))
      slots = np.flatnonzero(
          (batch.sequence[b] == sequence) & (batch.mask[b] > 0)
      )
      found.append((b, sequence, seen, slots))
  out = blank(
      len(found),
      max((len(seen) for _, _, seen, _ in found), default=0),
      max((len(slots) for _, _, _, slots in found), default=0),
  )
  for row, (b, _, seen, slots) in enumerate(found):
    out.tokens[row, : len(seen)] = batch.tokens[b, seen]
    out.position[row, : len(seen)] = batch.position[b, seen]
    out.segment[row, : len(seen)] = 0
    for name in types.Batch._fields[types.Batch._fields.index('target') :]:
      getattr(out, name)[row, : len(slots)] = getattr(batch, name)[b, slots]
    out.sequence[row] = 0
    out.predictor[row, : len(slots)] = np.searchsorted(
        seen, batch.predictor[b, slots]
    )
  index = np.array([(b, s) for b, s, _, _ in found], int).reshape(-1, 2)
  return out, index
