"""Single turn: the prompt's text, the answer's text, and the protocol."""

import asyncio
import json

import pytest

from rlpost import errors, types, workers
from rlpost.environments.environment import Action, State
from rlpost.environments.single_turn import SingleTurn
from rlpost.rewards import scoring


def _task(question, gold):
  return types.Task(
    'd',
    (types.Message.of('user', question),),
    {'name': 'exact', 'gold': gold},
  )


SHOTS = (_task('1 + 1 =', '2'), _task('2 + 3 =', '5'))
TASK = _task('4 + 4 =', '8')


def test_plain_prompt_is_the_few_shot_text():
  env = SingleTurn(shots=SHOTS)
  state = env.render(TASK)
  assert state.prefix + state.suffix == (
    'Question: 1 + 1 =\nAnswer: 2\n\n'
    'Question: 2 + 3 =\nAnswer: 5\n\n'
    'Question: 4 + 4 =\nAnswer:'
  )
  assert state.stop == ('\n',)
  # All tasks share the prefix, and it shows nothing of any of them.
  assert env.render(_task('7 + 1 =', '8')).prefix == state.prefix


@pytest.mark.parametrize('form', ['plain', 'bare', 'chat'])
def test_gold_is_never_rendered(form):
  env = SingleTurn(form=form, instruction='Be brief.')
  state = env.render(_task('What is hidden?', 'SECRET'))
  seen = json.dumps([state.prefix, state.suffix, state.messages])
  assert 'hidden' in seen and 'SECRET' not in seen


def test_bare_and_chat_forms():
  bare = SingleTurn(form='bare').render(_task('rev ab=', 'ba'))
  assert (bare.prefix, bare.suffix, bare.stop) == ('', 'rev ab=', ('\n',))
  chat = SingleTurn(form='chat', shots=SHOTS[:1], instruction='Be brief.')
  state = chat.render(TASK)
  turns = [(m['role'], m['parts'][0]['text']) for m in state.messages]
  assert turns == [
    ('system', 'Be brief.'),
    ('user', '1 + 1 ='),
    ('assistant', '2'),
    ('user', '4 + 4 ='),
  ]
  assert state.prefix == state.suffix == '' and state.stop == ()
  with pytest.raises(errors.InputError, match='2 shots'):
    SingleTurn(form='bare', shots=SHOTS)
  with pytest.raises(errors.InputError, match='plain, bare, chat'):
    SingleTurn(form='haiku')


def test_answer_ends_at_the_first_line_break():
  env = SingleTurn()
  assert env.answer(' 8\nQuestion: 1') == '8'
  assert env.answer('\n8') == ''  # not the next line
  assert env.answer(' 8 ') == '8'
  assert SingleTurn(form='chat').answer('a\nb ') == 'a\nb'


def test_state_survives_json():
  for form in ('plain', 'chat'):
    state = SingleTurn(form=form).render(TASK, seed=3)
    assert State.from_json(json.loads(json.dumps(state.to_json()))) == state


def test_episode_with_and_without_a_scorer():
  async def play(env, action):
    state = await env.reset(TASK, 0)
    step = await env.step(state, action)
    with pytest.raises(ValueError, match='ended'):
      await env.step(step.state, action)
    await env.close(step.state)
    return step

  with workers.WorkerPool(1) as pool:
    env = SingleTurn(shots=SHOTS, scorer=scoring.Scorer(pool))
    right = asyncio.run(play(env, Action(' 8\nQuest', (5, 8))))
    cut = asyncio.run(play(env, Action(' 8', (5, 8), 'length')))
  assert right.verdict.value == 1 and right.stop_reason == 'stop'
  assert cut.verdict.value == 0 and cut.stop_reason == 'length'
  assert cut.verdict.reason == 'cut off'
  later = asyncio.run(play(SingleTurn(), Action(' 8', (5, 8))))
  assert later.verdict is None
  item = json.loads(json.dumps(later.artifacts['item']))
  assert item == {
    'checker': {'name': 'exact', 'gold': '8'},
    'text': '8',
    'stop_reason': 'stop',
  }
