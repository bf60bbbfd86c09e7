"""GGUF files, written by the gguf package, against our reader."""

import struct

import gguf as gguf_package
import ml_dtypes
import numpy as np
import pytest

from rlpost import errors
from rlpost.models.config import ModelConfig, RopeScaling
from rlpost.weights import gguf, gguf_header, layout
from tests import reference

CONFIG = ModelConfig(
    vocab_size=96, width=64, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, hidden=96, rope_theta=5e4, max_position=128,
)
Type = gguf_package.GGMLQuantizationType
FULL = {Type.F32: np.float32, Type.F16: np.float16}


def interleave(rows, heads):
  """What converters do: pair (i, i + P/2) of each head becomes (2i, 2i + 1)."""
  width = rows.shape[1]
  return (
      rows.reshape(heads, 2, -1, width).swapaxes(1, 2).reshape(-1, width)
  )


def file_tensors(config, params):
  """Name -> matrix, cut and interleaved as in a GGUF file."""
  q, kv = (
      n * config.head_dim for n in (config.num_heads, config.num_kv_heads)
  )
  tensors = {
      'token_embd': params['embed/table'], 'output_norm': params['norm/scale']
  }
  if not config.tied:
    tensors['output'] = params['head/kernel']
  for i in range(config.num_layers):
    qkv = params[f'layers/{i}/attn/qkv']
    gate, up = np.split(params[f'layers/{i}/mlp/gate_up'], 2)
    for name, tensor in {
        'attn_norm': params[f'layers/{i}/attn_norm/scale'],
        'attn_q': interleave(qkv[:q], config.num_heads),
        'attn_k': interleave(qkv[q : q + kv], config.num_kv_heads),
        'attn_v': qkv[q + kv :],
        'attn_output': params[f'layers/{i}/attn/out'],
        'ffn_norm': params[f'layers/{i}/mlp_norm/scale'],
        'ffn_gate': gate, 'ffn_up': up,
        'ffn_down': params[f'layers/{i}/mlp/down'],
    }.items():
      tensors[f'blk.{i}.{name}'] = tensor
  return {f'{k}.weight': v for k, v in tensors.items()}


