"""Every registered domain: determinism, disjoint pools, canary, constants."""

import collections
import json
import subprocess
import sys

import numpy as np
import pytest

from rlpost import errors, types, workers
from rlpost.domains import domain as domain_lib
from rlpost.domains import table, words
from rlpost.rewards import scoring

NAMES = sorted(table.DOMAINS)
BEST_CONSTANT_LIMIT = 0.4


@pytest.fixture(scope='module')
def scorer():
  with workers.WorkerPool(1) as pool:
    yield scoring.Scorer(pool, batch_size=512)


@pytest.fixture(scope='module')
def pools():
  """Pools of every domain for held-out seed 1."""
  return {
    name: domain_lib.pools(table.load(name), heldout_seed=1) for name in NAMES
  }


def _ids(tasks):
  return {task.content_id for task in tasks}


def _coarse(generate_count):
  """A domain of exactly this many items."""

  def generate(rng):
    n = int(rng.integers(generate_count))
    return domain_lib.Item(f'q{n}', {'name': 'exact', 'gold': f'a{n}'})

  return domain_lib.Domain('coarse', 'test', generate)


def test_table_has_enough_domains_and_families():
  families = collections.Counter(table.load(name).family for name in NAMES)
  assert sum(min(count, 2) for count in families.values()) >= 16
  assert len(families) >= 9
  for name in NAMES:
    assert table.load(name).name == name
  with pytest.raises(errors.InputError, match='known ones: add, bigger'):
    table.load('addition')


@pytest.mark.parametrize('name', NAMES)
def test_training_tasks_have_random_access(name, pools):
  pool = pools[name]
  forward = [pool.train_task(i, 7).to_json() for i in range(8)]
  fresh = domain_lib.pools(table.load(name), heldout_seed=1)
  backward = [fresh.train_task(i, 7).to_json() for i in reversed(range(8))]
  assert forward == backward[::-1]
  other = [pool.train_task(i, 8).to_json() for i in range(8)]
  assert forward != other
  assert len({json.dumps(task) for task in forward}) > 4
  task = types.Task.from_json(json.loads(json.dumps(forward[0])))
  assert task.content_id == pool.train_task(0, 7).content_id


@pytest.mark.parametrize('name', NAMES)
def test_pools_are_disjoint_for_many_seeds(name):
  domain = table.load(name)
  for seed in range(3):
    pool = domain_lib.pools(domain, heldout_seed=seed)
    heldout, validation = _ids(pool.heldout), _ids(pool.validation)
    train = _ids(pool.train_task(i, seed) for i in range(60))
    shots = _ids(pool.shots)
    assert not heldout & validation
    assert not (heldout | validation) & (train | shots)
    assert not shots & train
    assert len(heldout) == len(pool.heldout)
    answers = {shot.checker['gold'] for shot in pool.shots}
    assert len(answers) == domain.num_shots
    if pool.train_items is None:
      assert (len(heldout), len(validation)) == (64, 32)


@pytest.mark.parametrize('name', NAMES)
def test_a_question_has_one_answer(name, pools):
  """Else one content would have two ids, and held-out items could leak."""
  golds = {}
  pool = pools[name]
  for task in (*pool.heldout, *(pool.train_task(i, 3) for i in range(100))):
    question = task.messages[-1].text.casefold()
    assert golds.setdefault(question, task.checker) == task.checker


@pytest.mark.parametrize('name', NAMES)
def test_canary_and_best_constant(name, pools, scorer):
  tasks = [pools[name].train_task(i, 5) for i in range(100)]
  tasks = [*tasks, *pools[name].heldout]
  scoring.canary(scorer, tasks)
  answer, score = scoring.best_constant(scorer, tasks)
  assert score <= BEST_CONSTANT_LIMIT, (answer, score)


