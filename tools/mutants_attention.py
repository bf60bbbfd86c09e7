"""Faults of attention's kinds and of its spreading; see `mutants_list`."""

FAULTS = (
  ('rlpost/ops/visibility.py', 'tests/ops/attention_test.py::test_visible_is_'
   'the_pairwise_rule', (
    ('a bidirectional rule keeps the order',
     'query.order[:, :, None]) | (not rule.causal)',
     'query.order[:, :, None])'),
    ('a bidirectional window reaches ahead without end',
     'tests.append(key - query < rule.window)', 'tests.append(key == key)'),
    ('the first positions are one too many',
     'key < rule.first', 'key <= rule.first'),
  )),
  ('rlpost/ops/blockwise.py', 'tests/ops/blockwise_test.py::test_no_visible_'
   'pair_is_skipped', (
    ('a block of the first positions is skipped',
     'near |= least < rule.first', 'near |= least < 0'),
    ('a block of the same chunk is skipped',
     'low // rule.chunk <= most', 'low // rule.chunk < most'),
  )),
  ('rlpost/ops/blockwise.py', 'tests/ops/blockwise_test.py::test_equals_the_'
   'pairwise_oracle', (
    ('the gradient takes the soft cap for the identity',
     'd_s *= _slope(scores, spec.softcap)', 'd_s *= 1.0'),
    ('the sink has the other sign',
     'jax.nn.sigmoid(lse_BTH - sink_H', 'jax.nn.sigmoid(lse_BTH + sink_H'),
  )),
  ('rlpost/ops/attention.py', 'tests/ops/attention_test.py::test_dense_equals_'
   'the_pairwise_oracle', (
    ('dense attention leaves out the sink',
     '_softmax([*scores, sink], [*seen, True])[:-1]', '_softmax(scores, seen)'),
  )),
  ('rlpost/ops/context.py', 'tests/ops/context_test.py::test_equals_the_'
   'pairwise_oracle', (
    ('each device takes the sinks of the first heads',
     'sink_H.reshape(ways, -1)[jax.lax.axis_index(AXIS)]',
     'sink_H.reshape(ways, -1)[0]'),
    ('the ring drops the gradient of the log-sum-exp',
     'cut_pull(d_out, d_lse, out,', 'cut_pull(d_out, 0 * d_lse, out,'),
  )),
  ('rlpost/ops/context.py', 'tests/ops/context_faults_test.py::test_zigzag_'
   'keeps_all_devices_busy', (
    ('a part of the keys that tours has early tokens or late ones',
     'x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1)',
     'x.reshape(count, -1, *x.shape[1:])'),
  )),
  ('rlpost/ops/context.py', 'tests/ops/context_test.py::test_memory_of_a_'
   'device_goes_by_its_share_of_the_tokens', (
    ('all keys tour the ring at one time', 'for n in (4, 3, 2, 1) if',
     'for n in (1,) if'),
  )),
  ('rlpost/ops/splash.py', 'tests/ops/splash_test.py::test_around_a_ring_it_'
   'equals_dense', (
    ('of what comes round the ring, late pieces count as early ones',
     'jax.lax.cond(number <= me, before, behind, *keys)',
     'before(*keys)'),
    ('gradients of the first half of the keys go to the second',
     'nothing = [(0, 0), (0, 0), (0, half), (0, 0)]',
     'nothing = [(0, 0), (0, 0), (half, 0), (0, 0)]'),
  )),
)
