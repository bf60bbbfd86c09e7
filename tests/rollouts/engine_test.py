"""Scheduling: every answer once, whatever the slots; programs are fakes."""

import numpy as np
import pytest

from rlpost import errors
from rlpost.rollouts import engine as engines
from tests.rollouts import fakes

BASE = {'prompts': 3, 'rows': 2, 'prefix_len': 4, 'prompt_len': 5, 'width': 6,
        'prefixes': 2}
CONFIGS = {
    'plain': {},
    'one prompt a time': {'admit': 1},
    'late refill': {'refill': 4, 'admit': 2},
    'one slot': {'prompts': 1, 'rows': 1, 'prefixes': 1},
    'one row each': {'prompts': 4, 'rows': 1, 'admit': 3},
    'wide': {'prompts': 16, 'rows': 8, 'prefixes': 5},
    'few prefixes': {'prefixes': 1, 'admit': 2},
}
PREFIXES = (), (3,), (4, 5, 6), (7, 8, 9, 9)


def config(**changes):
  return engines.EngineConfig(**BASE | changes)


def requests(seed=0, count=9, first=100):
  """Prompts of any length, groups of any size, and temperatures of their own.
  """
  rng = np.random.default_rng(seed)
  out = []
  for g in range(count):
    samples = rng.permutation(8)[: rng.integers(1, 8)]
    out.append(engines.Request(
        first + 3 * g, PREFIXES[rng.integers(len(PREFIXES))],
        tuple(rng.integers(0, fakes.VOCAB, rng.integers(1, 6)).tolist()),
        tuple((int(s), (0.0, 0.5, 1.0)[s % 3]) for s in samples),
    ))
  return out


def wanted(asked, root=7, version=1, budget=6):
  return {
      (r.group, s): (
          fakes.answer(version, root, r.group, s, r.prefix + r.suffix, t,
                       budget), t
      )
      for r in asked for s, t in r.samples
  }


def collected(batches):
  out = {}
  for batch in batches:
    for done in batch:
      key = done.group, done.sample
      assert key not in out, f'{key} ended twice'
      out[key] = done
  return out


def made(settings):
  fake = fakes.Fake(settings)
  return fake, engines.Engine(settings, fake.programs, fakes.STOP)


@pytest.mark.parametrize('name', CONFIGS)
@pytest.mark.parametrize('seed', range(4))
def test_every_answer_once_whatever_the_slots_and_the_order(name, seed):
  _, engine = made(config(**CONFIGS[name]))
  asked = requests(seed)
  rng = np.random.default_rng(seed)
  for _ in range(2):
    found = collected(engine.generate(1, 1, asked, 7))
    expected = wanted(asked)
    assert found.keys() == expected.keys()
    for key, (tokens, temperature) in expected.items():
      done = found[key]
      assert done.tokens.tolist() == tokens
      assert done.temperature == temperature
      assert done.logp.tolist() == [-float(i) for i in range(len(tokens))]
      stopped = bool(fakes.STOP[tokens[-1]])
      assert done.stop_reason == ('stop' if stopped else 'length')
    asked = [asked[i] for i in rng.permutation(len(asked))]
  reasons = {d.stop_reason for d in found.values()}
  assert reasons == {'stop', 'length'}


def test_an_end_token_comes_once_and_last_and_the_budget_holds():
  _, engine = made(config())
  asked = requests(5)
  for budget in (1, 3, 6):
    found = collected(engine.generate(1, 1, asked, 7, budget))
    for done in found.values():
      ends = fakes.STOP[done.tokens]
      assert len(done.tokens) <= budget and not ends[:-1].any()
      assert (done.stop_reason == 'stop') == ends[-1]
      assert ends[-1] or len(done.tokens) == budget
      # A smaller budget gives the beginning of the same answer.
      whole = wanted(asked)[done.group, done.sample][0]
      assert done.tokens.tolist() == whole[:budget]
  for budget in (0, 7, -1):
    with pytest.raises(errors.InputError, match=f'{budget=} must be in 1..6'):
      next(engine.generate(1, 1, asked, 7, budget))


