"""The real base model against independent implementations.

Skipped where its file is not cached (`python -m rlpost.weights.fetch`).
"""

import json
import pathlib
import re
import resource
import subprocess
import sys

import numpy as np
import pytest

from rlpost import errors
from rlpost.data import chat
from rlpost.models.config import CONFIGS
from rlpost.weights import fetch, load, safetensors
from tests import reference

FIXTURES = pathlib.Path(__file__).parents[1] / 'fixtures'
# Result, one tensor's bytes, and Python with its packages.
PEAK_BYTES = 134_515_008 * 4 + 35e6 + 120e6


def golden(name):
  return json.loads((FIXTURES / name).read_text('utf-8'))


@pytest.fixture(scope='module')
def path():
  try:
    return fetch.base_model_path()
  except errors.InputError as error:
    pytest.skip(str(error))


@pytest.fixture(scope='module')
def tokenizer(path):
  return load.load_tokenizer(path)


def test_token_ids_equal_those_of_a_plain_bpe(tokenizer):
  for text, ids in golden('smollm2_tokens.json')['cases']:
    assert tokenizer.encode(text) == ids, text
    assert tokenizer.decode(ids) == text


def test_every_token_with_a_newline_stops(tokenizer):
  expected = golden('smollm2_tokens.json')['newline_ids']
  stop = tokenizer.stop_ids(['\n'])
  assert set(np.flatnonzero(stop)) == {*expected, 2}
  assert len(expected) > 100


def test_ids_and_template_of_the_file(tokenizer):
  assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 2)
  assert tokenizer.vocab_size == 49152
  assert len(tokenizer.special_tokens) == 17
  prompt = golden('smollm2_logits.json')
  user = 'What is the capital of France?'
  tokens = chat.encode_chat(
      tokenizer, [{'role': 'user', 'content': user}], True
  )
  assert tokens.ids.tolist() == prompt['ids']
  turns = [{'role': 'user', 'content': user},
           {'role': 'assistant', 'content': 'Paris.'}]
  tokens = chat.encode_chat(tokenizer, turns)
  assert tokenizer.decode(tokens.ids[tokens.mask]) == 'Paris.<|im_end|>'


def test_config_is_the_one_in_the_table(path):
  assert load.load_config(path) == CONFIGS['smollm2-135m']


@pytest.mark.slow
def test_logits_equal_those_of_transformers(path):
  config, params, _ = load.load(path)
  assert sum(p.size for p in params.values()) == config.num_params
  expected = golden('smollm2_logits.json')
  logits_TV = reference.forward(
      config, params, [expected['ids']], dtype=np.float32
  )[0]
  for t, top in expected['positions'].items():
    ours = logits_TV[int(t)]
    np.testing.assert_allclose(ours[top['ids']], top['logits'], atol=1e-3)
    np.testing.assert_allclose(
        np.logaddexp.reduce(ours), top['logsumexp'], atol=1e-3
    )
    assert set(np.argsort(-ours)[:15]) <= set(top['ids'])


@pytest.mark.slow
def test_loading_takes_no_more_memory_than_the_result(path):
  program = (
      'import pathlib, sys\nfrom rlpost.weights import load\n'
      'model = load.load(sys.argv[1])\nassert "jax" not in sys.modules\n'
      'print(pathlib.Path("/proc/self/status").read_text())'
  )
  before = resource.getrusage(resource.RUSAGE_CHILDREN)
  out = subprocess.run(
      [sys.executable, '-c', program, str(path)], capture_output=True,
      text=True, check=True,
  )
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  # Not ru_maxrss, which a process inherits from the one that started it.
  peak = re.search(r'VmHWM:\s*(\d+) kB', out.stdout)
  assert int(peak[1]) * 1024 < PEAK_BYTES, peak[0]
  # 1.7 CPU seconds where this was written, imports included.
  assert after.ru_utime - before.ru_utime < 8


@pytest.mark.slow
def test_exported_model_in_transformers_gives_the_golden_logits(path, tmp_path):
  transformers = pytest.importorskip('transformers')
  torch = pytest.importorskip('torch')
  config, params, tokenizer = load.load(path)
  safetensors.save_folder(tmp_path, config, params, tokenizer, 'float32')
  del params
  model = transformers.AutoModelForCausalLM.from_pretrained(
      tmp_path, dtype=torch.float32
  )
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
  for text, ids in golden('smollm2_tokens.json')['cases']:
    assert theirs(text, add_special_tokens=False)['input_ids'] == ids, text
  expected = golden('smollm2_logits.json')
  with torch.no_grad():
    logits_TV = model(torch.tensor([expected['ids']])).logits[0].numpy()
  for t, top in expected['positions'].items():
    np.testing.assert_allclose(
        logits_TV[int(t)][top['ids']], top['logits'], atol=1e-3
    )
