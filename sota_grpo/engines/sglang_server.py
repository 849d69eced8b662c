"""Rollout engine on an SGLang server, started here on the loopback interface or already running.

Written against SGLang's documented HTTP interface (``/generate``, ``/update_weights_from_disk``, ``/pause_generation``,
``/continue_generation``, ``/abort_request``) and tested against a fake server. It was never run against a real SGLang
server: try a short run first, whose checks before training compare log-probs before and after a push of weights.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from sota_grpo.engines import EngineOptions
from sota_grpo.engines.server_engine import ServerEngine
from sota_grpo.engines.stepping import Flight
from sota_grpo.http import ServerError
from sota_grpo.policy.weight_pack import Checksum
from sota_grpo.rl.records import GroupOutput, GroupRequest, Sample, Sampling, sample_seed
from sota_grpo.text import one_line

_SEED_BITS = 31  # SGLang keeps seeds as int32


class SGLangEngine(ServerEngine):
    """Rollout engine on an SGLang server.

    Seeds take effect only if the server runs with ``--enable-deterministic-inference``, as a server started here does.
    SGLang's log-probs include the temperature, but not top-p, top-k or min-p, so :meth:`submit` raises ValueError if
    one of these is on. If the server does not report which weights sampled each token, all tokens of a sample get the
    version at which its request was sent, the oldest possible.
    """

    name, package = "sglang_server", "sglang"
    remedy = "use a newer SGLang"
    generate_path, probe_path = "/generate", "/health_generate"
    pause, resume = ("/pause_generation", {"mode": "in_place"}), ("/continue_generation", {})
    # The weights' memory stays: its content would be lost until the next push.
    free_memory = ("/release_memory_occupation", {"tags": ["kv_cache"]})
    restore_memory = ("/resume_memory_occupation", {"tags": ["kv_cache"]})

    @staticmethod
    def command(options: EngineOptions, port: int, key: str, scratch: Path, *, on_cpu: bool) -> list[str]:
        """Return the server's command line; write ``key`` into a file in ``scratch`` that only this user can read."""
        settings = scratch / "server.yaml"
        settings.touch(mode=0o600)
        settings.write_text(json.dumps({"api-key": key}))  # JSON is YAML
        return [
            *(sys.executable, "-m", "sglang.launch_server", "--config", str(settings)),
            *("--host", "127.0.0.1", "--port", str(port), "--skip-tokenizer-init", "--enable-deterministic-inference"),
            *("--model-path", options.model_path, "--dtype", options.dtype, "--random-seed", str(options.seed)),
            *("--max-running-requests", str(options.max_rows), "--tp-size", str(options.tensor_parallel_size)),
            *(() if options.max_model_len is None else ("--context-length", str(options.max_model_len))),
            *("--mem-fraction-static", str(options.gpu_memory_utilization)),
            *(("--trust-remote-code",) if options.trust_remote_code else ()),
            *(("--disable-cuda-graph", "--device", "cpu") if on_cpu else ("--enable-memory-saver",)),
        ]

    @staticmethod
    def environment(options: EngineOptions, key: str, *, on_cpu: bool) -> dict[str, str]:
        """Return the variable that makes SGLang report log-probs after temperature; the arguments are ignored."""
        return {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}

    def submit(self, request: GroupRequest, sampling: Sampling) -> Future[GroupOutput]:
        if sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0:
            raise ValueError(
                "SGLang's log-probs leave out top-p, top-k and min-p, unlike the sampled distribution; use "
                f"top_p=1, top_k=0 and min_p=0 instead of top_p={sampling.top_p:g}, top_k={sampling.top_k} and "
                f"min_p={sampling.min_p:g}."
            )
        return super().submit(request, sampling)

    def _check_sampling(self) -> None:
        """No-op: :meth:`submit` excludes the sampling settings under which log-probs would differ."""

    def _request_names(self, ticket: int, num_samples: int) -> list[str]:
        """Return the request id of each sample; SGLang aborts by prefix, so a dot must separate groups 1 and 10."""
        return [f"{self._request_name(ticket)}.{index}" for index in range(num_samples)]

    def _body(self, ticket: int, flight: Flight) -> dict[str, Any]:
        """Return a batch of ``num_samples`` prompt copies: with ``n`` all samples of a group would have one seed."""
        request, room, sampling, _ = flight
        common = {
            "temperature": sampling.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": room,
            "stop_token_ids": [] if sampling.ignore_eos else self._stop_token_ids,
            "ignore_eos": sampling.ignore_eos,
            "skip_special_tokens": False,
        }
        indexes = range(request.first_sample, request.first_sample + request.num_samples)
        seeds = [sample_seed(request.seed, index) % (1 << _SEED_BITS) for index in indexes]
        return {
            "rid": self._request_names(ticket, request.num_samples),
            "input_ids": [list(request.prompt_ids)] * request.num_samples,
            "sampling_params": [common | {"sampling_seed": seed} for seed in seeds],
            "return_logprob": True,
            "extra_key": [self._cache_salt] * request.num_samples,
        }

    def _samples(self, answer: Any, flight: Flight, version: int) -> Sequence[Sample]:
        samples = []
        for info in (row["meta_info"] for row in answer):
            tokens = [(token, log_prob) for log_prob, token, *_ in info["output_token_logprobs"]]
            sent = {"version": self._label(version), "start": 0, "end": len(tokens)}
            samples.append(self._sample(tokens, info["finish_reason"]["type"], info.get("weight_versions", [sent])))
        return samples

    def _abort(self, ticket: int, num_samples: int) -> None:
        for name in self._request_names(ticket, num_samples):
            self._post("/abort_request", {"rid": name})

    def _set_label(self, label: str) -> None:
        self._post("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    def _served_label(self) -> str | None:
        return None  # SGLang does not document whether it keeps weights that a push leaves out

    def weight_sums(self) -> Mapping[str, Mapping[str, Checksum]] | None:
        """Return None: SGLang implements ``/get_weights_by_name`` per model, and for most models not at all."""
        return None

    def _load(self, folder: str, label: str) -> None:
        """Load weights; the prompt cache can be flushed only while no group runs, else the salt drops old prompts."""
        idle = not self._flights
        load = {"model_path": folder, "weight_version": label, "abort_all_requests": False, "flush_cache": idle}
        answer = self._client.post("/update_weights_from_disk", load, timeout_s=self._load_s)
        if not (isinstance(answer, dict) and answer.get("success")):
            said = one_line(str(answer))
            raise ServerError(f"The server at {self._client.url} failed to load the weights in {folder}: {said}")
