"""TorchRL transforms of rows of finished responses: rewards, reference log-probs, penalties and advantages.

Each is a :class:`torchrl.envs.transforms.Transform` over rows: a table, or TensorDicts, lazily stacked (ragged) or
dense. It writes in place, and only once: rows that already have its output key are not changed. So in a
``ReplayBuffer``, :class:`GroupAdvantage` is computed when whole groups are added, and not again for sampled subsets; in
a ``GroupReplayBuffer`` that a collector fills, when a batch is sampled.
Transforms that write under ``"next"`` also work on the steps of an env (``TransformedEnv``); of their entries, only the
reward is then in the env's specs. :class:`UserTransforms` applies ``env.transforms``, transforms of the user.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.envs.transforms import Transform

from sota_grpo import keys
from sota_grpo.errors import RunFailed, memory_for
from sota_grpo.files import error_line, file_reference
from sota_grpo.functional import advantages
from sota_grpo.functional.advantages import Baseline, Scale, UnusableValues, group_advantages, zero_advantage_mask
from sota_grpo.functional.loss_terms import of_terms
from sota_grpo.rl.collate import complete_rows, graded_rows, known_tokens, pad_rows, require_plain
from sota_grpo.rl.custom_objectives import ObjectiveError, estimator
from sota_grpo.rl.planner import micro_batches
from sota_grpo.rl.records import Example, Score, rewarded, total_reward
from sota_grpo.rl.table import Column, Key, Row, RowTable, in_place, row_list
from sota_grpo.text import sentence

Reference = Callable[[TensorDictBase], Tensor | TensorDictBase]
_INFO = json.JSONEncoder(default=str)
Rows = TypeVar("Rows", RowTable, TensorDictBase)


def _checked(estimated: Any, rewards: Tensor) -> Tensor:
    """Return the advantages of a user's estimator; raise ``ObjectiveError`` unless finite, one per response."""
    if not isinstance(estimated, Tensor) or estimated.shape != rewards.shape:
        returned = list(estimated.shape) if isinstance(estimated, Tensor) else type(estimated).__name__
        raise ObjectiveError(
            f"algorithm.baseline returned {returned} for {len(rewards)} responses; return a tensor of shape "
            f"{list(rewards.shape)}, one advantage per response."
        )
    if len(bad := (~estimated.isfinite()).nonzero()):
        row = int(bad[0])
        raise ObjectiveError(
            f"algorithm.baseline returned the advantage {estimated[row].item()} at index {row}, for a response with "
            f"the reward {rewards[row].item():g}; an advantage must be a finite number."
        )
    return estimated


def _have(rows: TensorDictBase, key: NestedKey) -> list[bool]:
    """Return for each of ragged rows whether it has the entry; for others, one value for all."""
    if isinstance(rows, LazyStackedTensorDict) and rows.batch_dims == 1:
        return [row.get(key, None) is not None for row in row_list(rows)]
    return [key in RowTable.of([rows] if not rows.batch_dims else row_list(rows)[:1]).columns]


class RowTransform(Transform):
    """Base class: calls ``_write(rows)``, in place, for a batch that does not have ``written_key`` yet.

    Of a lazy stack, only some of whose rows have the key, the other rows are written.
    """

    written_key: NestedKey

    def _write(self, rows: RowTable) -> None:
        raise NotImplementedError

    def _check(self, rows: TensorDictBase, have: list[bool]) -> None:
        """Raise if the rows, of which some ``have`` the written entry, cannot be transformed."""

    def forward(self, tensordict: Rows) -> Rows:  # type: ignore[override]
        if isinstance(tensordict, RowTable):
            if self.written_key not in tensordict.columns:
                self._write(tensordict)
            return tensordict
        have = _have(tensordict, self.written_key)
        self._check(tensordict, have)
        if not any(have):
            in_place(self._write)(tensordict)
        elif not all(have):  # as in a replay buffer, some of whose rows were sampled before
            in_place(self._write)([row for row, has in zip(row_list(tensordict), have) if not has])
        return tensordict

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self.forward(next_tensordict)  # by ``ReplayBuffer.append_transform(.., invert=True)``, for added rows

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return tensordict_reset

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        rows = tensordict.copy().set("next", next_tensordict)
        if keys.ASSISTANT_MASK in self.in_keys and not all(_have(rows, keys.ASSISTANT_MASK)):
            complete_rows(rows)  # with the response that TorchRL's wrapper has just written
        in_place(self._write)(rows)
        return next_tensordict.update(rows.get("next"))

    def transform_output_spec(self, output_spec: Any) -> Any:
        return output_spec  # rewards keep their spec; other entries exist only after a step, not after a reset


