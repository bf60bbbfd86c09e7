"""Episodes become scored groups, token for token; engine and scorer are fakes.
"""

import asyncio

import numpy as np
import pytest

from rlpost import errors, types
from rlpost.data import tokenizer as tokenizers
from rlpost.environments.single_turn import SingleTurn
from rlpost.rollouts import collect
from rlpost.rollouts.engine import Completion

TOKENIZER = tokenizers.bytes_tokenizer()
NEWLINE = 10
# Half a letter, an end of line in the middle, and a control token's bytes:
# none of them survives decoding and encoding again.
AWKWARD = ([0xC3, 0x28, 65], [65, NEWLINE, 66], list(b'<|im_end|>'), [0xFF])


def task(domain, text, gold='4'):
  return types.Task(
      domain, (types.Message.of('user', text),),
      {'name': 'exact', 'gold': gold},
  )


class Environment:
  """A real environment that notes what is called."""

  def __init__(self, inner, log, fail_at=None):
    self.inner, self.log, self.fail_at = inner, log, fail_at

  async def reset(self, task, seed):
    if self.fail_at == ('reset', seed):
      raise RuntimeError('no room')
    self.log.append(('reset', seed))
    return await self.inner.reset(task, seed)

  async def step(self, state, action):
    if self.fail_at == ('step', state.seed):
      raise RuntimeError('lost')
    self.log.append(('step', state.seed, action))
    return await self.inner.step(state, action)

  async def close(self, state):
    self.log.append(('close', state.seed))


