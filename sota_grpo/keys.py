"""Names of all columns (TensorDict keys) of a batch of responses (docs/design.md, "One carrier").

One row is one sampled response. Rows are ragged, of length ``T_i``, until :mod:`sota_grpo.rl.collate` pads them: they
are in columns of a :class:`~sota_grpo.rl.table.RowTable`, or in lazily stacked TensorDicts for TorchRL. Keys have
TorchRL's names if it has any, so both libraries read the same rows.

>>> from sota_grpo import keys
>>> keys.FULL_TOKENS
('tokens', 'full')
"""

QUERY = "query"  # str [N], raw text of the question, without chat template; written by the task
ANSWER = "answer"  # str [N], raw text of the gold answer; written by the task
EXTRA = "extra"  # JSON text [N], further columns for the task's scorer; written by the task
GROUP_ID = "group_id"  # int64 [N], the prompt group of the response, unique in the run; written by the source
SAMPLE_ID = "sample_id"  # int64 [N], index of the response in its group; written by the source
TURN = "turn"  # int64 [N], number of the policy's turns before this one in the dialog; written by a dialog env

FULL_TOKENS = ("tokens", "full")  # int64 [N, T], prompt then response, exactly as sampled; written by the engine
PROMPT_TOKENS = ("tokens", "prompt")  # int64 [N, P]; written by the env
PARENTS = ("tokens", "parents")  # int64 [N, T], position of the token that a token follows, -1: none; absent: the one
# before it. Written by AgentEngine: the requests of an agent make a tree, in which each sampled token is once.
RESPONSE_TOKENS = ("tokens", "response")  # int64 [N, R]; written by the engine

ATTENTION_MASK = ("masks", "all_attention_mask")  # bool [N, T], real tokens; False only on padding
ASSISTANT_MASK = ("masks", "all_assistant_mask")  # bool [N, T], tokens that the policy sampled, its EOS included

LOG_PROBS = ("log_probs", "full")  # f32 [N, T], under the distribution that was sampled from; 0 off-mask
# Only if sampling was truncated (top-k, top-p, min-p): the tokens that truncation kept at each position, the sampling
# support, over which every policy is renormalised. Written by the engine.
SUPPORT_IDS = ("kept", "ids")  # int32 [K] of a row, position after position; [N, max K] of a padded batch
SUPPORT_COUNTS = ("kept", "counts")  # int32 [N, T], number of kept tokens at each position; 0 off the assistant mask
TOKEN_VERSION = ("next", "token_version")  # int64 [N, T], policy version that sampled the token; -1 off-mask
POLICY_VERSION = ("next", "policy_version")  # int64 [N], smallest version among the row's sampled tokens

RESPONSE_TEXT = ("text", "response")  # str [N], decoded response without end tokens and padding; written by the env
DIALOG = "dialog"  # JSON text [N], Sample.record, absent if a sample has none; written by the engine
REWARD = ("next", "reward")  # f32 [N, 1], weighted sum of the reward terms, penalties included; by ScoreResponse
REWARD_TERMS = ("next", "reward_terms")  # one f32 [N, 1] entry per term that applies; by ScoreResponse, penalties
TERM_WEIGHTS = ("next", "term_weights")  # one f32 [N, 1] entry per term; by GroupAdvantage, if it decouples the terms
KL_TERM = (*REWARD_TERMS, "kl")  # f32 [N, 1], minus the KL penalty; written by ReferenceKL, if it is in the reward
GRADED_REWARD = ("next", "graded_reward")  # f32 [N, 1], the reward without the KL penalty; by ReferenceKL
SUCCESS = ("next", "success")  # bool [N, 1], the answer is right; written by ScoreResponse
REWARD_ERROR = ("next", "reward_error")  # bool [N, 1], the grader failed or timed out; written by ScoreResponse
REWARD_TIMEOUT = ("next", "reward_timeout")  # bool [N, 1], the grader timed out; written by ScoreResponse
REWARD_INFO = ("next", "reward_info")  # JSON text [N], other results of the grader, or why it failed; by ScoreResponse
DONE = ("next", "done")  # bool [N, 1]; written by the env
TERMINATED = ("next", "terminated")  # bool [N, 1]; written by the env
TRUNCATED = ("next", "truncated")  # bool [N, 1], the engine stopped for length; written by the env

ADVANTAGE = "advantage"  # f32 [N, 1, 1], exactly 0 in a zero-advantage group; written by GroupAdvantage
REF_LOG_PROBS = ("next", "ref_log_probs", "full")  # f32 [N, T]; written by ReferenceKL, absent without a reference
PROXIMAL_LOG_PROBS = ("proximal_log_probs", "full")  # f32 [N, T], computed before the first epoch; by the learner
LAYOUT = "layout"  # policy.shared_prompt.Layout of a packed batch, not a tensor; written by the learner
# bool [N, T], tokens that the surrogate includes; written by the learner, unless all
OBJECTIVE_MASK = ("masks", "objective_mask")
LOSS_WEIGHT = "loss_weight"  # f32 [N, T], weight in the loss, 0 off-mask; written by collate, once per optimizer step
