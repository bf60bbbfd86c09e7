"""What a run writes while it runs: one line a step, and readable samples.

`metrics.jsonl` has one JSON object a step with the keys `step, cpu_s, reward,
entropy, tokens, logp_gap_max, nonfinite, domains`, then whatever else the step
reports; `samples.jsonl` has transcripts with their verdicts. Both are cut back
to the restored step on resume, so a killed run leaves the files of an
uninterrupted one. TensorBoard files are written where `tensorboardX` is
installed.
"""

import contextlib
import json
import math
import os
import pathlib
import resource
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from etils import epath

from rlpost import types

REQUIRED = ('reward', 'entropy', 'tokens', 'logp_gap_max', 'domains')


def _plain(value: Any) -> tuple[Any, int]:
  """(JSON value, count of numbers that were not finite and are now null)."""
  if isinstance(value, Mapping):
    pairs = {str(k): _plain(v) for k, v in value.items()}
    return {k: v for k, (v, _) in pairs.items()}, sum(
        n for _, n in pairs.values()
    )
  if isinstance(value, np.ndarray | np.generic) or hasattr(value, '__array__'):
    return _plain(np.asarray(value).tolist())
  if isinstance(value, list | tuple):
    items = [_plain(v) for v in value]
    return [v for v, _ in items], sum(n for _, n in items)
  if isinstance(value, float) and not math.isfinite(value):
    return None, 1
  return value, 0


def _cut_back(path: epath.Path, step: int) -> int:
  """Keeps the lines of steps up to `step`; returns how many were unreadable.

  A kill may tear the last line. The file is replaced in one rename.
  """
  if not path.exists():
    return 0
  kept, torn = [], 0
  text = path.read_text()
  for line in text.splitlines():
    try:
      if json.loads(line)['step'] <= step:
        kept.append(line)
    except (ValueError, KeyError, TypeError):
      torn += 1
  new = ''.join(line + '\n' for line in kept)
  if new != text:
    temporary = path.with_name(path.name + '.tmp')
    temporary.write_text(new)
    temporary.replace(path)
  return torn


def transcript(trajectory: types.Trajectory) -> dict[str, Any]:
  """A trajectory as a person reads it: messages, answer, verdict.

  `token_ids` and `logp` are of the sampled tokens, in nats to five digits.
  """
  task, verdict = trajectory.task, trajectory.verdict
  sampled = trajectory.sampled
  return {
      'domain': task.domain,
      'content_id': task.content_id,
      'prompt': [{'role': m.role, 'text': m.text} for m in task.messages],
      'answer': trajectory.text,
      'tokens': int(sampled.sum()),
      'token_ids': trajectory.tokens[sampled].tolist(),
      'logp': [round(x, 5) for x in trajectory.logp[sampled].tolist()],
      'stop_reason': trajectory.stop_reason,
      'verdict': verdict and verdict.to_json(),
  }


