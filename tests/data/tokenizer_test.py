"""The tokenizer against golden ids, and against what text must survive."""

import json
import pathlib
import pickle

import numpy as np
import pytest
import tokenizers as package

from rlpost import errors
from rlpost.data import tokenizer as tokenizers

FIXTURES = pathlib.Path(__file__).parents[1] / 'fixtures'
TEXTS = [
    '', ' ', 'Hello, world!\n', 'line\r\nline\n\n',
    'naïve 你好 😀👩‍👩‍👧', '\x00\x7f',
    'e\u0301', '\u200b\ufeff', 'a<|im_end|>\n<|im_start|>b',
]


def small_metadata(pre='smollm', **changes):
  """GGUF metadata of a BPE over bytes with two merges."""
  letters = tokenizers.byte_letters()
  tokens = [*letters, '12', 'ab', 'ab.', '<|end|>', '<think>']
  return {
      'tokenizer.ggml.model': 'gpt2',
      'tokenizer.ggml.pre': pre,
      'tokenizer.ggml.tokens': tokens,
      'tokenizer.ggml.token_type': [1] * (len(tokens) - 2) + [3, 4],
      'tokenizer.ggml.merges': ['1 2', 'a b', 'ab .'],
      'tokenizer.ggml.eos_token_id': 259,
  } | {f'tokenizer.ggml.{k}': v for k, v in changes.items()}


@pytest.fixture(scope='module')
def by_bytes():
  return tokenizers.bytes_tokenizer()


@pytest.mark.parametrize('text', TEXTS)
def test_byte_ids_are_the_utf8_bytes(by_bytes, text):
  assert by_bytes.encode(text, allow_special=False) == list(text.encode())
  ids = by_bytes.encode(text)
  assert by_bytes.decode(ids) == text
  specials = text.count('<|im_end|>') + text.count('<|im_start|>')
  assert sum(i >= 256 for i in ids) == specials


def test_byte_tokenizer_has_the_documented_ids(by_bytes):
  assert by_bytes.vocab_size == 384
  assert (by_bytes.pad_id, by_bytes.eos_id) == (256, 257)
  assert by_bytes.encode('<|pad|><|im_end|><|im_start|>') == [256, 257, 258]
  assert by_bytes.decode([259]) == '<|unused_0|>'
  assert len(by_bytes.special_tokens) == 384 - 256


def test_decode_of_cut_characters_and_unknown_ids(by_bytes):
  euro = list('€'.encode())
  assert by_bytes.decode(euro[:2]) == '\ufffd'
  cut = by_bytes.decode([65, *euro[1:], 66])
  assert cut.replace('\ufffd', '') == 'AB' and '\ufffd' in cut
  assert by_bytes.decode(np.array(euro, np.int32)) == '€'
  assert by_bytes.decode([65, 10_000, 66]) == 'AB'
  assert by_bytes.decode([65, 257], skip_special=True) == 'A'


def test_offsets_cover_the_text(by_bytes):
  ids, offsets = by_bytes.encode_with_offsets('a€\n<|im_end|>')
  assert ids == [97, *'€'.encode(), 10, 257]
  assert offsets == [(0, 1), (1, 2), (1, 2), (1, 2), (2, 3), (3, 13)]


def test_batch_equals_one_by_one(by_bytes):
  assert by_bytes.encode_batch(TEXTS) == [by_bytes.encode(t) for t in TEXTS]
  plain = by_bytes.encode_batch(TEXTS, allow_special=False)
  assert plain[-1] == list(TEXTS[-1].encode())


def test_stop_ids_are_all_tokens_that_contain_the_text():
  tokenizer = tokenizers.from_gguf_metadata(small_metadata())
  stop = tokenizer.stop_ids(['.', '\n'])
  assert stop.dtype == bool and stop.shape == (261,)
  assert set(np.flatnonzero(stop)) == {10, ord('.'), 258, 259}
  assert set(np.flatnonzero(tokenizer.stop_ids())) == {259}
  with pytest.raises(errors.InputError, match='empty'):
    tokenizer.stop_ids([''])


def test_pre_tokenizers_cut_digits_as_their_models_do():
  ids = {
      pre: tokenizers.from_gguf_metadata(small_metadata(pre)).encode('1212')
      for pre in tokenizers.PRE_TOKENIZERS
  }
  one, two, both = ord('1'), ord('2'), 256
  assert ids['smollm'] == [one, two, one, two]  # each digit alone
  assert ids['gpt-2'] == [both, both]  # all digits are one word
  assert ids['llama-bpe'] == [both, one, two]  # words of three digits


