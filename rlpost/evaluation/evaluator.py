"""Held-out results per domain: greedy and sampled, with intervals."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlpost import types
from rlpost.evaluation import report, statistics
from rlpost.rollouts.collect import Collector, Episode

GREEDY = 0  # sample id of the greedy completion


class Result(NamedTuple):
  """Verdicts of one evaluation.

  `sampled` and `greedy`: {domain: {content id: [verdicts]}}.
  """

  sampled: Mapping[str, Mapping[str, Sequence[types.Verdict]]]
  greedy: Mapping[str, Mapping[str, Sequence[types.Verdict]]]


def evaluate(
    collector: Collector, params, version: int,
    tasks: Mapping[str, Sequence[types.Task]], environments: Mapping[str, Any],
    *, samples: int, temperature: float, root, greedy=True, progress=None,
) -> Result:
  """Attempts every task `samples` times at `temperature`, and once greedily.

  The random streams depend on `root` and the task's place alone, so that two
  evaluations with the same tasks are paired.
  """
  plan = tuple((i, temperature) for i in range(1, samples + 1))
  if greedy:
    plan = ((GREEDY, 0.0), *plan)
  episodes = []
  for name in sorted(tasks):
    for task in tasks[name]:
      episodes.append(
          Episode(len(episodes), task, environments[name], plan)
      )
  result = Result({n: {} for n in tasks}, {n: {} for n in tasks})
  groups = collector.collect(
      params, version, episodes, root, progress=progress
  )
  for group in groups:
    name, key = group.task.domain, group.task.content_id
    for t in group.trajectories:
      side = result.greedy if t.sample == GREEDY else result.sampled
      side[name].setdefault(key, []).append(t.verdict)
  return result


def estimates(verdicts: Mapping) -> dict[str, statistics.Estimate]:
  """{domain: estimate}."""
  return {n: statistics.summarise(v) for n, v in sorted(verdicts.items())}


def to_json(result: Result) -> dict:
  """A result as `report` reads it, with every verdict under `tasks`."""
  sides = {report.SAMPLED: result.sampled, report.GREEDY: result.greedy}
  out = {}
  for kind, verdicts in sides.items():
    if any(verdicts.values()):
      out[kind] = report.result_json(estimates(verdicts))
      out[kind]['tasks'] = {
          name: {
              key: [v.value if v.valid else v.status for v in found]
              for key, found in tasks.items()
          }
          for name, tasks in verdicts.items()
      }
  return out
