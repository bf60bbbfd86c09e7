"""Demonstrations: the tokens of a rollout, and an answer that would score."""

import dataclasses
import json

import numpy as np
import pytest
import tokenizers
from tokenizers import models

from rlpost import errors, types
from rlpost.data import tokenizer as tokenizer_lib
from rlpost.data.example import Example
from rlpost.domains import demonstrations, table
from rlpost.domains import domain as domain_lib
from rlpost.rollouts import collect

NAMES = ('add', 'sort_letters', 'tiny_copy')
FORMS = ('plain', 'bare', 'chat')


@pytest.fixture(scope='module')
def pools():
  return {
    name: domain_lib.pools(
      table.load(name), heldout_seed=0, heldout=16, validation=8
    )
    for name in NAMES
  }


@pytest.fixture(scope='module')
def tokenizer():
  return tokenizer_lib.bytes_tokenizer()


def environments(pools, form):
  return {name: p.environment(form=form) for name, p in pools.items()}


@pytest.mark.parametrize('form', FORMS)
def test_a_document_is_the_rollout_that_knows_the_answer(
  pools, tokenizer, form
):
  found = environments(pools, form)
  encode = demonstrations.encoder(tokenizer, found)
  for place, name in enumerate(sorted(NAMES)):
    task, environment = pools[name].train_task(3, 0), found[name]
    document = encode(demonstrations.example(task, environment))
    prompt = sum(
      collect.prompt_tokens(tokenizer, environment.render(task)), ()
    )
    size = len(prompt)
    assert document.tokens[:size].tolist() == list(prompt)
    assert not document.trained[:size].any() and document.trained[size:].all()
    answer = document.tokens[size:]
    text = tokenizer.decode(answer.tolist(), skip_special=True)
    assert environment.answer(text) == task.checker['gold']
    # The end is there once, and last: the policy would have stopped there.
    stops = tokenizer.stop_ids(environment.stop)[answer]
    assert stops.tolist() == [False] * (len(answer) - 1) + [True]
    assert document.domain == place


def test_examples_are_distinct_and_no_other_pool_has_them(pools):
  found = environments(pools, None)

  def draw(seed, count=40):
    return demonstrations.examples(pools, found, count=count, seed=seed)

  ids = [e.content_id for e in draw(0)]
  assert len(set(ids)) == len(ids) == 40 * len(NAMES)
  for pool in pools.values():
    assert not set(ids) & pool.refused
  # A run with the same seed meets other tasks than its warm-up.
  for name in ('sort_letters', 'tiny_copy'):
    met = {pools[name].train_task(i, 0).content_id for i in range(40)}
    own = {e.content_id for e in draw(0) if e.domain == name}
    assert len(met & own) < 10
  assert draw(0) == draw(0)
  assert {e.content_id for e in draw(1)} != set(ids)
  # There are 780 sums, fewer than what is asked for.
  sums = [e for e in draw(0, count=2000) if e.domain == 'add']
  assert 100 < len(sums) < 780
  with pytest.raises(errors.InputError, match='at least 1'):
    draw(0, count=0)


def test_an_answer_that_merges_with_its_prompt_is_refused(pools, tokenizer):
  spec = json.loads(tokenizer.inner.to_str())['model']
  letters = spec['vocab'] | {'Ċa': 384}
  inner = tokenizers.Tokenizer.from_str(tokenizer.inner.to_str())
  inner.model = models.BPE(vocab=letters, merges=[('Ċ', 'a')])
  merging = dataclasses.replace(tokenizer, inner=inner)
  encode = demonstrations.encoder(merging, environments(pools, 'chat'))
  question = types.Message.of('user', 'abc').to_json()
  document = encode(Example(json.dumps([question]), 'b', 'add', ''))
  assert np.count_nonzero(document.trained) == 2
  with pytest.raises(errors.InputError, match="'a' of domain 'add' merges"):
    encode(Example(json.dumps([question]), 'a', 'add', ''))
