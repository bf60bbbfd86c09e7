"""Faults in what is sampled, and in the caches that it is sampled from."""

_DECODE = 'tests/rollouts/decode_test.py::'
_CACHES = 'tests/rollouts/caches_test.py::'
_PREFILL = 'tests/rollouts/prefill_test.py::'

FAULTS = (
  ('rlpost/ops/decoding.py', 'tests/ops/decoding_test.py', (
    ('decoding forgets to scale the scores',
     'q_BHP.reshape(B, J, G, P) * jnp.asarray(P**-0.5, q_BHP.dtype)',
     'q_BHP.reshape(B, J, G, P)'),
    ('a row that sees nothing takes the mean of everything',
     'jnp.where(m, jnp.exp(s - top), 0.0)', 'jnp.exp(s - top)'),
    ('scores of prompts and of rows have maxima of their own',
     'jnp.maximum(*(s.max(-1, keepdims=True) for s in scores))',
     'scores[0].max(-1, keepdims=True)'),
  )),
  ('rlpost/rollouts/decode.py', f'{_DECODE}test_log_probs_are_those_of_the_'
   'teacher_forced_model[narrow]', (
    ('a decoded token stands one position too far',
     'before + slots.count - 1', 'before + slots.count'),
    ('a row does not see the token it was just fed',
     'age = (slots.step - jnp', 'age = (slots.step - 1 - jnp'),
  )),
  ('rlpost/rollouts/prefill.py', f'{_DECODE}test_log_probs_are_those_of_the_'
   'teacher_forced_model[wide]', (
    ('the first token comes from the padding of the prompt',
     'at = length_A - 1 - first', 'at = length_A * 0 + c - 1'),
    ('a prompt starts at position 0 behind its prefix',
     'jnp.where(filled, start_A[:, None] + index, -1)',
     'jnp.where(filled, index, -1)'),
  )),
  ('rlpost/rollouts/decode.py', f'{_CACHES}test_log_probs_are_those_of_the_'
   'teacher_forced_model', (
    ('decoding ignores windows in the prompt',
     'seen &= query - at_QT[:, None] < window', 'pass'),
    ('a rounded ring shows what the window hides',
     'mine &= age[None] < window', 'pass'),
  )),
  ('rlpost/rollouts/prefill.py', f'{_PREFILL}test_pieces_of_any_size_give_the_'
   'cache_of_the_whole', (
    ('every piece is written over the first',
     'column + i * size, backend,', 'column, backend,'),
    ('the hidden state is that of the last piece',
     'jnp.where((at >= 0)[:, None]', 'jnp.where((at < c)[:, None]'),
    ('a window forgets what came before the piece',
     'caches.roll(*pair, kept[kind], begin)',
     'caches.roll(*pair, kept[kind], begin * 0)'),
  )),
  ('rlpost/rollouts/prefill.py', f'{_PREFILL}test_prefill_keeps_tokens_spread',
   (
    ('pieces are not dealt to all devices alike',
     'return caches.put(into, new, column // ways, at, ways)',
     'return caches.put(into, new, column, at)'),
  )),
  ('rlpost/rollouts/cache.py', f'{_CACHES}test_bytes_of_a_cache_are_those_of_'
   f'the_programs {_CACHES}test_a_window_bounds_what_a_layer_keeps', (
    ('layers with a window keep the whole prompt',
     'else self.rounded(min(window, most))', 'else self.rounded(most)'),
  )),
  ('rlpost/rollouts/engine.py', f'{_CACHES}test_bytes_of_a_cache_are_those_of_'
   'the_programs', (
    ('values are left out of the bytes of a cache',
     'elements += 2 * math.prod(', 'elements += math.prod('),
    ('prefixes count as if they were spread over rows',
     'held(config.prefixes, room.prefix, None)',
     'held(config.prefixes, room.prefix)'),
  )),
  ('rlpost/ops/decoding.py', f'{_PREFILL}test_a_decoded_token_moves_neither_'
   'weights_nor_caches', (
    ('the partitioner may move what weighs the keys',
     'if mesh.empty or mesh.shape[AXIS] == 1:', 'if True:'),
  )),
  ('rlpost/rollouts/decode.py', f'{_PREFILL}test_a_decoded_token_moves_neither_'
   'weights_nor_caches', (
    ('the output table is gathered for every token',
     'transformer.head(params))',
     'jax.lax.with_sharding_constraint(\n'
     "      transformer.head(params), jax.P('tensor')))"),
  )),
)
