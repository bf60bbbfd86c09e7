"""Hugging Face folders: golden logits of transformers, and round trips."""

import json
import pathlib
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest

from rlpost import errors
from rlpost.data import tokenizer as tokenizers
from rlpost.models import transformer
from rlpost.models.config import ModelConfig, RopeScaling
from rlpost.weights import hf_config, layout, safetensors, tensorfile
from tests import reference

FIXTURES = pathlib.Path(__file__).parents[1] / 'fixtures'
CONFIG = ModelConfig(
    vocab_size=384, width=32, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, hidden=48, rope_theta=3e4, norm_eps=1e-6, max_position=64,
)


def golden(name, kind='default'):
  with np.load(FIXTURES / 'llama_logits.npz') as file:
    return file[f'{name}/tokens'][None], file[f'{name}/{kind}']


def changed(**fields):
  return ModelConfig(**vars(CONFIG) | fields)


def saved(path, config=CONFIG, dtype='float32', **kwargs):
  params = reference.random_params(config)
  safetensors.save_folder(path, config, params, dtype=dtype, **kwargs)
  return params


@pytest.mark.parametrize('fields', [{}, {'tied': False, 'value_head': True}])
def test_files_and_the_model_agree_on_names_and_shapes(fields):
  spec = transformer.spec(changed(**fields)).shapes
  expected = {name: leaf.shape for name, leaf in spec.items()}
  assert layout.shapes(changed(**fields)) == expected


@pytest.mark.parametrize('name', ['llama_tied', 'llama_untied'])
def test_logits_equal_those_of_transformers(name):
  config, params = safetensors.load_folder(FIXTURES / name)
  tokens, logits = golden(name)
  ours = reference.forward(config, params, tokens)[0, -len(logits):]
  np.testing.assert_allclose(ours, logits, atol=2e-5)


@pytest.mark.parametrize('kind', ['linear', 'llama3', 'yarn'])
def test_rope_scaling_is_that_of_transformers(kind):
  _, params = safetensors.load_folder(FIXTURES / 'llama_tied')
  data = json.loads((FIXTURES / 'llama_configs.json').read_text())[kind]
  config = hf_config.from_json(data, kind)
  tokens, logits = golden('llama_tied', kind)
  ours = reference.forward(config, params, tokens)[0, -len(logits):]
  np.testing.assert_allclose(ours, logits, atol=2e-5)
  # Not by chance: unscaled frequencies are far off.
  assert np.abs(golden('llama_tied')[1] - logits).max() > 0.5


@pytest.mark.parametrize('fields', [
    {},
    {'tied': False},
    {'value_head': True},
    {'head_dim': 16, 'num_kv_heads': 4},
    {'rope_scaling': RopeScaling('linear', 2.0, 32)},
    {'rope_scaling': RopeScaling('llama3', 8.0, 32, 1.0, 3.0)},
    {'rope_scaling': RopeScaling('yarn', 2.0, 32, beta_fast=16.0)},
])
def test_float32_round_trip_is_exact(tmp_path, fields):
  config = changed(**fields)
  params = saved(tmp_path, config)
  loaded_config, loaded = safetensors.load_folder(tmp_path)
  assert loaded_config == config
  assert loaded.keys() == params.keys()
  for name in params:
    np.testing.assert_array_equal(loaded[name], params[name], name)


def test_ntk_scaling_is_saved_as_the_base_it_means(tmp_path):
  config = changed(rope_scaling=RopeScaling('ntk', 4.0, 16))
  params = saved(tmp_path, config)
  loaded_config, _ = safetensors.load_folder(tmp_path)
  assert loaded_config.rope_scaling is None
  tokens = np.arange(40)[None]
  np.testing.assert_allclose(
      reference.forward(loaded_config, params, tokens),
      reference.forward(config, params, tokens), atol=1e-9,
  )


def test_bfloat16_is_rounded_once_and_kept(tmp_path):
  params = saved(tmp_path, dtype='bfloat16')
  _, loaded = safetensors.load_folder(tmp_path, ml_dtypes.bfloat16)
  for name, array in params.items():
    assert loaded[name].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(
        loaded[name], array.astype(ml_dtypes.bfloat16), name
    )
  _, wide = safetensors.load_folder(tmp_path)
  kept = wide['layers/0/attn/qkv'].astype(ml_dtypes.bfloat16)
  np.testing.assert_array_equal(kept, loaded['layers/0/attn/qkv'])
  # Half the bytes of float32, in the file as well.
  size = (tmp_path / 'model.safetensors').stat().st_size
  assert size < 2 * CONFIG.num_params + 8192


def test_jax_arrays_are_saved_like_numpy_ones(tmp_path):
  params = saved(tmp_path / 'a', dtype='bfloat16')
  safetensors.save_folder(
      tmp_path / 'b', CONFIG, {k: jax.numpy.asarray(v) for k, v in
                               params.items()})
  a, b = (
      (tmp_path / n / 'model.safetensors').read_bytes() for n in 'ab'
  )
  assert a == b


