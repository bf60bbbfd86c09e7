"""Solved training tasks: what a supervised stage imitates.

The prompt is the one that a rollout shows, token for token. The completion is
what a policy that knows the answer samples after it, its end included.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rlpost import errors, types
from rlpost.data import chat, packing
from rlpost.data.example import Example
from rlpost.domains.domain import Pools

# Rollouts take their tasks from index 0 on, and never get here.
_FIRST = 2**40
_DRAWS = 4  # per wanted example, before a domain counts as exhausted


def examples(
    pools: Mapping[str, Pools], environments: Mapping[str, Any], *,
    count: int, seed: int,
) -> list[Example]:
  """`count` distinct training tasks of each domain, solved.

  A domain that runs out of new ones gives fewer.

  Args:
    pools, environments: by domain.
    count: per domain, at least 1.
    seed: of the tasks; the same as of a run's rollouts gives other tasks.
  """
  if count < 1:
    raise errors.InputError(f'examples={count} must be at least 1.')
  out = []
  for name in sorted(pools):
    tasks = {}
    for index in range(_FIRST, _FIRST + _DRAWS * count):
      task = pools[name].train_task(index, seed)
      tasks.setdefault(task.content_id, task)
      if len(tasks) == count:
        break
    out += [example(task, environments[name]) for task in tasks.values()]
  return out


def example(task: types.Task, environment) -> Example:
  """A task as its environment shows it, with its solution."""
  state = environment.render(task)
  prompt = state.prefix + state.suffix
  if state.messages:
    prompt = json.dumps(state.messages)
  solution = environment.solution(task)
  return Example(prompt, solution, task.domain, task.content_id)


def encoder(
    tokenizer, environments: Mapping[str, Any]
) -> Callable[[Example], packing.Document]:
  """A function from an example to tokens, of which the completion trains.

  Args:
    tokenizer: `data.tokenizer.Tokenizer`.
    environments: by domain; a document's `domain` is the place of its name in
      their sorted names.
  """
  places = {name: i for i, name in enumerate(sorted(environments))}

  def encode(example: Example) -> packing.Document:
    if environments[example.domain].form == 'chat':
      tokens, trained = _conversation(tokenizer, example)
    else:
      prompt = tokenizer.encode(example.prompt)
      tokens = np.array(
          prompt + tokenizer.encode(example.completion), np.int32
      )
      trained = np.arange(len(tokens)) >= len(prompt)
    return packing.Document(tokens, trained, places[example.domain])

  return encode


def _conversation(tokenizer, example: Example):
  """Tokens up to the end of the last turn, and the mask of that turn."""
  messages = [types.Message.from_json(m) for m in json.loads(example.prompt)]
  prompt = chat.encode_chat(tokenizer, messages, True).ids
  answer = types.Message.of('assistant', example.completion)
  whole = chat.encode_chat(tokenizer, [*messages, answer])
  size = len(prompt)
  if not np.array_equal(whole.ids[:size], prompt):
    raise errors.InputError(
        f'The answer {example.completion!r} of domain {example.domain!r} '
        'merges with the tokens before it, so no rollout would write it; '
        'it should not begin with white space.'
    )
  trained = whole.mask & (np.arange(len(whole.ids)) >= size)
  stop = int(np.flatnonzero(trained)[-1]) + 1
  return whole.ids[:stop], trained[:stop]
