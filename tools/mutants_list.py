"""One-line faults, each with the tests that should notice it."""

from typing import NamedTuple


class Mutant(NamedTuple):
  """`old` is in `file` exactly once; `new` takes its place."""

  file: str
  old: str
  new: str
  tests: tuple[str, ...]
  says: str


# (file, its quickest tests, faults as (says, old, new)).
FAULTS = (
  ('experiments/launching.py',
   'tests/experiments/launching_test.py::test_equal_config_resumes_and_steps_'
   'may_grow', (
    ('a resumed run may ask for fewer steps, not for more',
     'numbers and a <= b', 'numbers and a >= b'),
  )),
  ('experiments/launching.py',
   'tests/experiments/launching_test.py::test_a_section_is_the_arguments_of_'
   'what_it_builds', (
    ('a config may set what the launcher supplies',
     'keywords - set(given), needed - set(given)',
     'keywords, needed - set(given)'),
  )),
  ('experiments/launching.py',
   'tests/experiments/launching_test.py::test_errors_become_exit_codes', (
    ('every failure has the same exit code',
     '_end(error, error.exit_code)', '_end(error, 1)'),
  )),
  ('rlpost/errors.py',
   'tests/experiments/launching_test.py::test_errors_become_exit_codes', (
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
    ('YaRN leaves queries and keys unscaled',
     'mscale = 0.1 * math.log(scaling.factor) + 1.0', 'mscale = 1.0'),
  )),
  ('rlpost/ops/visibility.py',
   'tests/ops/attention_test.py::test_visible_is_the_pairwise_rule', (
    ('a completion does not see its prompt',
     'seen = (own | parent) & (segment >= 0)', 'seen = own & (segment >= 0)'),
    ('siblings see each other',
     'own = query.segment[:, :, None] == segment', 'own = segment >= 0'),
    ('a token does not see itself',
     'seen &= key.order[:, None, :] <= query.order[:, :, None]',
     'seen &= key.order[:, None, :] < query.order[:, :, None]'),
    ('a window is one token too wide',
     'seen &= distance < window', 'seen &= distance <= window'),
  )),
  ('rlpost/ops/visibility.py',
   'tests/ops/attention_test.py::test_causal_describes_contiguous_documents', (
    ('positions run on over the documents of a row',
     'return Where(order, order - start,', 'return Where(order, order,'),
  )),
  ('rlpost/ops/visibility.py',
   'tests/ops/attention_test.py::test_poisoned_padding_changes_nothing', (
    ('padding is weighed with 0 but not blanked',
     'valid = segment_BT >= 0', 'valid = segment_BT >= -1'),
  )),
  ('rlpost/ops/attention.py',
   'tests/ops/attention_test.py::test_decode_attention_equals_dense', (
    ('decoding forgets to scale the scores',
     'q = q_BHP.reshape(B, J, G, P) * jnp.asarray(P**-0.5, q_BHP.dtype)',
     'q = q_BHP.reshape(B, J, G, P)'),
  )),
  ('rlpost/ops/attention.py',
   'tests/ops/attention_test.py::test_shared_prefix_layout_equals_dense', (
    ('the window ends at the shared prompt',
     'seen = [visible(tail, head, window), seen_own]',
     'seen = [visible(tail, head, None), seen_own]'),
  )),
  ('rlpost/ops/logprobs.py',
   'tests/ops/logprobs_test.py::test_any_chunk_equals_whole_logits', (
    ('the entropy has a wrong sign inside',
     'entropy = norm - (e * z).sum(1) / total',
     'entropy = norm + (e * z).sum(1) / total'),
  )),
  ('rlpost/ops/logprobs.py',
   'tests/ops/logprobs_test.py::test_gradients_equal_autodiff_of_log_softmax', (
    ('the gradient misses the temperature',
     'd_z = (d_z / temperature[:, None]).astype(h.dtype)',
     'd_z = d_z.astype(h.dtype)'),
    ('only the last chunk reaches the gradient of the head',
     'return d if d_table is None else d_table + d, d_h', 'return d, d_h'),
  )),
  ('rlpost/ops/logprobs.py',
   'tests/ops/logprobs_test.py::test_poisoned_rows_without_cotangent_change_'
   'nothing', (
    ('0 times NaN gets into the gradient',
     'used = (g != 0) | (g_entropy != 0)', 'used = g == g'),
  )),
  ('rlpost/ops/sampling.py', 'tests/ops/sampling_test.py', (
    ('sampling ignores the temperature',
     'scaled = logits_VB / jnp.where(greedy, 1.0, temperature_B)[None]',
     'scaled = logits_VB'),
    ('the second level of sampling starts at 0 again',
     'jnp.cumsum(inside, 0), inside, goal - before)',
     'jnp.cumsum(inside, 0), inside, goal)'),
  )),
  # What is learned from.
  ('rlpost/algorithms/advantages.py', 'tests/algorithms/advantages_test.py', (
    ('the variance in place of the standard deviation',
     'std_G = np.where(stats.flat_G, 1.0, stats.std_G)',
     'std_G = np.where(stats.flat_G, 1.0, stats.std_G**2)'),
    ('leave-one-out scales by the inverse',
     'factor_G = stats.count_G / np.maximum(stats.count_G - 1, 1)',
     'factor_G = np.maximum(stats.count_G - 1, 1) / stats.count_G'),
    ('an invalid verdict moves the baseline',
     'return valid_B & finite_B, int(', 'return finite_B, int('),
    ('rounding noise counts as a spread',
     'high - low <= threshold * scale', 'high - low <= 0 * scale'),
    ('GAE bootstraps from the value of a tool token',
     'next_value = np.where(sampled, value, next_value)', 'next_value = value'),
    ('KL in the reward pays for leaving the reference',
     '(-coefficient * (behavior_logp - ref_logp))',
     '(coefficient * (behavior_logp - ref_logp))'),
  )),
  ('rlpost/algorithms/policy_losses.py',
   'tests/algorithms/policy_losses_test.py', (
    ('the two clips are swapped',
     'clipped_BK = jnp.clip(ratio_BK, 1 - clip_low, 1 + clip_high)',
     'clipped_BK = jnp.clip(ratio_BK, 1 - clip_high, 1 + clip_low)'),
    ('the optimistic side of the clip is kept',
     'jnp.minimum(ratio_BK * advantage_BK, clipped_BK * advantage_BK)',
     'jnp.maximum(ratio_BK * advantage_BK, clipped_BK * advantage_BK)'),
    ('the dual clip lifts good tokens too',
     'gain_BK = jnp.where(advantage_BK < 0, floor_BK, gain_BK)',
     'gain_BK = floor_BK'),
    ('the sequence ratio loses its token gradient',
     'return jnp.exp(stop(log_s_BK) + logp_BK - stop(logp_BK))',
     'return jnp.exp(log_s_BK)'),
    ('the weight of CISPO has a gradient',
     'weight_BK = stop(jnp.clip(ratio_BK, 1 - clip_low, 1 + clip_high))',
     'weight_BK = jnp.clip(ratio_BK, 1 - clip_low, 1 + clip_high)'),
    ('the entropy bonus punishes entropy',
     'return -entropy_BK', 'return entropy_BK'),
  )),
  ('rlpost/algorithms/slots.py',
   'tests/algorithms/policy_losses_test.py::test_padding_never_matters', (
    ('padding is multiplied by 0 and not left out',
     'jnp.where(mask_BK > 0, x, jnp.zeros_like(x)) for x',
     '(x * (mask_BK > 0)).astype(x.dtype) for x'),
  )),
  ('rlpost/algorithms/divergences.py', 'tests/algorithms/divergences_test.py', (
    ('k3 estimates the other direction',
     'return jnp.expm1(-x_BK) + x_BK', 'return jnp.expm1(x_BK) - x_BK'),
    ('the KL loss descends its own estimate',
     'slope_BK = jnp.where(inside_BK, weight_BK * x_BK, 0.0)',
     'slope_BK = jnp.where(inside_BK, -weight_BK * jnp.expm1(-x_BK), 0.0)'),
    ('a clamped KL leaks a gradient',
     'slope_BK = jnp.where(inside_BK, weight_BK * x_BK, 0.0)',
     'slope_BK = weight_BK * x_BK'),
  )),
  ('rlpost/algorithms/aggregation.py',
   'tests/algorithms/aggregation_test.py::test_equals_the_closed_form_in_any_'
   'layout', (
    ('padding is in the denominator',
     'return jnp.sum((mask_BK > 0).astype(jnp.float32))',
     'return jnp.float32(mask_BK.size)'),
    ('a long answer weighs more in the mean over sequences',
     'return trained_BK / jnp.maximum(length_BK, 1)', 'return trained_BK'),
  )),
  ('rlpost/algorithms/corrections.py',
   'tests/algorithms/corrections_test.py', (
    ('the correction is sampler over trainer',
     'stop_gradient(old_logp_BK - behavior_logp_BK)',
     'stop_gradient(behavior_logp_BK - old_logp_BK)'),
    ('the correction carries a gradient',
     'return jax.lax.stop_gradient(old_logp_BK - behavior_logp_BK)',
     'return old_logp_BK - behavior_logp_BK'),
  )),
  ('rlpost/algorithms/recipes.py',
   'tests/algorithms/corrections_test.py tests/algorithms/recipes_test.py', (
    ('a dropped sequence is still exponentiated',
     'mask_BK = jnp.where(weight_BK > 0, batch.mask, '
     'jnp.zeros_like(batch.mask))', 'mask_BK = batch.mask'),
    ('the coefficient of the KL is forgotten',
     "terms['kl'] = (recipe.kl_coefficient * scale_BK * kl_BK, unit)",
     "terms['kl'] = (scale_BK * kl_BK, unit)"),
  )),
  ('rlpost/algorithms/dynamic_sampling.py',
   'tests/algorithms/dynamic_sampling_test.py', (
    ('drawing has no cap',
     'room = math.ceil(max_factor * wanted) - drawn', 'room = 10**9'),
    ('a short batch moves the policy as far as a full one',
     'return Selection(groups, len(groups) / wanted)',
     'return Selection(groups, 1.0)'),
  )),
  ('rlpost/algorithms/overlong.py', 'tests/algorithms/overlong_test.py', (
    ('only answers beyond the budget are punished',
     '- (max_tokens - buffer_tokens)', '- max_tokens'),
    ('a cut-off answer stays in the baseline',
     'return np.asarray(valid_B, bool) & ended_B',
     'return np.asarray(valid_B, bool)'),
  )),
  ('rlpost/algorithms/diagnostics.py', 'tests/algorithms/diagnostics_test.py', (
    ('a logged sum is divided by the count of its first part',
     'name: (total + second.sums[name][0], count + second.sums[name][1])',
     'name: (total + second.sums[name][0], count)'),
  )),
  # What is asked, and what an answer is worth.
  ('rlpost/data/plan.py', 'tests/data/plan_test.py', (
    ('the carried remainder is lost',
     "self._domains[self.names[index]]['carry'] = carry",
     "self._domains[self.names[index]]['carry'] = 0 * carry"),
    ('the floor of a share is ignored',
     'free_D & (share_D < least)', 'free_D & (share_D < 0)'),
    ('the same random key at every step',
     "_draws(self._seed, 'step', self.step, size + prompts)",
     "_draws(self._seed, 'step', 0, size + prompts)"),
    ('every epoch has the same order',
     "_draws(self._seed, f'order/{domain}', epoch, size)",
     "_draws(self._seed, f'order/{domain}', 0, size)"),
    ('a resumed plan draws the same tasks again',
     "self.step = state['step']", 'self.step = 0'),
  )),
  ('rlpost/data/packing.py', 'tests/data/packing_test.py', (
    ('a token is predicted from itself',
     'offset == 0, size - 1, start + offset - 1',
     'offset == 0, size - 1, start + offset'),
    ('the first token is predicted from padding',
     'offset == 0, size - 1, start + offset - 1',
     'offset == 0, start - 1, start + offset - 1'),
    ('positions count the padding of the prompt',
     'batch.position[b, at] = size + np.arange(len(tokens))',
     'batch.position[b, at] = start + np.arange(len(tokens))'),
    ('an invalid verdict trains',
     '      trajectory.verdict is None or trajectory.verdict.valid',
     '      True'),
    ('the sampler temperature is lost',
     'batch.temperature[b, slots] = trajectory.temperature',
     'batch.temperature[b, slots] = 1'),
    ('a document predicts from one token too far back',
     'batch.predictor[b, at] = token + index - 1',
     'batch.predictor[b, at] = token + index - 2'),
  )),
  ('rlpost/data/chat.py', 'tests/data/chat_test.py', (
    ('the loss mask begins one token early',
     '(offsets[:, 1] > start) &', '(offsets[:, 1] >= start) &'),
    ('the end token is cut from what is trained',
     'mask[last + 1 : end + 1] = False', 'mask[last : end + 1] = False'),
  )),
  ('rlpost/data/tokenizer.py', 'tests/data/tokenizer_test.py', (
    ('only a token that is a line break ends an answer',
     '(text in t for t in self.token_texts)',
     '(text == t for t in self.token_texts)'),
  )),
  ('rlpost/data/pipeline.py',
   'tests/data/pipeline_test.py::test_set_state_goes_back_and_forth_in_one_'
   'stream', (
    ('a resumed stream starts from the first record',
     "self._iterator.set_state({'next_index': self._cursor})",
     "self._iterator.set_state({'next_index': 0})"),
  )),
  ('rlpost/domains/domain.py',
   'tests/domains/domains_test.py::test_pools_are_disjoint_for_many_seeds'
   '[tiny_add]', (
    ('training tasks may be held-out ones',
     'if task.content_id not in self.refused:',
     'if task.content_id is not None:'),
  )),
  ('rlpost/domains/domain.py',
   'tests/domains/domains_test.py::test_pools_are_disjoint_for_many_seeds'
   '[tiny_sort]', (
    ('items of a small domain train and are held out',
     'train = few[ends[1] :]', 'train = few[ends[0] :]'),
  )),
  ('rlpost/domains/domain.py',
   'tests/domains/domains_test.py::test_training_tasks_have_random_access'
   '[add]', (
    ('every index is the same task',
     "rng = _rng(self.domain.name, 'train', seed, index, attempt)",
     "rng = _rng(self.domain.name, 'train', seed, 0, attempt)"),
  )),
  ('rlpost/environments/single_turn.py',
   'tests/environments/single_turn_test.py', (
    ('what comes after the stop is the answer',
     'text = text.split(stop, 1)[0]', 'text = text.split(stop, 1)[-1]'),
    ('the examples show no answers',
     '''Answer: {shot.checker["gold"]}''', '''Answer: ?'''),
  )),
  ('rlpost/rewards/checkers.py', 'tests/rewards/checkers_test.py', (
    ('a broken checker is the policy\'s fault',
     "return {'status': 'infra', 'reason': "
     "f'the checker is broken: {reason}'}", 'return _zero(reason)'),
    ('an unreadable answer is our fault',
     '    if fine:', '    if not fine:'),
    ('reciting the prompt contains the answer',
     'if not wanted or len(words) > max_words:', 'if not wanted:'),
    ('true is as good as 1',
     'return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)',
     'return a == b'),
  )),
  ('rlpost/rewards/scoring.py',
   'tests/rewards/scoring_test.py::test_stop_reasons_and_missing_gold', (
    ('a cut-off answer is nobody\'s fault',
     "return types.Verdict('value', 0.0, reason='cut off')",
     "return types.Verdict('invalid', reason='cut off')"),
  )),
  ('rlpost/rewards/scoring.py',
   'tests/rewards/scoring_test.py::test_only_the_guilty_item_is_infra', (
    ('a checker that died gives a reward of 0',
     "self._verdicts[i] = types.Verdict('infra', reason=reason)",
     "self._verdicts[i] = types.Verdict('value', reason=reason)"),
  )),
  ('rlpost/rewards/normalize.py', 'tests/rewards/normalize_test.py', (
    ('all domains share one scale',
     "        domain, {'moment': 0.0,", "        'domain', {'moment': 0.0,"),
    ('the variance scales rewards',
     "spread = (entry['moment'] / entry['weight']) ** (1 / self._power)",
     "spread = entry['moment'] / entry['weight']"),
    ('the floor of a scale is ignored',
     'return max(spread, self._floor)', 'return spread'),
    ('a batch of values decays like one value',
     'keep = self._decay**values.size', 'keep = self._decay'),
  )),
  ('rlpost/workers.py',
   'tests/workers_test.py::test_environment_is_an_allow_list', (
    ('a checker sees the secrets of the parent',
     'env = {k: os.environ[k] for k in ENV_ALLOWED if k in os.environ}',
     'env = dict(os.environ)'),
  )),
  # How it is kept and reported.
  ('rlpost/training/curriculum.py', 'tests/training/curriculum_test.py', (
    ('solved domains are worth most',
     'return a * b / ((a + b) * (a + b + 1))', 'return a / (a + b)'),
    ('the share of exploration is ignored',
     'name: self._explore / size + rest * u / total', 'name: u / total'),
    ('failures are forgotten at once',
     "self._decay * entry['failure'] + values.size - success",
     'values.size - success'),
  )),
  ('rlpost/training/digest.py', 'tests/training/digest_test.py', (
    ('the digest does not see the dtype',
     'record = json.dumps([*leaf[:3], list(leaf.shape), leaf.sha256])',
     'record = json.dumps([*leaf[:2], list(leaf.shape), leaf.sha256])'),
    ('the digest depends on the clock',
     'for k, v in sorted(leaves.items()) if k != TIMING}',
     'for k, v in sorted(leaves.items())}'),
  )),
  ('rlpost/training/checkpoint.py',
   'tests/training/checkpoint_test.py::test_one_flipped_bit_of_a_weight_is_'
   'found', (
    ('a damaged weight is restored in silence',
     '    if old != new:', '    if old.shape != new.shape:'),
  )),
  ('rlpost/training/checkpoint.py',
   'tests/training/checkpoint_test.py::test_latest_and_best_are_kept', (
    ('the worst step is kept as the best',
     "best = max((s for s in scores if s[0] is not None), default=(None, "
     'None))',
     "best = min((s for s in scores if s[0] is not None), default=(None, "
     'None))'),
  )),
  ('rlpost/training/targeting.py',
   'tests/training/targeting_test.py::test_another_model_is_not_damage', (
    ('a restore casts to another dtype',
     'if wanted.get(path) != found.get(path)',
     'if (path in wanted) != (path in found)'),
  )),
  ('rlpost/training/metrics.py', 'tests/training/metrics_test.py', (
    ('the cut-back drops the line of the restored step',
     "if json.loads(line)['step'] <= step:",
     "if json.loads(line)['step'] < step:"),
    ('CPU seconds leave out living children',
     'return total + sum(map(_living_s, _children(os.getpid())))',
     'return total'),
  )),
  ('rlpost/evaluation/statistics.py', 'tests/evaluation/statistics_test.py', (
    ('samples of one task count as independent',
     'size = min(size, mean * (1 - mean) / max(variance, 1e-300))',
     'size = size'),
    ('Holm steps up',
     'most = max(most, min(1.0, (len(p) - rank) * p[name]))',
     'most = min(1.0, (len(p) - rank) * p[name])'),
    ('a drawn p-value may be 0',
     'return (1 + hits) / (1 + draws)', 'return hits / draws'),
  )),
  ('rlpost/weights/gguf.py', 'tests/weights/gguf_test.py', (
    ('rotary rows stay interleaved',
     '      if slot.rotary_heads:', '      if slot.rotary_heads < 0:'),
    ('Q4_0 is off by one step',
     '  out -= 8', '  out -= 7'),
    ('Q4_1 forgets its minimum',
     '  out += _f16(blocks, 2)', '  out += 0 * _f16(blocks, 2)'),
  )),
  ('rlpost/weights/layout.py', 'tests/weights/safetensors_test.py', (
    ('values are read as keys',
     "('attn/qkv', (q + kv, q + 2 * kv), 'self_attn.v_proj', 'attn_v', 0),",
     "('attn/qkv', (q + kv, q + 2 * kv), 'self_attn.k_proj', 'attn_v', 0),"),
  )),
  ('rlpost/weights/hf_config.py', 'tests/weights/safetensors_test.py', (
    ('the base of RoPE in a config.json is ignored',
     "theta = rope.get('rope_theta', data.get('rope_theta', 10_000.0))",
     "theta = rope.get('rope_theta', 10_000.0)"),
  )),
)

MUTANTS = tuple(
  Mutant(file, old, new, tuple(tests.split()), says)
  for file, tests, faults in FAULTS
  for says, old, new in faults
)