def test_package_reads_our_file_and_we_read_its(tmp_path):
  package = pytest.importorskip('safetensors.numpy')
  params = saved(tmp_path)
  theirs = package.load_file(tmp_path / 'model.safetensors')
  assert theirs.keys() == {s.hf for s in layout.slots(CONFIG)}
  q = theirs['model.layers.1.self_attn.q_proj.weight']
  np.testing.assert_array_equal(q, params['layers/1/attn/qkv'][:32])
  package.save_file(theirs, tmp_path / 'model.safetensors')
  _, loaded = safetensors.load_folder(tmp_path)
  np.testing.assert_array_equal(
      loaded['layers/1/attn/qkv'], params['layers/1/attn/qkv']
  )


def shard(folder):
  """Splits model.safetensors in two, with an index."""
  tensors = {
      k: np.array(v)
      for k, v in tensorfile.read(folder / 'model.safetensors').items()
  }
  names = sorted(tensors)
  where = {}
  for i, part in enumerate((names[::2], names[1::2])):
    file = f'model-{i}.safetensors'
    sources = [
        tensorfile.Source(n, tensors[n].shape, lambda n=n: tensors[n])
        for n in part
    ]
    tensorfile.write(folder / file, sources, np.float32)
    where |= dict.fromkeys(part, file)
  (folder / 'model.safetensors').unlink()
  index = folder / 'model.safetensors.index.json'
  index.write_text(json.dumps({'metadata': {}, 'weight_map': where}))
  return index, where


def test_shards_give_the_same_parameters(tmp_path):
  params = saved(tmp_path)
  index, where = shard(tmp_path)
  _, loaded = safetensors.load_folder(tmp_path)
  for name in params:
    np.testing.assert_array_equal(loaded[name], params[name])
  where['model.norm.weight.twin'] = 'model-0.safetensors'
  index.write_text(json.dumps({'weight_map': where}))
  with pytest.raises(errors.InputError, match='1 missing: model.norm.weight.t'):
    safetensors.load_folder(tmp_path)
  index.write_text(json.dumps({'weight_map': {'a': '../x/model.safetensors'}}))
  with pytest.raises(errors.InputError, match='outside its folder'):
    safetensors.load_folder(tmp_path)


def rewrite(folder, change):
  path = folder / 'model.safetensors'
  tensors = {k: np.array(v) for k, v in tensorfile.read(path).items()}
  change(tensors)
  sources = [
      tensorfile.Source(n, t.shape, lambda t=t: t) for n, t in tensors.items()
  ]
  tensorfile.write(path, sources, np.float32)