def write_file(path, config, tensors, kind=Type.F32, architecture='llama',
               **metadata):
  writer = gguf_package.GGUFWriter(str(path), architecture)
  writer.add_block_count(config.num_layers)
  writer.add_context_length(config.max_position)
  writer.add_embedding_length(config.width)
  writer.add_feed_forward_length(config.hidden)
  writer.add_head_count(config.num_heads)
  writer.add_head_count_kv(config.num_kv_heads)
  writer.add_key_length(config.head_dim)
  writer.add_value_length(config.head_dim)
  writer.add_rope_freq_base(config.rope_theta)
  writer.add_layer_norm_rms_eps(config.norm_eps)
  for key, value in metadata.items():
    key = 'llama.' + key.replace('__', '.')
    add = {float: writer.add_float32, int: writer.add_uint32,
           str: writer.add_string, list: writer.add_array}[type(value)]
    add(key, value)
  for name, tensor in tensors.items():
    if tensor.ndim == 1 or kind in FULL:
      writer.add_tensor(name, tensor.astype(FULL.get(kind, np.float32)))
    else:
      packed = gguf_package.quants.quantize(tensor, kind)
      writer.add_tensor(name, packed, raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


@pytest.fixture(scope='module')
def params():
  return reference.random_params(CONFIG)


@pytest.fixture
def whole_file(tmp_path, params):
  return write_file(tmp_path / 'm.gguf', CONFIG, file_tensors(CONFIG, params))


def test_f32_file_gives_the_parameters_and_the_config(whole_file, params):
  config, loaded = gguf.load(whole_file)
  assert config == CONFIG
  assert loaded.keys() == params.keys()
  for name, array in params.items():
    np.testing.assert_array_equal(loaded[name], array, name)


def test_untied_output_is_kept(tmp_path):
  config = ModelConfig(**vars(CONFIG) | {'tied': False})
  params = reference.random_params(config)
  path = write_file(tmp_path / 'm.gguf', config, file_tensors(config, params))
  loaded_config, loaded = gguf.load(path)
  assert loaded_config == config
  np.testing.assert_array_equal(loaded['head/kernel'], params['head/kernel'])


def test_rows_left_interleaved_would_give_other_logits(whole_file, params):
  _, loaded = gguf.load(whole_file)
  tokens = np.arange(24)[None] * 5 % CONFIG.vocab_size
  right = reference.forward(CONFIG, params, tokens)
  ours = reference.forward(CONFIG, loaded, tokens)
  np.testing.assert_array_equal(ours, right)
  order = np.argsort(layout.half_split_rows(4, 64))
  loaded['layers/0/attn/qkv'][:64] = loaded['layers/0/attn/qkv'][:64][order]
  wrong = reference.forward(CONFIG, loaded, tokens)
  assert np.abs(wrong - right).max() > 0.1


@pytest.mark.parametrize('kind', [
    Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1,
])
def test_quantised_values_are_those_of_the_package(tmp_path, params, kind):
  tensors = file_tensors(CONFIG, params)
  path = write_file(tmp_path / 'm.gguf', CONFIG, tensors, kind)
  _, loaded = gguf.load(path)
  rounded = {
      k: v if v.ndim == 1 and kind != Type.F16
      else gguf_package.quants.dequantize(
          gguf_package.quants.quantize(v, kind), kind)
      for k, v in tensors.items()
  }
  back = file_tensors(CONFIG, loaded)
  for name, array in rounded.items():
    np.testing.assert_array_equal(back[name], array, name)
  worst = max(np.abs(back[k] - tensors[k]).max() for k in tensors)
  assert 0 < worst < {Type.F16: 2e-3, Type.BF16: 8e-3, Type.Q8_0: 8e-3}.get(
      kind, 0.2)


def test_chunks_and_half_precision_give_the_same_values(monkeypatch):
  rng = np.random.default_rng(0)
  dense = rng.normal(size=(7, 96)).astype(np.float32)
  raw = gguf_package.quants.quantize(dense, Type.Q4_1)
  whole, cut = np.empty((2, 7, 96), np.float32)
  gguf.dequantise(raw, Type.Q4_1, whole)
  monkeypatch.setattr(gguf, '_CHUNK', 64)
  gguf.dequantise(raw, Type.Q4_1, cut)
  np.testing.assert_array_equal(whole, cut)
  half = np.empty((7, 96), ml_dtypes.bfloat16)
  gguf.dequantise(raw, Type.Q4_1, half)
  np.testing.assert_array_equal(half, whole.astype(ml_dtypes.bfloat16))


def test_header_equals_that_of_the_package(whole_file):
  ours = gguf_header.read(whole_file)
  theirs = gguf_package.GGUFReader(whole_file)
  for name, field in theirs.fields.items():
    if not name.startswith('GGUF.'):
      assert ours.metadata[name] == field.contents()
  assert {t.name: t.data_offset for t in theirs.tensors} == {
      t.name: t.offset for t in ours.tensors.values()
  }


@pytest.mark.parametrize('metadata, scaling', [
    ({}, None),
    ({'rope__scaling__type': 'linear', 'rope__scaling__factor': 4.0},
     RopeScaling('linear', 4.0, 128)),
    ({'rope__scale_linear': 2.0}, RopeScaling('linear', 2.0, 128)),
    ({'rope__scaling__type': 'yarn', 'rope__scaling__factor': 4.0,
      'rope__scaling__original_context_length': 32},
     RopeScaling('yarn', 4.0, 32)),
])
def test_rope_scaling_from_metadata(tmp_path, params, metadata, scaling):
  path = write_file(
      tmp_path / 'm.gguf', CONFIG, file_tensors(CONFIG, params), **metadata
  )
  assert gguf.load(path)[0].rope_scaling == scaling


def test_llama3_table_of_frequencies_is_recognised(tmp_path, params):
  scaling = RopeScaling('llama3', 32.0, 8192)
  config = ModelConfig(**vars(CONFIG) | {'rope_scaling': scaling})
  plain, _ = reference.rope_frequencies(CONFIG)
  scaled, _ = reference.rope_frequencies(config)
  tensors = file_tensors(CONFIG, params)
  tensors['rope_freqs.weight'] = (plain / scaled).astype(np.float32)
  path = write_file(tmp_path / 'm.gguf', CONFIG, tensors)
  assert gguf.load(path)[0].rope_scaling == scaling
  tensors['rope_freqs.weight'][3] *= 1.5
  path = write_file(tmp_path / 'n.gguf', CONFIG, tensors)
  with pytest.raises(errors.InputError, match='not the table of Llama 3'):
    gguf.load(path)


def test_a_file_cut_anywhere_is_an_input_error(tmp_path, whole_file):
  data = whole_file.read_bytes()
  first_tensor = min(
      t.offset for t in gguf_header.read(whole_file).tensors.values()
  )
  cuts = [*range(0, first_tensor, 41), first_tensor + 100, len(data) - 64]
  for size in cuts:
    path = tmp_path / 'cut.gguf'
    path.write_bytes(data[:size])
    with pytest.raises(errors.InputError, match='cut|whole|magic'):
      gguf.load(path)


def test_damaged_lengths_are_input_errors(tmp_path, whole_file):
  data = bytearray(whole_file.read_bytes())
  for at, value in ((8, 2**40), (16, 2**40), (24, 2**62)):
    broken = data.copy()
    broken[at : at + 8] = struct.pack('<Q', value)
    path = tmp_path / 'damaged.gguf'
    path.write_bytes(broken)
    with pytest.raises(errors.InputError, match='whole GGUF'):
      gguf.load(path)


def test_other_files_are_input_errors(tmp_path, whole_file):
  with pytest.raises(errors.InputError, match='Cannot read'):
    gguf.load(tmp_path / 'absent.gguf')
  other = tmp_path / 'other.gguf'
  other.write_bytes(b'PK\3\4' + bytes(64))
  with pytest.raises(errors.InputError, match='magic'):
    gguf.load(other)
  data = bytearray(whole_file.read_bytes())
  data[4:8] = struct.pack('<I', 9)
  other.write_bytes(data)
  with pytest.raises(errors.InputError, match='version 9'):
    gguf.load(other)


def test_missing_unknown_and_misshapen_tensors_are_named(tmp_path, params):
  tensors = file_tensors(CONFIG, params)
  missing = dict(tensors)
  del missing['blk.1.ffn_up.weight']
  unknown = tensors | {'blk.0.attn_q.bias': np.zeros(64, np.float32)}
  shape = tensors | {'blk.0.attn_v.weight': np.zeros((32, 32), np.float32)}
  for bad, message in (
      (missing, '1 missing: blk.1.ffn_up.weight'),
      (unknown, '1 unknown: blk.0.attn_q.bias'),
      (shape, r'attn_v.weight has shape \(32, 32\), expected \(32, 64\)'),
  ):
    path = write_file(tmp_path / 'bad.gguf', CONFIG, bad)
    with pytest.raises(errors.InputError, match=message):
      gguf.load(path)


def test_unsupported_types_and_architectures_are_named(tmp_path, params):
  tensors = file_tensors(CONFIG, params)
  path = write_file(tmp_path / 'a.gguf', CONFIG, tensors, architecture='gemma')
  with pytest.raises(errors.InputError, match="'gemma'; supported: llama"):
    gguf.load(path)
  for metadata, message in (
      ({'expert_count': 8}, 'expert_count is 8'),
      ({'rope__dimension_count': 8}, 'dimension_count is 8; only 16'),
      ({'rope__scaling__type': 'longrope'}, "'longrope'; supported"),
  ):
    path = write_file(tmp_path / 'a.gguf', CONFIG, tensors, **metadata)
    with pytest.raises(errors.InputError, match=message):
      gguf.load(path)
  # The type of one tensor, changed in the table (35 is TQ2_0).
  path = write_file(tmp_path / 'a.gguf', CONFIG, tensors)
  data = path.read_bytes()
  entry = b'blk.0.attn_q.weight' + struct.pack('<IQQI', 2, 64, 64, 0)
  assert data.count(entry) == 1
  path.write_bytes(data.replace(entry, entry[:-4] + struct.pack('<I', 35)))
  with pytest.raises(errors.InputError, match='TQ2_0; supported: F32, F16'):
    gguf.load(path)
