"""One-line faults, each with the tests that should notice it."""

from typing import NamedTuple

from tools import (
  mutants_attention,
  mutants_context,
  mutants_generation,
  mutants_lengths,
  mutants_planning,
)


class Mutant(NamedTuple):
  """`old` is in `file` exactly once; `new` takes its place."""

  file: str
  old: str
  new: str
  tests: tuple[str, ...]
  says: str


# (file, its quickest tests, faults as (says, old, new)).
FAULTS = (
  ('experiments/launching.py', 'tests/experiments/launching_test.py::test_'
   'equal_config_resumes_and_steps_may_grow', (
    ('a resumed run may ask for fewer steps, not for more',
     'numbers and a <= b', 'numbers and a >= b'),
  )),
  ('experiments/launching.py', 'tests/experiments/launching_test.py::test_'
   'a_section_is_the_arguments_of_what_it_builds', (
    ('a config may set what the launcher supplies',
     'keywords - set(given), needed -', 'keywords, needed -'),
  )),
  ('experiments/launching.py', 'tests/experiments/launching_test.py::test_'
   'errors_become_exit_codes', (
    ('every failure has the same exit code',
     '_end(error, error.exit_code)', '_end(error, 1)'),
  )),
  ('rlpost/errors.py', 'tests/experiments/launching_test.py::test_'
   'errors_become_exit_codes', (
    ('a run stopped by a signal looks finished',
     'exit_code = 75', 'exit_code = 0'),
  )),
  # What the model computes.
  ('rlpost/ops/rope.py', 'tests/ops/rope_test.py', (
    ('the base of RoPE has no effect',
     'inverse = theta**-exponents', 'inverse = 10_000.0**-exponents'),
    ('RoPE turns the other way',
     '[first * cos - second * sin, second * cos + first * sin]',
     '[first * cos + second * sin, second * cos - first * sin]'),
    ('the gradient of RoPE turns with it',
     'angle[0], -angle[1]', 'angle[0], angle[1]'),
    ('YaRN leaves queries and keys unscaled',
     'mscale = 0.1 * math.log(scaling.factor) + 1.0', 'mscale = 1.0'),
  )),
  ('rlpost/ops/visibility.py', 'tests/ops/attention_test.py', (
    ('a completion does not see its prompt',
     '(own | parent) & (segment >= 0)', 'own & (segment >= 0)'),
    ('siblings see each other',
     'own = query.segment[:, :, None] == segment', 'own = segment >= 0'),
    ('a token does not see itself',
     '<= query.order[:, :, None]', '< query.order[:, :, None]'),
    ('a window is one token too wide',
     'query - key < rule.window', 'query - key <= rule.window'),
    ('positions run on over the documents of a row',
     'Where(order, order - start,', 'Where(order, order,'),
    ('padding is weighed with 0 but not blanked',
     'valid = segment_BT >= 0', 'valid = segment_BT >= -1'),
  )),
  ('rlpost/ops/attention.py', 'tests/ops/attention_test.py', (
    ('the gradient of the softmax leaves out its sum',
     '(x - mean) for w', 'x for w'),
    ('the window ends at the shared prompt',
     'visible(tail, head, rule).re', 'visible(tail, head).re'),
  )),
  ('rlpost/ops/logprobs.py', 'tests/ops/logprobs_test.py', (
    ('the gradient of the entropy is left out',
     'if not plain:', 'if False:'),
    ('the entropy has a wrong sign inside',
     'entropy = norm - (e * z)', 'entropy = norm + (e * z)'),
    ('the gradient misses the temperature',
     'd_z = (d_z / temperature[:, None])', 'd_z = d_z'),
    ('only the last chunk reaches the gradient of the head',
     'd if d_table is None else d_table + d, d_h', 'd, d_h'),
    ('0 times NaN gets into the gradient',
     'used = (g != 0) | (g_entropy != 0)', 'used = g == g'),
  )),
  ('rlpost/ops/sampling.py', 'tests/ops/sampling_test.py', (
    ('sampling ignores the temperature',
     'logits_VB / jnp.where(greedy, 1.0, temperature_B)[None]', 'logits_VB'),
    ('the second level of sampling starts at 0 again',
     'inside, goal - before)', 'inside, goal)'),
  )),
  ('rlpost/models/layers.py', 'tests/models/layers_test.py', (
    ('the gate and what it gates are swapped',
     'jax.nn.silu(gate) * up', 'jax.nn.silu(up) * gate'),
    ('the gradient of SwiGLU takes the gate for linear',
     's * (1 + gate * (1 - s))', 's'),
    ('the gradient of the norm takes the size for a constant',
     '(g - unit * jnp.mean(g * unit, -1, keepdims=True))', 'g'),
  )),
  ('rlpost/models/layers.py', 'tests/models/transformer_test.py::test_logits_'
   'equal_those_of_transformers', (
    ('the norm divides by the standard deviation',
     'jnp.mean(y * y, -1', 'jnp.var(y, -1'),
    ('keys are not rotated',
     'qk[:, :, H:], qkv', 'qkv[:, :, H : H + J], qkv'),
    ('a block forgets what it was given',
     'x_BTD = x_BTD + self.mlp(', 'x_BTD = self.mlp('),
  )),
  ('rlpost/models/transformer.py', 'tests/models/transformer_test.py::test_'
   'logits_equal_those_of_transformers', (
    ('the scaling of RoPE is ignored',
     'config.rope_theta, config.rope_scaling', 'config.rope_theta, None'),
    ('an untied head reads the embedding',
     "params.get('head/kernel', params['embed/table'])",
     "params['embed/table']"),
  )),
  # What is sampled.
  ('rlpost/rollouts/decode.py', 'tests/rollouts/decode_test.py::test_roots_'
   'groups_and_samples_draw_apart', (
    ('all samples of a prompt share a random key',
     'jax.random.fold_in(jax.random.fold_in(root, group), sample)',
     'jax.random.fold_in(root, group)'),
  )),
  ('rlpost/rollouts/decode.py', 'tests/rollouts/decode_test.py::test_answers_'
   'end_with_one_end_token_or_at_the_budget', (
    ('an answer may be one token longer than its budget',
     '(count >= start.budget)', '(count > start.budget)'),
  )),
  ('rlpost/rollouts/engine.py', 'tests/rollouts/decode_test.py::test_new_'
   'weights_never_meet_an_old_cache', (
    ('the cache of shared prefixes outlives its weights',
     'is not None and self._cache[0] == version:', 'is not None:'),
  )),
  ('rlpost/rollouts/engine.py', 'tests/rollouts/engine_test.py', (
    ('the end token is dropped',
     'tokens[b, :n].copy(),', 'tokens[b, : n - 1].copy(),'),
    ('a prompt that is too long is tried',
     '0 < len(request.suffix) <= config.prompt_len', '0 < len(request.suffix)'),
  )),
  ('rlpost/rollouts/collect.py', 'tests/rollouts/collect_test.py', (
    ('an answer gets the verdict of another',
     'zip(trajectories, verdicts.result(), strict',
     'zip(trajectories, verdicts.result()[::-1], strict'),
    ('log-probs stand one token too early',
     'logp[length:] = done.logp', 'logp[length - 1 : -1] = done.logp'),
  )),
  # What is learned from.
  ('rlpost/algorithms/advantages.py', 'tests/algorithms/advantages_test.py', (
    ('the variance in place of the standard deviation',
     '1.0, stats.std_G)', '1.0, stats.std_G**2)'),
    ('leave-one-out scales by the inverse',
     'stats.count_G / np.maximum(stats.count_G - 1, 1)',
     'np.maximum(stats.count_G - 1, 1) / stats.count_G'),
    ('an invalid verdict moves the baseline',
     'return valid_B & finite_B, int(', 'return finite_B, int('),
    ('rounding noise counts as a spread',
     'high - low <= threshold * scale', 'high - low <= 0 * scale'),
    ('GAE bootstraps from the value of a tool token',
     'next_value = np.where(sampled, value, next_value)', 'next_value = value'),
    ('KL in the reward pays for leaving the reference',
     '(-coefficient * (', '(coefficient * ('),
  )),
  ('rlpost/algorithms/policy_losses.py', 'tests/algorithms/policy_losses_'
   'test.py', (
    ('the two clips are swapped',
     'clipped_BK = jnp.clip(ratio_BK, 1 - clip_low, 1 + clip_high)',
     'clipped_BK = jnp.clip(ratio_BK, 1 - clip_high, 1 + clip_low)'),
    ('the optimistic side of the clip is kept',
     'gain_BK = jnp.minimum(', 'gain_BK = jnp.maximum('),
    ('the dual clip lifts good tokens too',
     'jnp.where(advantage_BK < 0, floor_BK, gain_BK)', 'floor_BK'),
    ('the sequence ratio loses its token gradient',
     'jnp.exp(stop(log_s_BK) + logp_BK - stop(logp_BK))', 'jnp.exp(log_s_BK)'),
    ('the weight of CISPO has a gradient',
     'weight_BK = stop(jnp.clip(ratio_BK, 1 - clip_low, 1 + clip_high))',
     'weight_BK = jnp.clip(ratio_BK, 1 - clip_low, 1 + clip_high)'),
    ('the entropy bonus punishes entropy',
     'return -entropy_BK', 'return entropy_BK'),
  )),
  ('rlpost/algorithms/slots.py', 'tests/algorithms/policy_losses_test.py::test_'
   'padding_never_matters', (
    ('padding is multiplied by 0 and not left out',
     'jnp.where(mask_BK > 0, x, jnp.zeros_like(x)) for x',
     '(x * mask_BK).astype(x.dtype) for x'),
  )),
  ('rlpost/algorithms/divergences.py', 'tests/algorithms/divergences_test.py', (
    ('k3 estimates the other direction',
     'jnp.expm1(-x_BK) + x_BK', 'jnp.expm1(x_BK) - x_BK'),
    ('the KL loss descends its own estimate',
     'inside_BK, weight_BK * x_BK,',
     'inside_BK, -weight_BK * jnp.expm1(-x_BK),'),
    ('a clamped KL leaks a gradient',
     'jnp.where(inside_BK, weight_BK * x_BK, 0.0)', 'weight_BK * x_BK'),
  )),
  ('rlpost/algorithms/aggregation.py', 'tests/algorithms/aggregation_test.py::'
   'test_equals_the_closed_form_in_any_layout', (
    ('padding is in the denominator',
     'return jnp.sum((mask_BK > 0).astype(jnp.float32))',
     'return jnp.float32(mask_BK.size)'),
    ('a long answer weighs more in the mean over sequences',
     'trained_BK / jnp.maximum(length_BK, 1)', 'trained_BK'),
  )),
  ('rlpost/algorithms/corrections.py', 'tests/algorithms/corrections_test.py', (
    ('the correction is sampler over trainer',
     '(old_logp_BK - behavior_logp_BK)', '(behavior_logp_BK - old_logp_BK)'),
    ('the correction carries a gradient',
     'return jax.lax.stop_gradient(', 'return ('),
  )),
  ('rlpost/algorithms/recipes.py', 'tests/algorithms/corrections_test.py tests/'
   'algorithms/recipes_test.py', (
    ('a dropped sequence is still exponentiated',
     'jnp.where(weight_BK > 0, batch.mask, jnp.zeros_like(batch.mask))',
     'batch.mask'),
    ('the coefficient of the KL is forgotten',
     '(recipe.kl_coefficient * scale_BK * kl_BK,', '(scale_BK * kl_BK,'),
  )),
  ('rlpost/algorithms/dynamic_sampling.py', 'tests/algorithms/dynamic_sampling_'
   'test.py', (
    ('one group more than the cap is drawn',
     'max_factor * wanted) - drawn', 'max_factor * wanted) - drawn + 1'),
    ('a short batch moves the policy as far as a full one',
     'Selection(groups, len(groups) / wanted)', 'Selection(groups, 1.0)'),
  )),
  ('rlpost/algorithms/overlong.py', 'tests/algorithms/overlong_test.py', (
    ('only answers beyond the budget are punished',
     '- (max_tokens - buffer_tokens)', '- max_tokens'),
    ('a cut-off answer stays in the baseline',
     'np.asarray(valid_B, bool) & ended_B', 'np.asarray(valid_B, bool)'),
  )),
  ('rlpost/algorithms/diagnostics.py', 'tests/algorithms/diagnostics_test.py', (
    ('a logged sum is divided by the count of its first part',
     'count=first.count + second.count', 'count=first.count'),
  )),
  # What is asked, and what an answer is worth.
  ('rlpost/data/plan.py', 'tests/data/plan_test.py', (
    ('the carried remainder is lost',
     "['carry'] = carry", "['carry'] = 0 * carry"),
    ('the floor of a share is ignored',
     'free_D & (share_D < least)', 'free_D & (share_D < 0)'),
    ('the same random key at every step',
     "'step', self.step, size", "'step', 0, size"),
    ('a resumed plan draws the same tasks again',
     "self.step = state['step']", 'self.step = 0'),
  )),
  ('rlpost/data/packing.py', 'tests/data/packing_test.py', (
    ('a token is predicted from itself',
     'size - 1, start + offset - 1', 'size - 1, start + offset'),
    ('the first token is predicted from padding',
     'offset == 0, size - 1,', 'offset == 0, start - 1,'),
    ('positions count the padding of the prompt',
     '= size + np.arange(len(tokens))', '= start + np.arange(len(tokens))'),
    ('an invalid verdict trains',
     '      trajectory.verdict is None or trajectory.verdict.valid',
     '      True'),
    ('the temperature of the sampler is lost',
     'slots] = trajectory.temperature', 'slots] = 1'),
    ('a document predicts from one token too far back',
     'token + index - 1', 'token + index - 2'),
  )),
  ('rlpost/data/chat.py', 'tests/data/chat_test.py', (
    ('the loss mask begins one token early',
     '(offsets[:, 1] > start)', '(offsets[:, 1] >= start)'),
    ('the end token is cut from what is trained',
     'mask[last + 1 : end + 1]', 'mask[last : end + 1]'),
  )),
  ('rlpost/data/tokenizer.py', 'tests/data/tokenizer_test.py', (
    ('only a token that is a line break ends an answer',
     '(text in t for t in', '(text == t for t in'),
  )),
  ('rlpost/data/pipeline.py', 'tests/data/pipeline_test.py::test_set_state_'
   'goes_back_and_forth_in_one_stream', (
    ('a resumed stream starts from the first record',
     "{'next_index': self._cursor}", "{'next_index': 0}"),
  )),
  ('rlpost/domains/domain.py', 'tests/domains/domains_test.py::test_pools_are_'
   'disjoint_for_many_seeds[tiny_add]', (
    ('training tasks may be held-out ones',
     'if task.content_id not in self.refused:', 'if task.content_id:'),
  )),
  ('rlpost/domains/domain.py', 'tests/domains/domains_test.py::test_few_items_'
   'are_split_by_item_whatever_the_seed', (
    ('items of a small domain train and are held out',
     'train = few[ends[1] :]', 'train = few[ends[0] :]'),
  )),
  ('rlpost/domains/domain.py', 'tests/domains/domains_test.py::test_training_'
   'tasks_have_random_access[add]', (
    ('every index is the same task',
     'seed, index, attempt)', 'seed, 0, attempt)'),
  )),
  ('rlpost/types.py', 'tests/types_test.py', (
    ('a task in capitals is another task',
     '.strip().casefold()', '.strip()'),
  )),
  ('rlpost/environments/single_turn.py', 'tests/environments/single_turn_'
   'test.py', (
    ('what comes after the stop is the answer',
     'text.split(stop, 1)[0]', 'text.split(stop, 1)[-1]'),
  )),
  ('rlpost/rewards/checkers.py', 'tests/rewards/checkers_test.py', (
    ("a broken checker is the policy's fault",
     "return {'status': 'infra', 'reason': f'the checker is broken: {reason}'}",
     'return _zero(reason)'),
    ('an unreadable answer is our fault',
     '    if fine:', '    if not fine:'),
    ('true is as good as 1',
     'json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)',
     'a == b'),
  )),
  ('rlpost/rewards/scoring.py', 'tests/rewards/scoring_test.py::test_stop_'
   'reasons_and_missing_gold', (
    ("a cut-off answer is nobody's fault",
     "'value', 0.0, reason='cut off'", "'invalid', reason='cut off'"),
  )),
  ('rlpost/rewards/scoring.py', 'tests/rewards/scoring_test.py::test_only_the_'
   'guilty_item_is_infra', (
    ('a checker that died gives a reward of 0',
     "Verdict('infra', reason=reason)", "Verdict('value', reason=reason)"),
  )),
  ('rlpost/rewards/normalize.py', 'tests/rewards/normalize_test.py', (
    ('all domains share one scale',
     "        domain, {'moment': 0.0,", "        'domain', {'moment': 0.0,"),
    ('the variance scales rewards',
     "entry['weight']) ** (1 / self._power)", "entry['weight'])"),
    ('the floor of a scale is ignored',
     'max(spread, self._floor)', 'spread'),
  )),
  ('rlpost/workers.py', 'tests/workers_test.py::test_environment_is_an_allow_'
   'list', (
    ('a checker sees the secrets of the parent',
     '{k: os.environ[k] for k in ENV_ALLOWED if k in os.environ}',
     'dict(os.environ)'),
  )),
  # How it is learned, kept and reported.
  ('rlpost/training/credit.py', 'tests/training/credit_test.py', (
    ('a short batch weighs less where nothing more was drawn',
     'weight if recipe.dynamic_sampling else 1.0', 'weight'),
    ('a penalty goes to the next sample',
     '(t.group, t.sample)', '(t.group, t.sample + 1)'),
  )),
  ('rlpost/training/step.py', 'tests/training/step_test.py::test_gradient_'
   'equals_finite_differences_of_the_reference', (
    ('only the last micro-batch is learned from',
     'jax.tree.map(jnp.add, (grads, terms), carry[:2])', 'grads, terms'),
    ('each micro-batch divides by its own size',
     'values_BK.sum() / denominators[unit]', 'values_BK.mean()'),
  )),
  ('rlpost/training/step.py', 'tests/training/step_test.py::test_only_'
   'trainable_parameters_move_along_minus_the_gradient', (
    ('short gradients are stretched to the norm',
     'jnp.minimum(1.0, config.clip_norm / (norm + 1e-6))',
     'config.clip_norm / (norm + 1e-6)'),
  )),
  ('rlpost/training/step.py', 'tests/training/step_test.py::test_slot_i_holds_'
   'the_log_prob_of_token_i', (
    ('the trainer forgets the temperature',
     'rows.temperature, config', 'rows.temperature * 0 + 1, config'),
  )),
  ('rlpost/training/state.py', 'tests/training/state_test.py', (
    ('AdamW decays the scales of norms',
     "not k.endswith('scale')", 'True'),
    ('the decay ends one update late',
     'total_steps - warmup_steps - 1', 'total_steps - warmup_steps'),
  )),
  ('rlpost/sharding.py', 'tests/sharding_test.py', (
    ('rows need not divide over fsdp',
     "mesh.shape['data'] * mesh.shape['fsdp']", "mesh.shape['data']"),
  )),
  ('rlpost/training/loop.py', 'tests/training/loop_test.py::test_kl_in_the_'
   'reward_costs_each_answer_its_own_log_ratio', (
    ('a run pays for leaving the reference',
     '= -run.recipe.kl_coefficient', '= run.recipe.kl_coefficient'),
  )),
  ('rlpost/training/curriculum.py', 'tests/training/curriculum_test.py', (
    ('solved domains are worth most',
     'a * b / ((a + b) * (a + b + 1))', 'a / (a + b)'),
    ('the share of exploration is ignored',
     'self._explore / size + rest * u / total', 'u / total'),
  )),
  ('rlpost/training/digest.py', 'tests/training/digest_test.py', (
    ('the digest does not see the dtype', '*leaf[:3],', '*leaf[:2],'),
    ('the digest depends on the clock',
     'in sorted(leaves.items()) if k != TIMING}',
     'in sorted(leaves.items())}'),
  )),
  ('rlpost/training/checkpoint.py', 'tests/training/checkpoint_test.py::test_'
   'one_flipped_bit_of_a_weight_is_found', (
    ('a damaged weight is restored in silence',
     '    if old != new:', '    if old.shape != new.shape:'),
  )),
  ('rlpost/training/checkpoint.py', 'tests/training/checkpoint_test.py::test_'
   'latest_and_best_are_kept', (
    ('the worst step is kept as the best', 'best = max((', 'best = min(('),
  )),
  ('rlpost/training/targeting.py', 'tests/training/targeting_test.py::test_'
   'another_model_is_not_damage', (
    ('a restore casts to another dtype',
     'wanted.get(path) != found.get(path)',
     '(path in wanted) != (path in found)'),
  )),
  ('rlpost/training/metrics.py', 'tests/training/metrics_test.py', (
    ('the cut-back drops the line of the restored step',
     "['step'] <= step:", "['step'] < step:"),
    ('CPU seconds leave out living children',
     'total + sum(map(_living_s, _children(os.getpid())))', 'total'),
    ('transcripts show the log-probs of the prompt',
     'trajectory.logp[sampled]', 'trajectory.logp[~sampled]'),
  )),
  ('rlpost/evaluation/statistics.py', 'tests/evaluation/statistics_test.py', (
    ('samples of one task count as independent',
     'size = min(size, mean * (1 - mean) / max(variance, 1e-300))',
     'size = float(total)'),
    ('Holm steps up', 'max(most, min(1.0, (len(p) - rank) * p[name]))',
     'min(1.0, (len(p) - rank) * p[name])'),
    ('a drawn p-value may be 0', 'return (1 + hits)', 'return hits'),
  )),
  ('rlpost/weights/gguf.py', 'tests/weights/gguf_test.py', (
    ('rotary rows stay interleaved',
     'if slot.rotary_heads:', 'if slot.rotary_heads < 0:'),
    ('Q4_0 is off by one step', '  out -= 8', '  out -= 7'),
  )),
  ('rlpost/weights/hf_config.py', 'tests/weights/safetensors_test.py', (
    ('the base of RoPE in a config.json is ignored',
     "data.get('rope_theta', 10_000.0)", '10_000.0'),
  )),
)

MUTANTS = tuple(
  Mutant(file, old, new, tuple(tests.split()), says)
  for file, tests, faults in (
    *FAULTS,
    *mutants_attention.FAULTS,
    *mutants_context.FAULTS,
    *mutants_generation.FAULTS,
    *mutants_lengths.FAULTS,
    *mutants_planning.FAULTS,
  )
  for says, old, new in faults
)
