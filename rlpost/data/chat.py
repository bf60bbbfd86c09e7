"""Conversations to tokens, and which of them the model is to learn.

Templates come with a model and are programs: they run in jinja2's sandbox, see
plain JSON data only, and have no loader, so no file is in reach.
"""

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.sandbox
import numpy as np

from rlpost import errors, types
from rlpost.data import tokenizer as tokenizers

# Templates may ask for today's date; a run must not depend on the day.
FIXED_DATE = datetime.datetime(2025, 1, 1)

Messages = Sequence[types.Message | Mapping[str, Any]]


class Tokens(NamedTuple):
  """A rendered conversation.

  Attributes:
    ids: int32 [T].
    mask: bool [T], tokens of the assistant: what it says and the token that
      ends its turn, without the header that the template puts before.
  """

  ids: np.ndarray
  mask: np.ndarray


class _Generation(jinja2.ext.Extension):
  """Renders the body of `{% generation %}`; we find spans without it."""

  tags = {'generation'}

  def parse(self, parser):
    line = next(parser.stream).lineno
    body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
    return jinja2.nodes.Scope(body, lineno=line)


class _Namespace(jinja2.utils.Namespace):
  """A namespace that cannot hold names of Python's internals."""

  def __init__(*args, **kwargs):
    self, values = args[0], dict(*args[1:], **kwargs)
    for name in values:
      _check_name(name)
    jinja2.utils.Namespace.__init__(self, values)

  def __setitem__(self, name, value):
    _check_name(name)
    jinja2.utils.Namespace.__setitem__(self, name, value)


def _check_name(name):
  if str(name).startswith('_'):
    raise jinja2.exceptions.SecurityError(f'{name!r} may not be set.')


def _raise_exception(message):
  raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value, ensure_ascii=False, indent=None, separators=None, sort_keys=False
):
  # jinja2's own sorts keys and escapes HTML; models saw neither.
  return json.dumps(
      value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
      sort_keys=sort_keys,
  )


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True,
      lstrip_blocks=True,
      extensions=[_Generation, jinja2.ext.loopcontrols],
  )
  environment.filters['tojson'] = _tojson
  environment.globals['raise_exception'] = _raise_exception
  environment.globals['namespace'] = _Namespace
  try:
    return environment.from_string(template)
  except jinja2.TemplateError as error:
    raise errors.InputError(f'The chat template is wrong: {error}.') from error


def _plain(messages: Messages) -> list[dict]:
  """Messages as fresh JSON data: a template must not reach real objects."""
  result = []
  for message in messages:
    if isinstance(message, types.Message):
      kinds = sorted({p.kind for p in message.parts} - {'text'})
      if kinds:
        raise errors.InputError(f'Chat templates take text, not {kinds}.')
      message = {'role': message.role, 'content': message.text}
    result.append({k: v for k, v in message.items() if v is not None})
  try:
    return json.loads(json.dumps(result))
  except (TypeError, ValueError) as error:
    raise errors.InputError(f'Messages must be JSON: {error}.') from error


def render(
    template: str,
    messages: Messages,
    *,
    add_generation_prompt: bool = False,
    tools: Sequence[Mapping] | None = None,
    special_tokens: Mapping[str, str] | None = None,
    now: datetime.datetime = FIXED_DATE,
) -> str:
  """The text that a chat template makes of a conversation.

  Args:
    template: jinja2 source, in the dialect of Hugging Face (trimmed blocks,
      `raise_exception`, `strftime_now`, `tojson` that keeps the order of keys).
    messages: Messages of text parts, or dicts with 'role', 'content' and what
      else the template reads ('tool_calls', ...).
    add_generation_prompt: end with the header of an assistant's turn.
    tools: JSON schemas of tools, for templates that list them.
    special_tokens: 'bos_token' and the like, for templates that write them.
    now: what `strftime_now` formats.

  Raises:
    InputError: the template is wrong or refuses the conversation.
  """
  try:
    return _compile(template).render(
        messages=_plain(messages),
        add_generation_prompt=add_generation_prompt,
        tools=json.loads(json.dumps(tools)),
        strftime_now=now.strftime,
        **(special_tokens or {}),
    )
  except (
      jinja2.TemplateError, TypeError, ValueError, ArithmeticError,
      LookupError, AttributeError,
  ) as error:
    roles = [
        m.role if isinstance(m, types.Message) else m.get('role')
        for m in messages
    ]
    raise errors.InputError(
        f'The chat template cannot render {roles=}: {error}'
    ) from error


