import numpy as np
import pytest

from rlpost import errors, types
from rlpost.data import packing

VOCAB, WIDTH = 11, 8
T, R, N = 7, 3, 5


def task(domain='a'):
  return types.Task(domain, (types.Message.of('user', 'q'),), {'name': 'x'})


def trajectory(rng, prompt, turns, *, sample=0, value=1.0, **fields):
  """A rollout from turns of (number of tokens, sampled)."""
  spans, tokens = [types.Span(0, len(prompt), 'user', False)], list(prompt)
  for size, sampled in turns:
    role = 'assistant' if sampled else 'tool'
    spans.append(types.Span(len(tokens), len(tokens) + size, role, sampled))
    # Ids include 0, which padding uses too.
    tokens += rng.integers(0, VOCAB, size).tolist()
  mask = np.zeros(len(tokens), bool)
  for span in spans:
    mask[span.start : span.stop] = span.sampled
  logp = np.where(mask, -rng.random(len(tokens)), 0).astype(np.float32)
  return types.Trajectory(
      **{
          'task': task(),
          'group': 0,
          'sample': sample,
          'tokens': np.array(tokens, np.int32),
          'spans': tuple(spans),
          'logp': logp,
          'versions': np.where(mask, 0, -1),
          'temperature': 0.7,
          'stop_reason': 'stop',
          'verdict': types.Verdict('value', value),
      }
      | fields
  )


def group(rng, id_, prompt_size, samples):
  prompt = rng.integers(0, VOCAB, prompt_size)
  members = tuple(
      trajectory(rng, prompt, turns, sample=r, value=r / 4)
      for r, turns in enumerate(samples)
  )
  return types.Group(id_, task(), members)


def three_groups(rng):
  return [
      group(rng, 10, 4, [[(5, True)], [(1, True)], [(3, True)]]),
      group(rng, 11, 7, [[(2, True), (2, False), (1, True)], [(4, True)]]),
      group(rng, 12, 1, [[(1, True), (3, False)], [(2, True)], [(5, True)]]),
  ]


def pack(groups, **fields):
  return packing.pack_groups(
      groups, prompt_len=T, samples=R, width=N, **fields
  )


