"""Every kind of cache gives the teacher-forced log-probabilities.

Windows, layers that are scanned, prompts in pieces, columns over the context:
what is sampled depends on none of it but the windows.
"""

import dataclasses
import functools
import itertools
import math

import jax
import numpy as np
import pytest

from rlpost import errors, sharding
from rlpost.rollouts import engine as engines
from rlpost.training import programs as program_lib
from tests import reference
from tests.rollouts import decoders
from tests.rollouts.decoders import requests, setting

MODEL = dataclasses.replace(decoders.MODEL, num_layers=4)
WINDOWS = (None,), (5,), (5, None), (2, 30)
HALF = {'prompts': 4, 'rows': 3, 'prefixes': 3, 'admit': 2, 'refill': 1}
# Of which the rest is compared with the first.
SETTINGS = {
    'plain': {},
    'scanned': {'stacked': True},
    'in pieces': {'prefill_chunk': 4},
    'scanned, token by token': {'stacked': True, 'prefill_chunk': 1},
    'over 4': {'mesh': {'context': 4}},
    'over 4, scanned': {'mesh': {'context': 4}, 'stacked': True},
    'over all axes': {'mesh': {'data': 2, 'tensor': 2, 'context': 2}},
    'over 4 by ring, in pieces': {
        'mesh': {'context': 4, 'tensor': 2}, 'prefill_chunk': 3,
        'backend': 'ring', 'stacked': True,
    },
}
SLOW = {
    f'over {ways}, {stacked=}, {chunk} at a time, {backend}': {
        'mesh': {'context': ways}, 'stacked': stacked,
        'prefill_chunk': chunk, 'backend': backend,
    }
    for ways, stacked, (chunk, backend) in itertools.product(
        (1, 2, 4, 8), (False, True),
        ((0, 'dense'), (1, 'ring'), (3, 'blockwise'), (4, 'all_gather')),
    )
}


@functools.cache
def params():
  return reference.random_params(MODEL, scale=0.3)


def made(windows, **changes):
  model = dataclasses.replace(MODEL, windows=windows)
  return setting(**HALF | changes, model=model)


@functools.cache
def result(windows, name):
  settings = made(windows, **(SETTINGS | SLOW)[name])
  return decoders.generate(settings, params(), requests())


def check(windows, name):
  found, wanted = result(windows, name), result(windows, 'plain')
  assert found.keys() == {
      (r.group, s) for r in requests() for s, _ in r.samples
  }
  model = dataclasses.replace(MODEL, windows=windows)
  assert decoders.gap(model, params(), found, requests()) < 1e-4
  for key, done in found.items():
    np.testing.assert_array_equal(done.tokens, wanted[key].tokens)
    np.testing.assert_allclose(done.logp, wanted[key].logp, atol=1e-5)


FAST = [
    *(((5, None), name) for name in SETTINGS),
    *(((5,), name) for name in ('plain', 'over 4, scanned')),
    ((2, 30), 'in pieces'),
    ((None,), 'over 4 by ring, in pieces'),
]


@pytest.mark.parametrize('windows, name', FAST)
def test_log_probs_are_those_of_the_teacher_forced_model(windows, name):
  check(windows, name)


@pytest.mark.slow
@pytest.mark.parametrize('name', SLOW)
@pytest.mark.parametrize('windows', WINDOWS)
def test_the_whole_matrix(windows, name):
  check(windows, name)


SIZES = {
    'windows': made((5, None)),
    'one window, larger than anything': made((30,)),
    'in pieces, scanned, over 4': made(
        (5, None), stacked=True, prefill_chunk=4, mesh={'context': 4},
    ),
    'all axes': made(
        (None,), mesh={'data': 2, 'tensor': 2, 'context': 2}, prefixes=2,
    ),
    'no shared prefix': made((5,), prefix_len=0, admit=0),
}


@pytest.mark.parametrize('name', SIZES)
def test_bytes_of_a_cache_are_those_of_the_programs(name):
  """Arithmetic alone says what each device of a mesh will hold."""
  settings = SIZES[name]
  mesh = settings.make_mesh()
  found = engines.cache_bytes(settings.config, settings.model, 'float32', mesh)
  admit = decoders.programs(settings)[0]['rollout/admit']
  _, slots, shared, *_ = admit.arguments

  def held(*trees):
    return sum(
        4 * math.prod(x.sharding.shard_shape(x.shape))
        for x in jax.tree.leaves(trees)
    )

  assert found['prefixes'] == held(shared.cache[:2])
  assert found['prompts'] == held(slots.prompt[:2])
  assert found['rows'] == held(slots.keys, slots.values)
  admit = settings.config.admit or settings.prompts
  assert found['admitted'] * settings.prompts == found['prompts'] * admit


def test_a_window_bounds_what_a_layer_keeps():
  """Layers with a window hold no more for a longer prompt, or answer."""

  def held(windows, length, ways=1):
    model = dataclasses.replace(MODEL, windows=windows)
    settings = made(
        windows, prompt_len=length, width=length // 2, prefix_len=0
    )
    mesh = sharding.make_mesh(context=ways)
    return engines.cache_bytes(settings.config, model, 'bfloat16', mesh)

  for kind, length in (('prompts', 4096), ('rows', 2048)):
    # Layers, keys and values, heads, columns, width of a head, bytes.
    sequences = HALF['prompts'] * (HALF['rows'] if kind == 'rows' else 1)
    a_column = sequences * 4 * 2 * 2 * 4 * 2
    assert held((None,), 4096)[kind] == a_column * length
    assert held((512,), 4096)[kind] == a_column * 512
    assert held((512, None), 4096)[kind] == a_column * (512 + length) // 2
    assert held((512,), 8192)[kind] == a_column * 512
    # Each device of the context holds its share, rounded up.
    assert held((None,), 4096, 8)[kind] == a_column * length // 8
    assert held((5,), 4096, 8)[kind] == a_column


@pytest.mark.parametrize('changes, message', [
    ({'tensor': 4}, 'num_kv_heads=2 must divide over 4 devices'),
    ({'tensor': 8}, 'num_heads=4 must divide over 8 devices'),
])
def test_heads_that_do_not_divide_are_refused_before_compiling(
    changes, message
):
  with pytest.raises(errors.InputError, match=message):
    program_lib.programs(made((None,)).shapes(), sharding.make_mesh(**changes))


@pytest.mark.parametrize('changes, message', [
    ({'prefill_chunk': -1}, 'prefill_chunk=-1 must be >= 1'),
    ({'backend': 'flash'}, "backend='flash' must be one of"),
])
def test_impossible_ways_of_prefill_are_refused(changes, message):
  with pytest.raises(errors.InputError, match=message):
    _ = made((None,), **changes).config
