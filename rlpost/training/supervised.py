"""The supervised stage: solved tasks, packed into rows, completions trained.

It is the loop of reinforcement learning with examples in place of rollouts:
the same update program, workdir, evaluation and resume. The examples are a
TFDS data set in the workdir, read by Grain from where the checkpoint stopped.
"""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlpost import errors, sharding
from rlpost.data import pipeline, sft_dataset, zigzag
from rlpost.domains import demonstrations
from rlpost.models import transformer
from rlpost.rollouts import collect
from rlpost.rollouts import engine as engines
from rlpost.training import imitation, sections, setup
from rlpost.training import programs as program_lib
from rlpost.training import state as states
from rlpost.training import step as steps
from rlpost.training.workdir import Workdir
from rlpost.weights import safetensors


@dataclasses.dataclass(frozen=True)
class Data:
  """What is learned from.

  Attributes:
    examples: distinct solved tasks of each domain.
    threads: that read and encode ahead; 0 does it in line.
    look_ahead: documents to choose from when rows are filled; 1 keeps the
      order of the stream, more leave less padding.
  """

  examples: int
  threads: int = 0
  look_ahead: int = 1


@dataclasses.dataclass(frozen=True)
class Train:
  """How an update is computed; see `step.StepConfig`.

  Attributes:
    rows, micro: rows of a micro-batch, and micro-batches of an update.
    length, slots: tokens of a row, and how many of them may train.
  """

  rows: int
  length: int
  slots: int
  micro: int = 1
  backend: str = 'dense'
  block: int = 256
  remat: str = 'none'
  chunk: int = 512
  clip_norm: float = 1.0
  offload: bool = False

  def __post_init__(self):
    for name in ('rows', 'micro', 'length', 'slots', 'block'):
      if getattr(self, name) < 1:
        raise errors.InputError(
            f'train.{name}={getattr(self, name)} must be at least 1.'
        )


@dataclasses.dataclass
class Run(setup.Policy):
  """Everything that a supervised run holds; `state` changes with updates."""

  config: Any
  data: Data
  train: Train
  evaluation: sections.Evaluation
  checkpoint: sections.Checkpoint
  mesh: Any
  model: setup.Model
  tasks: setup.Tasks
  shapes: program_lib.Shapes
  programs: Mapping[str, program_lib.Program]
  evaluations: collect.Collector
  recipe: Any = imitation.RECIPE
  state: states.TrainState | None = None
  frozen: Mapping[str, Any] | None = None


def shapes(config, mesh, measured) -> program_lib.Shapes:
  """What decides the programs of a run; as `setup.shapes`."""
  section = setup.split_model(config.model)
  train = Train(**config.train)
  evaluation = sections.Evaluation(**config.evaluation)
  prefix, rest, answer = map(setup.bucket, measured)
  domains = len(config.domains.names) + len(config.domains.get('unseen', ()))
  engine = engines.EngineConfig(
      prompts=evaluation.slots, rows=evaluation.samples + 1,
      prefix_len=prefix, prompt_len=rest, width=answer, prefixes=domains,
      admit=evaluation.admit, refill=evaluation.refill,
  )
  setup.check_backend(train.backend, mesh, documents=True)
  setup.check_reach(section.model, engine)
  return program_lib.Shapes(
      step=steps.StepConfig(
          model=section.model, recipe=imitation.RECIPE, backend=train.backend,
          block=train.block, remat=train.remat, chunk=train.chunk,
          clip_norm=train.clip_norm, dtype=section.dtype, offload=train.offload,
      ),
      stacked=section.stacked, trainable=section.trainable,
      optimizer=states.adamw(total_steps=config.steps, **config.optimizer),
      rows=train.rows, micro=train.micro, slots=train.slots,
      length=zigzag.padded(train.length, mesh.shape['context']),
      evaluation=engine,
  )


def build(config, scorer, display, workdir_tasks: Mapping | None = None) -> Run:
  """Everything but the parameters; reads no weights and compiles nothing.

  Arguments as of `setup.build`.
  """
  mesh = sharding.make_mesh(**config.mesh)
  model = setup.load_model(**config.model, seed=config.seed)
  tasks = setup.make_tasks(**{**config.domains, **(workdir_tasks or {})})
  found = shapes(config, mesh, setup.longest(tasks, model.tokenizer))
  programs = program_lib.programs(found, mesh, display.phase)
  return Run(
      config=config, data=Data(**config.data), train=Train(**config.train),
      evaluation=sections.Evaluation(**config.evaluation),
      checkpoint=sections.Checkpoint(**config.checkpoint), mesh=mesh,
      model=model, tasks=tasks, shapes=found, programs=programs,
      evaluations=setup.collector(
          programs, 'evaluation', found.evaluation, model, tasks, scorer
      ),
  )