def test_missing_unknown_and_misshapen_tensors_are_named(tmp_path):
  up = 'model.layers.1.mlp.up_proj.weight'
  for change, message in (
      (lambda t: t.pop(up), f'1 missing: {up}'),
      (lambda t: t.update({'model.layers.0.self_attn.q_proj.bias': t[up]}),
       '1 unknown: model.layers.0.self_attn.q_proj.bias'),
      (lambda t: t.update({up: t[up].T}),
       r'up_proj.weight has shape \(32, 48\), expected \(48, 32\)'),
  ):
    saved(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(errors.InputError, match=message):
      safetensors.load_folder(tmp_path)


def test_copies_of_the_tied_head_and_old_buffers_are_accepted(tmp_path):
  saved(tmp_path)
  name = 'model.embed_tokens.weight'
  buffer = 'model.layers.0.self_attn.rotary_emb.inv_freq'
  rewrite(tmp_path, lambda t: t.update(
      {'lm_head.weight': t[name], buffer: np.ones(4, np.float32)}))
  config, params = safetensors.load_folder(tmp_path)
  assert config == CONFIG and 'head/kernel' not in params
  rewrite(tmp_path, lambda t: t.update({'lm_head.weight': 2 * t[name]}))
  with pytest.raises(errors.InputError, match='lm_head.weight differs'):
    safetensors.load_folder(tmp_path)


def test_damaged_files_are_input_errors(tmp_path):
  saved(tmp_path)
  path = tmp_path / 'model.safetensors'
  data = path.read_bytes()
  length = int.from_bytes(data[:8], 'little')
  header = json.loads(data[8 : 8 + length])

  def with_header(change):
    entries = json.loads(json.dumps(header))
    raw = json.dumps(change(entries) or entries).encode()
    return len(raw).to_bytes(8, 'little') + raw + data[8 + length :]

  norm = 'model.norm.weight'
  for broken in (
      b'', data[:5], data[:100], data[:-4], data + b'\0' * 4,
      b'\xff' * 8 + data[8:], data[:9] + b'\xff' + data[10:],
      with_header(lambda h: h[norm].update(dtype='F4')),
      with_header(lambda h: h[norm].update(shape=[33])),
      with_header(lambda h: h[norm].update(data_offsets=[0, 128])),
      with_header(lambda h: h[norm].pop('shape') and None),
      with_header(lambda h: [1]),
  ):
    path.write_bytes(broken)
    with pytest.raises(errors.InputError, match='model.safetensors'):
      safetensors.load_folder(tmp_path)
  twice = data[8 : 8 + length].decode().rstrip()[:-1]
  twice += f',"{norm}":' + json.dumps(header[norm]) + '}'
  path.write_bytes(
      len(twice).to_bytes(8, 'little') + twice.encode() + data[8 + length :]
  )
  with pytest.raises(errors.InputError, match='twice'):
    safetensors.load_folder(tmp_path)


def test_folders_without_their_files_are_input_errors(tmp_path):
  with pytest.raises(errors.InputError, match=r'config\.json'):
    safetensors.load_folder(tmp_path)
  shutil.copy(FIXTURES / 'llama_tied' / 'config.json', tmp_path)
  with pytest.raises(errors.InputError, match=r'0 \*.safetensors files'):
    safetensors.load_folder(tmp_path)


@pytest.mark.parametrize('change, message', [
    ({'model_type': 'gemma'}, "model_type is 'gemma'; supported: 'llama'"),
    ({'hidden_act': 'gelu'}, "hidden_act is 'gelu'"),
    ({'attention_bias': True}, 'attention_bias is True'),
    ({'quantization_config': {'bits': 4}}, 'quantization_config'),
    ({'rope_scaling': {'rope_type': 'dynamic', 'factor': 2}}, "'dynamic'"),
    ({'rope_scaling': {'rope_type': 'llama3', 'factor': 2}}, 'low_freq_factor'),
    ({'rope_scaling': {'type': 'yarn', 'factor': 2, 'attention_factor': 2}},
     'attention_factor'),
    ({'hidden_size': None}, 'hidden_size'),
])
def test_config_that_asks_for_other_mathematics_is_refused(change, message):
  data = hf_config.to_json(CONFIG, 'float32') | change
  data = {k: v for k, v in data.items() if v is not None}
  with pytest.raises(errors.InputError, match=message):
    hf_config.from_json(data, 'config.json')


def test_saving_checks_names_shapes_and_types(tmp_path):
  params = reference.random_params(CONFIG)
  with pytest.raises(errors.InputError, match='1 unknown: lora'):
    safetensors.save_folder(tmp_path, CONFIG, params | {'lora': params})
  wrong = params | {'norm/scale': np.ones(33)}
  with pytest.raises(errors.InputError, match=r'\(33,\), expected \(32,\)'):
    safetensors.save_folder(tmp_path, CONFIG, wrong)
  with pytest.raises(errors.InputError, match='float8'):
    safetensors.save_folder(tmp_path, CONFIG, params, dtype='float8')
  assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(tmp_path):
  saved(tmp_path)
  before = (tmp_path / 'model.safetensors').read_bytes()

  def fail():
    raise OSError('No space left on device')

  with pytest.raises(OSError, match='No space'):
    tensorfile.write(
        tmp_path / 'model.safetensors',
        [tensorfile.Source('a', (4,), lambda: np.ones(4)),
         tensorfile.Source('b', (4,), fail)], np.float32)
  assert (tmp_path / 'model.safetensors').read_bytes() == before
  assert not list(tmp_path.glob('*.part-*'))


@pytest.mark.slow
@pytest.mark.parametrize('fields', [
    {}, {'tied': False, 'rope_scaling': RopeScaling('yarn', 2.0, 32)},
    {'value_head': True, 'rope_scaling': RopeScaling('llama3', 8.0, 32)},
    {'rope_scaling': RopeScaling('ntk', 4.0, 16)},
    {'rope_scaling': RopeScaling('linear', 4.0, 16)},
])
def test_transformers_loads_our_folder_with_equal_logits(tmp_path, fields):
  transformers = pytest.importorskip('transformers')
  torch = pytest.importorskip('torch')
  config = changed(**fields)
  tokenizer = tokenizers.bytes_tokenizer()
  params = saved(tmp_path, config, tokenizer=tokenizer)
  model, report = transformers.AutoModelForCausalLM.from_pretrained(
      tmp_path, dtype=torch.float32, output_loading_info=True
  )
  assert not report['missing_keys'] and not report['mismatched_keys']
  text = 'Hello, wörld<|im_end|>\n'
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
  ids = theirs(text, add_special_tokens=False)['input_ids']
  assert ids == tokenizer.encode(text)
  assert theirs.eos_token_id == tokenizer.eos_id
  messages = [{'role': 'user', 'content': 'Hi'}]
  assert '<|im_start|>user\nHi' in theirs.apply_chat_template(
      messages, tokenize=False)
  with torch.no_grad():
    logits = model(torch.tensor([ids])).logits.numpy()
  np.testing.assert_allclose(
      reference.forward(config, params, [ids]), logits, atol=5e-5
  )
