"""The whole state in one step directory: saved atomically, read back whole.

`<workdir>/checkpoints/<step>/` holds one folder per item and a `digest` item
with the SHA-256 of every leaf, so that what is read is what was saved, or the
step is named as damaged and the one before it is used.

Orbax does the writing. What this module adds: what `save()` returns is
checked, every restored leaf gets a mesh sharding, a directory's name is not
evidence of a checkpoint, and space is looked for before it is needed.
"""

import contextlib
import dataclasses
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from rlpost import errors
from rlpost.training import digest as digests
from rlpost.training import targeting

DIRECTORY = 'checkpoints'
_DIGEST = 'digest'
_SPARE_BYTES = 32 << 20


class _Damage(errors.DamagedStateError):
  """Why one step cannot be used."""


@dataclasses.dataclass
class _Best:
  """Preserves the step with the highest metric; ties go to the later one.

  Orbax's own reads a file of each step when it starts, and does not start if
  one of them is damaged.
  """

  metric: Callable[[int], float | None]

  def should_preserve(self, checkpoints, *, context) -> list[bool]:
    del context
    scores = [(self.metric(c.step), c.step) for c in checkpoints]
    best = max((s for s in scores if s[0] is not None), default=(None, None))
    return [c.step == best[1] for c in checkpoints]


def _args_registry() -> ocp.handlers.DefaultCheckpointHandlerRegistry:
  """One handler family for arrays and one for JSON, for items of any name."""
  registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
  # Uncompressed: trained fp32 shrinks by 8 %, which costs seven times the CPU
  # seconds and a second copy of the state in memory.
  arrays = ocp.PyTreeCheckpointHandler(use_compression=False)
  for args in (ocp.args.PyTreeSave, ocp.args.PyTreeRestore):
    registry.add(None, args, arrays)
  text = ocp.JsonCheckpointHandler()
  for args in (ocp.args.JsonSave, ocp.args.JsonRestore):
    registry.add(None, args, text)
  return registry


