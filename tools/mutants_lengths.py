"""Faults of what feeds long rows, as `mutants_list`."""

FAULTS = (
  ('rlpost/data/pipeline.py', 'tests/data/pipeline_test.py', (
    ('the shortest of the documents that wait goes first',
     'fitting[int(np.argmax(sizes))]', 'fitting[int(np.argmin(sizes))]'),
    ('a document may wait for ever',
     'packer.add(self._waiting.pop(0))',
     'packer.add(self._waiting.pop(-1))'),
    ('a resumed stream forgets the documents that waited',
     "for i in state['waiting']", "for i in state['waiting'][:0]"),
    ('a batch that failed keeps the documents that it took',
     'self._cursor, self._overlong, self._waiting = before',
     'self._cursor, self._overlong = before[:2]'),
  )),
  ('rlpost/training/lengths.py', 'tests/training/lengths_test.py', (
    ('a stage begins one step late',
     'sum(first <= step for', 'sum(first < step for'),
    ('tasks come again in the stage in which they failed',
     'if entry[2] < stage]', 'if entry[2] <= stage]'),
    ('rounding is lost, not owed',
     'max(0.0, self._owed - due)', '0.0'),
    ('the newest of the tasks that wait give way',
     'self._failed[-self._keep :]', 'self._failed[: self._keep]'),
  )),
  ('rlpost/data/plan.py', 'tests/training/lengths_test.py', (
    ('closed domains are drawn from',
     'names = tuple(sorted(self.names if only is None else only))',
     'names = self.names'),
  )),
  ('rlpost/training/loop.py', 'tests/training/lengths_test.py', (
    ('a resumed run forgets the tasks that failed',
     "run.lengths.set_state(items['lengths'])", 'pass'),
  )),
  ('rlpost/domains/recall.py', 'tests/domains/recall_test.py', (
    ('keys that are kept back are asked for in training',
     '_NEW if new else _KEYS', '_NEW if new else _KEYS + _NEW'),
    ('the pair that is asked for is always the first',
     '[pairs[i] for i in rng.permutation(PAIRS)]',
     '[pairs[i] for i in range(PAIRS)]'),
  )),
)  # fmt: skip
