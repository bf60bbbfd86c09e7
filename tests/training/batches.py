"""A tiny decoder, and groups of sampled answers with their oracle log-probs.

Lengths differ everywhere, one group is short, and temperatures differ between
groups. Behaviour and reference log-probs lie around the model's own, so that
ratios fall on both sides of every clip.
"""

import numpy as np

from rlpost import types
from rlpost.data import packing
from rlpost.models.config import ModelConfig
from rlpost.ops.attention import SharedPrefix
from tests import reference

MODEL = ModelConfig(
    vocab_size=32, width=16, num_layers=1, num_heads=4, num_kv_heads=2,
    head_dim=4, hidden=24,
)
PROMPT, SAMPLES, WIDTH = 6, 3, 4
LAYOUT = SharedPrefix(PROMPT, SAMPLES, WIDTH)
SLOTS = SAMPLES * WIDTH
LENGTH = PROMPT + SLOTS
# Per group: tokens of the prompt, tokens of each answer, temperature.
SIZES = (
    (6, (4, 1, 3), 1.0), (2, (2, 4), 0.7), (4, (1, 2, 1), 1.3), (1, (3,), 1.0)
)
SEQUENCES = sum(len(answers) for _, answers, _ in SIZES)


def oracle_logp(config, params, tokens, temperature=1.0):
  """log p(token i | tokens before i) for i = 1.., float64 [n - 1]."""
  logits_TV = reference.forward(config, params, [tokens])[0, :-1] / temperature
  norm_T = np.logaddexp.reduce(logits_TV, axis=-1)
  chosen_T = logits_TV[np.arange(len(logits_TV)), tokens[1:]]
  return chosen_T - norm_T


def task(domain='a', text='q'):
  return types.Task(domain, (types.Message.of('user', text),), {'name': 'x'})


def trajectory(tokens, prompt, **fields):
  """An answer: `tokens` after the first `prompt` ones are sampled."""
  n = len(tokens)
  spans = types.Span(0, prompt, 'user', False),
  if n > prompt:
    spans += (types.Span(prompt, n, 'assistant', True),)
  given = {
      'task': task(), 'group': 0, 'sample': 0, 'spans': spans,
      'tokens': np.asarray(tokens, np.int32),
      'logp': np.zeros(n, np.float32),
      'versions': np.where(np.arange(n) < prompt, -1, 0),
      'temperature': 1.0, 'stop_reason': 'stop',
      'verdict': types.Verdict('value', 1.0),
  }
  return types.Trajectory(**given | fields)


def groups(params, config=MODEL, seed=0, noise=0.3, sizes=SIZES):
  """One group per entry of `sizes`; behaviour = own log-prob plus noise."""
  rng = np.random.default_rng(seed)
  out = []
  for g, (prompt, answers, temperature) in enumerate(sizes):
    start = rng.integers(0, config.vocab_size, prompt)
    members = []
    for sample, size in enumerate(answers):
      tokens = np.concatenate(
          [start, rng.integers(0, config.vocab_size, size)]
      )
      logp = np.zeros(len(tokens), np.float32)
      own = oracle_logp(config, params, tokens, temperature)[prompt - 1 :]
      logp[prompt:] = own + noise * rng.normal(size=size)
      members.append(trajectory(
          tokens, prompt, group=g, sample=sample, logp=logp,
          temperature=temperature,
      ))
    out.append(types.Group(g, task(), tuple(members)))
  return out


def packed(found, seed=0, noise=0.3):
  """Rows of groups, [B, ...], with random advantages and references."""
  rng = np.random.default_rng(seed)
  batch = packing.pack_groups(
      found, prompt_len=PROMPT, samples=SAMPLES, width=WIDTH,
      advantages=[rng.normal(size=len(g.trajectories)) for g in found],
  )
  ref = batch.behavior_logp + noise * rng.normal(size=batch.mask.shape)
  return batch._replace(ref_logp=np.float32(ref * batch.mask))


def rows(batch, index):
  """Rows of a batch by index; -1 is a row of padding."""
  padding = packing.blank(1, batch.tokens.shape[1], batch.mask.shape[1])
  padded = types.Batch(
      *(np.concatenate(pair) for pair in zip(batch, padding, strict=True))
  )
  return types.Batch(*(leaf[np.asarray(index)] for leaf in padded))


def columns(batch, order_BT):
  """The same rows with token i where `order_BT` says; slots follow."""
  where_BT = np.argsort(order_BT, axis=1)
  moved = {
      name: np.take_along_axis(getattr(batch, name), order_BT, axis=1)
      for name in ('tokens', 'order', 'position', 'segment', 'parent')
  }
  predictor = np.take_along_axis(where_BT, batch.predictor, axis=1)
  return batch._replace(predictor=np.int32(predictor), **moved)


def poisoned(batch, value, seed=0):
  """The same batch with nonsense wherever nothing is."""
  rng = np.random.default_rng(seed)
  token, slot = batch.segment < 0, batch.mask <= 0
  T = batch.tokens.shape[-1]

  def ids(x, empty, high):
    return np.where(empty, rng.integers(0, high, x.shape), x).astype(x.dtype)

  floats = ('behavior_logp', 'ref_logp', 'advantage', 'reward', 'temperature')
  return batch._replace(
      tokens=ids(batch.tokens, token, MODEL.vocab_size),
      position=ids(batch.position, token, 10_000),
      order=ids(batch.order, token, T),
      parent=ids(batch.parent, token, 3),
      predictor=ids(batch.predictor, slot, T),
      target=ids(batch.target, slot, MODEL.vocab_size),
      sequence=ids(batch.sequence, slot, 10**9),
      group=ids(batch.group, slot, 10**9),
      domain=ids(batch.domain, slot, 10**9),
      **{
          name: np.where(slot, np.float32(value), getattr(batch, name))
          for name in floats
      },
  )
