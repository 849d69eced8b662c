"""Rollout engine whose responses come from a function instead of a model: for tests, demos and measurements."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Iterable, Mapping

import torch

from sota_grpo.engines import Duration, EngineOptions, Script
from sota_grpo.engines.stepping import Flight, SteppingEngine
from sota_grpo.engines.transformers_engine import uniforms
from sota_grpo.rl.records import GroupOutput, GroupRequest, Sample, sample_seed

_LONGEST_SLEEP_S = 0.002  # so that a push of weights does not wait until a long group has ended


class ScriptedEngine(SteppingEngine):
    """Rollout engine whose sample ``i`` of a group, at policy ``version``, is ``script(request, i, version)``.

    ``i`` counts from ``request.first_sample``; at temperature 0 it is always 0. A response ends at its first EOS, which
    is appended if missing, and at the token limit; with ``ignore_eos`` it is repeated up to that limit. All tokens of a
    group have the version at which the group started, even after a push of weights.

    Args:
        script: function that returns the token ids of a response; None: uniformly random tokens below ``vocab_size``
            (EOS included), seeded by the request's seed, the sample index and the version.
        eos_token_id: token that ends a response.
        vocab_size: vocabulary size of the default script.
        log_prob: log-prob of every token; None: ``-log(vocab_size)``, that of the default script.
        duration_s: seconds until a group ends, or a function of its request; groups in flight run concurrently.
        max_model_len: context in tokens, prompt and response together.

    >>> from sota_grpo.rl.records import Sampling
    >>> engine = ScriptedEngine(lambda request, sample, version: [5, 6 + sample], eos_token_id=0)
    >>> request = GroupRequest(group_id=3, prompt_ids=(1, 2), num_samples=2, seed=0)
    >>> [sample.token_ids.tolist() for sample in next(engine.generate([request], Sampling(max_tokens=8))).samples]
    [[5, 6, 0], [5, 7, 0]]
    """

    name = "scripted"

    def __init__(
        self,
        script: Script | None = None,
        *,
        eos_token_id: int = 0,
        vocab_size: int = 32,
        log_prob: float | None = None,
        duration_s: Duration = 0.0,
        max_model_len: int = 4096,
    ):
        super().__init__()
        self.max_model_len = max_model_len
        self._script = script or self._uniform_tokens
        self._eos_token_id = eos_token_id
        self._vocab_size = vocab_size
        self._log_prob = -math.log(vocab_size) if log_prob is None else log_prob
        self._duration_s = duration_s
        # a heap by end (monotonic seconds), then ticket; last is the version of the group
        self._flying: list[tuple[float, int, Flight, int]] = []

    def _start(self, flights: Mapping[int, Flight]) -> None:
        now = time.monotonic()
        for ticket, flight in flights.items():
            duration = self._duration_s(flight.request) if callable(self._duration_s) else self._duration_s
            heapq.heappush(self._flying, (now + duration, ticket, flight, self.version))

    def _step(self) -> Iterable[tuple[int, GroupOutput]]:
        wait = self._flying[0][0] - time.monotonic()
        if wait > 0:
            time.sleep(min(wait, _LONGEST_SLEEP_S))
        now = time.monotonic()
        ended = []
        while self._flying and self._flying[0][0] <= now:
            _, ticket, flight, version = heapq.heappop(self._flying)
            ended.append((ticket, self._group(flight, version)))
        return ended

    def _drop(self, flights: Mapping[int, Flight]) -> None:
        self._flying = [entry for entry in self._flying if entry[1] not in flights]
        heapq.heapify(self._flying)

    def _group(self, flight: Flight, version: int) -> GroupOutput:
        request, room, sampling, _ = flight
        samples = []
        for index in range(request.first_sample, request.first_sample + request.num_samples):
            script = self._script(request, 0 if sampling.temperature == 0 else index, version)
            ids = [*itertools.takewhile(lambda token: token != self._eos_token_id, script), self._eos_token_id]
            if sampling.ignore_eos:
                ids = list(itertools.islice(itertools.cycle(ids), room + 1))
            length = min(len(ids), room)
            sample = Sample(
                token_ids=torch.tensor(ids[:room], dtype=torch.int64),
                log_probs=torch.full((length,), self._log_prob, dtype=torch.float32),
                versions=torch.full((length,), version, dtype=torch.int64),
                truncated=len(ids) > room,
            )
            samples.append(sample)
        return GroupOutput(group_id=request.group_id, samples=tuple(samples))

    def _uniform_tokens(self, request: GroupRequest, index: int, version: int) -> list[int]:
        seed = torch.tensor([sample_seed(request.seed, index, version)])
        room = self.max_model_len - len(request.prompt_ids)
        return (uniforms(seed, room)[0] * self._vocab_size).to(torch.int64).tolist()

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Set the policy version and ignore the weights; ValueError if they are an adapter and ``base`` is None."""
        for _ in self.whole(weights):
            pass
        with self._between_steps():
            self.version = version


def scripted_engine(options: EngineOptions) -> ScriptedEngine:
    """Build a :class:`ScriptedEngine` with the smallest end token as EOS; of the model only the config is read."""
    from transformers import AutoConfig

    if options.model:
        config = options.model.config
    else:
        config = AutoConfig.from_pretrained(options.model_path, trust_remote_code=options.trust_remote_code)
    config = config.get_text_config()
    return ScriptedEngine(
        options.script,
        eos_token_id=min(options.eos_token_ids),
        vocab_size=config.vocab_size,
        duration_s=options.duration_s,
        max_model_len=options.max_model_len or config.max_position_embeddings,
    )
