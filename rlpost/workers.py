"""Killable worker processes: spawn, deadline, kill, replace.

A pool keeps a fixed number of processes. A call names a function as
'module:function'; its argument and its result are JSON over pipes, so nothing
is pickled and the child never needs the parent's `__main__`. A deadline counts
the worker's own CPU seconds, so that a busy machine does not change who meets
it; a generous wall-clock limit stops workers that sleep. Past either one the
process *group* is killed, and a new worker takes the place before the caller
hears of it: the pool has the same size after any number of hangs.

Children are started with `exec` (never a bare fork), hence a pool may replace
workers after JAX has started its threads.
"""

import concurrent.futures
import contextlib
import importlib
import json
import os
import pathlib
import queue
import resource
import selectors
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

from rlpost import errors

# The parent's variables that a worker may see.
ENV_ALLOWED = ('PATH', 'HOME', 'LANG', 'LC_ALL', 'TMPDIR', 'TZ',
               'LD_LIBRARY_PATH', 'PYTHONPATH')  # fmt: skip
MEMORY_BYTES = 4 << 30
_STDERR_BYTES = 4096  # the tail kept for error messages
_FRAME_BYTES = 256 << 20
_HEADER = struct.Struct('>I')
_OUT_OF_MEMORY = 77  # exit code of a worker whose call ran out of memory
_START_TRIES = 2


class CallError(Exception):
  """The called function raised; the message carries its traceback."""


class DeadlineError(Exception):
  """The call passed its CPU deadline or the wall-clock limit, twice."""


class DiedError(Exception):
  """The worker died during the call (crash, kill, out of memory), twice."""


class _Job(NamedTuple):
  frame: bytes
  retries: int
  future: concurrent.futures.Future


class WorkerPool:
  """A fixed number of killable worker processes.

  Args:
    size: number of workers, the same from start to end.
    cpu_s: default deadline of one attempt, in CPU seconds of the worker.
      Imports that the call needs are not counted.
    wall_s: limit of one attempt, start and imports included, in wall seconds.
    memory_bytes: limit of a worker's data segment; past it the worker counts
      as dead and is replaced.

  Threads, one a worker, hold the pipes; `submit` may be called from any thread
  and futures resolve in the order in which calls finish.
  """

  def __init__(
    self,
    size: int,
    *,
    cpu_s: float = 5.0,
    wall_s: float = 120.0,
    memory_bytes: int = MEMORY_BYTES,
  ):
    if size < 1:
      raise errors.InputError(f'{size=} workers; give at least 1.')
    if cpu_s <= 0 or wall_s < cpu_s:
      raise errors.InputError(f'{cpu_s=} must be > 0 and <= {wall_s=}.')
    self.size = size
    self._cpu_s, self._wall_s = cpu_s, wall_s
    self._memory_bytes = memory_bytes
    self._lock = threading.Lock()
    kinds = ('calls', 'restarts', 'timeouts', 'deaths')
    self._counts = dict.fromkeys(kinds, 0)
    self._live: set[_Process] = set()
    self._closed = False
    self._lost: errors.LostWorkerError | None = None
    self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
    self._threads = [
      threading.Thread(target=self._serve, name=f'worker-{i}', daemon=True)
      for i in range(size)
    ]
    for thread in self._threads:
      thread.start()

  def __enter__(self) -> 'WorkerPool':
    return self

  def __exit__(self, *unused_exc_info) -> None:
    self.close()

  @property
  def counts(self) -> dict[str, int]:
    """Calls finished; attempts that ended badly; workers replaced."""
    with self._lock:
      return dict(self._counts)

  @property
  def pids(self) -> list[int]:
    """Process ids of the workers that are up."""
    with self._lock:
      return sorted(process.pid for process in self._live)

  def submit(
    self,
    function: str,
    payload: Any,
    *,
    cpu_s: float | None = None,
    retries: int = 1,
    imports: Sequence[str] = (),
  ) -> concurrent.futures.Future:
    """Calls `function(payload)` in a worker.

    Args:
      function: 'module:function', importable by the worker.
      payload: JSON.
      cpu_s: deadline of this call.
      retries: how often to try again, on a new worker, after a death or a
        missed deadline. A function that raises is not tried again.
      imports: modules to import first, outside the deadline.

    Returns:
      A future of the JSON result. It raises `CallError`, `DeadlineError`,
      `DiedError`, or `LostWorkerError` when a worker cannot be replaced.
    """
    if self._lost is not None:
      raise self._lost
    if self._closed:
      raise RuntimeError('The worker pool is closed.')
    request = dict(function=function, payload=payload, imports=list(imports))
    request |= dict(cpu_s=cpu_s or self._cpu_s, wall_s=self._wall_s)
    job = _Job(_frame(request), retries, concurrent.futures.Future())
    self._jobs.put(job)
    if self._closed or self._lost is not None:  # it may have come too late
      self._drain()
    return job.future

  def close(self) -> None:
    """Kills every worker; calls not yet finished are cancelled or fail."""
    with self._lock:
      self._closed = True
      for process in self._live:
        process.kill()
    self._drain()
    for _ in self._threads:
      self._jobs.put(None)
    for thread in self._threads:
      thread.join()

  def _serve(self) -> None:
    """Body of a thread: one worker at a time, for ever."""
    process = job = None
    try:
      process = self._start()
      while (job := self._jobs.get()) is not None:
        if job.future.set_running_or_notify_cancel():
          process = self._run(job, process)
    except Exception as lost:  # nobody may wait for a thread that is gone
      if not isinstance(lost, errors.LostWorkerError):
        lost = errors.LostWorkerError(f'A worker thread failed: {lost!r}')
      if job is not None and not job.future.done():
        job.future.set_exception(lost)
      if not self._closed:
        self._lost = lost
        self._drain()
    finally:
      if process is not None:
        self._stop(process)

  def _run(self, job: _Job, process: '_Process') -> '_Process':
    """Runs a job to its end; returns the worker that is up afterwards."""
    for attempt in range(job.retries + 1):
      try:
        reply = process.exchange(job.frame, self._wall_s)
      except (DeadlineError, DiedError) as error:
        self._stop(process)
        late = isinstance(error, DeadlineError)
        self._count('timeouts' if late else 'deaths')
        process = self._start()
        self._count('restarts')
        if attempt == job.retries:
          self._count('calls')
          job.future.set_exception(error)
      else:
        self._count('calls')
        if reply['ok']:
          job.future.set_result(reply['result'])
        else:
          job.future.set_exception(CallError(reply['error']))
        break
    return process

  def _count(self, name: str) -> None:
    with self._lock:
      self._counts[name] += 1

  def _start(self) -> '_Process':
    """Starts a worker and waits for its greeting."""
    reason = 'the pool is closed'
    for _ in range(_START_TRIES):
      if self._closed:
        break
      process = None
      try:
        process = _Process()
        with self._lock:
          self._live.add(process)
        if self._closed:  # close() may not have seen this one
          process.kill()
        process.exchange(_frame({'hello': self._memory_bytes}), self._wall_s)
        return process
      except (OSError, DeadlineError, DiedError) as error:
        reason = str(error)
        if process:
          self._stop(process)
    raise errors.LostWorkerError(
      f'A worker could not be started in {_START_TRIES} tries: {reason} '
      f'Check that {sys.executable} can run `-m rlpost.workers` and that the '
      'machine has processes and memory left, then resume.'
    )

  def _stop(self, process: '_Process') -> None:
    process.reap()
    with self._lock:
      self._live.discard(process)

  def _drain(self) -> None:
    """Fails or cancels every queued job; leaves the threads their ends."""
    ends = 0
    with contextlib.suppress(queue.Empty):
      while True:
        job = self._jobs.get_nowait()
        if job is None:
          ends += 1
        elif self._lost is None:
          job.future.cancel()
        elif job.future.set_running_or_notify_cancel():
          job.future.set_exception(self._lost)
    for _ in range(ends):
      self._jobs.put(None)


