"""Engines of a small model, what they are asked, and what they should say."""

import dataclasses
import functools
from unittest import mock

import jax
import numpy as np

from rlpost import sharding
from rlpost.algorithms import recipes
from rlpost.models import transformer
from rlpost.models.config import ModelConfig
from rlpost.ops.attention import SharedPrefix
from rlpost.rollouts import engine as engines
from rlpost.training import programs as program_lib
from rlpost.training import state as states
from rlpost.training import step as steps
from tests import compilation, reference

MODEL = ModelConfig(
    vocab_size=40, width=16, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=4, hidden=24, rope_theta=100.0,
)
STOP = np.arange(40) < 3
BUDGET = 8
ROOM = 16  # of a prompt in a packed row: 64 tokens, for any context
ROOT = 11
TEMPERATURES = 1.0, 0.0, 0.6, 1.5, 1.0, 1.0


@dataclasses.dataclass(frozen=True)
class Setting:
  """An engine's shapes, and what it runs on; hashable."""

  prompts: int
  rows: int
  more: tuple = ()  # further fields of an EngineConfig
  mesh: tuple = ()
  stacked: bool = False
  model: ModelConfig = MODEL

  @property
  def config(self) -> engines.EngineConfig:
    given = {'prefix_len': 4, 'prompt_len': 6, 'width': BUDGET}
    return engines.EngineConfig(
        self.prompts, self.rows, **given | dict(self.more)
    )

  def make_mesh(self):
    return sharding.make_mesh(**dict(self.mesh))

  def shapes(self) -> program_lib.Shapes:
    layout = SharedPrefix(ROOM, 6, BUDGET)
    step = steps.StepConfig(
        self.model, recipes.RECIPES['grpo'], layout=layout, chunk=64
    )
    return program_lib.Shapes(
        step=step, stacked=self.stacked, trainable='.*',
        optimizer=states.adamw(1e-3, total_steps=1), rows=8, micro=1,
        slots=6 * BUDGET, length=layout.length, rollout=self.config,
        scored=True,
    )


def setting(prompts, rows, *, mesh=None, stacked=False, model=MODEL, **more):
  """A `Setting` from plain dicts."""
  return Setting(
      prompts, rows, tuple(more.items()), tuple((mesh or {}).items()), stacked,
      model,
  )


@functools.lru_cache(maxsize=16)  # a process may not hold them by hundreds
def programs(setting_: Setting):
  """(programs, engine), compiled in little time at first use."""
  made = program_lib.programs(setting_.shapes(), setting_.make_mesh())
  decoding = program_lib.decoding(made, 'rollout')
  return made, engines.Engine(setting_.config, decoding, STOP)


def place(setting_: Setting, params, program='rollout/run'):
  """Parameters in the layout and the places that a program takes."""
  params = transformer.stack(params) if setting_.stacked else params
  known = programs(setting_)[0][program].arguments[0]
  return {k: jax.device_put(params[k], x.sharding) for k, x in known.items()}


def generate(setting_: Setting, params, asked, root=ROOT, version=0,
             engine=None):
  """{(group, sample): Completion}."""
  if not setting_.config.prefix_len:
    asked = [
        r._replace(prefix=(), suffix=r.prefix + r.suffix) for r in asked
    ]
  engine = engine or programs(setting_)[1]
  with (
      sharding.use(setting_.make_mesh()),
      mock.patch.object(program_lib, 'CPU_OPTIONS', compilation.FAST),
  ):
    batches = engine.generate(
        place(setting_, params), version, asked, jax.random.key(root), BUDGET
    )
    return {(d.group, d.sample): d for batch in batches for d in batch}


def requests():
  """Prompts of 1 to 10 tokens, with prefixes of 0, 2 and 4 of them.

  Groups 20 and 21 have one prompt.
  """
  rng = np.random.default_rng(0)
  prefixes = (), (5, 9), (7, 7, 30, 2)
  out = []
  for g, size in enumerate((1, 6, 3, 5, 2, 6, 4)):
    suffix = tuple(rng.integers(0, 40, size).tolist())
    samples = tuple(enumerate(TEMPERATURES[: 6 - g % 3]))
    out.append(engines.Request(20 + g, prefixes[g % 3], suffix, samples))
  out[1] = out[0]._replace(group=21)
  return out


def logits(model, params, done, asked):
  """fp64 [n, V]: what predicts each token of a completion, from the start.

  Teacher-forced, layer by layer, each under a mask of its own window.
  """
  request = next(r for r in asked if r.group == done.group)
  prompt = request.prefix + request.suffix
  tokens = np.concatenate([prompt, done.tokens]).astype(int)
  at = np.arange(len(tokens))[None]
  distance = at[0][:, None] - at
  x = params['embed/table'][tokens[None]].astype(np.float64)
  for i in range(model.num_layers):
    window = model.windows[i % len(model.windows)]
    seen = (distance >= 0) & (distance < (window or len(tokens)))
    x = reference.block(
        x, lambda n, i=i: params[f'layers/{i}/{n}'].astype(np.float64), at,
        seen[None], model,
    )
  x = reference.rms_norm(x, params['norm/scale'], model.norm_eps)
  return (x @ params['embed/table'].T)[0, len(prompt) - 1 : -1]


def gap(model, params, found, asked):
  """Largest difference from the teacher-forced log-probabilities."""
  worst = 0.0
  for done in found.values():
    z = logits(model, params, done, asked) / (done.temperature or 1.0)
    logp = z - np.logaddexp.reduce(z, axis=-1, keepdims=True)
    chosen = logp[np.arange(len(z)), done.tokens]
    worst = max(worst, np.abs(chosen - done.logp).max())
  return worst
