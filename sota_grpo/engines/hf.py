"""The embedded engine: any transformers causal language model, no further install, CPU or one CUDA device."""

from __future__ import annotations

import copy
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from sota_grpo.engines.checks import checked_weights, response_rooms, tied_names
from sota_grpo.engines.decode import DECODE_ATTENTION, GroupDecoder
from sota_grpo.records import GroupOutput, GroupRequest, Sampling

_SUPPORTED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


class TransformersEngine:
    """Samples with its own copy of a transformers model.

    The model given is deep-copied, so training it changes nothing here until :meth:`update_weights`. Groups are decoded
    together, up to ``max_rows`` samples at a time; each prompt is computed once per group. A row is drawn from the
    random stream ``sample_seed(request.seed, i)``: it does not depend on the other rows, up to rounding, and equal
    calls give equal bits.

    Contract. Consumes: requests. Produces: groups, as they finish. Waits for: nothing. Weights may be pushed from
    another thread, or between two groups: the next token of every row comes from them, and carries their version.

    Args:
        model: a causal language model without adapters.
        eos_token_ids: the tokens that end a response.
        pad_token_id: fills unused cells; no output depends on it.
        max_model_len: context in tokens; None takes what the model allows.
        max_rows: most samples decoded together (one group is never split).
        device: where to sample; None stays where the model is.
        dtype: of the engine's copy; None keeps the model's.

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
    ):
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
        self._lock = threading.Lock()
        own: Any = copy.deepcopy(model)
        self._model: PreTrainedModel | None = own.to(device=device, dtype=dtype)
        own.eval().requires_grad_(False)
        self._device = own.device
        self._tied = tied_names(own)
        if own.config._attn_implementation == "sdpa":
            own.set_attn_implementation(DECODE_ATTENTION)

    def generate(self, requests: Sequence[GroupRequest], sampling: Sampling) -> Iterator[GroupOutput]:
        """Yield each group once, when its last sample has ended.

        Raises:
            ValueError: a prompt leaves no room for a response; nothing was sampled then.
            RuntimeError: the engine is closed.
        """
        rooms = response_rooms(requests, sampling, self.max_model_len)
        self._open_model()
        return self._stream(list(requests), rooms, sampling)

    def _stream(self, requests: list[GroupRequest], rooms: list[int], sampling: Sampling) -> Iterator[GroupOutput]:
        for part in self._parts(requests):
            with self._lock:
                decoder = GroupDecoder(
                    self._open_model(), requests[part], sampling, rooms[part], self._eos_token_ids, self._pad_token_id
                )
            while decoder.active:
                with self._lock:
                    ended = decoder.step(self.version)
                for group in ended:
                    yield GroupOutput(requests[part][group].group_id, decoder.samples(group))

    def _parts(self, requests: list[GroupRequest]) -> Iterator[slice]:
        """Consecutive groups of at most ``max_rows`` samples together."""
        start = rows = 0
        for i, request in enumerate(requests):
            if rows and rows + request.num_samples > self._max_rows:
                yield slice(start, i)
                start, rows = i, 0
            rows += request.num_samples
        if rows:
            yield slice(start, len(requests))

    def _open_model(self) -> PreTrainedModel:
        if self._model is None:
            raise RuntimeError("This engine is closed; build a new one to sample again.")
        return self._model

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copy every weight by name; an explicit tied ``lm_head.weight`` is accepted when it equals its partner.

        Raises:
            ValueError: a name is unknown or missing, a shape differs, or a tied pair differs; nothing was copied then.
        """
        own = self._open_model().state_dict()
        shapes = {name: tensor.shape for name, tensor in own.items()}
        given = checked_weights(weights, shapes, self._tied, tied_required=False)
        with self._lock:
            for name, tensor in given.items():
                if name not in self._tied:
                    own[name].copy_(tensor)
            self.version = version

    def sleep(self) -> None:
        """Free the device memory: the weights move to the CPU. Nothing to free on a CPU."""
        if self._device.type != "cpu":
            self._open_model().cpu()
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Bring the weights back to the device."""
        if self._device.type != "cpu":
            model: Any = self._open_model()
            model.to(self._device)

    def close(self) -> None:
        """Free the weights; idempotent."""
        self._model = None
