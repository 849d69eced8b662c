"""The embedded engine: any transformers causal language model, no further install, CPU or one CUDA device."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from sota_grpo.engines.checks import checked_weights, matrix_dtype, tied_names
from sota_grpo.engines.decode import GroupDecoder
from sota_grpo.engines.decode_attention import use_decode_attention
from sota_grpo.engines.stepping import SteppingEngine
from sota_grpo.records import GroupOutput, GroupRequest, Sampling

_SUPPORTED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass
class _Part:
    """Groups that are decoded together, by ticket."""

    groups: dict[int, tuple[GroupRequest, int]]  # ticket: request, room
    sampling: Sampling

    @property
    def num_rows(self) -> int:
        return sum(request.num_samples for request, _ in self.groups.values())


class TransformersEngine(SteppingEngine):
    """Samples with its own copy of a transformers model.

    The model given is deep-copied, so training it changes nothing here until :meth:`update_weights`. The groups of one
    call are decoded together, up to ``max_rows`` samples at a time, and those of other calls beside them while there
    is room, first come first served; each prompt is computed once per group, and kept once where the model's attention
    lets its rows share it. A row is drawn from the random stream ``sample_seed(request.seed, i)``: it does not depend
    on the other rows of its call, up to rounding, nor on other calls at all, and equal calls give equal bits.

    Contract. Consumes: requests. Produces: groups, as they finish. Waits for: nothing. Weights may be pushed from
    another thread, or between two steps: the next token of every row comes from them, and carries their version; the
    keys and values of the tokens before it stay as they are.

    Args:
        model: a causal language model without adapters.
        eos_token_ids: the tokens that end a response.
        pad_token_id: fills unused cells; no output depends on it.
        max_model_len: context in tokens; None takes what the model allows.
        max_rows: most samples in the batch (one group is never split).
        device: where to sample; None stays where the model is.
        dtype: of the engine's copy; None keeps the model's.
        copy_model: False takes the given model itself, for a caller that has no other use of it.

    Raises:
        ValueError: the model keeps a state other than keys and values, or states no context length.
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
        config: Any = model.config.get_text_config()
        layer_types = set(getattr(config, "layer_types", None) or ())
        if layer_types - _SUPPORTED_LAYERS:
            raise ValueError(
                f"engine=transformers keeps keys and values only, and this model has layers of type "
                f"{sorted(layer_types - _SUPPORTED_LAYERS)}; use engine=vllm."
            )
        context = max_model_len or getattr(config, "max_position_embeddings", None)
        if not context:
            raise ValueError("The model's config has no max_position_embeddings; give max_model_len.")
        self.version = 0
        self.max_model_len = int(context)
        self._max_rows = max_rows
        self._eos_token_ids = torch.tensor(sorted(eos_token_ids), dtype=torch.int64)
        self._pad_token_id = pad_token_id
        self._waiting: deque[_Part] = deque()
        self._running: list[tuple[list[int], GroupDecoder]] = []  # the tickets of a decoder's groups
        own: Any = copy.deepcopy(model) if copy_model else model
        self._model: PreTrainedModel | None = own.to(device=device, dtype=dtype)
        own.eval().requires_grad_(False)
        self.device = own.device
        self.weight_dtype = matrix_dtype(own.state_dict().values())
        self._tied = tied_names(own)
        self._shares_prompts = use_decode_attention(own)

    def _start(
        self, tickets: Sequence[int], requests: Sequence[GroupRequest], rooms: Sequence[int], sampling: Sampling
    ) -> None:
        self._bring_back()
        for part in self._parts(requests):
            groups = zip(tickets[part], zip(requests[part], rooms[part]))
            self._waiting.append(_Part(dict(groups), sampling))

    def _parts(self, requests: Sequence[GroupRequest]) -> Iterator[slice]:
        """Consecutive groups of at most ``max_rows`` samples together."""
        start = rows = 0
        for i, request in enumerate(requests):
            if rows and rows + request.num_samples > self._max_rows:
                yield slice(start, i)
                start, rows = i, 0
            rows += request.num_samples
        if rows:
            yield slice(start, len(requests))

    def _step(self) -> Iterable[tuple[int, GroupOutput]]:
        self._start_waiting()
        ended = []
        for tickets, decoder in self._running:
            for group in decoder.step(self.version):
                ended.append((tickets[group], decoder.output(group)))
        self._running = [(tickets, decoder) for tickets, decoder in self._running if decoder.active]
        return ended

    def _start_waiting(self) -> None:
        """Start the parts that fit. A part waits until all of it fits: a pass of the model costs much, a row little."""
        num_rows = sum(decoder.num_rows for _, decoder in self._running)
        while self._waiting and (not self._running or num_rows + self._waiting[0].num_rows <= self._max_rows):
            part = self._waiting.popleft()
            requests, rooms = zip(*part.groups.values())
            decoder = GroupDecoder(
                self._require_open(),
                requests,
                part.sampling,
                rooms,
                self._eos_token_ids,
                self._pad_token_id,
                shared=self._shares_prompts,
            )
            self._running.append((list(part.groups), decoder))
            num_rows += decoder.num_rows

    def _drop(self, tickets: Collection[int]) -> None:
        gone = set(tickets)
        for part in self._waiting:
            part.groups = {ticket: group for ticket, group in part.groups.items() if ticket not in gone}
        self._waiting = deque(part for part in self._waiting if part.groups)
        for known, decoder in self._running:
            for group, ticket in enumerate(known):
                if ticket in gone:
                    decoder.drop(group)
        self._running = [(known, decoder) for known, decoder in self._running if decoder.active]

    def _require_open(self) -> PreTrainedModel:
        if self._model is None:
            raise RuntimeError("This engine is closed; build a new one to sample again.")
        return self._model

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copy every weight by name; an explicit tied ``lm_head.weight`` is accepted when it equals its partner.

        Raises:
            ValueError: a name is unknown or missing, a shape differs, or a tied pair differs; nothing was copied then.
        """
        own = self._require_open().state_dict()
        shapes = {name: tensor.shape for name, tensor in own.items()}
        given = checked_weights(weights, shapes, self._tied, tied_required=False)
        with self._turn():
            for name, tensor in given.items():
                if name not in self._tied:
                    own[name].copy_(tensor)
            self.version = version

    def sleep(self) -> None:
        """Free the device memory: the weights move to the CPU. Nothing to free on a CPU.

        Raises:
            RuntimeError: groups are in flight; their keys and values would stay behind.
        """
        with self._turn():
            if self.device.type == "cpu":
                return
            if self._baskets:
                raise RuntimeError(
                    f"The transformers engine was asked to sleep with {len(self._baskets)} groups in flight; consume "
                    "or abort them first."
                )
            self._require_open().cpu()
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Bring the weights back to the device; sampling does it by itself."""
        with self._turn():
            self._bring_back()

    def _bring_back(self) -> None:
        model: Any = self._require_open()
        if model.device != self.device:
            model.to(self.device)

    def close(self) -> None:
        """Free the weights and forget what is in flight; idempotent."""
        with self._turn():
            self._forget_all()
            self._model = None
