"""Faults of plans; see `mutants_list`."""

FAULTS = (
  ('rlpost/planning/hlo.py', 'tests/planning/hlo_test.py', (
    ('a collective in a loop counts once',
     'yield from visit(other, times * trips)',
     'yield from visit(other, times)'),
    ('a sum is sent once', 'share *= 2', 'share *= 1'),
    ('a group is named by axes that its members share',
     '(at != at[:, :1]).any(1)', '(at == at[:, :1]).all(1)'),
    ('a permute is hidden by what ran before it',
     'open_[line.name] = busy', 'open_[line.name] = -1'),
  )),
  ('rlpost/planning/cost.py', 'tests/planning/cost_test.py', (
    ('a window forgets the query itself',
     '(queries - short) * window', '(queries - short) * (window - 1)'),
    ('the backward pass costs as much as the forward pass',
     'Work(3 * forward, again', 'Work(2 * forward, again'),
    ('a prompt is paid for once per completion',
     'pairs = layer_pairs(model, prompt, 0, rows)',
     'pairs = layer_pairs(model, prompt, 0, rows * samples)'),
    ('what is offloaded counts on the device', "'host' if away else kind",
     'kind'),
    ('a reference takes no room', "(shapes.step.recipe.kl != 'none')", '0'),
    ('what is not read is passed',
     'layouts is not None and id(leaf) not in layouts', 'False'),
    ('the tiles of an array are free', '-shape[i] % edge', '0'),
    ('the published policy is the trained one',
     "given['parameters'] = 0  # another copy", 'pass'),
  )),
  ('rlpost/planning/roofline.py', 'tests/planning/cost_test.py', (
    ('all limits count but memory',
     'seconds = max(compute, memory, links)', 'seconds = max(compute, links)'),
  )),
  ('rlpost/planning/report.py', 'tests/planning/plan_test.py::test_what_fits_'
   'alone_may_not_fit_beside_what_the_run_holds tests/planning/plan_test.py::'
   'test_the_cure_follows_the_largest_kind_of_bytes', (
    ('a program fits whatever the run holds beside it',
     "needed = verdict['bytes']['total'] + verdict['beside']",
     "needed = verdict['bytes']['total']"),
    ('the smallest kind of bytes decides the cure',
     'max(kinds, key=kinds.get)', 'min(kinds, key=kinds.get)'),
  )),
  ('rlpost/planning/compilation.py', 'tests/planning/plan_test.py::test_an_'
   'overflow_is_a_verdict_with_its_numbers tests/planning/plan_test.py::test_a_'
   'verdict_is_kept_by_the_hash_of_the_program', (
    ('a verdict serves every slice',
     "'\\n'.join((topology_name, version, stablehlo))",
     "'\\n'.join((version, stablehlo))"),
    ('an overflow has no limit', "limit = float(found[3])",
     "limit = float(found[1])"),
  )),
  ('rlpost/planning/plan.py', 'tests/planning/plan_test.py::test_a_program_'
   'that_takes_too_long_is_unknown_and_its_compiler_ended tests/planning/'
   'plan_test.py::test_the_search_screens_by_arithmetic_and_compiles_at_most_'
   'six', (
    ('unknown fits', "return all(v['fits'] for",
     "return all(v['fits'] is not False for"),
    ('a search compiles all that may fit', 'ranked[:MOST_COMPILED]', 'ranked'),
  )),
)