class Loop:
  """A supervised run with its workdir; arguments as of `loop.Loop`."""

  def __init__(self, run: Run, workdir, display, stop_asked, events):
    self.run, self.display = run, display
    self.workdir = Workdir(run, workdir, display, stop_asked, events)
    self.step = self.tokens = 0
    with display.phase('writing the examples', quiet=True):
      self.stream, self.shown = self._examples()

  # The story.

  def train(self) -> dict[str, Any]:
    """Runs to `config.steps` and returns what `summary.json` holds."""
    try:
      return self._train()
    except collect.NonFiniteSamples as error:
      self.workdir.refuse_samples(self.step + 1, error)

  def _train(self):
    run, config = self.run, self.run.config
    self.restore()
    writer = self.workdir.writer(self.step)
    self.workdir.evaluate('before', self.step, self.step, self.save)
    with contextlib.closing(self.stream):
      while self.step < config.steps:
        self.workdir.end_if_asked(self.step, self.save)
        row = self.update()
        self.display.step(writer.write(self.step, row))
        if self.step % run.checkpoint.every == 0:
          self.save()
      if self.workdir.saved_step != self.step:
        self.save()
    self.workdir.evaluate('after', self.step, self.step, self.save)
    writer.close()
    if config.export:
      with self.display.phase('exporting the model'):
        export(run, self.workdir.path / 'model')
    return self.workdir.finish(self.step)

  def update(self) -> dict[str, Any]:
    """One update on the next rows; returns the step's metrics."""
    run = self.run
    rows = next(self.stream)
    with self.display.phase('learning', quiet=True):
      batch = program_lib.batch_of(run.shapes, run.mesh, rows)
      run.state, learned = imitation.learn(
          run.programs, run.state, run.frozen, batch
      )
    self.step += 1
    if not learned['finite']:
      self.workdir.refuse(self.step, batch, learned)
    trained = rows.mask > 0
    self.tokens += int(trained.sum())
    names = sorted(run.tasks.pools)
    return {
        'reward': None, 'logp_gap_max': None, 'tokens': int(trained.sum()),
        'domains': {
            name: {'tokens': int(trained[rows.domain == i].sum())}
            for i, name in enumerate(names) if name in run.tasks.trained
        },
        **{k: float(learned[k]) for k in ('loss', 'entropy', 'grad_norm')},
        **self.stream.report(),
    }

  # State.

  def save(self, wait=False) -> None:
    """Saves everything that decides the next number."""
    items = {
        'stream': self.stream.get_state(),
        'counters': {'step': self.step, 'tokens': self.tokens},
        'trained': self.shown,
    }
    self.workdir.save(self.step, self.step, items, wait)

  def restore(self) -> None:
    """Goes on from the newest whole checkpoint, or starts afresh."""
    run = self.run
    items = self.workdir.restore(('stream', 'counters', 'trained'))
    frozen = program_lib.abstract(run.shapes, run.mesh).frozen
    if items is None or frozen:
      with self.display.phase('loading the model'):
        setup.place(run, setup.on_mesh(run, run.model.params()))
    if items is not None:
      self.stream.set_state(items['stream'])
      self.step = items['counters']['step']
      self.tokens = items['counters']['tokens']

  def _examples(self):
    """The stream over the workdir's data set, and the tasks behind it."""
    run, config = self.run, self.run.config
    tasks = run.tasks
    examples = demonstrations.examples(
        tasks.sources, tasks.environments, count=run.data.examples,
        seed=config.seed,
    )
    builder = sft_dataset.build(
        self.workdir.path / 'data', 'demonstrations', examples,
        config={
            'domains': {n: tasks.fingerprint(n) for n in sorted(tasks.trained)},
            'form': {n: e.form for n, e in sorted(tasks.environments.items())},
            'examples': run.data.examples, 'seed': config.seed,
        },
    )
    encode = demonstrations.encoder(run.model.tokenizer, tasks.environments)
    train = run.train
    stream = pipeline.Stream(
        sft_dataset.source(builder),
        lambda record: encode(sft_dataset.decode(record)),
        rows=train.rows * train.micro, length=train.length, slots=train.slots,
        seed=config.seed, fingerprint=sft_dataset.content_sha256(builder),
        threads=run.data.threads, look_ahead=run.data.look_ahead,
    )
    return stream, [e.content_id for e in examples]


def export(run, folder) -> None:
  """Writes a run's model as an fp32 folder that `model.source` can name."""
  params = run.params
  if transformer.is_stacked(params):
    params = transformer.unstack(params)
  params = {k: np.asarray(v) for k, v in params.items()}
  safetensors.save_folder(
      folder, run.model.config, params, run.model.tokenizer, dtype='float32'
  )


# As `setup.SECTIONS`.
SECTIONS = {
    'launcher': None,
    'seed': None,
    'steps': None,
    'export': None,
    'model': (setup.load_model, ('seed',)),
    'mesh': (sharding.make_mesh, ('devices',)),
    'domains': (setup.make_tasks, ('shots', 'trained')),
    'data': (Data, ()),
    'optimizer': (states.adamw, ('total_steps',)),
    'train': (Train, ()),
    'evaluation': (sections.Evaluation, ()),
    'checkpoint': (sections.Checkpoint, ()),
}