def graded_texts(rows: Sequence[Row]) -> list[tuple[str, Example]]:
    """Return ``(response text, example)`` of every row; consecutive rows with the same texts share one example."""

    def text(value: Any) -> str:
        return value if isinstance(value, str) else value.data

    pairs: list[tuple[str, Example]] = []
    before: list[Any] = []
    for row in rows:
        texts = [row.get(keys.QUERY), row.get(keys.ANSWER), row.get(keys.EXTRA, None)]
        if not before or any(one is not other for one, other in zip(texts, before)):
            extra = {} if texts[2] is None else json.loads(text(texts[2]))
            example, before = Example(text(texts[0]), text(texts[1]), extra), texts
        pairs.append((text(row.get(keys.RESPONSE_TEXT)), example))
    return pairs


def write_scores(rows: RowTable, scores: Sequence[Score], term_weights: Mapping[str, float]) -> None:
    """Write one score per row; ``reward = sum_k weight_k * term_k`` (in float64).

    Writes the reward, its terms, success, errors and info under ``next``. A term that is None adds nothing to the
    reward, and the row lacks its key. If all terms are None, the row gets a reward error, as after a grader error.
    KeyError if a score lacks a term of ``term_weights``, or a term that applies has no weight.
    """
    scores = [*map(rewarded, scores)]
    for name in term_weights:
        values = (score.terms[name] for score in scores)
        terms = [None if value is None else torch.tensor([value], dtype=torch.float32) for value in values]
        rows.set((*keys.REWARD_TERMS, name), terms)
    rewards = [[total_reward(score.terms, term_weights)] for score in scores]
    rows.set(keys.REWARD, torch.tensor(rewards, dtype=torch.float32))
    rows.set(keys.SUCCESS, torch.tensor([[score.success] for score in scores]))
    rows.set(keys.REWARD_ERROR, torch.tensor([[score.error is not None] for score in scores]))
    rows.set(keys.REWARD_TIMEOUT, torch.tensor([[(score.error or "").startswith("TimeoutError")] for score in scores]))
    errors = [{} if score.error is None else {"error": score.error} for score in scores]
    rows.set(keys.REWARD_INFO, [_INFO.encode({**score.info, **error}) for score, error in zip(scores, errors)])