class _Process:
  """One child and its pipes; only the thread that made it may talk to it."""

  def __init__(self):
    self._child = subprocess.Popen(
      # -P: a `json.py` in the current folder must not shadow the library.
      [sys.executable, '-P', '-m', 'rlpost.workers'],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      env=_environment(),
      start_new_session=True,
      bufsize=0,
    )
    self.pid = self._child.pid
    self._lock = threading.Lock()
    self._stderr = b''
    self._inbox = bytearray()
    for pipe in (self._child.stdin, self._child.stdout, self._child.stderr):
      os.set_blocking(pipe.fileno(), False)

  def exchange(self, frame: bytes, wall_s: float) -> dict:
    """Writes a frame and reads one back, draining stderr all the while."""
    stop = time.monotonic() + wall_s
    outbox = memoryview(frame)
    with selectors.DefaultSelector() as selector:
      selector.register(self._child.stdin, selectors.EVENT_WRITE)
      selector.register(self._child.stdout, selectors.EVENT_READ)
      selector.register(self._child.stderr, selectors.EVENT_READ)
      while (reply := self._reply()) is None:
        left_s = stop - time.monotonic()
        if left_s <= 0:
          raise DeadlineError(
            f'passed the wall-clock limit of {wall_s:g} s.{self._tail()}'
          )
        events = selector.select(min(left_s, 0.5))
        if not events and self._exited():
          raise self._death()  # a descendant may hold the pipes open
        for key, _ in events:
          pipe = key.fileobj
          if pipe is self._child.stdin:
            try:
              outbox = outbox[os.write(pipe.fileno(), outbox) :]
            except BrokenPipeError:
              raise self._death() from None
            done = not outbox
          else:
            done = not self._read(pipe)
            if done and pipe is self._child.stdout:
              raise self._death()
          if done:
            selector.unregister(pipe)
    return reply

  def _read(self, pipe) -> bool:
    """Takes in what a readable pipe holds; false at its end."""
    data = os.read(pipe.fileno(), 1 << 16)
    if pipe is self._child.stdout:
      self._inbox += data
    else:
      self._stderr = (self._stderr + data)[-_STDERR_BYTES:]
    return bool(data)

  def kill(self) -> None:
    """SIGKILL to the whole group, from any thread."""
    with self._lock:
      if self._child.returncode is None:  # not reaped: the id is still ours
        with contextlib.suppress(ProcessLookupError, PermissionError):
          os.killpg(self.pid, signal.SIGKILL)

  def reap(self) -> None:
    self.kill()
    with self._lock:
      self._child.wait()
    for pipe in (self._child.stdin, self._child.stdout, self._child.stderr):
      with contextlib.suppress(OSError):
        pipe.close()

  def _reply(self) -> dict | None:
    if len(self._inbox) < _HEADER.size:
      return None
    (length,) = _HEADER.unpack_from(self._inbox)
    if length > _FRAME_BYTES:
      raise DiedError(f'a reply of {length} bytes is not one of ours.')
    end = _HEADER.size + length
    if len(self._inbox) < end:
      return None
    body = bytes(self._inbox[_HEADER.size : end])
    del self._inbox[:end]
    try:
      return json.loads(body)
    except ValueError as error:
      raise DiedError(f'the worker sent what is not JSON: {error}') from None

  def _exited(self) -> bool:
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT  # look, leave the zombie
    return os.waitid(os.P_PID, self.pid, flags) is not None

  def _death(self) -> Exception:
    """Why the child's pipe ended, from the way it exited."""
    with contextlib.suppress(BlockingIOError):
      self._read(self._child.stderr)
    self.reap()
    code = self._child.returncode
    if code in (-signal.SIGPROF, -signal.SIGALRM):
      clock = 'CPU deadline' if code == -signal.SIGPROF else 'wall-clock limit'
      return DeadlineError(f'passed its {clock}.{self._tail()}')
    if code == _OUT_OF_MEMORY:
      return DiedError(f'ran out of memory.{self._tail()}')
    how = f'signal {-code}' if code < 0 else f'exit code {code}'
    return DiedError(f'the worker died ({how}).{self._tail()}')

  def _tail(self) -> str:
    text = self._stderr.decode('utf-8', 'replace').strip()
    return f' Its stderr ends: {text}' if text else ''


