"""One question, one answer: the trivial environment.

Three forms of a prompt:

  plain  the shots and the question as `Question: ... / Answer: ...` blocks,
         for base models; a line break ends the answer
  bare   the question alone, for tiny models; a line break ends the answer
  chat   system and user messages for a chat template; the end token ends it

The plain prompt is cut behind its last `Question:`, because that is where the
tasks of a domain begin to differ and because byte-level BPE never merges across
it: the two parts tokenised apart are the whole tokenised at once.

Scoring goes through whatever has `Scorer.score`. Without one, `step` leaves the
verdict open and `artifacts` holds the item for a batch; callers that decode
many rows do that (`answer` and `item` are plain functions for them). An
environment of several turns has the same three methods and simply does not end
at its first step.
"""

import asyncio
import dataclasses
from collections.abc import Sequence

from rlpost import errors, types
from rlpost.environments.environment import Action, State, Step
from rlpost.rewards import scoring

FORMS = ('plain', 'bare', 'chat')


class SingleTurn:
  """Renders tasks of one domain and scores their one answer.

  Args:
    shots: solved examples; their gold answers are shown.
    form: 'plain', 'bare' or 'chat'.
    instruction: the system message of the chat form.
    scorer: scores at once; None leaves it to the caller.

  Attributes:
    form: as given.
    prefix: text that the prompts of all tasks share.
    stop: texts that end an answer, beside the model's end token.
  """

  def __init__(
    self,
    *,
    shots: Sequence[types.Task] = (),
    form: str = 'plain',
    instruction: str = '',
    scorer: scoring.Scorer | None = None,
  ):
    if form not in FORMS:
      raise errors.InputError(f'{form=} must be one of {", ".join(FORMS)}.')
    if form == 'bare' and shots:
      raise errors.InputError(
        f'The bare form shows no examples, {len(shots)} shots were given; '
        "use form='plain' or no shots."
      )
    self.form = form
    self._shots = tuple(shots)
    self._instruction = instruction
    self._scorer = scorer
    blocks = [
      f'Question: {_question(shot)}\nAnswer: {shot.checker["gold"]}\n\n'
      for shot in shots
    ]
    self.prefix = ''.join(blocks) + 'Question:' if form == 'plain' else ''
    self.stop = () if form == 'chat' else ('\n',)

  def render(self, task: types.Task, seed: int = 0) -> State:
    """The first state: the prompt in this environment's form."""
    question = _question(task)
    suffix, messages = '', ()
    if self.form == 'plain':
      suffix = f' {question}\nAnswer:'
    elif self.form == 'bare':
      suffix = question
    else:
      messages = tuple(m.to_json() for m in self._chat(question))
    return State(
      task=task.to_json(),
      seed=seed,
      prefix=self.prefix,
      suffix=suffix,
      stop=self.stop,
      messages=messages,
    )

  def solution(self, task: types.Task) -> str:
    """What a policy that knows the answer writes after the prompt.

    It ends with the stop; in chat form the template adds the end token.
    """
    gold = task.checker['gold']
    if self.form == 'chat':
      return gold
    return f' {gold}\n' if self.form == 'plain' else f'{gold}\n'

  def answer(self, text: str) -> str:
    """The answer in the policy's text: up to the first stop, stripped."""
    for stop in self.stop:
      # A leading stop ends an empty answer: white space is not skipped first.
      text = text.split(stop, 1)[0]
    return text.strip()

  def item(self, task: types.Task, action: Action) -> scoring.Item:
    """What the scorer needs to judge this action."""
    return scoring.Item(
      task.checker, self.answer(action.text), action.stop_reason
    )

  async def reset(self, task: types.Task, seed: int) -> State:
    return self.render(task, seed)

  async def step(self, state: State, action: Action) -> Step:
    """Ends the episode; raises ValueError when it has ended before."""
    if state.turn:
      raise ValueError(f'turn {state.turn}: a single turn has ended already.')
    item = self.item(types.Task.from_json(state.task), action)
    verdict = None
    if self._scorer is not None:
      scored = await asyncio.to_thread(self._scorer.score, [item])
      verdict = scored[0]
    return Step(
      state=dataclasses.replace(state, turn=1),
      rewards=dict(verdict.components) if verdict else {},
      verdict=verdict,
      stop_reason=action.stop_reason,
      artifacts={'item': item._asdict()},
    )

  async def close(self, state: State) -> None:
    del state  # nothing is held

  def _chat(self, question: str) -> list[types.Message]:
    turns = []
    if self._instruction:
      turns.append(types.Message.of('system', self._instruction))
    for shot in self._shots:
      turns.append(types.Message.of('user', _question(shot)))
      turns.append(types.Message.of('assistant', shot.checker['gold']))
    return [*turns, types.Message.of('user', question)]


def _question(task: types.Task) -> str:
  return task.messages[-1].text
