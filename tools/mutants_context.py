"""Faults of rows that are spread over devices; see `mutants_list`."""

FAULTS = (
  ('rlpost/data/zigzag.py', 'tests/training/context_test.py', (
    ('zigzag order gives a device two neighbouring chunks',
     'for c in (i, 2 * ways - 1 - i)', 'for c in (2 * i, 2 * i + 1)'),
    ('predictors stay where they were before the zigzag',
     'place[batch.predictor]', 'batch.predictor'),
    ('only tokens move, not where they stand',
     'moved[name] = x[:, order]',
     "moved[name] = x[:, order] if name == 'tokens' else x"),
  )),
  ('rlpost/ops/spread.py', 'tests/training/context_test.py', (
    ('the first device answers for predictors of others',
     'jnp.where(here[..., None], h, 0)', 'h'),
    ('devices score each other\'s slots',
     "at = jax.lax.axis_index((_TIME, 'tensor')) * share",
     "at = jax.lax.axis_index(('tensor', _TIME)) * share"),
    ('every part of a table begins at token 0',
     "tokens = tokens - jax.lax.axis_index('tensor') * table.shape[0]",
     'tokens = tokens + 0'),
    ('columns of the embedding are traded for the wrong tokens',
     'jax.lax.all_to_all(table, name, 1, 0, tiled=True)',
     'jax.lax.all_to_all(table, split[0], 1, 0, tiled=True)'),
  )),
  ('rlpost/sharding.py', 'tests/sharding_test.py', (
    ('matrices are copied along the context',
     "COPIES = 'fsdp', 'context'", "COPIES = ('fsdp',)"),
  )),
  ('rlpost/training/programs.py', 'tests/training/programs_test.py', (
    ('norms are published in half precision',
     "v.dtype if 'norm' in axes[k] else jnp.dtype(shapes.step.dtype)",
     'jnp.dtype(shapes.step.dtype)'),
    ('matrices are published as training stores them',
     'functools.partial(sharding.fitted, rules=sharding.DECODING)',
     'sharding.stored'),
  )),
  ('rlpost/training/state.py', 'tests/training/programs_test.py', (
    ('nothing is offloaded', "offload and path[0].name == 'opt'", 'False'),
  )),
)
