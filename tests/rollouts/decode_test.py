"""What the decoding programs sample, against a teacher-forced NumPy forward."""

import functools
from unittest import mock

import jax
import numpy as np
import pytest

from rlpost import types
from rlpost.data import packing
from rlpost.rollouts import engine as engines
from rlpost.training import programs as program_lib
from tests import compilation, reference
from tests.rollouts import decoders
from tests.rollouts.decoders import (
  BUDGET,
  MODEL,
  ROOT,
  STOP,
  TEMPERATURES,
  programs,
  requests,
  setting,
)
from tests.training import batches

SETTINGS = {
    'wide': setting(4, 3, prefixes=3, admit=2, refill=1),
    # Rows refilled often, other padding, a longer ring, a prefix at a time.
    'narrow': setting(
        2, 2, admit=1, refill=2, prefix_len=6, prompt_len=7, width=BUDGET + 3
    ),
    'no shared prefix': setting(3, 4, prefix_len=0, prompt_len=10),
    'stacked on a mesh': setting(
        4, 3, prefixes=3, stacked=True,
        mesh={'data': 2, 'fsdp': 2, 'tensor': 2},
    ),
}


def generate(name, params, asked, **more):
  return decoders.generate(SETTINGS[name], params, asked, **more)


@functools.cache
def _params():
  return reference.random_params(MODEL, scale=0.3)


@pytest.fixture(scope='module')
def params():
  return _params()


@functools.cache
def _result(name):
  asked = requests()
  if name != 'wide':
    asked = asked[::-1]
  return generate(name, _params(), asked)


@pytest.fixture(params=SETTINGS)
def result(request):
  return _result(request.param)


def logits(params, done):
  return decoders.logits(MODEL, params, done, requests())


def gap(params, found):
  return decoders.gap(MODEL, params, found, requests())


def test_log_probs_are_those_of_the_teacher_forced_model(params, result):
  assert result.keys() == {(r.group, s) for r in requests() for s, _ in
                           r.samples}
  assert gap(params, result) < 1e-4
  assert all(d.logp.dtype == np.float32 for d in result.values())
  # The oracle tells models apart.
  assert gap(params | {'norm/scale': params['norm/scale'] * 1.1}, result) > 0.01


def test_greedy_answers_take_the_largest_logit(params, result):
  greedy = [d for d in result.values() if d.temperature == 0]
  assert len(greedy) == 7
  for done in greedy:
    np.testing.assert_array_equal(
        done.tokens, logits(params, done).argmax(-1)
    )
  sampled = [d for d in result.values() if d.temperature > 0]
  best = [d.tokens[0] == logits(params, d)[0].argmax() for d in sampled]
  assert not all(best)


def test_answers_end_with_one_end_token_or_at_the_budget(result):
  for done in result.values():
    ends = STOP[done.tokens]
    assert not ends[:-1].any()
    assert done.stop_reason == ('stop' if ends[-1] else 'length')
    assert ends[-1] or len(done.tokens) == BUDGET
  assert {d.stop_reason for d in result.values()} == {'stop', 'length'}


@pytest.mark.parametrize('name', [n for n in SETTINGS if n != 'wide'])
def test_tokens_do_not_depend_on_slots_padding_order_or_mesh(name):
  wanted = _result('wide')
  for key, done in _result(name).items():
    np.testing.assert_array_equal(done.tokens, wanted[key].tokens)
    np.testing.assert_allclose(done.logp, wanted[key].logp, atol=1e-5)


def test_tokens_do_not_depend_on_who_else_is_asked(params):
  wanted = _result('wide')
  for part in (requests()[2:3], requests()[4:]):
    few = [r._replace(samples=r.samples[::2]) for r in part]
    found = generate('wide', params, few)
    assert found.keys() == {(r.group, s) for r in few for s, _ in r.samples}
    for key, done in found.items():
      np.testing.assert_array_equal(done.tokens, wanted[key].tokens)


