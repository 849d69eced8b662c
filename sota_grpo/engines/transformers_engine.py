"""Rollout engine in this process: a causal language model of transformers, on a CPU or one GPU.

In this file: sampling of tokens (processed distribution, inversion of its CDF), batched decoding of groups, the engine.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from sota_grpo.engines import EngineOptions
from sota_grpo.engines.decode_attention import GroupCache, RepeatedPrompts, SharedPrompts, use_decode_attention
from sota_grpo.engines.stepping import (
    Flight,
    SteppingEngine,
    StopStrings,
    checked_weights,
    matrix_dtype,
    tied_names,
)
from sota_grpo.errors import UserError
from sota_grpo.policy.model_sizes import rotary_limit
from sota_grpo.policy.weight_pack import Checksum
from sota_grpo.rl.records import GroupOutput, GroupRequest, Sample, Sampling, SamplingSupport, sample_seed

_SHRINK_BELOW = 0.9  # the batch is compacted when less than this fraction of its rows is still sampled
_BITS = 24  # every multiple of 2^-24 in [0, 1) is a float32
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX = tuple(
    (np.uint64(bits), np.uint64(factor)) for bits, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
)
_SUPPORTED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


def require_cache(config: PretrainedConfig) -> None:
    """Raise UserError if the config lists a layer that keeps a state other than keys and values, or its model has one.

    Models that list no layers (RecurrentGemma, RWKV) declare in transformers that they are stateful.
    """
    listed = getattr(config.get_text_config(), "layer_types", None)
    is_stateful = getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "_is_stateful", False)
    others = sorted(set(listed or ("recurrent",) * is_stateful) - _SUPPORTED_LAYERS)
    if others:
        raise UserError(
            f"This model has layers of type {', '.join(others)}, and engine=transformers can cache only keys and "
            "values; use engine=vllm."
        )


def uniforms(seeds: torch.Tensor, num: int) -> torch.Tensor:
    """Return uniform random numbers by seed: ``u[n, t] = (splitmix64(seeds[n] + (t + 1) gamma) >> 40) / 2^24``.

    ``splitmix64`` is the source's mixing function, ``gamma`` its constant 0x9E3779B97F4A7C15; sums are modulo 2^64. For
    int64 seeds ``[N]`` the result is float32 ``[N, num]`` in ``[0, 1)``, on the device of the seeds; it does not depend
    on the device, because it is computed on the CPU.

    Source: splitmix64, Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".

    >>> u = uniforms(torch.tensor([3, 5]), 4)
    >>> u.shape, bool((u == torch.cat([uniforms(torch.tensor([3]), 4), uniforms(torch.tensor([5]), 4)])).all())
    (torch.Size([2, 4]), True)
    """
    x = seeds.cpu().numpy().astype(np.uint64)[:, None] + np.arange(1, num + 1, dtype=np.uint64) * _GAMMA
    for bits, multiplier in _MIX:
        x = (x ^ (x >> bits)) * multiplier
    x ^= x >> np.uint64(31)
    return torch.from_numpy((x >> np.uint64(64 - _BITS)).astype(np.float32) / (1 << _BITS)).to(seeds.device)


def sampled_probs(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return the distribution that tokens are sampled from, ``softmax(keep(logits / temperature))``.

    ``keep`` sets to minus infinity the logits of tokens that min-p, then top-k, then top-p removes (vLLM's order).
    Tokens that tie with the last one of top-k are kept. At temperature 0 (greedy) the result is ``softmax(logits)``, as
    in vLLM. ``logits`` are ``[N, V]`` for a vocabulary of ``V``, of any float type; the result is float32, 0 for
    removed tokens.

    Source: Holtzman et al. 2020 (arXiv:1904.09751, section 3.1) for top-p, Fan et al. 2018 (arXiv:1805.04833) for
    top-k, Nguyen et al. 2024 (arXiv:2407.01082, section 3) for min-p.

    >>> logits = torch.tensor([[0.0, 1.0, 2.0]])
    >>> sampled_probs(logits, Sampling(max_tokens=1, top_k=1)).tolist()
    [[0.0, 0.0, 1.0]]
    """
    scores = logits
    if sampling.temperature > 0:
        if sampling.temperature != 1:
            scores = scores.to(torch.float32) / sampling.temperature
        if sampling.min_p > 0:
            scores = scores.to(torch.float32)
            floor = scores.amax(-1, keepdim=True) + math.log(sampling.min_p)
            scores = scores.masked_fill(scores < floor, -torch.inf)
        if 0 < sampling.top_k < scores.shape[-1]:
            floor = scores.topk(sampling.top_k, dim=-1).values[:, -1:]
            scores = scores.masked_fill(scores < floor, -torch.inf)
        if sampling.top_p < 1:
            scores = scores.to(torch.float32)
            ranked, order = scores.sort(dim=-1, descending=True)
            probs = ranked.softmax(-1)
            mass_before = probs.cumsum(-1) - probs  # 0 of the most likely token, which is always kept
            outside = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, mass_before >= sampling.top_p)
            scores = scores.masked_fill(outside, -torch.inf)
    return scores.softmax(-1, dtype=torch.float32)