class MetricsWriter:
  """Appends to the metrics and samples of a workdir.

  Args:
    workdir: local path or bucket.
    step: the restored step; later lines are cut off. 0 for a new run.
    clock: gives `cpu_s`.
    tensorboard: whether to write TensorBoard files too, if they can be.

  Attributes:
    nonfinite: how many numbers so far were NaN or infinite.
    torn: how many unreadable lines were dropped on resume.
  """

  def __init__(
      self,
      workdir: os.PathLike | str,
      *,
      step: int = 0,
      clock: 'CpuClock | None' = None,
      tensorboard: bool = True,
  ):
    workdir = epath.Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    self.nonfinite = 0
    self.torn = 0
    self._clock = clock or CpuClock()
    self._files = {}
    for name in ('metrics', 'samples'):
      path = workdir / f'{name}.jsonl'
      self.torn += _cut_back(path, step)
      self._files[name] = path.open('a')
    self._board = _board(workdir, step) if tensorboard else None

  def write(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Appends the line of a step, and returns it.

    Args:
      step: the step that was completed.
      metrics: `reward, entropy, tokens, logp_gap_max, domains` and others;
        `domains` is {name: {key: number}}. Numbers that are not finite become
        null and are counted in `nonfinite`.

    Raises:
      ValueError: one of the required keys is missing.
    """
    missing = [key for key in REQUIRED if key not in metrics]
    if missing:
      raise ValueError(f'the metrics of {step=} lack {", ".join(missing)}.')
    values, bad = _plain(metrics)
    self.nonfinite += bad
    row = {'step': int(step), 'cpu_s': round(self._clock.total_s(), 3)}
    row |= {key: values[key] for key in REQUIRED if key != 'domains'}
    row |= {'nonfinite': bad, 'domains': values['domains']}
    row |= {k: v for k, v in values.items() if k not in row}
    self._append('metrics', row)
    if self._board:
      for tag, value in _scalars(row):
        self._board.add_scalar(tag, value, step)
    return row

  def write_samples(
      self, step: int, trajectories: Iterable[types.Trajectory]
  ) -> None:
    """Appends transcripts of a step."""
    for trajectory in trajectories:
      row, _ = _plain({'step': int(step)} | transcript(trajectory))
      self._append('samples', row)

  def close(self) -> None:
    for file in self._files.values():
      file.close()
    if self._board:
      self._board.close()

  def _append(self, name, row):
    text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    # One write a line, so that a kill tears the last one at most.
    self._files[name].write(text + '\n')
    self._files[name].flush()


def _board(workdir, step):
  """A TensorBoard writer, or None where the extra is not installed."""
  try:
    import tensorboardX
  except ImportError:
    return None
  return tensorboardX.SummaryWriter(
      os.fspath(workdir / 'tensorboard'), purge_step=step + 1 if step else None
  )


def _scalars(row, prefix=''):
  """(tag, number) of every number in a row, `domains/NAME/key` included."""
  for key, value in row.items():
    if isinstance(value, Mapping):
      yield from _scalars(value, f'{prefix}{key}/')
    elif isinstance(value, int | float) and key != 'step':
      yield f'{prefix}{key}', value


class CpuClock:
  """CPU seconds of this process and its children, over all restarts.

  Args:
    base_s: seconds that earlier processes of this run used.
  """

  def __init__(self, base_s: float = 0.0):
    self._base_s = base_s

  def total_s(self) -> float:
    """Seconds so far; a child counts while it lives and after it ended."""
    # `os.times` counts in hundredths, `process_time` in nanoseconds.
    ended = os.times()
    total = self._base_s + time.process_time()
    total += ended.children_user + ended.children_system
    return total + sum(map(_living_s, _children(os.getpid())))


def _children(pid: int) -> list[int]:
  """Living children of a process; none where the system does not say."""
  found = []
  for path in pathlib.Path(f'/proc/{pid}/task').glob('*/children'):
    with contextlib.suppress(OSError):  # The thread ended meanwhile.
      found += [int(x) for x in path.read_text().split()]
  return found


def _living_s(pid: int) -> float:
  """CPU seconds of a process, its ended and its living children."""
  try:
    stat = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except OSError:  # It ended meanwhile, and counts as such next time.
    return 0.0
  # After the name, which may hold anything: utime, stime, cutime, cstime.
  ticks = stat.rpartition(')')[2].split()[11:15]
  own = sum(map(int, ticks)) / os.sysconf('SC_CLK_TCK')
  return own + sum(map(_living_s, _children(pid)))


def peak_rss_bytes() -> int:
  """The largest resident memory of this process so far."""
  status = pathlib.Path('/proc/self/status')
  if status.exists():
    # `ru_maxrss` of a child starts with the size of the parent it came from.
    for line in status.read_text().splitlines():
      if line.startswith('VmHWM:'):
        return int(line.split()[1]) * 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
