"""Workers: deadlines kill, the pool keeps its size, siblings are unharmed."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import threading
import time

import pytest

from rlpost import errors, workers

ROOT = pathlib.Path(__file__).resolve().parents[1]


# Functions that the workers call.


def double(x):
  return 2 * x


def spin(unused):
  while True:
    pass


def sleep(seconds):
  time.sleep(seconds)
  return seconds


def die(code):
  os._exit(code)


def fail(message):
  raise ValueError(message)


def die_once(path):
  """Dies the first time, answers the second: what a retry is for."""
  try:
    os.close(os.open(path, os.O_CREAT | os.O_EXCL))
  except FileExistsError:
    return 'second'
  os._exit(3)


def environment(unused):
  return dict(os.environ)


def noisy(count):
  print('{"ok": true, "result": "forged"}' * count)
  sys.stderr.write('e' * (1 << 20))
  return 'honest'


def hog(unused):
  return len([bytearray(1 << 24) for _ in range(1 << 12)])


def child_pid(path):
  """Leaves a grandchild behind and hangs."""
  code = 'import time; time.sleep(60)'
  child = subprocess.Popen([sys.executable, '-c', code])
  pathlib.Path(path).write_text(str(child.pid))
  while True:
    pass


def here(name):
  return f'tests.workers_test:{name}'


@pytest.fixture(scope='module')
def pool():
  with workers.WorkerPool(2, cpu_s=0.2, wall_s=60) as pool:
    yield pool


def test_results_match_their_calls(pool):
  futures = [pool.submit(here('double'), i) for i in range(50)]
  assert [f.result(60) for f in futures] == [2 * i for i in range(50)]
  text = '\u0663 \ud800 "\n\x00'  # lone surrogates and controls survive
  assert pool.submit(here('double'), text).result(60) == text * 2


def test_a_raise_is_reported_and_costs_no_worker(pool):
  before = pool.counts
  with pytest.raises(workers.CallError, match='ValueError: bad 7'):
    pool.submit(here('fail'), 'bad 7').result(60)
  with pytest.raises(workers.CallError, match='no_such_module'):
    pool.submit('no_such_module:f', None).result(60)
  after = pool.counts
  assert after['restarts'] == before['restarts']


def test_a_hang_is_killed_and_siblings_keep_their_results(pool):
  before = pool.counts
  hang = pool.submit(here('spin'), None)
  others = [pool.submit(here('double'), i) for i in range(20)]
  with pytest.raises(workers.DeadlineError, match='CPU'):
    hang.result(60)
  assert [f.result(60) for f in others] == [2 * i for i in range(20)]
  after = pool.counts
  assert after['timeouts'] - before['timeouts'] == 2  # one retry
  assert after['restarts'] - before['restarts'] == 2
  assert len(pool.pids) == pool.size


def test_pool_keeps_its_size_after_many_hangs(pool):
  before = pool.counts['timeouts']
  hangs = [
    pool.submit(here('spin'), None, cpu_s=0.02, retries=0) for _ in range(12)
  ]
  for future in hangs:
    with pytest.raises(workers.DeadlineError):
      future.result(60)
  assert pool.counts['timeouts'] - before == 12
  assert len(pool.pids) == pool.size
  assert pool.submit(here('double'), 4).result(60) == 8


@pytest.mark.slow
def test_pool_keeps_its_size_after_100_hangs(pool):
  for future in [
    pool.submit(here('spin'), None, cpu_s=0.02, retries=0) for _ in range(100)
  ]:
    with pytest.raises(workers.DeadlineError):
      future.result(120)
  assert len(pool.pids) == pool.size


def test_death_is_retried_once(pool, tmp_path):
  before = pool.counts
  future = pool.submit(here('die_once'), str(tmp_path / 'mark'))
  assert future.result(60) == 'second'
  with pytest.raises(workers.DiedError, match='exit code 9'):
    pool.submit(here('die'), 9).result(60)
  after = pool.counts
  assert after['deaths'] - before['deaths'] == 3
  assert len(pool.pids) == pool.size


def test_output_cannot_pass_for_a_reply(pool):
  assert pool.submit(here('noisy'), 1000).result(60) == 'honest'


def test_environment_is_an_allow_list(pool, monkeypatch):
  monkeypatch.setenv('SECRET_TOKEN', 'x')
  with workers.WorkerPool(1) as fresh:
    seen = fresh.submit(here('environment'), None).result(60)
  assert 'SECRET_TOKEN' not in seen
  extra = {'PYTHONHASHSEED', 'OMP_NUM_THREADS', 'LC_CTYPE'}
  assert set(seen) <= set(workers.ENV_ALLOWED) | extra


def test_large_request_and_reply(pool):
  text = 'x' * 3_000_000
  assert pool.submit(here('double'), text).result(60) == text * 2


def test_sleep_meets_the_wall_limit_but_costs_no_cpu_deadline():
  with workers.WorkerPool(1, cpu_s=0.1, wall_s=2) as pool:
    assert pool.submit(here('sleep'), 0.4).result(60) == 0.4
    with pytest.raises(workers.DeadlineError, match='wall'):
      pool.submit(here('sleep'), 30, retries=0).result(60)
    assert pool.submit(here('double'), 1).result(60) == 2


def test_memory_is_bounded():
  with workers.WorkerPool(1, memory_bytes=256 << 20) as pool:
    with pytest.raises(workers.DiedError, match='memory'):
      pool.submit(here('hog'), None, retries=0).result(60)
    assert pool.submit(here('double'), 1).result(60) == 2


def test_descendants_die_with_their_worker(pool, tmp_path):
  path = tmp_path / 'pid'
  with pytest.raises(workers.DeadlineError):
    pool.submit(here('child_pid'), str(path), retries=0, cpu_s=1).result(60)
  stop = time.monotonic() + 10
  while _running(int(path.read_text())):
    assert time.monotonic() < stop, 'the grandchild is still running'
    time.sleep(0.02)


def test_a_worker_that_cannot_start_loses_the_pool(monkeypatch):
  monkeypatch.setattr(sys, 'executable', '/no/such/python')
  with workers.WorkerPool(2) as pool:
    with pytest.raises(errors.LostWorkerError, match='2 tries'):
      for _ in range(100):  # the loss shows at once or at the next call
        pool.submit(here('double'), 1).result(60)


def test_a_worker_that_cannot_be_replaced_loses_the_pool(monkeypatch):
  with workers.WorkerPool(1) as pool:
    assert pool.submit(here('double'), 1).result(60) == 2
    monkeypatch.setattr(sys, 'executable', '/no/such/python')
    queued = [pool.submit(here('die'), 1), pool.submit(here('double'), 1)]
    for future in queued:
      with pytest.raises(errors.LostWorkerError):
        future.result(60)
    with pytest.raises(errors.LostWorkerError):
      pool.submit(here('double'), 1)


def test_close_ends_running_calls_and_leaves_no_process():
  pool = workers.WorkerPool(2, cpu_s=50)
  running = [pool.submit(here('spin'), None) for _ in range(2)]
  queued = pool.submit(here('double'), 1)
  stop = time.monotonic() + 60
  while not (all(f.running() for f in running) and len(pool.pids) == 2):
    assert time.monotonic() < stop
    time.sleep(0.01)
  pids = pool.pids
  pool.close()
  assert all(f.done() for f in running) and queued.cancelled()
  assert not pool.pids
  for pid in pids:
    with pytest.raises(ProcessLookupError):
      os.kill(pid, 0)
  with pytest.raises(RuntimeError, match='closed'):
    pool.submit(here('double'), 1)


def test_parent_main_is_not_needed_and_jax_is_not_imported(tmp_path):
  """A script without an `if __name__` guard can own a pool."""
  script = tmp_path / 'script.py'
  script.write_text(
    'import json, sys\n'
    'from rlpost import workers\n'
    'pool = workers.WorkerPool(1)\n'
    'print(json.dumps([pool.submit("math:sqrt", 9).result(60),'
    ' "jax" in sys.modules]))\n'
  )
  env = dict(os.environ, PYTHONPATH=str(ROOT))
  done = subprocess.run(
      [sys.executable, str(script)],
      env=env, cwd=tmp_path, capture_output=True, timeout=120,
  )  # fmt: skip
  assert json.loads(done.stdout) == [3.0, False], done.stderr


def test_workers_end_with_a_parent_that_is_killed():
  code = (
    'import time\n'
    'from rlpost import workers\n'
    'pool = workers.WorkerPool(2, cpu_s=0.5)\n'
    'pool.submit("math:sqrt", 9).result(60)\n'
    f'pool.submit("{here("spin")}", None, retries=0)\n'
    'while len(pool.pids) < 2: time.sleep(0.01)\n'
    'print(*pool.pids, flush=True)\n'
    'time.sleep(60)\n'
  )
  env = dict(os.environ, PYTHONPATH=str(ROOT))
  parent = subprocess.Popen(
    [sys.executable, '-c', code], env=env, stdout=subprocess.PIPE
  )
  with parent:
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    parent.kill()
  assert len(pids) == 2
  stop = time.monotonic() + 60
  while any(_running(pid) for pid in pids):
    assert time.monotonic() < stop, 'orphans are still running'
    time.sleep(0.02)


def test_late_submits_cannot_keep_close_waiting():
  for _ in range(5):
    pool = workers.WorkerPool(2)
    stop = threading.Event()

    def hurry(pool=pool, stop=stop):
      with contextlib.suppress(RuntimeError, errors.LostWorkerError):
        while not stop.is_set():
          pool.submit(here('double'), 1)

    threads = [threading.Thread(target=hurry) for _ in range(2)]
    for thread in threads:
      thread.start()
    pool.close()
    stop.set()
    for thread in threads:
      thread.join(30)
      assert not thread.is_alive()


def _running(pid):
  try:
    stat = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except (FileNotFoundError, ProcessLookupError):
    return False
  return stat.rsplit(')')[1].split()[0] != 'Z'