class Checkpoints:
  """The checkpoints of one work directory.

  Args:
    workdir: local path or bucket.
    keep_latest: how many of the latest steps to keep, beside the best.
    best_metric: key of `metrics` whose highest value marks the best step; it
      is to be measured on a pool that is neither trained nor held out.
    mesh: where leaves without a sharding go, replicated. By default the mesh
      of the other leaves, the active one, or one device.
    primary: whether this process may rename and delete.
    read_only: look, and touch nothing.
    log: called with a line for each step that cannot be used.

  Attributes:
    damaged: [(step, why)] for each step found unusable so far.
  """

  def __init__(
      self,
      workdir: os.PathLike | str,
      *,
      keep_latest: int = 2,
      best_metric: str = 'validation',
      mesh: Mesh | None = None,
      primary: bool = True,
      read_only: bool = False,
      log: Callable[[str], None] = logging.warning,
  ):
    self.directory = epath.Path(workdir).absolute() / DIRECTORY
    self.damaged: list[tuple[int, str]] = []
    self._best_metric = best_metric
    self._mesh = mesh
    self._primary = primary
    self._read_only = read_only
    self._log = log
    self._metrics: dict[int, float | None] = {}
    self._pending: tuple[int, int] | None = None
    keep = ocp.checkpoint_managers.AnyPreservationPolicy([
        ocp.checkpoint_managers.LatestN(keep_latest),
        _Best(self._metric),
    ])
    options = ocp.CheckpointManagerOptions(
        preservation_policy=keep,
        cleanup_tmp_directories=not read_only,
        create=not read_only,
        read_only=read_only,
        save_interval_steps=0 if read_only else 1,
        save_root_metadata=False,
    )
    self._manager = ocp.CheckpointManager(
        self.directory, options=options, handler_registry=_args_registry()
    )

  def steps(self) -> list[int]:
    """Steps that have a directory, whole or not, in increasing order."""
    return sorted(self._manager.all_steps())

  def best_step(self) -> int | None:
    """The step with the highest `best_metric`; None if none has it."""
    scores = [(self._metric(s), s) for s in self.steps()]
    return max((s for s in scores if s[0] is not None), default=(0, None))[1]

  # Saving.

  def save(
      self,
      step: int,
      items: Mapping[str, Any],
      *,
      metrics: Mapping[str, float] | None = None,
      wait: bool = False,
  ) -> None:
    """Saves a step in the background; it appears whole or not at all.

    Every process calls it. The arrays may be donated or changed as soon as it
    returns: what is still to be written is then copied, so a save in flight
    costs up to one more state of memory. `wait=True` costs none.

    Args:
      step: above every saved step.
      items: name -> pytree of arrays, or a JSON value. `timing` is kept out of
        the digest.
      metrics: for the choice of the best step; only finite ones count.
      wait: return when it is on disk.

    Raises:
      InputError: the step is not above the latest.
      DoesNotFitError: not enough free disk space; nothing was written.
      RunError: this save, or the one before it, failed.
      TypeError, ValueError: an item is neither arrays nor finite JSON.
    """
    self.wait()
    latest = self._manager.latest_step()
    if latest is not None and step <= latest:
      raise errors.InputError(
          f'{step=} is not above the latest saved step {latest}; after a '
          f'rollback call delete_after({step - 1}) first.'
      )
    leaves = {k: digests.leaves_of(k, v) for k, v in items.items()}
    known = {k: v for k, v in (metrics or {}).items() if v is not None}
    finite = {k: float(v) for k, v in known.items() if math.isfinite(v)}
    body = {'step': step, 'metrics': finite}
    manifest = digests.seal(body, leaves)
    args = {_DIGEST: ocp.args.JsonSave(manifest)}
    needed = len(json.dumps(manifest)) + _SPARE_BYTES
    for name, value in items.items():
      if digests.is_arrays(value):
        flat = digests.flatten(value)
        args[name] = ocp.args.PyTreeSave(flat)
        needed += sum(x.nbytes for x in flat.values())
      else:
        # A copy, since the caller's may change before it is written.
        text = digests.canonical_json(value)
        args[name] = ocp.args.JsonSave(json.loads(text))
        needed += len(text)
    self._check_space(step, needed)
    self._metrics[step] = body['metrics'].get(self._best_metric)
    self._pending = (step, needed)
    with self._failures_named():
      saved = self._manager.save(step, args=ocp.args.Composite(**args))
    if not saved:
      raise errors.RunError(f'Orbax refused to save {step=} without a reason.')
    if wait:
      self.wait()

  def wait(self) -> None:
    """Returns when nothing is being written.

    Raises:
      DoesNotFitError: the disk filled up during the save.
      RunError: the save failed otherwise. Earlier steps are whole.
    """
    with self._failures_named():
      self._manager.wait_until_finished()

  @contextlib.contextmanager
  def _failures_named(self):
    try:
      yield
    except Exception as error:  # Whatever a file system can say.
      step, needed = self._pending
      free = self._free_bytes()
      full = free is not None and free < needed
      kind = errors.DoesNotFitError if full else errors.RunError
      raise kind(
          f'saving step {step} ({needed / 1e6:.0f} MB) to {self.directory} '
          f'failed with {_mb(free)} free: {error}. Earlier steps are whole; '
          'the same command goes on from the latest.'
      ) from error

  def close(self) -> None:
    self.wait()
    self._manager.close()

  def delete_after(self, step: int) -> None:
    """Deletes every step above `step`: a rollback ends with this."""
    self.wait()
    for later in reversed(self.steps()):
      if later > step:
        self._manager.delete(later)
        self._metrics.pop(later, None)

  def _free_bytes(self) -> int | None:
    """Free space for this user, or None where nobody can say (a bucket)."""
    if '://' in os.fspath(self.directory):
      return None
    return shutil.disk_usage(self.directory).free

  def _check_space(self, step, needed):
    free = self._free_bytes()
    if free is not None and free < needed:
      raise errors.DoesNotFitError(
          f'step {step} needs {needed / 1e6:.0f} MB, and {self.directory} has '
          f'{_mb(free)} free; free {(needed - free) / 1e6:.0f} MB or choose '
          'another --workdir. Nothing was written.'
      )

  # Restoring.

  def restore(
      self, targets: Mapping[str, Any], step: int | None = None
  ) -> tuple[int, dict[str, Any]] | None:
    """Reads items of the newest step that is complete and undamaged.

    A step that fails is logged, counted in `damaged`, and set aside as
    `damaged-<step>` once an earlier one has been read.

    Args:
      targets: name -> 'json', or a pytree of `jax.ShapeDtypeStruct` or arrays
        that gives structure, shapes, dtypes and shardings. Leaves that are
        NumPy come back as NumPy. The mesh may differ from the saved one.
      step: only this one.

    Returns:
      (step, items), or None if nothing was ever saved.

    Raises:
      DamagedStateError: steps exist, and none of them can be used.
      InputError: there is no such step; a target has another structure, shape
        or dtype than what was saved.
    """
    return self._newest(step, lambda s: self._read(s, targets))

  def restore_arrays(
      self,
      step: int | None,
      names: Sequence[str],
      sharding: Callable[[str, tuple], jax.sharding.Sharding] | None = None,
  ) -> tuple[int, dict[str, dict[str, Any]]] | None:
    """Reads array items without a target, each as {leaf path: array}.

    Args:
      step: None for the newest that is complete and undamaged.
      names: items to read; nothing else is touched.
      sharding: (path, shape) -> sharding; replicated by default.

    Returns, raises: as `restore`.
    """

    def read(candidate):
      leaves = digests.leaves_in(self.describe(candidate))
      targets = {}
      for name in names:
        targets[name] = {
            x.path: jax.ShapeDtypeStruct(
                x.shape, jax.numpy.dtype(x.dtype),
                sharding=sharding and sharding(x.path, x.shape),
            )
            for x in leaves.get(name, ())
        }
      return self._read(candidate, targets)

    return self._newest(step, read)

  def describe(self, step: int) -> dict[str, Any]:
    """What a step says of itself.

    Returns:
      `step`, `schema`, `metrics`, `state_sha256`, `items` {name: hex} and
      `leaves` [[item, path, dtype, shape, sha256]], as recorded at the save.

    Raises:
      DamagedStateError: the record is missing or does not match its digest.
    """
    path = self.directory / str(step) / _DIGEST / 'metadata'
    if not path.exists():
      raise _Damage(f'it is incomplete: {_DIGEST}/metadata is missing')
    try:
      body = digests.unseal(path.read_text())
    except ValueError as error:
      raise _Damage(f'{_DIGEST}/metadata is unreadable: {error}') from error
    if body['step'] != step:
      raise _Damage(f'it is step {body["step"]} in a folder called {step}')
    return body

  def _newest(self, step, read):
    """The first of the candidate steps, newest first, that `read` can read."""
    self.wait()
    self._manager.reload()
    steps = self.steps()
    if step is not None and step not in steps:
      raise errors.InputError(
          f'{self.directory} has no step {step}; it has {steps or "none"}.'
      )
    bad = {}
    for candidate in [step] if step is not None else steps[::-1]:
      try:
        items = read(candidate)
      except _Damage as error:
        bad[candidate] = str(error)
      except (errors.RunError, MemoryError, jax.errors.JaxRuntimeError):
        raise
      except Exception as error:  # A damaged file may be any error anywhere.
        line = str(error).strip().partition('\n')[0][:200]
        bad[candidate] = f'it is unreadable: {type(error).__name__}: {line}'
      else:
        if bad:
          self._log(f'checkpoint {candidate} is used instead.')
          self._set_aside(bad)
        return candidate, items
      self.damaged.append((candidate, bad[candidate]))
      self._log(
          f'checkpoint {candidate} in {self.directory} is damaged: '
          f'{bad[candidate]}.'
      )
    if not bad:
      return None
    raise errors.DamagedStateError(
        f'{self.directory} holds no usable step: '
        + '; '.join(f'step {s}: {why}' for s, why in bad.items())
        + '. Restore the folder from a copy, or start in another --workdir.'
    )

  def _set_aside(self, steps):
    """Renames damaged steps, so that new ones may take their numbers."""
    if self._read_only:
      return
    if self._primary:
      for step in steps:
        aside = self.directory / f'damaged-{step}'
        if aside.exists():
          aside.rmtree()
        (self.directory / str(step)).rename(aside)
    if jax.process_count() > 1:
      multihost_utils.sync_global_devices('rlpost:set_aside')
    self._manager.reload()

  def _read(self, step, targets) -> dict[str, Any]:
    saved = digests.leaves_in(self.describe(step))
    mesh = self._mesh or targeting.mesh_of(targets)
    args = {}
    for name, target in targets.items():
      if name not in saved:
        raise _Damage(f'it has no item {name!r}, only {sorted(saved)}')
      targeting.check(name, target, saved[name])
      if targeting.is_json(target):
        args[name] = ocp.args.JsonRestore()
      else:
        flat = digests.flatten(target)
        flat = {path: targeting.place(x, mesh) for path, x in flat.items()}
        args[name] = ocp.args.PyTreeRestore(
            flat, restore_args=ocp.checkpoint_utils.construct_restore_args(flat)
        )
    restored = self._manager.restore(step, args=ocp.args.Composite(**args))
    items = {}
    for name, target in targets.items():
      value = restored[name]
      if not targeting.is_json(target):
        paths = digests.flatten(target)
        value = jax.tree.unflatten(
            jax.tree.structure(target), [value[path] for path in paths]
        )
      _check_digest(saved[name], digests.leaves_of(name, value))
      # An optimizer without state has no leaves, and is saved as JSON.
      items[name] = value if jax.tree.leaves(target) else target
    return items

  def _metric(self, step) -> float | None:
    if step not in self._metrics:
      try:
        body = self.describe(step)
      except errors.DamagedStateError:
        return None
      self._metrics[step] = body['metrics'].get(self._best_metric)
    return self._metrics[step]


def _mb(count) -> str:
  return 'an unknown space' if count is None else f'{count / 1e6:.0f} MB'


def _check_digest(saved, restored):
  for old, new in zip(sorted(saved), sorted(restored), strict=True):
    if old != new:
      raise _Damage(f'{old.item}/{old.path} does not match its digest')