def _environment() -> dict[str, str]:
  env = {k: os.environ[k] for k in ENV_ALLOWED if k in os.environ}
  root = str(pathlib.Path(__file__).resolve().parents[1])
  path = os.pathsep.join(filter(None, (root, env.get('PYTHONPATH'))))
  # One thread a worker, and the same set order in every one of them.
  ours = {'PYTHONHASHSEED': '0', 'OMP_NUM_THREADS': '1'}
  return env | ours | {'PYTHONPATH': path}


def _frame(message: Any) -> bytes:
  body = json.dumps(message).encode()
  if len(body) > _FRAME_BYTES:
    raise errors.InputError(
      f'A call of {len(body)} bytes passes the limit of {_FRAME_BYTES}; '
      'send smaller batches.'
    )
  return _HEADER.pack(len(body)) + body


def _main() -> None:
  """The child: answers calls until the parent closes the pipe."""
  source = os.fdopen(os.dup(0), 'rb')
  sink = os.fdopen(os.dup(1), 'wb')
  # What a function prints goes to stderr and can never look like a reply.
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  os.dup2(2, 1)
  for number in (signal.SIGPROF, signal.SIGALRM):
    signal.signal(number, signal.SIG_DFL)  # the default is to die
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  while header := source.read(_HEADER.size):
    request = json.loads(source.read(_HEADER.unpack(header)[0]))
    sink.write(_answer(request))
    sink.flush()


def _answer(request: dict) -> bytes:
  if 'hello' in request:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    unlimited = hard == resource.RLIM_INFINITY
    limit = request['hello'] if unlimited else min(request['hello'], hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return _frame({'ok': True, 'result': None})
  # Should the parent be gone, nobody else would end a call that sleeps.
  signal.setitimer(signal.ITIMER_REAL, 2 * request['wall_s'])
  try:
    for name in request['imports']:
      importlib.import_module(name)
    module, _, attribute = request['function'].partition(':')
    function = getattr(importlib.import_module(module), attribute)
    signal.setitimer(signal.ITIMER_PROF, request['cpu_s'])
    try:
      return _frame({'ok': True, 'result': function(request['payload'])})
    finally:
      signal.setitimer(signal.ITIMER_PROF, 0)
  except MemoryError:
    os._exit(_OUT_OF_MEMORY)
  except (Exception, SystemExit):
    text = traceback.format_exc(limit=-5)[-_STDERR_BYTES:]
    return _frame({'ok': False, 'error': text})
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == '__main__':
  _main()