class ReferenceKL(RowTransform):
    """Writes the reference's log-probs of the sampled tokens and, with a coefficient, adds a KL penalty to the reward.

    Writes ``("next", "ref_log_probs", "full")`` (``[T_i]`` per row, 0 off the assistant mask). With a coefficient the
    reward ``r`` becomes ``r + kl``, with the reward term ``kl = -coeff * sum_t (logp_t - ref_t)``, the k1 estimate over
    the assistant tokens (a token with NaN adds 0). ``logp`` is of the behaviour policy; ``graded_reward`` keeps ``r``.

    Args:
        reference: function from right-padded rows (:func:`sota_grpo.rl.collate.pad_rows`) to log-probs ``[N, T]``, or
            to rows with ``("log_probs", "full")`` like TorchRL's LLM wrappers; runs without gradient. A transformers
            model is wrapped in a :class:`~sota_grpo.policy.causal.FrozenReference`.
        in_reward_coeff: coefficient of the KL penalty; None does not change the reward.
        pad_token_id: token that pads the rows.
        token_budget, shared_prompt: see :func:`sota_grpo.rl.planner.micro_batches`.

    UnusableValues for a non-finite log-prob, RunFailed if the device lacks memory, ValueError for ``token_budget < 1``
    and for rows that a TorchRL wrapper would compute wrongly (:func:`sota_grpo.rl.collate.require_plain`).

    Sources: in the reward, Ouyang et al. 2022 (arXiv:2203.02155, eq. 2); in the loss, Shao et al. 2024 (eq. 3, 4).

    >>> from tensordict import TensorDict
    >>> rows = TensorDict({
    ...     "tokens": {"full": torch.tensor([[4, 5, 6]])}, "log_probs": {"full": torch.tensor([[0.0, -1.0, -2.0]])},
    ...     "masks": {"all_assistant_mask": torch.tensor([[False, True, True]])}, "next": {"reward": torch.ones(1, 1)},
    ... }, [1])
    >>> reference = lambda padded: torch.full(padded["tokens", "full"].shape, -3.0)
    >>> rows = ReferenceKL(reference, in_reward_coeff=0.1, pad_token_id=0, token_budget=64)(rows)
    >>> rows["next", "ref_log_probs", "full"].tolist(), round(rows["next", "reward"].item(), 4)  # 1 - 0.1 * (2 + 1)
    ([[0.0, -3.0, -3.0]], 0.7)
    """

    written_key = keys.REF_LOG_PROBS

    def __init__(
        self,
        reference: Reference,
        *,
        in_reward_coeff: float | None = None,
        pad_token_id: int,
        token_budget: int,
        shared_prompt: bool = True,
    ) -> None:
        reads: list[NestedKey] = [keys.FULL_TOKENS, keys.ATTENTION_MASK, keys.ASSISTANT_MASK]
        writes: list[NestedKey] = [keys.REF_LOG_PROBS]
        if in_reward_coeff is not None:
            reads += [keys.LOG_PROBS, keys.REWARD]
            writes += [keys.REWARD, keys.KL_TERM, keys.GRADED_REWARD]
        super().__init__(in_keys=reads, out_keys=writes)
        if hasattr(reference, "get_output_embeddings"):
            from sota_grpo.policy.causal import FrozenReference  # brings transformers

            reference = FrozenReference(reference)  # type: ignore[arg-type]
        self.reference, self.in_reward_coeff = reference, in_reward_coeff
        self.pad_token_id, self.token_budget, self.shared_prompt = pad_token_id, token_budget, shared_prompt

    def _write(self, rows: RowTable) -> None:
        if self.in_reward_coeff is not None:
            _require_ends(rows, whole=True)
        sizes: dict[str, Any] = {"token_budget": self.token_budget, "shared_prompt": self.shared_prompt}
        log_probs = reference_log_probs(self.reference, rows, pad_token_id=self.pad_token_id, **sizes)
        write_reference(rows, log_probs, in_reward_coeff=self.in_reward_coeff)


@torch.no_grad()
def reference_log_probs(
    reference: Reference,
    rows: Sequence[Row],
    *,
    pad_token_id: int,
    token_budget: int,
    shared_prompt: bool = True,
) -> list[Tensor]:
    """Return reference log-probs, f32 ``[T_i]`` for a row of ``T_i`` tokens, 0 off its mask (:class:`ReferenceKL`)."""
    log_probs_of: dict[int, Tensor] = {}
    rows = list(rows)
    if hasattr(reference, "get_dist"):  # a wrapper of TorchRL
        require_plain(rows)
    micros = micro_batches(rows, token_budget=token_budget, shared_prompt=shared_prompt)
    fix = "use a smaller train.micro_batch_tokens (the reference computes up to four times as many at once)"
    with memory_for(f"the reference's micro-batches of {token_budget:,} tokens", f"{fix} with train.resume=auto"):
        computed = [reference(pad_rows(micro, pad_token_id=pad_token_id)) for micro in micros]  # copied later
    for micro, scored in zip(micros, computed):
        log_probs = scored.get(keys.LOG_PROBS) if isinstance(scored, TensorDictBase) else scored
        fetched = log_probs.detach().to(micro[0][keys.ASSISTANT_MASK].device, torch.float32)
        for row, values in zip(micro, fetched, strict=True):
            mask = row[keys.ASSISTANT_MASK].bool()
            log_probs_of[id(row)] = torch.where(mask, values[: mask.shape[0]], 0.0)
    return [log_probs_of[id(row)] for row in rows]