def test_prompts_that_do_not_fit_are_named_and_nothing_is_sampled():
  fake, engine = made(config())
  fitting = requests(6)
  long = [
      engines.Request(1, (), (3,) * 6, ((0, 1.0), (4, 0.5))),
      engines.Request(2, (3,) * 5, (3,), ((0, 1.0),)),
      engines.Request(3, (3,), (), ((0, 1.0),)),
  ]
  found = collected(engine.generate(1, 1, long[:1] + fitting + long[1:], 7))
  over = {k: d for k, d in found.items() if d.stop_reason == 'overlong'}
  assert over.keys() == {(1, 0), (1, 4), (2, 0), (3, 0)}
  for done in over.values():
    assert done.tokens.shape == done.logp.shape == (0,)
  assert over[1, 4].temperature == 0.5
  rest = {k: d.tokens.tolist() for k, d in found.items() if k not in over}
  assert rest == {k: tokens for k, (tokens, _) in wanted(fitting).items()}
  assert fake.admitted == len(fitting)
  fake, engine = made(config())
  assert len(collected(engine.generate(1, 1, long, 7))) == 4
  assert not fake.runs and not fake.prefills
  assert not collected(engine.generate(1, 1, [], 7))


def test_a_prefix_is_computed_once_per_version_of_the_weights():
  fake, engine = made(config(prefixes=4))
  asked = requests(1)
  for version in (1, 1, 2, 1):
    found = collected(engine.generate(version, version, asked, 7))
    assert {k: d.tokens.tolist() for k, d in found.items()} == {
        k: tokens for k, (tokens, _) in wanted(asked, version=version).items()
    }
  assert [version for version, _ in fake.prefills] == [1, 2, 1]
  # And only for what is needed: the fake refuses other weights' caches.
  for _, prefixes in fake.prefills:
    assert {p for p in prefixes if p} == {r.prefix for r in asked if r.prefix}


def test_more_prefixes_than_fit_go_in_parts():
  fake, engine = made(config(prefixes=2))
  asked = requests(2)
  kinds = {r.prefix for r in asked}
  assert len(kinds) == 4
  collected(engine.generate(1, 1, asked, 7))
  assert len(fake.prefills) == 2
  seen = [p for _, prefixes in fake.prefills for p in prefixes]
  assert sorted(seen) == sorted(kinds)


def test_another_root_gives_other_answers():
  _, engine = made(config())
  asked = requests(3)
  first = collected(engine.generate(1, 1, asked, 7))
  second = collected(engine.generate(1, 1, asked, 8))
  equal = [
      np.array_equal(first[k].tokens, second[k].tokens) for k in first
  ]
  assert np.mean(equal) < 0.2


@pytest.mark.parametrize('name', CONFIGS)
def test_arguments_of_a_program_are_not_changed_after_the_call(name):
  """A program may still be reading them: dispatch does not wait."""
  fake, engine = made(config(**CONFIGS[name]))
  collected(engine.generate(1, 1, requests(4), 7))
  assert any(then.fresh.any() for _, then in fake.starts)
  for passed, then in fake.starts:
    for now, before in zip(passed, then, strict=True):
      np.testing.assert_array_equal(now, before)


def test_an_answer_left_half_way_does_not_disturb_the_next_call():
  _, engine = made(config())
  asked = requests(7)
  next(engine.generate(1, 1, asked, 3))
  found = collected(engine.generate(1, 1, asked, 7))
  assert {k: d.tokens.tolist() for k, d in found.items()} == {
      k: tokens for k, (tokens, _) in wanted(asked).items()
  }


def test_idle_rows_are_refilled_while_others_run():
  """One prompt with many samples must not decode in waves."""
  settings = config(prompts=1, rows=4, refill=1)
  _, engine = made(settings)
  asked = [engines.Request(1, (), (3,), tuple((s, 1.0) for s in range(40)))]
  batches = list(engine.generate(1, 1, asked, 7))
  sizes = [len(b) for b in batches]
  assert sum(sizes) == 40
  assert np.mean(sizes) < 3, 'answers end one by one, not four by four'


@pytest.mark.parametrize('changes, message', [
    ({'prompts': 0}, 'prompts=0 must be >= 1'),
    ({'width': 0}, 'width=0 must be >= 1'),
    ({'prefixes': 0}, 'prefixes=0 must be >= 1'),
    ({'admit': 4}, 'admit=4 must not exceed self.prompts=3'),
])
def test_impossible_shapes_are_refused(changes, message):
  with pytest.raises(errors.InputError, match=message):
    config(**changes)
