"""Every key of rows in sota_grpo, spelled once (docs/design.md, "One carrier").

One row of a batch is one sampled response. Rows are ragged, one length ``T_i`` each, until
:mod:`sota_grpo.rl.collate` pads them: columns of a :class:`~sota_grpo.rl.table.RowTable`, or lazily stacked TensorDicts
for TorchRL. Its names are used where it has one, so rows travel between the two libraries unchanged.

>>> from sota_grpo import keys
>>> keys.FULL_TOKENS
('tokens', 'full')
"""

QUERY = "query"  # str [N], raw text of the question, never templated; written by the task
ANSWER = "answer"  # str [N], raw text of the gold answer; written by the task
EXTRA = "extra"  # JSON text [N], what else the task's scorer needs; written by the task
GROUP_ID = "group_id"  # int64 [N], unique per draw of a prompt, shared by its siblings; written by the source
SAMPLE_ID = "sample_id"  # int64 [N], index of the sibling inside its group; written by the source
TURN = "turn"  # int64 [N], turns of the policy before this step of a dialog; written by a dialog env

FULL_TOKENS = ("tokens", "full")  # int64 [N, T], prompt then response, exactly as sampled; written by the engine
PROMPT_TOKENS = ("tokens", "prompt")  # int64 [N, P]; written by the env
RESPONSE_TOKENS = ("tokens", "response")  # int64 [N, R]; written by the engine

ATTENTION_MASK = ("masks", "all_attention_mask")  # bool [N, T], real tokens; False only on padding
ASSISTANT_MASK = ("masks", "all_assistant_mask")  # bool [N, T], tokens the policy produced, its EOS included

LOG_PROBS = ("log_probs", "full")  # f32 [N, T], of the behaviour policy's sampled distribution; 0 off-mask
# Where sampling was truncated (top-k, top-p, min-p), else absent: the sampling support of each token, over which every
# policy is renormalised. Written by the engine.
SUPPORT_IDS = ("kept", "ids")  # int32 [K] of a row, set after set; [N, max K] of a padded batch
SUPPORT_COUNTS = ("kept", "counts")  # int32 [N, T], tokens of each set; 0 off the assistant mask
TOKEN_VERSION = ("next", "token_version")  # int64 [N, T], policy version that sampled each token; -1 off-mask
POLICY_VERSION = ("next", "policy_version")  # int64 [N], version of the oldest sampled token of the row

RESPONSE_TEXT = ("text", "response")  # str [N], decoded response without end tokens and padding; written by the env
DIALOG = "dialog"  # JSON text [N], Sample.record, absent where a sample has none; written by the engine
REWARD = ("next", "reward")  # f32 [N, 1], weighted sum of the reward terms, penalties included; by ScoreResponse
REWARD_TERMS = ("next", "reward_terms")  # one f32 [N, 1] entry per term that applies; by ScoreResponse, penalties
TERM_WEIGHTS = ("next", "term_weights")  # one f32 [N, 1] entry per term; by GroupAdvantage, if it decouples the terms
KL_TERM = (*REWARD_TERMS, "kl")  # f32 [N, 1], minus the KL taken off the reward; written by ReferenceKL, if asked to
GRADED_REWARD = ("next", "graded_reward")  # f32 [N, 1], the reward before the KL was taken off; by ReferenceKL
SUCCESS = ("next", "success")  # bool [N, 1], the answer is right; written by ScoreResponse
REWARD_ERROR = ("next", "reward_error")  # bool [N, 1], the grader failed or timed out; written by ScoreResponse
REWARD_TIMEOUT = ("next", "reward_timeout")  # bool [N, 1], it timed out; written by ScoreResponse
REWARD_INFO = ("next", "reward_info")  # JSON text [N], what else the grader found, or why it failed; by ScoreResponse
DONE = ("next", "done")  # bool [N, 1]; written by the env
TERMINATED = ("next", "terminated")  # bool [N, 1]; written by the env
TRUNCATED = ("next", "truncated")  # bool [N, 1], the engine stopped for length; written by the env

ADVANTAGE = "advantage"  # f32 [N, 1, 1], exactly 0 for a constant group; written by GroupAdvantage
REF_LOG_PROBS = ("next", "ref_log_probs", "full")  # f32 [N, T]; written by ReferenceKL, absent without a reference
PROXIMAL_LOG_PROBS = ("proximal_log_probs", "full")  # f32 [N, T], recomputed before the first epoch; by the learner
LAYOUT = "layout"  # policy.shared_prompt.Layout of the padded batch, not a tensor; written by the learner, if it packs
# bool [N, T], tokens that the surrogate keeps; by the learner, unless all
OBJECTIVE_MASK = ("masks", "objective_mask")
LOSS_WEIGHT = "loss_weight"  # f32 [N, T], 0 off-mask; written by collate, once per optimizer step