def write_reference(rows: RowTable, log_probs: Sequence[Tensor], *, in_reward_coeff: float | None) -> None:
    """Write reference log-probs, ``[T_i]`` per row, and, with a coefficient, the KL penalty (:class:`ReferenceKL`)."""
    column = Column.of(log_probs)
    if not bool(column.values.isfinite().all()):
        raise UnusableValues(
            "the reference gave a log-prob that is not finite for a trainable token; check the reference model."
        )
    rows.columns[keys.REF_LOG_PROBS] = column
    if in_reward_coeff is None:
        return
    gaps = [
        torch.where(known_tokens(row), row[keys.LOG_PROBS] - ref, 0.0).sum()
        for row, ref in zip(rows.rows(keys.ASSISTANT_MASK, keys.LOG_PROBS), log_probs, strict=True)
    ]
    reward = _reward(rows)
    penalty = -in_reward_coeff * torch.stack(gaps).reshape(reward.shape)
    rows.set(keys.KL_TERM, penalty)
    rows.set(keys.GRADED_REWARD, reward.clone())
    rows.set(keys.REWARD, reward + penalty)


class OverlongPenalty(RowTransform):
    """Adds DAPO's soft length penalty to the reward.

    The penalty is 0 up to ``max_tokens - buffer_tokens`` sampled tokens, then decreases linearly to ``-weight`` at
    ``max_tokens`` and stays there. Writes the penalty before the weight, in [-1, 0], as the reward term ``overlong``.
    Raises ``ValueError`` unless ``1 <= buffer_tokens <= max_tokens``.

    Source: Yu et al. 2025 (arXiv:2503.14476, eq. 13).

    >>> from tensordict import TensorDict
    >>> masks, reward = {"all_assistant_mask": torch.ones(1, 9).bool()}, {"reward": torch.ones(1, 1)}
    >>> rows = TensorDict({"masks": masks, "next": reward}, [1])
    >>> OverlongPenalty(max_tokens=10, buffer_tokens=4)(rows)["next", "reward"].tolist()
    [[0.25]]
    """

    written_key = (*keys.REWARD_TERMS, "overlong")

    def __init__(self, max_tokens: int, buffer_tokens: int, *, weight: float = 1.0) -> None:
        super().__init__(in_keys=[keys.ASSISTANT_MASK, keys.REWARD], out_keys=[keys.REWARD, self.written_key])
        self._penalty = partial(advantages.soft_overlong_penalty, max_tokens=max_tokens, buffer_tokens=buffer_tokens)
        self._penalty(torch.zeros(1))  # raises for invalid numbers
        self.weight = weight

    def _write(self, rows: RowTable) -> None:
        _require_ends(rows, whole=True)
        penalty = self._penalty(rows.sums(keys.ASSISTANT_MASK))
        rows.set(self.written_key, penalty.reshape(_reward(rows).shape))
        graded = [keys.GRADED_REWARD] if rows.has(keys.GRADED_REWARD) else []  # ReferenceKL came before
        for key in (keys.REWARD, *graded):
            reward = _reward(rows, key)
            rows.set(key, reward + self.weight * penalty.reshape(reward.shape))