def test_control_and_user_defined_tokens():
  tokenizer = tokenizers.from_gguf_metadata(small_metadata())
  assert tokenizer.special_tokens == {'<|end|>': 259}
  assert tokenizer.encode('<think>ab<|end|>') == [260, 257, 259]
  plain = tokenizer.encode('<|end|>', allow_special=False)
  assert plain == list(b'<|end|>')
  assert tokenizer.pad_id == tokenizer.eos_id == 259


def test_unsupported_gguf_tokenizers_are_named():
  with pytest.raises(errors.InputError, match="'llama'.*supported: 'gpt2'"):
    tokenizers.from_gguf_metadata(small_metadata(model='llama'))
  with pytest.raises(errors.InputError, match="'qwen2'.*gpt-2"):
    tokenizers.from_gguf_metadata(small_metadata(pre='qwen2'))
  metadata = small_metadata()
  del metadata['tokenizer.ggml.merges']
  with pytest.raises(errors.InputError, match=r'no tokenizer\.ggml\.merges'):
    tokenizers.from_gguf_metadata(metadata)


def test_saved_files_give_the_same_tokenizer(tmp_path, by_bytes):
  by_bytes.save(tmp_path)
  loaded = tokenizers.from_file(tmp_path)
  assert loaded.fingerprint == by_bytes.fingerprint
  for text in TEXTS:
    assert loaded.encode(text) == by_bytes.encode(text)
  assert pickle.loads(pickle.dumps(loaded)).encode('é') == loaded.encode('é')


def test_fingerprint_sees_every_part(by_bytes):
  def variant(**fields):
    return tokenizers.Tokenizer(**{
        k: getattr(by_bytes, k)
        for k in ('inner', 'eos_id', 'pad_id', 'bos_id', 'chat_template')
    } | fields).fingerprint

  other = tokenizers.from_gguf_metadata(small_metadata()).inner
  prints = {
      variant(), variant(inner=other), variant(eos_id=1), variant(pad_id=1),
      variant(bos_id=1), variant(chat_template='x'),
  }
  assert len(prints) == 6
  assert by_bytes.fingerprint in prints


def test_files_of_others(tmp_path, by_bytes):
  """Post-processors, truncation and the forms of a config do no harm."""
  by_bytes.save(tmp_path)
  inner = package.Tokenizer.from_file(str(tmp_path / 'tokenizer.json'))
  inner.post_processor = package.processors.ByteLevel(trim_offsets=True)
  inner.enable_truncation(4)
  inner.enable_padding(length=6)
  inner.save(str(tmp_path / 'tokenizer.json'))
  config = {
      'eos_token': {'content': '<|im_end|>'}, 'bos_token': None,
      'chat_template': [{'name': 'tools', 'template': 'T'},
                        {'name': 'default', 'template': 'D'}],
  }
  (tmp_path / 'tokenizer_config.json').write_text(json.dumps(config))
  loaded = tokenizers.from_file(tmp_path / 'tokenizer.json')
  assert loaded.encode('  hello  ') == list(b'  hello  ')
  assert loaded.encode_with_offsets(' a')[1] == [(0, 1), (1, 2)]
  assert (loaded.pad_id, loaded.bos_id) == (257, None)
  assert loaded.chat_template == 'D'
  (tmp_path / 'chat_template.jinja').write_text('own file')
  assert tokenizers.from_file(tmp_path).chat_template == 'own file'


def test_bad_files_are_input_errors(tmp_path, by_bytes):
  with pytest.raises(errors.InputError, match=r'tokenizer\.json'):
    tokenizers.from_file(tmp_path / 'tokenizer.json')
  by_bytes.save(tmp_path)
  beside = tmp_path / 'tokenizer_config.json'
  beside.unlink()
  with pytest.raises(errors.InputError, match='names no eos_token'):
    tokenizers.from_file(tmp_path)
  assert tokenizers.from_file(tmp_path, '<|im_end|>', '<|pad|>').pad_id == 256
  with pytest.raises(errors.InputError, match=r"no token '</s>' \(eos_token"):
    tokenizers.from_file(tmp_path, '</s>')
  (tmp_path / 'tokenizer.json').write_text('{"model": 3}')
  with pytest.raises(errors.InputError, match='Cannot read the tokenizer'):
    tokenizers.from_file(tmp_path)