def test_roots_groups_and_samples_draw_apart(params):
  first = _result('wide')
  other = generate('wide', params, requests(), root=ROOT + 1)
  warm = [k for k, d in first.items() if d.temperature]

  def equal(pairs):
    return np.mean([np.array_equal(a.tokens, b.tokens) for a, b in pairs])

  assert equal([(first[k], other[k]) for k in warm]) < 0.1
  # Groups 20 and 21 have one prompt; so do samples 0, 4 and 5 of a group.
  twins = [(first[20, s], first[21, s]) for s, t in enumerate(TEMPERATURES)
           if t and (21, s) in first]
  assert equal(twins) < 0.5
  siblings = [(first[20 + g, 0], first[20 + g, 4]) for g in (0, 3, 4, 6)
              if (20 + g, 4) in first]
  assert equal(siblings) < 0.5
  greedy = [k for k, d in first.items() if not d.temperature]
  assert equal([(first[k], other[k]) for k in greedy]) == 1


def test_a_model_without_opinions_draws_evenly_and_never_alike():
  """Logits are all 0: what is left is the random stream of each token."""
  flat = {k: np.zeros_like(v) for k, v in _params().items()}
  found = generate('wide', flat, requests(), version=7)
  rows = [d.tokens for d in found.values() if d.temperature]
  for done in found.values():
    np.testing.assert_allclose(done.logp, -np.log(40), rtol=1e-5)
  tokens = np.concatenate(rows)
  again = np.concatenate([t[1:] == t[:-1] for t in rows])
  assert len(tokens) > 100 and len(set(tokens.tolist())) > 30
  assert again.mean() < 0.1
  starts = [tuple(t[:4]) for t in rows if len(t) >= 4]
  assert len(set(starts)) == len(starts) > 10


def test_new_weights_never_meet_an_old_cache(params):
  moved = reference.random_params(MODEL, seed=1, scale=0.3)
  made, engine = programs(SETTINGS['wide'])
  generate('wide', params, requests(), version=5, engine=engine)
  found = generate('wide', moved, requests(), version=6, engine=engine)
  assert gap(moved, found) < 1e-4
  fresh = engines.Engine(
      engine.config, program_lib.decoding(made, 'rollout'), STOP
  )
  alone = generate('wide', moved, requests(), version=6, engine=fresh)
  for key, done in alone.items():
    np.testing.assert_array_equal(done.tokens, found[key].tokens)
    np.testing.assert_array_equal(done.logp, found[key].logp)


def test_a_second_call_compiles_nothing(params):
  """Whatever is asked: shapes are those of the slots."""
  _result('wide')
  events = []
  jax.monitoring.register_event_duration_secs_listener(
      lambda event, *_, **__: events.append(event)
      if 'backend_compile' in event else None
  )
  found = generate('wide', params, requests()[1:4], root=ROOT + 2, version=1)
  assert len(found) == sum(len(r.samples) for r in requests()[1:4])
  assert not events
  assert {
      p.compilations for k, p in programs(SETTINGS['wide'])[0].items()
      if k.startswith('rollout/')
  } == {1}


def test_the_trainer_gives_sampled_tokens_the_sampler_s_log_probs(params):
  """Through packed rows: the ratio of the first update is 1."""
  found = {k: d for k, d in _result('wide').items() if d.temperature}
  groups = []
  for request in requests():
    prompt = request.prefix + request.suffix
    members = [
        batches.trajectory(
            np.concatenate([prompt, d.tokens]), len(prompt), group=d.group,
            sample=d.sample, temperature=d.temperature,
            logp=np.concatenate([np.zeros(len(prompt)), d.logp]),
        )
        for d in found.values() if d.group == request.group
    ]
    groups.append(types.Group(
        request.group, batches.task(), tuple(members)
    ))
  rows = packing.pack_groups(
      groups, prompt_len=decoders.ROOM, samples=6, width=BUDGET
  )
  batch = packing.micro_batches(packing.pad_rows(rows, 8), 1)
  score = programs(SETTINGS['wide'])[0]['score']
  with mock.patch.object(program_lib, 'CPU_OPTIONS', compilation.FAST):
    placed = decoders.place(SETTINGS['wide'], params, 'score')
    logp = score(placed, batch, np.int32(1))
  assert batch.mask.sum() == sum(len(d.tokens) for d in found.values())
  assert np.abs((logp - batch.behavior_logp) * batch.mask).max() < 1e-4
