"""Text to token ids and back, for one model."""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from rlpost import errors

# ChatML without a default system turn: what models made here start with.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n'"
    " + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r' ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)


def _byte_level(use_regex=True):
  return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _smollm():
  digits = pre_tokenizers.Digits(individual_digits=True)
  return pre_tokenizers.Sequence([digits, _byte_level()])


def _llama_bpe():
  split = pre_tokenizers.Split(tokenizers.Regex(_LLAMA3_SPLIT), 'isolated')
  return pre_tokenizers.Sequence([split, _byte_level(use_regex=False)])


# How text is cut before BPE, by the name in GGUF metadata.
PRE_TOKENIZERS = {
    'gpt-2': _byte_level,
    'smollm': _smollm,
    'llama-bpe': _llama_bpe,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
  """A tokenizer with its special ids and chat template.

  Attributes:
    inner: does the work.
    eos_id: ends an answer.
    pad_id: fills; may equal `eos_id`, so padding is known by length alone.
    bos_id: starts a sequence, or None. Nothing here adds it by itself.
    chat_template: jinja2 source, or None.
  """

  inner: tokenizers.Tokenizer
  eos_id: int
  pad_id: int
  bos_id: int | None = None
  chat_template: str | None = None

  @functools.cached_property
  def vocab_size(self) -> int:
    """One more than the largest id."""
    return max(self.inner.get_vocab(with_added_tokens=True).values()) + 1

  @functools.cached_property
  def special_tokens(self) -> dict[str, int]:
    """Text and id of every control token."""
    added = self.inner.get_added_tokens_decoder().items()
    return {t.content: i for i, t in added if t.special}

  @functools.cached_property
  def fingerprint(self) -> str:
    """SHA-256 over everything that decides ids and chat renderings."""
    parts = [
        self.inner.to_str(), self.eos_id, self.pad_id, self.bos_id,
        self.chat_template,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

  @functools.cached_property
  def _worker(self) -> tokenizers.Tokenizer:
    if self.inner.post_processor is None:
      return self.inner
    # A post-processor may trim white space from offsets or add tokens.
    spec = json.loads(self.inner.to_str()) | {'post_processor': None}
    return tokenizers.Tokenizer.from_str(json.dumps(spec))

  @functools.cached_property
  def _plain_worker(self) -> tokenizers.Tokenizer:
    worker = tokenizers.Tokenizer.from_str(self._worker.to_str())
    worker.encode_special_tokens = True
    return worker

  def encode(self, text: str, allow_special: bool = True) -> list[int]:
    """Token ids of `text`; no token is added.

    Args:
      text: any string.
      allow_special: read '<|im_end|>' and the like as control tokens. False
        for text that is not trusted: they become ordinary characters.
    """
    worker = self._worker if allow_special else self._plain_worker
    return worker.encode(text, add_special_tokens=False).ids

  def encode_with_offsets(
      self, text: str, allow_special: bool = True
  ) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids as `encode`, and the characters [start, stop) of each token.

    Tokens that share the bytes of one character share its offsets.
    """
    worker = self._worker if allow_special else self._plain_worker
    encoding = worker.encode(text, add_special_tokens=False)
    return encoding.ids, encoding.offsets

  def encode_batch(
      self, texts: Sequence[str], allow_special: bool = True
  ) -> list[list[int]]:
    """`encode` for many texts."""
    worker = self._worker if allow_special else self._plain_worker
    batch = worker.encode_batch(list(texts), add_special_tokens=False)
    return [e.ids for e in batch]

  def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
    """Text of `ids`; bytes that are not UTF-8 become U+FFFD.

    Args:
      ids: token ids; ids that the tokenizer does not have give no text.
      skip_special: leave control tokens out.
    """
    ids = [int(i) for i in ids]
    return self.inner.decode(ids, skip_special_tokens=skip_special)

  @functools.cached_property
  def token_texts(self) -> list[str]:
    """Decoded text of each id alone."""
    ids = [[i] for i in range(self.vocab_size)]
    return self.inner.decode_batch(ids, skip_special_tokens=False)

  def stop_ids(self, texts: Iterable[str] = ()) -> np.ndarray:
    """Boolean [V]: tokens that end an answer.

    These are the end token and every token whose own text contains one of
    `texts`. A newline is inside many tokens, so looking for the id of '\\n'
    alone would miss '.\\n'. Text that spans tokens is not found this way.
    """
    texts = list(texts)
    if not all(texts):
      raise errors.InputError('A stop text must not be empty.')
    result = np.zeros(self.vocab_size, bool)
    result[self.eos_id] = True
    for text in texts:
      result |= np.fromiter((text in t for t in self.token_texts), bool)
    return result

  def save(self, folder: str | os.PathLike) -> None:
    """Writes tokenizer.json and tokenizer_config.json with the template."""
    folder = pathlib.Path(folder)
    names = {
        'bos_token': self.bos_id,
        'eos_token': self.eos_id,
        'pad_token': self.pad_id,
    }
    config = {
        'tokenizer_class': 'PreTrainedTokenizerFast',
        'clean_up_tokenization_spaces': False,
        'chat_template': self.chat_template,
    } | {
        k: self.inner.id_to_token(i) for k, i in names.items() if i is not None
    }
    self.inner.save(str(folder / 'tokenizer.json'))
    (folder / 'tokenizer_config.json').write_text(
        json.dumps(config, indent=2, ensure_ascii=False) + '\n', 'utf-8'
    )


def from_gguf_metadata(metadata: Mapping[str, Any]) -> Tokenizer:
  """The tokenizer that the metadata of a GGUF file describes.

  Byte-level BPE only ('gpt2' in GGUF), cut by one of PRE_TOKENIZERS.

  Args:
    metadata: the file's keys and values.

  Raises:
    InputError: a key is missing, or the tokenizer is of another kind.
  """

  def get(key):
    if f'tokenizer.ggml.{key}' not in metadata:
      raise errors.InputError(f'The GGUF file has no tokenizer.ggml.{key}.')
    return metadata[f'tokenizer.ggml.{key}']

  model, pre = get('model'), metadata.get('tokenizer.ggml.pre', 'gpt-2')
  if model != 'gpt2' or pre not in PRE_TOKENIZERS:
    raise errors.InputError(
        f'GGUF tokenizer {model!r} with pre-tokenizer {pre!r} is not '
        f"supported; supported: 'gpt2' with {sorted(PRE_TOKENIZERS)}. Give a "
        'tokenizer.json instead.'
    )
  tokens, kinds = get('tokens'), get('token_type')
  merges = [tuple(merge.split(' ')) for merge in get('merges')]
  inner = tokenizers.Tokenizer(
      models.BPE(
          vocab={t: i for i, t in enumerate(tokens)},
          merges=merges,
          ignore_merges=pre == 'llama-bpe',
      )
  )
  inner.pre_tokenizer = PRE_TOKENIZERS[pre]()
  inner.decoder = decoders.ByteLevel()
  control, user_defined = 3, 4
  for kind, special in ((control, True), (user_defined, False)):
    inner.add_tokens([
        tokenizers.AddedToken(t, special=special, normalized=False)
        for t, k in zip(tokens, kinds, strict=True)
        if k == kind
    ])
  eos_id = get('eos_token_id')
  return Tokenizer(
      inner,
      eos_id=eos_id,
      pad_id=metadata.get('tokenizer.ggml.padding_token_id', eos_id),
      bos_id=metadata.get('tokenizer.ggml.bos_token_id'),
      chat_template=metadata.get('tokenizer.chat_template'),
  )


def from_file(
    path: str | os.PathLike,
    eos_token: str | None = None,
    pad_token: str | None = None,
) -> Tokenizer:
  """The tokenizer in a tokenizer.json, with what lies beside it.

  tokenizer_config.json gives the special tokens and the chat template, which
  may also be in chat_template.jinja.

  Args:
    path: the tokenizer.json, or its folder.
    eos_token: end token; None takes it from tokenizer_config.json.
    pad_token: None takes it from there, else the end token.

  Raises:
    InputError: a file is missing or damaged, or no end token is known.
  """
  path = pathlib.Path(path)
  path = path / 'tokenizer.json' if path.is_dir() else path
  beside = path.parent / 'tokenizer_config.json'
  try:
    inner = tokenizers.Tokenizer.from_str(path.read_text('utf-8'))
    config = json.loads(beside.read_text('utf-8')) if beside.exists() else {}
  except Exception as error:  # the package raises plain Exception
    raise errors.InputError(
        f'Cannot read the tokenizer at {path}: {error}.'
    ) from error
  inner.no_truncation()
  inner.no_padding()

  def special_id(name, token=None):
    token = token or config.get(name)
    if isinstance(token, dict):
      token = token.get('content')
    if token is None:
      return None
    if inner.token_to_id(token) is None:
      raise errors.InputError(f'{path} has no token {token!r} ({name}).')
    return inner.token_to_id(token)

  eos_id = special_id('eos_token', eos_token)
  if eos_id is None:
    raise errors.InputError(
        f'{beside} names no eos_token; pass eos_token=.'
    )
  pad_id = special_id('pad_token', pad_token)
  return Tokenizer(
      inner,
      eos_id=eos_id,
      pad_id=eos_id if pad_id is None else pad_id,
      bos_id=special_id('bos_token'),
      chat_template=_template(config, path.parent / 'chat_template.jinja'),
  )


def _template(config, file):
  """Chat template of a folder: its own file, or a key of the config."""
  if file.exists():
    return file.read_text('utf-8')
  template = config.get('chat_template')
  if isinstance(template, list):  # several, by name
    template = {t['name']: t['template'] for t in template}.get('default')
  return template


def bytes_tokenizer() -> Tokenizer:
  """Bytes as tokens, for models made here: 384 ids.

  Id b < 256 is byte b. 256 `<|pad|>`, 257 `<|im_end|>` (end), 258
  `<|im_start|>`, 259 to 383 `<|unused_n|>`. The chat template is CHATML.
  """
  # BPE without merges over the characters that stand for bytes.
  letters = byte_letters()
  specials = ['<|pad|>', '<|im_end|>', '<|im_start|>']
  specials += [f'<|unused_{i}|>' for i in range(384 - 256 - len(specials))]
  vocab = {letter: i for i, letter in enumerate(letters)}
  vocab |= {text: 256 + i for i, text in enumerate(specials)}
  inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
  inner.pre_tokenizer = _byte_level(use_regex=False)
  inner.decoder = decoders.ByteLevel()
  inner.add_special_tokens([
      tokenizers.AddedToken(t, special=True, normalized=False)
      for t in specials
  ])
  return Tokenizer(
      inner, eos_id=257, pad_id=256, chat_template=CHATML
  )


def byte_letters() -> list[str]:
  """The printable character that byte-level BPE writes for each byte.

  Radford et al., 2019 (GPT-2): printable Latin-1 bytes are themselves, the
  rest are the characters from U+0100 on.
  """
  printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
  letters, spare = [], 256
  for byte in range(256):
    letters.append(chr(byte if byte in printable else spare))
    spare += byte not in printable
  return letters
