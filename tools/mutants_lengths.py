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
)  # fmt: skip