class Engine:
  """Answers in an order of its own: the last samples first, two at a time."""

  def __init__(self, log):
    self.log = log
    self.requests = None

  def answer(self, group, sample, temperature):
    tokens = np.array([group % 256, sample, *AWKWARD[sample % 4]], np.int32)
    stop = ('stop', 'length', 'overlong')[(group + sample) % 3]
    if stop == 'overlong':
      tokens = tokens[:0]
    logp = -0.125 * np.arange(1, len(tokens) + 1, dtype=np.float32)
    return Completion(group, sample, temperature, tokens, logp, stop)

  def generate(self, params, version, requests, root, budget):
    assert (params, version, root, budget) == ('params', 5, 'root', 7)
    self.requests = requests
    done = [
        self.answer(r.group, s, t) for r in requests for s, t in r.samples
    ][::-1]
    for i in range(0, len(done), 2):
      self.log.append(('decode', i // 2))
      yield done[i : i + 2]


class Scorer:
  """A verdict that depends on the text; three kinds of them."""

  def __init__(self, log):
    self.log, self.items = log, []

  @staticmethod
  def verdict(item):
    kind = sum(item.text.encode()) % 3
    if item.stop_reason == 'overlong' or kind == 0:
      return types.Verdict('invalid', reason=item.text)
    if kind == 1:
      return types.Verdict('infra', reason=item.text)
    return types.Verdict('value', 0.5, reason=item.text)

  def submit(self, items):
    index = len(self.items)
    self.items.append(items)
    self.log.append(('submit', index))
    return Pending(self, index)


class Pending:

  def __init__(self, scorer, index):
    self.scorer, self.index = scorer, index

  def result(self):
    self.scorer.log.append(('result', self.index))
    return [self.scorer.verdict(i) for i in self.scorer.items[self.index]]


SAMPLES = ((3, 1.0), (0, 0.5), (2, 1.0))


def made(fail_at=None):
  """(log, engine, scorer, collector, episodes); ids out of order."""
  log = []
  engine, scorer = Engine(log), Scorer(log)
  collector = collect.Collector(engine, TOKENIZER, scorer)
  shots = [task('sum', '1+1', '2'), task('sum', '1+2', '3')]
  forms = {
      'sum': SingleTurn(form='plain', shots=shots),
      'bare': SingleTurn(form='bare'),
      'chat': SingleTurn(form='chat', instruction='Be short.'),
  }
  episodes = [
      collect.Episode(
          group, task(name, text), Environment(forms[name], log, fail_at),
          SAMPLES[: 3 - place % 2],
      )
      for place, (group, name, text) in enumerate([
          (40, 'sum', '2+2'), (7, 'bare', '2*2'), (21, 'chat', 'Two and two?'),
          (3, 'sum', '3+1'),
      ])
  ]
  return log, engine, scorer, collector, episodes


def run(collector, episodes, **more):
  return collector.collect('params', 5, episodes, 'root', 7, **more)


@pytest.fixture(scope='module')
def collected():
  log, engine, scorer, collector, episodes = made()
  progress = []
  groups = run(
      collector, episodes, progress=lambda *seen: progress.append(seen)
  )
  return log, engine, scorer, episodes, groups, progress


def test_groups_in_the_plan_s_order_with_samples_in_order(collected):
  *_, episodes, groups, _ = collected
  assert [g.id for g in groups] == [40, 7, 21, 3]
  for group, episode in zip(groups, episodes, strict=True):
    assert group.task is episode.task
    samples = [t.sample for t in group.trajectories]
    assert samples == sorted(s for s, _ in episode.samples)
    for t in group.trajectories:
      assert (t.group, t.task) == (group.id, group.task)
      assert t.temperature == dict(episode.samples)[t.sample]


def test_tokens_are_the_prompt_s_and_the_sampled_ones(collected):
  _, engine, _, _, groups, _ = collected
  changed = 0
  for group, request in zip(groups, engine.requests, strict=True):
    prompt = request.prefix + request.suffix
    for t in group.trajectories:
      done = engine.answer(t.group, t.sample, t.temperature)
      assert t.tokens.tolist() == [*prompt, *done.tokens]
      again = TOKENIZER.encode(TOKENIZER.decode(done.tokens.tolist()))
      changed += again != done.tokens.tolist()
      n = len(prompt)
      np.testing.assert_array_equal(t.logp[n:], done.logp)
      assert t.logp.dtype == np.float32 and not t.logp[:n].any()
      assert t.versions.tolist() == [-1] * n + [5] * len(done.tokens)
      assert t.sampled.tolist() == [False] * n + [True] * len(done.tokens)
      assert [(s.start, s.stop) for s in t.spans if s.stop > s.start] == (
          [(0, n), (n, len(t.tokens))][: len(t.spans)]
      )
      assert t.stop_reason == done.stop_reason
  assert changed > 3, 'encoding the text again would have passed'


def test_prompts_are_the_environment_s_text(collected):
  _, engine, _, _, _, _ = collected
  shots = 'Question: 1+1\nAnswer: 2\n\nQuestion: 1+2\nAnswer: 3\n\nQuestion:'
  texts = [
      (TOKENIZER.decode(r.prefix), TOKENIZER.decode(r.suffix))
      for r in engine.requests
  ]
  assert texts[0] == (shots, ' 2+2\nAnswer:')
  assert texts[1] == ('', '2*2')
  assert texts[3] == (shots, ' 3+1\nAnswer:')
  prefix, chat = texts[2]
  assert prefix == '' and chat.endswith('<|im_start|>assistant\n')
  assert 'Be short.' in chat and 'Two and two?' in chat
  # Tasks of a domain share the ids of their prefix, so its cache too.
  assert engine.requests[0].prefix == engine.requests[3].prefix


def test_every_verdict_is_that_of_its_own_answer(collected):
  _, _, scorer, episodes, groups, _ = collected
  environments = {e.group: e.environment.inner for e in episodes}
  kinds = set()
  for group in groups:
    for t in group.trajectories:
      action = collect.Action(t.text, stop_reason=t.stop_reason)
      item = environments[group.id].item(group.task, action)
      assert t.verdict == scorer.verdict(item)
      assert item.checker == group.task.checker
      kinds.add(t.verdict.status)
  assert kinds == {'value', 'invalid', 'infra'}
  scored = [i for items in scorer.items for i in items]
  assert len(scored) == sum(len(e.samples) for e in episodes)


def test_environments_hear_of_each_answer_and_its_place(collected):
  log, engine, _, _, groups, _ = collected
  actions = [(entry[1], entry[2]) for entry in log if entry[0] == 'step']
  found = {}
  for group in groups:
    for t in group.trajectories:
      n = int((~t.sampled).sum())
      found.setdefault(t.group, []).append(
          (t.text, (n, len(t.tokens)), t.stop_reason)
      )
  for group, action in actions:
    found[group].remove(tuple(action))
  assert not any(found.values())


def test_scoring_overlaps_with_decoding(collected):
  log, *_ = collected
  events = [e for e in log if e[0] in ('decode', 'submit', 'result')]
  assert events[:5] == [
      ('decode', 0), ('submit', 0), ('decode', 1), ('submit', 1),
      ('result', 0),
  ]
  results = [e[1] for e in events if e[0] == 'result']
  assert results == list(range(len(results))) and events[-1][0] == 'result'


def test_progress_ends_with_all_and_the_mean_over_values(collected):
  *_, episodes, groups, progress = collected
  wanted = sum(len(e.samples) for e in episodes)
  assert [p[0] for p in progress] == sorted(p[0] for p in progress)
  assert progress[-1] == (wanted, wanted, 0.5)


def test_environments_are_closed_after_success_and_after_failure(collected):
  log, _, _, _, groups, _ = collected
  assert sorted(e[1] for e in log if e[0] == 'close') == [3, 7, 21, 40]
  for fail_at, opened in ((('step', 21), [3, 7, 21, 40]),
                          (('reset', 21), [7, 40])):
    log, *_, collector, episodes = made(fail_at)
    with pytest.raises(RuntimeError):
      run(collector, episodes)
    assert sorted(e[1] for e in log if e[0] == 'close') == opened


def test_a_group_id_may_not_be_used_twice():
  log, *_, collector, episodes = made()
  episodes[1] = episodes[1]._replace(group=40)
  with pytest.raises(errors.InputError, match='same group id'):
    run(collector, episodes)
  assert not log


def test_log_probs_that_are_not_finite_name_their_answers():
  _, engine, _, collector, episodes = made()
  real = engine.answer

  def broken(group, sample, temperature):
    done = real(group, sample, temperature)
    if (group, sample) == (21, 0):
      assert len(done.logp)
      done.logp[-1] = np.nan
    return done

  engine.answer = broken
  with pytest.raises(errors.NonFiniteError, match='1 answers in domain chat'):
    run(collector, episodes)


def test_nothing_to_do_gives_no_groups():
  *_, collector, _ = made()
  assert run(collector, []) == []


def test_a_collector_works_again_and_again():
  """Each call has an event loop of its own."""
  *_, collector, episodes = made()
  first, second = run(collector, episodes), run(collector, episodes)
  assert [g.id for g in first] == [g.id for g in second]
  with pytest.raises(RuntimeError):
    asyncio.get_running_loop()