def _weighed_terms(rows: RowTable, weights: Mapping[str, float] | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return reward terms ``[N, K]`` (NaN if a term does not apply) and their weights ``[K]``, sorted by name."""
    names = sorted(rows.names(keys.REWARD_TERMS))
    if not names or {keys.KL_TERM, keys.GRADED_REWARD} <= rows.columns.keys():  # both are written by ReferenceKL
        has = "a KL penalty in the reward, which that would rescale" if names else f"no {keys.REWARD_TERMS}"
        fix = "use kl_to_ref_coeff of the loss" if names else "write the terms, or use decouple_terms=False"
        raise ValueError(f"decouple_terms standardises each reward term, but the rows have {has}; {fix}.")
    if weights is None and not rows.names(keys.TERM_WEIGHTS):
        raise ValueError("decouple_terms needs the weights of the terms, but the rows have none; pass term_weights.")
    for name in names if weights is not None else ():
        term = rows.columns[*keys.REWARD_TERMS, name]
        values = torch.full_like(term.values, (weights or {}).get(name, 1.0), dtype=torch.float32)
        rows.columns[*keys.TERM_WEIGHTS, name] = term._replace(values=values)
    terms = torch.stack([_scalars(rows, (*keys.REWARD_TERMS, name), device) for name in names], dim=-1)
    of_rows = torch.stack([_scalars(rows, (*keys.TERM_WEIGHTS, name), device) for name in names])
    return terms, of_rows.nan_to_num(-torch.inf).amax(-1).nan_to_num(neginf=0.0)  # 0 if no row has the term


def _reward(rows: RowTable, key: Any = keys.REWARD) -> Tensor:
    """Return the reward of each row, or another entry; of rows of several dtypes, in the widest."""
    reward = rows.get(key)
    if isinstance(reward, Tensor):
        return reward
    return torch.cat([torch.as_tensor(value).reshape(1) for value in reward]).unsqueeze(-1)


def _scalars(rows: RowTable, key: tuple[str, ...], device: torch.device) -> Tensor:
    """Return an entry with one number per row as ``[N]``; NaN for rows without the entry."""
    values = torch.full((len(rows),), torch.nan, device=device)
    if key in rows.columns:
        column = rows.columns[key]
        values[slice(None) if column.rows is None else column.rows] = column.values.flatten()
    return values


def zero_advantage_rows(rows: RowTable, term_weights: Mapping[str, float] | None = None) -> Tensor:
    """Return bool ``[N]``: True if the group's graded rewards, before any KL penalty, are equal; all must be finite.

    With ``term_weights`` (of terms that are standardised apart, GDPO) each term must be equal, too, unless it weighs 0.
    """
    rewards = rows.get(keys.GRADED_REWARD if keys.GRADED_REWARD in rows.columns else keys.REWARD)
    group_ids, counted = rows.get(keys.GROUP_ID), graded_rows(rows)
    alike = zero_advantage_mask(rewards.flatten(), group_ids, counted)
    for name in rows.names(keys.REWARD_TERMS) if term_weights is not None else ():
        if (term_weights or {}).get(name, 1.0):
            values = _scalars(rows, (*keys.REWARD_TERMS, name), rewards.device)
            has_term = ~values.isnan()
            alike &= zero_advantage_mask(values.where(has_term, 0.0), group_ids, counted & has_term)
    return alike


def _require_ends(rows: RowTable, *, whole: bool = False) -> None:
    """Raise ValueError for a step that did not end its dialog; with ``whole`` also for the last of several steps."""
    for index, row in enumerate(rows.rows(keys.TURN, keys.DONE) if keys.TURN in rows.columns else ()):
        turn, done = row.get(keys.TURN), row.get(keys.DONE)
        if isinstance(turn, Tensor) and done is not None and (not bool(done.any()) or (whole and int(turn))):
            raise ValueError(
                f"row {index} is one step of a dialog (turn {int(turn)}, done={bool(done.any())}); join the steps with "
                "DialogRows, and transform its rows."
            )


class GroupAdvantage(RowTransform):
    """Writes the advantage of each response over its group or batch: ``A_i = (r_i - b_i) / s_i``.

    Reads ``("next", "reward")`` ``[N, 1]`` and ``group_id`` ``[N]``, and for ``length_weighted`` and your own estimator
    the assistant mask; writes ``advantage`` ``[N, 1, 1]``. It needs whole groups: use it as a collector's ``postproc``
    or as a ``ReplayBuffer`` transform. In a buffer, with ``group_size``, the responses of a group may be added
    separately; they are written once the group is complete.

    If only the KL penalty makes the rewards of a group differ, or under a scale of the batch those of the batch, the
    advantage is the penalty minus its baseline (of your own estimator: its advantage), not divided by the scale. A
    response with a grader error
    (``("next", "reward_error")``) is left out of baseline and scale; its advantage is 0.

    Args:
        baseline, scale, eps: see :func:`sota_grpo.functional.advantages.group_advantages`. ``baseline`` may also be
            your own estimator, a function or ``FILE.py:FUNCTION`` (:func:`sota_grpo.rl.custom_objectives.estimator`),
            whose advantages are divided by the scale.
        decouple_terms: standardise each term (``("next", "reward_terms")``) in the group before the weighted sum
            (GDPO): :func:`sota_grpo.functional.advantages.decoupled_rewards`.
        term_weights: weight of each term, by name, written to ``("next", "term_weights")``; unnamed terms (penalties)
            weigh 1. None: the rows have the weights.
        group_size: size of every group. A buffer waits for incomplete groups; elsewhere they raise. None: any size.
        in_keys: reward, and an entry that identifies the group: a number or a text, such as ``query``.
        out_keys: advantage.

    Raises:
        KeyError: the rows lack a key.
        ValueError: a group has another size than ``group_size`` or several questions, every response is alone in its
            group, or an error of ``group_advantages``.
        ObjectiveError: your estimator cannot be used, raises, or does not return ``[N]`` finite values.
        RuntimeError: used inside an env, where groups are not known.

    Source: Shao et al. 2024 (arXiv:2402.03300, section 4.1.2).

    >>> from tensordict import TensorDict
    >>> rows = TensorDict({"next": {"reward": torch.tensor([[1.0], [0.0]])}, "group_id": torch.tensor([7, 7])}, [2])
    >>> GroupAdvantage(scale="none")(rows)["advantage"].flatten().tolist()
    [0.5, -0.5]
    """

    def __init__(
        self,
        baseline: Baseline | str | Callable[..., Tensor] = "group_mean",
        scale: Scale = "group_std",
        eps: float = 1e-6,
        *,
        decouple_terms: bool = False,
        term_weights: Mapping[str, float] | None = None,
        group_size: int | None = None,
        in_keys: tuple[NestedKey, NestedKey] = (keys.REWARD, keys.GROUP_ID),
        out_keys: tuple[NestedKey] = (keys.ADVANTAGE,),
    ) -> None:
        super().__init__(in_keys=list(in_keys), out_keys=list(out_keys))
        self.estimator = estimator(baseline)
        self.baseline: Any = "none" if self.estimator else baseline
        self.scale, self.eps, self.group_size = scale, eps, group_size
        self.decouple_terms, self.term_weights = decouple_terms, term_weights
        self.written_key = out_keys[0]
        self._waiting: dict[Any, list[TensorDictBase]] = {}  # rows of incomplete groups

    def _write(self, rows: RowTable) -> None:
        _require_ends(rows)
        group_ids = self._group_ids(rows)
        reward = _reward(rows, self.in_keys[0]).reshape(-1)
        group_ids, used = group_ids.to(reward.device), graded_rows(rows).to(reward.device)
        if not used.all() and self.baseline in ("leave_one_out", "best_of_others"):
            _, index, counts = group_ids.unique(return_inverse=True, return_counts=True)
            left = torch.zeros_like(counts).index_add(0, index, used.to(counts.dtype))
            used = used & ((left > 1) | (counts == 1))[index]  # a response without siblings raises below
        ids = group_ids[used]
        if self.decouple_terms:
            terms, weights = _weighed_terms(rows, self.term_weights, reward.device)
            decoupled = advantages.decoupled_rewards(terms[used], weights, ids, eps=self.eps)
            reward = reward if reward.is_floating_point() else reward.float()
            reward = torch.zeros_like(reward).index_put((used,), decoupled.to(reward.dtype))
        has_lengths = self.baseline == "length_weighted" or (self.estimator and keys.ASSISTANT_MASK in rows.columns)
        lengths = rows.sums(keys.ASSISTANT_MASK)[used] if has_lengths else None
        options: dict[str, Any] = {"baseline": self.baseline, "lengths": lengths}
        if self.estimator is not None:
            names = rows.names(keys.REWARD_TERMS)
            by_name = {name: _scalars(rows, (*keys.REWARD_TERMS, name), reward.device)[used] for name in names}
            terms_of = {"rewards": reward[used], "group_ids": ids, "lengths": lengths, "terms": by_name}
            try:
                estimated = of_terms(self.estimator, terms_of)
            except Exception as error:  # from the user's function
                raise ObjectiveError(f"algorithm.baseline failed: {sentence(error).rstrip('.')}.") from error
            options["baseline"] = _checked(estimated, reward[used])
        values = group_advantages(reward[used], ids, scale=self.scale, eps=self.eps, **options)
        graded = rows.get(keys.GRADED_REWARD) if self.in_keys[0] == keys.REWARD else None  # only this has the penalty
        if graded is not None and not self.decouple_terms and self.scale != "none":
            # Else tiny differences of the KL would be scaled up to full-size advantages: at the first step, where the
            # policy is the reference, even rounding errors.
            plain = graded.reshape(-1)[used].double()
            if self.scale in ("group_std", "group_mean"):
                alike = zero_advantage_mask(plain, ids)
            else:
                is_spread = self.scale == "batch_std" or self.estimator is not None
                divided = plain if is_spread else group_advantages(plain, ids, scale="none", **options)
                alike = (divided == divided[:1]).all()
            penalty = reward[used].double() - plain
            unscaled = group_advantages(penalty, ids, scale="none", **options).to(values.dtype)
            values = torch.where(alike, unscaled, values)
        advantage = torch.zeros_like(reward, dtype=values.dtype)
        advantage[used] = values
        rows.set(self.out_keys[0], advantage.reshape(-1, 1, 1))

    def _names(self, rows: RowTable) -> list[Any]:
        for key in self.in_keys:
            if key not in rows.columns:
                raise KeyError(f"the rows have no {key}; set in_keys=(reward, group) to entries of the rows.")
        names = rows.get(self.in_keys[1])
        return names.flatten().tolist() if isinstance(names, Tensor) else list(names)

    def _group_ids(self, rows: RowTable) -> Tensor:
        """Return the group number of each row, in order of first appearance, int64 ``[N]``; check the groups."""
        names = self._names(rows)
        members: dict[Any, list[int]] = {}
        for row, name in enumerate(names):
            members.setdefault(name, []).append(row)
        queries = rows.get(keys.QUERY, names)
        for name, indices in members.items():
            if self.group_size not in (None, len(indices)):
                raise ValueError(
                    f"group {name} has {len(indices)} responses in this batch instead of {self.group_size}; its "
                    "baseline would be wrong, so pass whole groups."
                )
            if len(prompts := {queries[row] for row in indices}) > 1:
                first, second, *_ = prompts
                raise ValueError(
                    f"the responses of group {name} answer several questions ({first!r:.60}, {second!r:.60}); their "
                    "baseline would be wrong, so make group ids unique across environments."
                )
        numbers = {name: number for number, name in enumerate(members)}
        return torch.tensor([numbers[name] for name in names])

    def _check(self, rows: TensorDictBase, have: list[bool]) -> None:
        if any(have):
            if not all(have):
                names = self._names(RowTable.of(rows))
                complete, lacking = ({n for n, has in zip(names, have) if has is which} for which in (True, False))
                if both := complete & lacking:
                    raise ValueError(
                        f"only some responses of group {both.pop()} have {self.written_key}; the baseline of the "
                        "others would be wrong, so pass whole groups."
                    )
        elif self.group_size is None and {self.baseline, self.scale}.intersection(advantages.GROUP_TERMS):
            names = self._names(RowTable.of(rows))
            if names and len(set(names)) == len(names):
                raise ValueError(
                    f"each of the {len(names)} responses is alone in its group, so each advantage would be 0; pass "
                    "whole groups, or set group_size in a replay buffer, which then waits for complete groups."
                )

    def _inv_call(self, tensordict: Rows) -> Rows | None:
        """Return the rows that a buffer writes: those of complete groups, with advantages; None if there are none."""
        if isinstance(tensordict, RowTable):  # one group for a GroupReplayBuffer: its batches get them when sampled
            return tensordict
        if self.group_size is None or _have(tensordict, self.written_key)[0]:
            return self.forward(tensordict)
        if not tensordict.batch_dims:
            raise ValueError("with group_size, rows are added in batches; use the buffer's extend instead of add.")
        rows, whole = tensordict.reshape(-1), []
        table = RowTable.of(rows)
        _require_ends(table)
        for name, row in zip(self._names(table), rows.unbind(0)):
            siblings = self._waiting.setdefault(name, [])
            siblings.append(row)
            if len(siblings) == self.group_size:
                whole += self._waiting.pop(name)
        return self.forward(lazy_stack(whole)) if whole else None

    def transform_output_spec(self, output_spec: Any) -> Any:
        raise RuntimeError(
            "GroupAdvantage compares the finished responses of a group, which an env step does not have; "
            "use it as a collector's postproc or as a ReplayBuffer transform."
        )


#: Entries that a transform must not change, in addition to those under ``tokens``, ``log_probs`` and ``kept``.
FIXED = (keys.GROUP_ID, keys.SAMPLE_ID, keys.QUERY, keys.ATTENTION_MASK, keys.TOKEN_VERSION, keys.POLICY_VERSION)
_FIXED_GROUPS = ("tokens", "log_probs", "kept")


class UserTransforms:
    """Applies the user's transforms to the rows of one prompt group, in place and in order.

    Each transform gets a copy of the rows as a lazily stacked TensorDict ``[G]``, one TensorDict per response. It may
    add entries, change the reward (finite), its terms and other entries that are not fixed (:data:`FIXED`), and set
    positions of the assistant mask to False. RunFailed, with the reason, if it raises or makes another change.

    Args:
        transforms: result of :func:`sota_grpo.files.load_instances`: (name in messages, transform) pairs.
    """

    def __init__(self, transforms: Sequence[tuple[str, Transform]]):
        self.transforms = transforms

    @torch.no_grad()
    def __call__(self, rows: RowTable) -> RowTable:
        for name, transform in self.transforms:
            try:
                after = RowTable.of(transform(rows.stack().clone()))
            except Exception as error:  # in the user's code
                value = name.partition("=")[2]
                path = (file_reference(value) or (Path(value),))[0]
                line = error_line(path, error)
                location = "" if line is None else f" in line {line}"
                raise RunFailed(f"{name} failed{location}: {sentence(error).rstrip('.')}.") from error
            if (fault := _fault(rows, after)) is not None:
                raise RunFailed(f"{name} {fault}.")
            rows.columns = {key: rows.columns[key] if _is_fixed(key) else new for key, new in after.columns.items()}
            if rows.has(keys.SUPPORT_IDS):
                _cut_supports(rows)
        return rows


def _cut_supports(rows: RowTable) -> None:
    """Remove the sampling supports of tokens that the assistant mask leaves out."""
    masks, ids, counts = map(rows.cells, (keys.ASSISTANT_MASK, keys.SUPPORT_IDS, keys.SUPPORT_COUNTS))
    kept = [None if n is None else i[mask.repeat_interleave(n)] for mask, i, n in zip(masks, ids, counts)]
    rows.set(keys.SUPPORT_IDS, kept)
    rows.set(keys.SUPPORT_COUNTS, [None if n is None else n.where(mask, 0) for mask, n in zip(masks, counts)])


def _is_fixed(key: Key) -> bool:
    return key in FIXED or (isinstance(key, tuple) and key[0] in _FIXED_GROUPS)


def _fault(before: RowTable, after: RowTable) -> str | None:
    """Return a message if the transform made a forbidden change, else None."""
    if len(after) != len(before):
        return (
            f"returned {len(after)} rows for a prompt group of {len(before)}; return every row once, and set a reward "
            "instead of removing a row"
        )
    if missing := [key for key in before.columns if key not in after.columns]:
        return f"removed {missing[0]}; return the input rows with all their entries"
    fixed = filter(_is_fixed, after.columns)
    if changed := [key for key in fixed if not _equal(before.columns.get(key), after.columns[key])]:
        return f"changed {changed[0]}, which is read-only; write to an entry of another name"
    masks, mask = after.columns[keys.ASSISTANT_MASK], before.columns[keys.ASSISTANT_MASK].flat()
    is_mask = isinstance(masks.values, Tensor) and masks.values.dtype == torch.bool  # a list: of several dtypes
    if not is_mask or masks.flat().lengths != mask.lengths or bool((masks.flat().values & ~mask.values).any()):
        return (
            f"set {keys.ASSISTANT_MASK} where the policy sampled no token, or changed its dtype or lengths; only set "
            "positions to False"
        )
    reward = after.columns[keys.REWARD].values
    is_float = isinstance(reward, Tensor) and reward.shape == (len(before), 1) and reward.is_floating_point()
    if not is_float or not bool(reward.isfinite().all()):
        return f"wrote a {keys.REWARD} that is not a finite float of shape [1] in each row; correct the transform"
    return None


def _equal(one: Column | None, other: Column) -> bool:
    def plain(column: Column) -> list[object]:
        return [value.tolist() if isinstance(value, Tensor) else value for value in column.cells()]

    return one is not None and (one.rows or None) == (other.rows or None) and plain(one) == plain(other)
