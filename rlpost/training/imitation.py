"""Supervised updates: -log p of the tokens of a completion, nothing else.

That is REINFORCE with advantage 1 on what a teacher wrote, mean over the
trained tokens of an update, so `step.train_step` makes these updates too.
"""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from rlpost import errors, types
from rlpost.algorithms import recipes
from rlpost.data import pipeline, zigzag
from rlpost.domains import demonstrations
from rlpost.training import programs as program_lib
from rlpost.training import state as states

RECIPE = recipes.Recipe(advantage='none', loss='reinforce')


@dataclasses.dataclass(frozen=True)
class Warmup:
  """Supervised updates before a run, for models that start from nothing.

  They learn from solved training tasks, so that some answers earn a reward.

  Attributes:
    steps: updates; 0 for none.
    rows, length, slots: of an update: rows, tokens of a row, and trained tokens
      of a row.
    examples: distinct ones per domain.
    learning_rate: the peak of a cosine schedule.
  """

  steps: int = 0
  rows: int = 4
  length: int = 128
  slots: int = 64
  examples: int = 512
  learning_rate: float = 3e-3


def learn(
    programs: Mapping[str, program_lib.Program], state: states.TrainState,
    frozen, batch: types.Batch,
) -> tuple[states.TrainState, dict[str, Any]]:
  """One update on a batch of `programs.batch_of`.

  Returns:
    (state, what `step.train_step` reports).
  """
  state, learned = programs['train'](
      state, frozen, batch, np.int32(len(batch.mask)), np.float32(1), None
  )
  return state, jax.device_get(learned)


def warm_up(run, params: Mapping[str, Any], display):
  """Updates the parameters of a run that has not begun, in memory.

  What it does depends on the config and its seed alone.

  Args:
    run: `setup.Run`; its state is left alone.
    params: of `setup.on_mesh`; they are used up.
    display: shows the progress.

  Returns:
    (new parameters, content ids of the tasks that it learned from).
  """
  settings, seed = run.warmup, run.config.seed
  examples = demonstrations.examples(
      run.tasks.sources, run.tasks.environments, count=settings.examples,
      seed=seed,
  )
  shapes = _shapes(run)
  say = lambda text: display.phase(f'{text} of the warm-up')  # noqa: E731
  programs = program_lib.programs(shapes, run.mesh, say)
  trainable, frozen = states.partition(params, run.shapes.trainable)
  state = programs['init'](trainable)
  stream = pipeline.Stream(
      examples, demonstrations.encoder(
          run.model.tokenizer, run.tasks.environments
      ),
      rows=settings.rows, length=settings.length, slots=settings.slots,
      seed=seed, fingerprint='',
  )
  with (
      display.phase(f'warm-up: {settings.steps} supervised updates'),
      contextlib.closing(stream),
  ):
    for i in range(settings.steps):
      batch = program_lib.batch_of(shapes, run.mesh, next(stream))
      state, learned = learn(programs, state, frozen, batch)
      if not learned['finite']:
        raise errors.NonFiniteError(
            f'warm-up: loss {learned["loss"]} at update {i + 1}; lower '
            'warmup.learning_rate.'
        )
      if 4 * (i + 1) // settings.steps > 4 * i // settings.steps:
        display.note(
            f'warm-up: update {i + 1} of {settings.steps}, loss '
            f'{learned["loss"]:.3f}'
        )
  return (
      states.union(state.trainable, frozen), [e.content_id for e in examples]
  )


def _shapes(run) -> program_lib.Shapes:
  settings, step = run.warmup, run.shapes.step
  ways = run.mesh.shape['context']
  return dataclasses.replace(
      run.shapes, step=dataclasses.replace(step, recipe=RECIPE, layout=None),
      optimizer=states.adamw(
          settings.learning_rate, total_steps=settings.steps,
          warmup_steps=settings.steps // 10, decay='cosine',
      ),
      rows=settings.rows, micro=1, slots=settings.slots,
      length=zigzag.padded(settings.length, ways), rollout=None,
      evaluation=None, scored=False,
  )
