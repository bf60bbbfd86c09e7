"""Every kind of cache gives the teacher-forced log-probabilities.

Windows, layers that are scanned, prompts in pieces, columns over the context:
what is sampled depends on none of it but the windows.
"""

import dataclasses
import functools
import itertools

import numpy as np
import pytest

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
    'over 4 by ring, in pieces': {
        'mesh': {'context': 4, 'tensor': 2}, 'prefill_chunk': 3,
        'backend': 'ring', 'stacked': True,
    },
}
SLOW = {
    f'{ways} {stacked} {chunk} {backend}': {
        'mesh': {'context': ways}, 'stacked': stacked,
        'prefill_chunk': chunk, 'backend': backend,
    }
    for ways, stacked, chunk, backend in itertools.product(
        (1, 2, 4, 8), (False, True), (0, 1, 7, 64),
        ('dense', 'ring', 'blockwise'),
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