def encode_chat(
    tokenizer: tokenizers.Tokenizer,
    messages: Messages,
    add_generation_prompt: bool = False,
    *,
    tools: Sequence[Mapping] | None = None,
    now: datetime.datetime = FIXED_DATE,
) -> Tokens:
  """Token ids of a conversation and the mask of what the assistant wrote.

  Assistant turns are found by rendering prefixes: turn k is what
  render(messages[:k + 1]) adds to render(messages[:k]) with its generation
  prompt. Text of messages never becomes a control token, even if it spells one.

  Args:
    tokenizer: has the template.
    messages, add_generation_prompt, tools, now: as in `render`.

  Raises:
    InputError: no template, it refuses the conversation, or a longer
      conversation does not begin with the text of a shorter one.
  """
  if tokenizer.chat_template is None:
    raise errors.InputError('The tokenizer has no chat template.')
  names = {
      'bos_token': tokenizer.bos_id,
      'eos_token': tokenizer.eos_id,
      'pad_token': tokenizer.pad_id,
  }
  special_tokens = {
      k: tokenizer.inner.id_to_token(i)
      for k, i in names.items() if i is not None
  }
  marked, mark = _mark_specials(
      [_plain(messages), tools], tokenizer.special_tokens
  )
  messages, tools = marked

  def text_of(count, prompt):
    return render(
        tokenizer.chat_template, messages[:count], add_generation_prompt=prompt,
        tools=tools, special_tokens=special_tokens, now=now,
    )

  full = text_of(len(messages), add_generation_prompt)
  spans = _assistant_spans(messages, text_of, full)
  ids, offsets = _encode(tokenizer, full, mark)
  mask = np.zeros(len(ids), bool)
  for start, stop in spans:
    # A token that reaches into the span belongs to it.
    mask |= (offsets[:, 1] > start) & (offsets[:, 0] < stop)
  _drop_after_end(tokenizer, ids, mask)
  return Tokens(ids, mask)


def _assistant_spans(messages, text_of, full) -> list[tuple[int, int]]:
  """Characters [start, stop) of each assistant turn in `full`."""
  spans = []
  for k, message in enumerate(messages):
    if message.get('role') != 'assistant':
      continue
    before, after = text_of(k, True), text_of(k + 1, False)
    if not after.startswith(before) or not full.startswith(after):
      raise errors.InputError(
          f'No loss mask with this chat template: the text up to message {k} '
          '(assistant) is not the beginning of the text that follows. Either '
          'the conversation must not start with the assistant, or the template '
          'rewrites earlier turns; train its turns one conversation each.'
      )
    spans.append((len(before), len(after)))
  return spans


def _drop_after_end(tokenizer, ids, mask) -> None:
  """Takes white space after an end token out of each run of `mask`.

  A template writes it between turns; the model has stopped by then.
  """
  special = np.isin(ids, list(tokenizer.special_tokens.values()))
  ends = np.flatnonzero(mask & ~np.append(mask[1:], False))
  for end in ends:
    last = end
    while mask[last] and not special[last]:
      if last == 0 or tokenizer.token_texts[ids[last]].strip():
        break
      last -= 1
    if mask[last] and special[last]:
      mask[last + 1 : end + 1] = False


def _special_pattern(special_tokens) -> re.Pattern:
  longest_first = sorted(special_tokens, key=len, reverse=True)
  return re.compile('|'.join(map(re.escape, longest_first)) or '(?!)')


def _mark_specials(data, special_tokens):
  """Breaks control tokens inside `data` with a mark that occurs nowhere else.

  Returns the data and the mark; '' when there was nothing to break.
  """
  pattern = _special_pattern(special_tokens)

  def walk(value, change):
    if isinstance(value, str):
      return change(value)
    if isinstance(value, Mapping):
      return {change(k): walk(v, change) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
      return [walk(v, change) for v in value]
    return value

  texts = []
  walk(data, lambda text: texts.append(text) or text)
  if not any(map(pattern.search, texts)):
    return data, ''
  used = set().union(*texts)
  mark = next(c for c in map(chr, range(0xE000, 0xF900)) if c not in used)

  def broken(text):
    return pattern.sub(lambda m: m[0][:1] + mark + m[0][1:], text)

  return walk(data, broken), mark


def _encode(tokenizer, text, mark) -> tuple[np.ndarray, np.ndarray]:
  """Ids int32 [T] and offsets int [T, 2] into `text`, which may hold marks."""
  if not mark:
    ids, offsets = tokenizer.encode_with_offsets(text)
    return np.array(ids, np.int32), np.array(offsets, int).reshape(-1, 2)
  ids, offsets, at = [], [], 0
  specials = tokenizer.special_tokens
  pieces = re.split(f'({_special_pattern(specials).pattern})', text)
  for piece in pieces:
    if piece in specials:
      ids.append(specials[piece])
      offsets.append((at, at + len(piece)))
    else:
      # Where each character without marks was in `text`.
      where = [i for i, c in enumerate(piece) if c != mark]
      where.append(len(piece))
      plain = piece.replace(mark, '')
      piece_ids, spans = tokenizer.encode_with_offsets(plain, False)
      ids += piece_ids
      offsets += [(at + where[a], at + where[b]) for a, b in spans]
    at += len(piece)
  return np.array(ids, np.int32), np.array(offsets, int).reshape(-1, 2)
