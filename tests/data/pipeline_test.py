import contextlib
import json

import numpy as np
import pytest

from rlpost import errors
from rlpost.data import packing, pipeline, sft_dataset

CONFIG = {'domains': ['a', 'b'], 'seed': 1}


def examples(count=40):
  for i in range(count):
    yield sft_dataset.Example(
        f'{i} ' + 'é' * (i % 7), f'= {i % 5}', 'ab'[i % 2], f'id{i}'
    )


@pytest.fixture(scope='module')
def builder(tmp_path_factory):
  folder = tmp_path_factory.mktemp('sft')
  return sft_dataset.build(folder, 'toy', examples(), config=CONFIG)


def encode(record):
  """Bytes as ids: a prompt that is seen, a completion that is trained."""
  example = sft_dataset.decode(record)
  prompt, rest = example.prompt.encode(), example.completion.encode() + b'\n'
  tokens = np.frombuffer(prompt + rest, np.uint8).astype(np.int32)
  trained = np.arange(len(tokens)) >= len(prompt)
  return packing.Document(tokens, trained, domain='ab'.index(example.domain))


def stream(builder, **fields):
  defaults = {
      'rows': 2,
      'length': 48,
      'seed': 3,
      'fingerprint': sft_dataset.content_sha256(builder),
  }
  return pipeline.Stream(
      sft_dataset.source(builder), encode, **defaults | fields
  )


def take(stream, count):
  return [next(stream) for _ in range(count)]


def assert_same(left, right):
  assert len(left) == len(right)
  for a, b in zip(left, right, strict=True):
    for x, y in zip(a, b, strict=True):
      np.testing.assert_array_equal(x, y)


def texts(batches):
  """Every packed document as text, in stream order."""
  found = {}
  for batch in batches:
    apart, index = packing.separate(batch, first_segment=0)
    for row in range(len(index)):
      group = int(apart.group[row, 0])
      tokens = apart.tokens[row][apart.segment[row] >= 0]
      found[group] = bytes(tokens.tolist()).decode()
  return [found[k] for k in sorted(found)]


def test_records_come_back_as_they_went_in(builder):
  source = sft_dataset.source(builder)
  got = [sft_dataset.decode(source[i]) for i in range(len(source))]
  assert got == list(examples())


def test_building_twice_reads_nothing_and_config_names_the_files(tmp_path):
  def never():
    raise AssertionError('a data set that exists must not be made again')
    yield

  first = sft_dataset.build(tmp_path, 'toy', examples(9), config=CONFIG)
  again = sft_dataset.build(tmp_path, 'toy', never(), config=CONFIG)
  assert again.data_path == first.data_path
  digest = sft_dataset.content_sha256(first)
  assert sft_dataset.content_sha256(again) == digest
  other = sft_dataset.build(
      tmp_path, 'toy', examples(8), config=CONFIG | {'seed': 2}
  )
  assert other.data_path != first.data_path
  assert sft_dataset.content_sha256(other) != digest
  with pytest.raises(errors.InputError, match='empty'):
    sft_dataset.build(tmp_path, 'none', [], config=CONFIG)


def test_a_build_that_dies_leaves_nothing_to_be_found(tmp_path):
  def broken():
    yield next(examples())
    raise RuntimeError('stop')

  for _ in range(2):
    with pytest.raises(RuntimeError):
      sft_dataset.build(tmp_path, 'toy', broken(), config=CONFIG)
  whole = sft_dataset.build(tmp_path, 'toy', examples(5), config=CONFIG)
  assert len(sft_dataset.source(whole)) == 5


def test_every_epoch_holds_every_document_in_a_new_order(builder):
  with contextlib.closing(stream(builder)) as s:
    got = texts(take(s, 30))
  want = sorted(f'{e.prompt}{e.completion}\n' for e in examples())
  epochs = [got[i : i + 40] for i in (0, 40, 80)]
  assert [sorted(e) for e in epochs] == [want] * 3
  assert len({tuple(e) for e in epochs}) == 3
  with contextlib.closing(stream(builder, seed=4)) as s:
    assert texts(take(s, 12))[:40] != epochs[0]


def test_only_completions_train(builder):
  with contextlib.closing(stream(builder)) as s:
    batch = next(s)
  trained = bytes(batch.target[0][batch.mask[0] > 0].tolist()).decode()
  assert trained.startswith('= ') and set(trained) <= set('= 01234\n')


@pytest.mark.parametrize('threads', [0, 3])
def test_resume_is_exact_at_every_batch(builder, threads):
  with contextlib.closing(stream(builder)) as s:
    want = take(s, 24)
    assert s.report()['epoch'] > 2
  with contextlib.closing(stream(builder, threads=threads)) as s:
    for cut in range(23):
      state = json.loads(json.dumps(s.get_state()))
      with contextlib.closing(stream(builder, threads=3 - threads)) as o:
        o.set_state(state)
        assert_same(take(o, 2), want[cut : cut + 2])
      assert_same([next(s)], [want[cut]])


def test_set_state_goes_back_and_forth_in_one_stream(builder):
  with contextlib.closing(stream(builder, threads=2)) as s:
    start = s.get_state()
    want = take(s, 9)
    later = s.get_state()
    after = take(s, 2)
    s.set_state(start)
    assert_same(take(s, 9), want)
    s.set_state(later)
    assert_same(take(s, 2), after)