def hidden(batch):
  """A two-layer attention model in NumPy: [B, T, D].

  It sees tokens, positions and the visibility rule, nothing else.
  """
  rng = np.random.default_rng(7)
  table_VD = rng.normal(size=(VOCAB, WIDTH))
  freq = 0.7 ** np.arange(WIDTH // 2)
  x_BTD = table_VD[batch.tokens]
  seen_BTS = (batch.order[:, None] <= batch.order[:, :, None]) & (
      (batch.segment[:, None] == batch.segment[:, :, None])
      | (batch.segment[:, None] == batch.parent[:, :, None])
  )
  seen_BTS &= batch.segment[:, None] >= 0
  for _ in range(2):
    angle = batch.position[..., None] * freq
    lo, hi = np.split(x_BTD, 2, -1)
    turned_BTD = np.concatenate(
        [
            lo * np.cos(angle) - hi * np.sin(angle),
            hi * np.cos(angle) + lo * np.sin(angle),
        ],
        -1,
    )
    score_BTS = np.einsum('btd,bsd->bts', turned_BTD, turned_BTD)
    score_BTS = np.where(seen_BTS, score_BTS - score_BTS.max(), -np.inf)
    weight_BTS = np.where(seen_BTS, np.exp(score_BTS / WIDTH), 0)
    total_BT1 = np.maximum(weight_BTS.sum(-1, keepdims=True), 1e-30)
    x_BTD = x_BTD + np.einsum('bts,bsd->btd', weight_BTS / total_BT1, x_BTD)
  return x_BTD, table_VD


def slot_logp(batch):
  """log p of every slot's target, [B, K]."""
  x_BTD, table_VD = hidden(batch)
  rows = np.arange(len(x_BTD))[:, None]
  logits_BKV = x_BTD[rows, batch.predictor] @ table_VD.T
  logits_BKV -= logits_BKV.max(-1, keepdims=True)
  logits_BKV -= np.log(np.exp(logits_BKV).sum(-1, keepdims=True))
  return np.take_along_axis(logits_BKV, batch.target[..., None], -1)[..., 0]


def plain_logp(tokens):
  """log p(token t | tokens < t) of one plain causal sequence, [n - 1]."""
  n = len(tokens)
  row = packing.blank(1, n, n - 1)
  row.tokens[0] = tokens
  row.position[0] = np.arange(n)
  row.segment[0] = 0
  row.predictor[0] = np.arange(n - 1)
  row.target[0] = tokens[1:]
  return slot_logp(row)[0]


def test_a_packed_group_equals_its_plain_sequences():
  groups = three_groups(np.random.default_rng(0))
  batch = pack(groups)
  logp_BK = slot_logp(batch)
  for b, g in enumerate(groups):
    for r, member in enumerate(g.trajectories):
      mine = (batch.mask[b] > 0) & (batch.sequence[b] == r)
      at = np.flatnonzero(member.sampled)
      np.testing.assert_allclose(
          logp_BK[b, mine], plain_logp(member.tokens)[at - 1], atol=1e-12
      )
      np.testing.assert_array_equal(batch.target[b, mine], member.tokens[at])
      np.testing.assert_array_equal(
          batch.behavior_logp[b, mine], member.logp[at]
      )
  sampled = sum(m.sampled.sum() for g in groups for m in g.trajectories)
  assert batch.mask.sum() == sampled


def test_the_layout_of_a_group_row():
  rng = np.random.default_rng(1)
  g = group(rng, 10, 4, [[(5, True)], [(1, True)]])
  batch = pack([g], advantages=[[2.0, -1.0]], domain_ids={'a': 6})
  assert batch.segment[0].tolist() == (
      [0] * 4 + [-1] * 3 + [1] * 5 + [2] + [-1] * 4 + [-1] * 5
  )
  assert batch.parent[0].tolist() == (
      [-2] * 7 + [0] * 5 + [0] + [-2] * 4 + [-2] * 5
  )
  assert batch.position[0].tolist() == (
      [0, 1, 2, 3, 0, 0, 0] + [4, 5, 6, 7, 8] + [4] + [0] * 9
  )
  assert batch.order[0].tolist() == list(range(T + R * N))
  # The first token of either sample comes from the last *real* prompt token.
  assert batch.predictor[0].tolist() == [3, 7, 8, 9, 10, 3] + [0] * 9
  assert batch.mask[0].tolist() == [1] * 6 + [0] * 9
  assert batch.sequence[0].tolist() == [0] * 5 + [1] + [0] * 9
  assert batch.advantage[0].tolist() == [2] * 5 + [-1] + [0] * 9
  assert batch.group[0].tolist() == [10] * 6 + [0] * 9
  assert batch.domain[0].tolist() == [6] * 6 + [0] * 9
  np.testing.assert_allclose(batch.temperature[0], [0.7] * 6 + [1] * 9)
  # The value of a verdict stands once, at its last token.
  assert batch.reward[0].tolist() == [0] * 5 + [0.25] + [0] * 9
  for leaf in batch:
    assert leaf.dtype in (np.int32, np.float32)


def test_padding_is_zero_from_birth():
  batch = pack(three_groups(np.random.default_rng(2)), advantages=[
      [1.0, 2.0, 3.0], [1.0, 2.0], [1.0, 2.0, 3.0]
  ])
  off_BT = batch.segment < 0
  assert (batch.tokens[off_BT] == 0).all()
  assert (batch.position[off_BT] == 0).all()
  assert (batch.parent[off_BT] == packing.NO_PARENT).all()
  off_BK = batch.mask == 0
  slots = types.Batch._fields[types.Batch._fields.index('predictor') :]
  for name in slots:
    wanted = 1 if name == 'temperature' else 0
    assert (getattr(batch, name)[off_BK] == wanted).all(), name
  assert not np.isin(packing.NO_PARENT, batch.segment)


def test_siblings_do_not_see_each_other():
  batch = pack(three_groups(np.random.default_rng(3)))
  before = slot_logp(batch)
  batch.tokens[0, T : T + N] = (batch.tokens[0, T : T + N] + 1) % VOCAB
  after = slot_logp(batch)
  other = (batch.mask[0] > 0) & (batch.sequence[0] != 0)
  np.testing.assert_array_equal(before[0, other], after[0, other])
  own = (batch.mask[0] > 0) & (batch.sequence[0] == 0)
  assert not np.allclose(before[0, own][1:], after[0, own][1:])


def test_masks_come_from_spans_and_not_from_ids():
  rng = np.random.default_rng(4)
  member = trajectory(rng, [0, 0, 0], [(4, True)])
  ends = np.array([0, 0, 0, 0, 0, 0, 0], np.int32)  # end id = padding id
  member = types.Trajectory(**{**vars(member), 'tokens': ends})
  batch = pack([types.Group(0, task(), (member,))])
  assert batch.mask.sum() == 4
  assert batch.predictor[0, :4].tolist() == [2, T, T + 1, T + 2]


def test_tool_tokens_are_seen_and_do_not_train():
  rng = np.random.default_rng(5)
  turns = [(2, True), (2, False), (1, True)]
  member = trajectory(rng, [1, 2], turns)
  spans = list(member.spans)
  spans[2] = spans[2]._replace(reward=0.5)  # the environment's reward
  member = types.Trajectory(**{**vars(member), 'spans': tuple(spans)})
  batch = pack([types.Group(0, task(), (member,))])
  assert batch.mask[0, :N].tolist() == [1, 1, 0, 0, 1]
  assert (batch.segment[0, T : T + N] == 1).all()
  # It belongs to the action before it; the verdict to the last action.
  assert batch.reward[0, :N].tolist() == [0, 0.5, 0, 0, 1.0]


def test_failures_stay_out_of_the_denominator():
  rng = np.random.default_rng(6)
  good, bad = (trajectory(rng, [1, 2], [(3, True)]) for _ in range(2))
  bad = types.Trajectory(**{**vars(bad), 'verdict': types.Verdict('infra')})
  both = pack([types.Group(0, task(), (good, bad))])
  assert both.mask.sum() == 3
  chosen = pack([types.Group(0, task(), (good, bad))], trained=[[False, True]])
  assert chosen.mask.sum() == 3 and (chosen.mask[0, N : N + 3] == 1).all()
  counts = packing.status_counts([types.Group(0, task(), (good, bad))])
  assert counts == {
      'stop': 2, 'length': 0, 'overlong': 0, 'invalid': 0, 'infra': 1
  }


def test_an_overlong_prompt_is_counted_and_never_cut():
  rng = np.random.default_rng(7)
  prompt = rng.integers(1, VOCAB, T + 1)
  long = trajectory(rng, prompt, [], stop_reason='overlong', verdict=None)
  g = types.Group(3, task(), (long, long))
  batch = pack([g])
  padding = packing.blank(1, T + R * N, R * N)
  for leaf, empty in zip(batch, padding, strict=True):
    np.testing.assert_array_equal(leaf, empty)
  assert packing.status_counts([g])['overlong'] == 2
  unlabelled = trajectory(rng, prompt, [(1, True)])
  with pytest.raises(errors.InputError, match='prompt of 8 tokens'):
    pack([types.Group(3, task(), (unlabelled,))])


def test_what_does_not_fit_is_refused():
  rng = np.random.default_rng(8)

  def refused(*members, match, **fields):
    with pytest.raises(errors.InputError, match=match):
      pack([types.Group(0, task(), members)], **fields)

  ok = trajectory(rng, [1, 2], [(3, True)])
  refused(trajectory(rng, [1], [(N + 1, True)]), match='6 tokens after')
  refused(ok, trajectory(rng, [2, 2], [(3, True)]), match='differ')
  refused(ok, ok, ok, ok, match='4 trajectories')
  refused(
      trajectory(rng, [1], [(1, True)], temperature=0.0), match='temperature'
  )
  refused(trajectory(rng, [], [(1, True)]), match='prompt of 0')
  refused(ok, match='2 advantages', advantages=[[1.0, 2.0]])
  with pytest.raises(errors.NonFiniteError, match="domain 'a'"):
    pack([types.Group(0, task(), (ok,))], advantages=[[np.nan]])


def documents(rng, count, longest=9):
  out = []
  for i in range(count):
    n = int(rng.integers(2, longest + 1))
    trained = rng.random(n) < 0.5
    trained[0], trained[-1] = False, True
    tokens = rng.integers(0, VOCAB, n).astype(np.int32)
    out.append(packing.Document(tokens, trained, domain=i % 3, group=i))
  return out


@pytest.mark.parametrize('slots', [None, 7])
def test_packed_documents_equal_plain_ones(slots):
  docs = documents(np.random.default_rng(9), 25)
  batch = packing.pack_documents(docs, length=12, slots=slots)
  assert batch.mask.shape[1] == (slots or 12)
  logp_BK = slot_logp(batch)
  assert batch.mask.sum() == sum(d.trained.sum() for d in docs)
  for i, doc in enumerate(docs):
    mine_BK = (batch.group == i) & (batch.mask > 0)
    rows = np.flatnonzero(mine_BK.any(1))
    assert len(rows) == 1
    at = np.flatnonzero(doc.trained)
    np.testing.assert_allclose(
        logp_BK[mine_BK], plain_logp(doc.tokens)[at - 1], atol=1e-12
    )
    np.testing.assert_array_equal(batch.target[mine_BK], doc.tokens[at])
  assert (batch.parent == packing.NO_PARENT).all()
  assert (batch.segment >= 0).sum() == sum(len(d.tokens) for d in docs)


def test_first_fit_goes_back_to_earlier_rows():
  sizes = [6, 7, 4, 3, 5]
  docs = [
      packing.Document(np.full(n, n, np.int32), np.arange(n) == n - 1)
      for n in sizes
  ]
  batch = packing.pack_documents(docs, length=10)
  rows = [
      [int(t) for t in dict.fromkeys(row[seg >= 0].tolist())]
      for row, seg in zip(batch.tokens, batch.segment, strict=True)
  ]
  assert rows == [[6, 4], [7, 3], [5]]


def test_a_full_packer_says_so_and_refuses_the_impossible():
  rng = np.random.default_rng(10)
  packer = packing.Packer(rows=1, length=6)
  doc = packing.Document(np.arange(4), np.arange(4) == 3)
  assert packer.add(doc) and not packer.add(doc)
  for tokens, trained in ((7, [6]), (4, []), (4, [0, 1])):
    flags = np.isin(np.arange(tokens), trained)
    with pytest.raises(errors.InputError):
      packer.add(packing.Document(np.arange(tokens), flags))
  with pytest.raises(errors.InputError):
    packer.add(packing.Document(rng.integers(0, 9, 3), np.ones(2, bool)))
  assert packer.batch().mask.sum() == 1


@pytest.mark.parametrize('kind', ['groups', 'documents'])
def test_separate_is_the_inverse_view(kind):
  rng = np.random.default_rng(11)
  if kind == 'groups':
    batch = pack(three_groups(rng), advantages=[
        [1.0, 2.0, 3.0], [4.0, 5.0], [6.0, 7.0, 8.0]
    ])
    apart, index = packing.separate(batch, first_segment=1)
  else:
    batch = packing.pack_documents(documents(rng, 15), length=12)
    apart, index = packing.separate(batch, first_segment=0)
  assert apart.mask.sum() == batch.mask.sum()
  packed, plain = slot_logp(batch), slot_logp(apart)
  for row, (b, sequence) in enumerate(index):
    mine = (batch.mask[b] > 0) & (batch.sequence[b] == sequence)
    own = apart.mask[row] > 0
    np.testing.assert_allclose(plain[row, own], packed[b, mine], atol=1e-12)
    for name in ('behavior_logp', 'advantage', 'reward', 'group', 'domain'):
      np.testing.assert_array_equal(
          getattr(apart, name)[row, own], getattr(batch, name)[b, mine]
      )
  real = apart.segment >= 0
  column = np.broadcast_to(np.arange(real.shape[1]), real.shape)
  np.testing.assert_array_equal(apart.position[real], column[real])


def test_padding_rows_and_micro_batches_change_no_slot():
  batch = pack(three_groups(np.random.default_rng(12)))
  padded = packing.pad_rows(batch, 8)
  assert (padded.mask[3:] == 0).all() and (padded.segment[3:] == -1).all()
  split = packing.micro_batches(padded, 4)
  assert split.tokens.shape == (4, 2, T + R * N)
  flat = types.Batch(*(x.reshape(8, *x.shape[2:]) for x in split))
  np.testing.assert_array_equal(slot_logp(flat)[:3], slot_logp(batch))
  for leaf, whole in zip(flat, padded, strict=True):
    np.testing.assert_array_equal(leaf, whole)
  with pytest.raises(errors.InputError, match='pad to 4 rows'):
    packing.micro_batches(batch, 2)
  with pytest.raises(errors.InputError):
    packing.pad_rows(batch, 2)