@pytest.mark.parametrize('name', NAMES)
def test_hostile_answers_win_nothing(name, pools, scorer):
  tasks = pools[name].heldout[:4]
  hostile = ('nan', '-inf', '\u0661\u0662', '9' * 4000, '[' * 4000,
             '{"a":' * 500, 'x' * (1 << 20), '\ud800', '9**9**9')  # fmt: skip
  items = [scoring.Item(t.checker, h) for t in tasks for h in hostile]
  for item, verdict in zip(items, scorer.score(items), strict=True):
    # Partial credit may see a letter in its place; nothing more.
    limit = 0.5 if item.checker.get('partial') else 0
    assert verdict.valid and verdict.value <= limit, item.text[:20]


@pytest.mark.parametrize('name', [n for n in NAMES if 'recall_' not in n])
def test_prompts_are_short(name, pools):
  """In words and digits, a floor of what a tokenizer makes of them."""
  env = pools[name].environment()
  for i in range(50):
    state = env.render(pools[name].train_task(i, 0))
    assert len(state.prefix) <= 260 and len(state.suffix) <= 110
    if env.prefix == '':
      assert len(state.suffix) <= 12


def test_held_out_words_are_varied():
  pool = domain_lib.pools(table.load('copy_words'), heldout_seed=0)
  seen = {w for t in pool.heldout for w in t.checker['gold'].split()}
  assert len(seen) > 100
  assert len(words.WORDS) > 300


def test_few_items_are_split_by_item_whatever_the_seed():
  domain = _coarse(100)
  pool = domain_lib.pools(domain, heldout_seed=0)
  parts = [pool.heldout, pool.validation, pool.shots, pool.train_items]
  assert [len(p) for p in parts] == [30, 15, 3, 52]
  assert len(set.union(*map(_ids, parts))) == 100
  drawn = _ids(pool.train_task(i, 0) for i in range(1000))
  assert drawn == _ids(pool.train_items)
  for seed in range(1, 5):  # no later held-out set may touch what was trained
    again = domain_lib.pools(domain, heldout_seed=seed)
    assert again.heldout == pool.heldout


def test_many_items_are_drawn_afresh_for_a_new_seed():
  domain = _coarse(5000)
  first = domain_lib.pools(domain, heldout_seed=0)
  assert first.train_items is None
  trained = _ids(first.train_task(i, 0) for i in range(3000))
  second = domain_lib.pools(
    domain, heldout_seed=1, shots=first.shots, trained=trained
  )
  assert second.shots == first.shots
  assert _ids(second.heldout) != _ids(first.heldout)
  assert not _ids(second.heldout + second.validation) & trained
  assert not _ids(second.heldout) & _ids(first.shots)
  # What was trained on bars evaluation, not more training.
  assert second.train_task(0, 0).content_id in trained


def test_too_few_items_is_an_error_with_the_numbers():
  with pytest.raises(errors.InputError, match='distinct'):
    domain_lib.pools(_coarse(3), heldout_seed=0)
  with pytest.raises(errors.InputError, match='of 400 heldout'):
    domain_lib.pools(_coarse(300), heldout_seed=0, heldout=400)
  pool = domain_lib.pools(_coarse(300), heldout_seed=0)
  starved = domain_lib.Pools(
      domain=pool.domain, heldout=(), validation=(), shots=(), train_items=None,
      refused=frozenset(_ids(pool.domain.task(np.random.default_rng(i))
                             for i in range(5000))),
  )  # fmt: skip
  with pytest.raises(errors.InputError, match='300 refused'):
    starved.train_task(0, 0)


def test_option_letters_are_balanced():
  for name in ('choice', 'odd_one_out'):
    domain = table.load(name)
    letters = collections.Counter(
      domain.task(np.random.default_rng(i)).checker['gold'] for i in range(2000)
    )
    assert set(letters) == set('ABCD')
    assert max(letters.values()) / 2000 < 0.29


def test_host_rooms_import_neither_jax_nor_the_optional_packages():
  code = (
    'import sys\n'
    'from rlpost import workers\n'
    'from rlpost.domains import table\n'
    'from rlpost.environments import single_turn\n'
    'from rlpost.rewards import scoring\n'
    'for n in table.DOMAINS: table.load(n)\n'
    'print([m for m in ("jax", "reasoning_gym", "torch", "etils")'
    ' if m in sys.modules])\n'
  )
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, timeout=120
  )
  assert done.stdout.strip() == b'[]', done.stderr
