"""Supervised examples as a TFDS data set, without TensorFlow.

One record is one example as JSON in a Text feature, in array_record files: any
record can be read at random, and decoding costs one `json.loads`.

The files live in `data_dir/NAME-FINGERPRINT/sft_examples/VERSION`, where the
fingerprint digests the config that made them, so that a changed config makes
new files and an equal one finds them. The digest of the content itself is kept
in the data set's metadata.
"""

import contextlib
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tensorflow_datasets as tfds
from etils import epath

from rlpost import errors
from rlpost.data.example import Example

SPLIT = 'train'


class SftExamples(tfds.core.GeneratorBasedBuilder):
  """TFDS builder over an iterable of examples, in their order."""

  VERSION = tfds.core.Version('1.0.0')
  # Nothing is downloaded; looking checksums up needs one more package.
  url_infos = None

  def __init__(self, *, examples: Iterable[Example] = (), **kwargs):
    self._examples = examples
    super().__init__(**kwargs)

  def _info(self):
    return tfds.core.DatasetInfo(
        builder=self,
        description='Prompts and completions for supervised fine-tuning.',
        features=tfds.features.FeaturesDict(
            {'example': tfds.features.Text()}
        ),
        metadata=tfds.core.MetadataDict(),
        disable_shuffling=True,
    )

  def _split_generators(self, dl_manager):
    del dl_manager  # nothing is downloaded
    return {SPLIT: self._generate_examples()}

  def _generate_examples(self) -> Iterator[tuple[int, dict]]:
    digest = hashlib.sha256()
    for index, example in enumerate(self._examples):
      text = json.dumps(Example(*example)._asdict(), sort_keys=True)
      digest.update(text.encode() + b'\n')
      yield index, {'example': text}
    self.info.metadata['content_sha256'] = digest.hexdigest()


def build(
    data_dir: epath.PathLike,
    name: str,
    examples: Iterable[Example],
    *,
    config: Mapping[str, Any],
) -> SftExamples:
  """Writes the data set, or finds the one that the same config wrote.

  Args:
    data_dir: folder for all such data sets.
    name: of this one.
    examples: read once, and only if there is nothing to be found.
    config: JSON that decides the examples: domains, counts, seed, template.

  Returns:
    The builder, prepared; read it with `source`.

  Raises:
    errors.InputError: no examples.
  """
  body = json.dumps(
      {'config': config, 'version': str(SftExamples.VERSION)}, sort_keys=True
  )
  fingerprint = hashlib.sha256(body.encode()).hexdigest()[:12]
  folder = epath.Path(data_dir) / f'{name}-{fingerprint}'
  tfds.disable_progress_bar()  # a launcher draws its own

  def open_builder(examples=()):
    return SftExamples(
        examples=examples, data_dir=folder, file_format='array_record'
    )

  builder = open_builder()
  # Asked about a folder without this file, `is_prepared` warns of it.
  begun = (builder.data_path / 'dataset_info.json').exists()
  if not begun or not builder.is_prepared():
    examples = list(examples)
    if not examples:
      raise errors.InputError(
          f'The data set {name!r} would be empty; give it examples.'
      )
    builder = open_builder(examples)
    # It prints of downloads, and there are none.
    with contextlib.redirect_stdout(io.StringIO()):
      builder.download_and_prepare()
  return builder


def source(builder: SftExamples):
  """Random access to the records, in the order of the examples."""
  return builder.as_data_source(SPLIT)


def decode(record: Mapping[str, bytes]) -> Example:
  """A record of `source` as an example."""
  return Example(**json.loads(record['example']))


def content_sha256(builder: SftExamples) -> str:
  """Digest of all records in order: what a stream's state is tied to."""
  return builder.info.metadata['content_sha256']