def test_an_interrupted_batch_is_made_again_in_full(builder):
  with contextlib.closing(stream(builder)) as s:
    want = take(s, 4)
  left = [None]  # documents until the disk fails, once

  def flaky(record):
    if left[0] is not None:
      left[0] -= 1
      if left[0] < 0:
        left[0] = None
        raise OSError('disk')
    return encode(record)

  s = pipeline.Stream(
      sft_dataset.source(builder), flaky, rows=2, length=48, seed=3,
      fingerprint=sft_dataset.content_sha256(builder),
  )
  with contextlib.closing(s):
    got = [next(s)]
    before = s.get_state()
    left[0] = 2  # in the middle of the pack
    with pytest.raises(OSError):
      next(s)
    assert s.get_state() == before
    assert_same(got + take(s, 3), want)


def test_state_holds_the_shuffle_and_refuses_other_data(builder):
  with contextlib.closing(stream(builder)) as s:
    next(s)
    state = s.get_state()
  assert state['seed'] == 3
  with contextlib.closing(stream(builder, seed=4)) as s:
    with pytest.raises(errors.InputError, match='seed 3, this one 4'):
      s.set_state(state)
  with contextlib.closing(stream(builder, fingerprint='other')) as s:
    with pytest.raises(errors.InputError, match='fingerprint'):
      s.set_state(state)


def test_long_documents_are_counted_and_never_cut(builder):
  lengths = [
      len(f'{e.prompt}{e.completion}\n'.encode()) for e in examples()
  ]
  limit = int(np.median(lengths))
  with contextlib.closing(stream(builder, length=limit)) as s:
    while s.report()['epoch'] < 1:
      batch = next(s)
    assert (batch.segment >= 0).any(1).all()
    report = s.report()
  begun = report['documents'] + report['overlong']
  assert report['overlong'] / begun == pytest.approx(
      np.mean(np.array(lengths) > limit), abs=0.05
  )
  with contextlib.closing(stream(builder, length=3)) as s:
    with pytest.raises(errors.InputError, match='None of the 40 records'):
      next(s)


def test_loss_slots_limit_a_row(builder):
  with contextlib.closing(stream(builder, length=96, slots=9)) as s:
    batches = take(s, 8)
  assert all(b.mask.shape == (2, 9) for b in batches)
  assert len(texts(batches)) == s.report()['documents']


def test_settings_are_checked(builder):
  with pytest.raises(errors.InputError):
    stream(builder, seed=2**32)
  with pytest.raises(errors.InputError):
    pipeline.Stream([], encode, rows=1, length=8, seed=0, fingerprint='')


def skewed(look_ahead, rows=4, length=256):
  """Many short documents, some as long as a row, a few longer."""
  sizes = np.random.default_rng(0).lognormal(4.0, 0.9, 600).astype(int) + 2

  def encode(size):
    return packing.Document(np.full(size, size), np.arange(size) > 0)

  return sizes, pipeline.Stream(
      sizes, encode, rows=rows, length=length, seed=0, fingerprint='',
      look_ahead=look_ahead,
  )


def padding(batches):
  return float(np.mean([(b.segment < 0).mean() for b in batches]))


def test_looking_ahead_leaves_a_quarter_of_the_padding():
  left = {}
  for look_ahead in (1, 32):
    with contextlib.closing(skewed(look_ahead)[1]) as s:
      left[look_ahead] = padding(take(s, 80))
  assert left[1] > 0.12
  assert left[32] < left[1] / 4


def test_looking_ahead_loses_and_repeats_no_document():
  sizes, s = skewed(32)
  with contextlib.closing(s):
    batches = take(s, 60)
    state = s.get_state()
    order = [int(s._documents[i].tokens[0]) for i in range(state['cursor'])]
  placed = np.concatenate(
      [packing.separate(b, first_segment=0)[0].group[:, 0] for b in batches]
  )
  overlong = [i for i, size in enumerate(order) if size > 256]
  every = sorted([*placed.tolist(), *state['waiting'], *overlong])
  assert every == list(range(state['cursor']))
  assert state['cursor'] > len(sizes) and len(state['waiting']) == 32


def test_no_document_waits_for_ever():
  """The one that waits longest opens the next batch."""
  _, s = skewed(8)
  with contextlib.closing(s):
    for _ in range(20):
      oldest = (s.get_state()['waiting'] or [0])[0]
      assert oldest in next(s).group


@pytest.mark.parametrize('threads', [0, 2])
def test_resume_is_exact_while_documents_wait(builder, threads):
  with contextlib.closing(stream(builder, look_ahead=7)) as s:
    want = take(s, 12)
  with contextlib.closing(stream(builder, look_ahead=7, threads=threads)) as s:
    for cut in range(11):
      state = json.loads(json.dumps(s.get_state()))
      with contextlib.closing(stream(builder, look_ahead=7)) as o:
        o.set_state(state)
        assert_same(take(o, 2), want[cut : cut + 2])
      assert_same([next(s)], [want[cut]])


def test_one_that_waits_is_the_order_of_the_stream(builder):
  with contextlib.closing(stream(builder)) as s:
    groups = [b.group[b.mask > 0] for b in take(s, 6)]
  highest = [int(g.max()) for g in groups]
  lowest = [int(g.min()) for g in groups]
  assert lowest[1:] == [h + 1 for h in highest[:-1]]