def draw(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Sample tokens by inversion: the first whose cumulative probability exceeds ``u``; never one of probability 0.

    ``probs`` are float32 ``[N, V]``, ``u`` float32 ``[N]`` in ``[0, 1)``; the token ids are int64 ``[N]``; of a
    row with NaN any ids below ``V``.

    >>> draw(torch.tensor([[0.25, 0.0, 0.75]]).expand(3, 3), torch.tensor([0.0, 0.25, 0.99])).tolist()
    [0, 2, 2]
    """
    vocab = probs.shape[1]
    length = math.isqrt(vocab)  # u selects one of about sqrt(V) runs, then a token: a cumsum over V would take longer
    whole = vocab - vocab % length
    sums = probs[:, :whole].unflatten(1, (-1, length)).sum(-1)
    if whole < vocab:
        sums = torch.cat([sums, probs[:, whole:].sum(-1, keepdim=True)], dim=1)
    run, rest = _invert(sums, u * sums.sum(-1))
    tokens = run.unsqueeze(1) * length + torch.arange(length, device=probs.device)
    inside = probs.gather(1, tokens.clamp(max=vocab - 1)).masked_fill_(tokens >= vocab, 0.0)
    return (run * length + _invert(inside, rest)[0]).clamp(max=vocab - 1)  # no index is beyond it but of NaN


def _invert(mass: torch.Tensor, threshold: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index where the sum of ``mass`` ``[N, K]`` exceeds ``threshold`` ``[N]``, and the gap before it."""
    cdf = mass.cumsum(-1)
    total = cdf[:, -1]  # rounding may put the threshold above it, and then nothing would exceed the threshold
    threshold = torch.minimum(threshold, torch.nextafter(total, torch.zeros_like(total))).unsqueeze(1)
    index = torch.searchsorted(cdf, threshold, right=True)
    entered = threshold - torch.where(index > 0, cdf.gather(1, (index - 1).clamp_min(0)), 0.0)
    return index.squeeze(1), entered.squeeze(1)


class GroupDecoder:
    """Decodes several groups as one batch; each :meth:`step` samples one token for every row that has not ended.

    Worked example: prompts ``[7]`` and ``[8, 9]`` with two samples each make four rows. The first input of a row is the
    prompt's last token; the tokens before that are computed once per prompt::

        prefill [] and [8]     rows 0, 1: samples 0, 1 of group 0, first input 7
                               rows 2, 3: samples 0, 1 of group 1, first input 9

    Args:
        requests: the groups; methods call a group by its index in this list, from 0.
        rooms: maximum tokens of a response, for each group; replaces ``sampling.max_tokens``.
        eos_token_ids: int64 ``[E]``, the tokens that end a response, as do the strings ``stops``.
        pad_token_id: fills the unused cells of the prefill; no output depends on it.
        shared: whether the rows of a prompt share its keys and values; only if ``use_decode_attention`` returned True.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        requests: Sequence[GroupRequest],
        sampling: Sampling,
        rooms: Sequence[int],
        eos_token_ids: torch.Tensor,
        pad_token_id: int,
        *,
        shared: bool,
        stops: StopStrings | None = None,
    ):
        device = model.device
        counts = torch.tensor([request.num_samples for request in requests])
        group_of_row = torch.repeat_interleave(torch.arange(len(requests)), counts)
        # consecutive groups of one prompt share it: a group may be requested sample by sample
        runs = [(prompt, len(list(equal))) for prompt, equal in itertools.groupby(r.prompt_ids for r in requests)]
        prompt_of_group = [index for index, (_, count) in enumerate(runs) for _ in range(count)]
        seeds = [
            sample_seed(request.seed, request.first_sample + i)
            for request in requests
            for i in range(request.num_samples)
        ]
        num_rows, horizon = len(seeds), max(rooms)
        self._model = model
        self._requests = list(requests)
        self._stops = stops
        self._cache: GroupCache | None = None
        self._make_cache = functools.partial(
            SharedPrompts if shared else RepeatedPrompts,
            prompts=[prompt for prompt, _ in runs],
            group_of_row=torch.tensor(prompt_of_group)[group_of_row].to(device),
            pad_token_id=pad_token_id,
        )
        self._sampling = sampling
        self._eos_token_ids = eos_token_ids.to(device)
        self._group_of_row: list[int] = group_of_row.tolist()
        self._first_row = (counts.cumsum(0) - counts).tolist()
        self._open_samples: list[int] = counts.tolist()  # of each group; 0 once it has ended or was dropped
        self._versions: list[int] = []
        self._rooms = torch.tensor(rooms)[group_of_row].to(device)
        self._uniforms = uniforms(torch.tensor(seeds), horizon).to(device)
        # Results, one row per sample; `_rows` maps the batch's rows to them.
        self._tokens = torch.zeros((num_rows, horizon), dtype=torch.int64, device=device)
        self._log_probs = torch.zeros((num_rows, horizon), dtype=torch.float32, device=device)
        self._supports: list[list[torch.Tensor]] = [[] for _ in seeds]  # int32 ids of each token's set, if truncated
        self._lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._truncated = torch.zeros(num_rows, dtype=torch.bool, device=device)
        self._rows = torch.arange(num_rows, device=device)
        self.num_rows = num_rows  # in the batch, including rows that ended since it was last compacted
        last_tokens = torch.tensor([request.prompt_ids[-1] for request in requests])
        self._last_tokens = last_tokens[group_of_row].to(device)
        self._living = torch.ones(num_rows, dtype=torch.bool, device=device)

    @property
    def active(self) -> bool:
        """True while a group is still being sampled."""
        return any(self._open_samples)

    def drop(self, group: int) -> None:
        """Stop sampling the group with the index ``group``; its rows end at once, and it has no output."""
        self._open_samples[group] = 0
        dropped = torch.tensor([row for row, group_of_row in enumerate(self._group_of_row) if group_of_row == group])
        self._living = self._living & ~torch.isin(self._rows, dropped.to(self._rows.device))

    @torch.inference_mode()
    def step(self, version: int) -> list[int]:
        """Sample a token, labelled ``version``, of every unfinished row; return the indices of newly ended groups."""
        t = len(self._versions)
        if self._cache is None:
            self._cache = self._make_cache(self._model)
        elif sum(self._open_samples) < _SHRINK_BELOW * self.num_rows:  # counted here: no wait for the device
            keep = self._living.nonzero().squeeze(1)
            self._cache.keep(keep)
            self._last_tokens, self._rows, self._living = self._last_tokens[keep], self._rows[keep], self._living[keep]
            self.num_rows = len(keep)
        logits = self._cache.next_logits(self._model, self._last_tokens)
        probs = sampled_probs(logits, self._sampling)
        if self._sampling.temperature > 0:
            tokens = draw(probs, self._uniforms[self._rows, t])
        else:
            tokens = logits.argmax(-1)
        self._tokens[self._rows, t] = tokens
        self._log_probs[self._rows, t] = probs.gather(1, tokens[:, None]).squeeze(1).log()
        if self._sampling.is_truncated:
            ids = (in_support := probs > 0).nonzero()[:, 1].to(torch.int32).cpu()
            for row, support in zip(self._rows.tolist(), ids.split(in_support.sum(1).tolist())):
                self._supports[row].append(support)
        self._versions.append(version)
        self._last_tokens = tokens
        length = t + 1  # of the rows that end with this token
        at_eos = torch.isin(tokens, self._eos_token_ids)
        if self._sampling.ignore_eos:
            at_eos = torch.zeros_like(at_eos)
        if self._stops is not None:
            tails = self._tokens[self._rows, max(0, length - self._stops.window) : length].tolist()
            at_eos |= torch.tensor([self._stops.is_complete(tail) for tail in tails], device=at_eos.device)
        stops = self._living & (at_eos | (self._rooms[self._rows] == length))
        rows = self._rows[stops]
        if not len(rows):
            return []
        self._lengths[rows] = length
        self._truncated[rows] = ~at_eos[stops]
        self._living = self._living & ~stops
        groups = [self._group_of_row[row] for row in rows.tolist()]
        for group in groups:
            self._open_samples[group] -= 1
        return [group for group in dict.fromkeys(groups) if self._open_samples[group] == 0]

    def output(self, group: int) -> GroupOutput:
        """Return the output, on the CPU, of the group with the index ``group``, which has ended."""
        first = self._first_row[group]
        last = self._first_row[group + 1] if group + 1 < len(self._first_row) else len(self._group_of_row)
        lengths = self._lengths[first:last].tolist()
        truncated = self._truncated[first:last].tolist()
        longest = max(lengths)
        tokens = self._tokens[first:last, :longest].cpu()
        log_probs = self._log_probs[first:last, :longest].cpu()
        versions = torch.tensor(self._versions[:longest])
        # Clones: a sample must neither pin the whole batch nor be an inference tensor, which autograd refuses.
        samples = []
        for i, length in enumerate(lengths):
            supports = self._supports[first + i][:length]
            sample = Sample(
                token_ids=tokens[i, :length].clone(),
                log_probs=log_probs[i, :length].clone(),
                versions=versions[:length].clone(),
                truncated=truncated[i],
                support=SamplingSupport(torch.cat(supports), torch.tensor([*map(len, supports)], dtype=torch.int32))
                if supports
                else None,
            )
            samples.append(sample)
        return GroupOutput(self._requests[group].group_id, tuple(samples))


def _num_rows(batch: Mapping[int, Flight]) -> int:
    return sum(flight.request.num_samples for flight in batch.values())


def are_drawn_alike(batch: Mapping[int, Flight], flight: Flight) -> bool:
    """Return whether ``flight`` can share the batch: its sampling equals the batch's, except ``max_tokens``."""
    sampling = next(iter(batch.values())).sampling
    return replace(sampling, max_tokens=flight.sampling.max_tokens) == flight.sampling


class TransformersEngine(SteppingEngine):
    """Rollout engine that samples with a transformers model: its own copy of ``model``, unless ``copy_model`` is False.

    Consecutive groups of equal sampling that were submitted together are decoded together, up to ``max_rows`` samples
    at a time. Later groups wait (FIFO) until they fit and at least as many samples wait as are being decoded. A prompt
    is computed once for consecutive groups that have it, and stored once if the model's attention supports that. Rows
    do not depend on each other, up to rounding.

    Weights may be pushed from another thread or between two steps: every row samples its next token with the new
    weights and records their version; cached keys and values of earlier tokens are not recomputed.

    Args:
        model: a causal language model without adapters.
        pad_token_id: fills unused cells; no output depends on it.
        max_model_len: context in tokens; None: the model's. At most its :func:`rotary_limit`.
        max_rows: most samples decoded at once; a request of more is decoded whole, alone.
        device, dtype: those of the engine's copy; None: the model's.
        copy_model: False: use ``model`` itself without a copy; only if nothing else uses it.

    UserError if the model keeps a state other than keys and values, or its config has no context length.
    """

    name = "transformers"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_token_ids: Collection[int],
        pad_token_id: int,
        max_model_len: int | None = None,
        max_rows: int = 256,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        copy_model: bool = True,
    ):
        super().__init__()
        require_cache(model.config)
        text = model.config.get_text_config()
        context = max_model_len or getattr(text, "max_position_embeddings", None)
        if not context:
            raise UserError("The model's config has no max_position_embeddings; set inference_model.max_model_len.")
        self.max_model_len = min(int(context), rotary_limit(text) or int(context))
        self._max_rows = max_rows
        self._eos_token_ids = torch.tensor(sorted(eos_token_ids), dtype=torch.int64)
        self._pad_token_id = pad_token_id
        self._waiting: deque[dict[int, Flight]] = deque()  # groups to be decoded together, by ticket
        self._running: list[tuple[list[int], GroupDecoder]] = []  # the tickets of a decoder's groups
        engine_model: Any = copy.deepcopy(model) if copy_model else model
        self._model: Any = engine_model.to(device=device, dtype=dtype)
        engine_model.eval().requires_grad_(False)
        self.device = engine_model.device
        self._can_sleep = self.device.type != "cpu"
        self.weight_dtype = matrix_dtype(engine_model.state_dict().values())
        self._tied = tied_names(engine_model)
        self._shares_prompts = use_decode_attention(engine_model)

    def _start(self, flights: Mapping[int, Flight]) -> None:
        batch: dict[int, Flight] = {}  # consecutive groups with equal sampling, of at most max_rows samples together
        for ticket, flight in flights.items():
            fits = _num_rows(batch) + flight.request.num_samples <= self._max_rows
            if not (batch and fits and are_drawn_alike(batch, flight)):
                self._waiting.append(batch := {})
            batch[ticket] = flight

    def _step(self) -> Iterable[tuple[int, GroupOutput]]:
        # A forward pass costs much and a row in it little, so later turns of dialogs should share forward passes:
        # waiting batches, as many as fit, start once they have at least as many rows as the running ones.
        num_rows = sum(decoder.num_rows for _, decoder in self._running)
        while self._waiting and num_rows <= sum(map(_num_rows, self._waiting)):
            batch = self._waiting[0]
            if self._running and num_rows + _num_rows(batch) > self._max_rows:
                break
            self._waiting.popleft()
            while self._waiting and are_drawn_alike(batch, next(iter(self._waiting[0].values()))):
                if num_rows + _num_rows(batch) + _num_rows(self._waiting[0]) > self._max_rows:
                    break
                batch |= self._waiting.popleft()
            decoder = GroupDecoder(
                self._model,
                [flight.request for flight in batch.values()],
                next(iter(batch.values())).sampling,
                [flight.room for flight in batch.values()],
                self._eos_token_ids,
                self._pad_token_id,
                shared=self._shares_prompts,
                stops=self.stops,
            )
            self._running.append((list(batch), decoder))
            num_rows += decoder.num_rows
        ended = []
        for tickets, decoder in self._running:
            for group in decoder.step(self.version):
                ended.append((tickets[group], decoder.output(group)))
        self._running = [(tickets, decoder) for tickets, decoder in self._running if decoder.active]
        return ended

    def may_start(self, num_rows: int) -> bool:
        """Return whether the next step starts a batch if ``num_rows`` more rows come; ``max_rows`` is not checked."""
        submitted = sum(flight.request.num_samples for flight in list(self._submitted))
        running = sum(decoder.num_rows for _, decoder in self._running)
        return running <= num_rows + submitted + sum(map(_num_rows, self._waiting))

    def _drop(self, flights: Mapping[int, Flight]) -> None:
        remaining = ({ticket: batch[ticket] for ticket in batch if ticket not in flights} for batch in self._waiting)
        self._waiting = deque(batch for batch in remaining if batch)
        for known, decoder in self._running:
            for group, ticket in enumerate(known):
                if ticket in flights:
                    decoder.drop(group)
        self._running = [(known, decoder) for known, decoder in self._running if decoder.active]

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copy every weight by name (an adapter is merged into :attr:`base`); tied names after the first are optional.

        ValueError, with nothing copied, if names, shapes or tied weights do not fit, or ``base`` is missing;
        RuntimeError if the engine is closed.
        """
        model = self._model  # before the check: another thread may close this at any time
        self._require_open()
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        pushed = checked_weights(self.whole(weights), shapes, self._tied, tied_required=False)
        with self._between_steps():
            self._require_open()
            tensors = model.state_dict()  # sleep and wake replace them
            for name, tensor in pushed.items():
                if name not in self._tied:
                    tensors[name].copy_(tensor)
            self.version = version

    def weight_sums(self) -> dict[str, dict[str, Checksum]]:
        """Return ``{"transformers": {weight's name: checksum}}`` of every weight; RuntimeError if closed."""
        with self._between_steps():
            self._require_open()
            return {self.name: {name: Checksum.of(tensor) for name, tensor in self._model.state_dict().items()}}

    def _free_memory(self) -> None:
        self._model.cpu()
        torch.cuda.empty_cache()

    def _restore_memory(self) -> None:
        self._model.to(self.device)

    def _release(self) -> None:
        self._model = None


def transformers_engine(options: EngineOptions) -> TransformersEngine:
    """Build the engine from resolved options: copy ``model`` or load ``model_path``; UserError: unusable model."""
    from sota_grpo.policy.load import load_model

    model = options.model or load_model(
        options.model_path,
        dtype=options.dtype,  # type: ignore[arg-type]
        trust_remote_code=options.trust_remote_code,
        attn_implementation=options.attn_implementation,
        load_kwargs=options.load_kwargs,
    )
    return TransformersEngine(
        model,
        eos_token_ids=options.eos_token_ids,
        pad_token_id=options.pad_token_id,
        max_model_len=options.max_model_len,
        max_rows=options.max_rows,
        device=options.device,
        dtype=getattr(torch, options.dtype),
        copy_model=options.model is not None,
    )
