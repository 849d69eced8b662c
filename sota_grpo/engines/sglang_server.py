"""SGLang behind HTTP: a server of its own on the loopback interface, or one that runs already.

Written against SGLang's documented HTTP interface (``/generate``, ``/update_weights_from_disk``, ``/pause_generation``,
``/continue_generation``, ``/abort_request``) and tested against a stand-in that speaks it. It was never run against a
real SGLang server: try a short run first, whose start-up checks compare log-probs before and after a push.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sota_grpo.engines import Deadlines, EngineOptions
from sota_grpo.engines.vllm_server import Order, Versions, VLLMDialect, finite_sample
from sota_grpo.http import HttpClient, ServerError
from sota_grpo.policy.weight_pack import Checksum
from sota_grpo.rl.records import GroupRequest, Sample, Sampling, sample_seed

_SEED_BITS = 31  # SGLang keeps seeds as int32


class SGLangDialect(VLLMDialect):
    """SGLang's own HTTP endpoints.

    Seeds hold only where the server runs with ``--enable-deterministic-inference``, as one that is started here does.
    SGLang reports log-probs after temperature but before top-p and top-k: sampling with these is refused. Where the
    server does not say which weights sampled which token, all tokens of a sample get the version of when it was sent,
    the oldest that is possible.
    """

    name, package = "sglang_server", "sglang"
    remedy = "use a newer SGLang"
    generate_path, probe_path = "/generate", "/health_generate"
    pause, resume = ("/pause_generation", {"mode": "in_place"}), ("/continue_generation", {})
    # The weights' memory stays: what it held would be lost until the next push.
    free_memory = ("/release_memory_occupation", {"tags": ["kv_cache"]})
    restore_memory = ("/resume_memory_occupation", {"tags": ["kv_cache"]})

    def command(self, options: EngineOptions, port: int, key: str, scratch: Path, *, on_cpu: bool) -> list[str]:
        """The key goes into a file that only this user can read."""
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
            *(("--disable-cuda-graph",) if on_cpu else ()),
            *(("--trust-remote-code",) if options.trust_remote_code else ()),
            *(("--device", "cpu") if on_cpu else ("--enable-memory-saver",)),
        ]

    def environment(self, options: EngineOptions, key: str, *, on_cpu: bool) -> dict[str, str]:
        """Log-probs after temperature, whatever this process's own environment says."""
        return {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}

    def refuse(self, request: GroupRequest, sampling: Sampling) -> None:
        """Raise ValueError for top-p, top-k and min-p sampling."""
        if sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0:
            raise ValueError(
                "SGLang reports log-probs before top-p and top-k, not those of what it samples from; use top_p=1, "
                f"top_k=0 and min_p=0 instead of top_p={sampling.top_p:g}, top_k={sampling.top_k} and "
                f"min_p={sampling.min_p:g}."
            )

    def _check_sampling(self, client: HttpClient, deadlines: Deadlines) -> None:
        """Nothing that would be reported otherwise is sampled (:meth:`refuse`)."""

    def _request(self, order: Order) -> dict[str, Any]:
        """``num_samples`` copies of the prompt in one batch, sample ``i`` with its own seed.

        ``n`` in the sampling parameters would give all siblings one seed, and so one response.
        """
        sampling, request = order.sampling, order.request
        common = {
            "temperature": sampling.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": order.room,
            "stop_token_ids": [] if sampling.ignore_eos else list(order.stop_token_ids),
            "ignore_eos": sampling.ignore_eos,
            "skip_special_tokens": False,
        }
        indexes = range(request.first_sample, request.first_sample + request.num_samples)
        seeds = [sample_seed(request.seed, index) % (1 << _SEED_BITS) for index in indexes]
        return {
            "rid": _names(order.name, request.num_samples),
            "input_ids": [list(request.prompt_ids)] * request.num_samples,
            "sampling_params": [common | {"sampling_seed": seed} for seed in seeds],
            "return_logprob": True,
            "extra_key": [order.cache_salt] * request.num_samples,
        }

    def _samples(self, answer: Any, order: Order, versions: Versions) -> tuple[Sample, ...]:
        return tuple(_sample(each["meta_info"], order, versions) for each in answer)

    def abort(self, client: HttpClient, name: str, num_samples: int, timeout_s: float) -> None:
        for rid in _names(name, num_samples):
            client.post("/abort_request", {"rid": rid}, timeout_s=timeout_s)

    def _label(self, client: HttpClient, label: str, deadlines: Deadlines) -> None:
        body = {"new_version": label, "abort_all_requests": False}
        client.post("/update_weight_version", body, timeout_s=deadlines.control)

    def label_to_build_on(self, client: HttpClient, deadlines: Deadlines) -> str | None:
        return None  # whether weights stay that a push leaves out is not documented

    def weight_sums(
        self, client: HttpClient, shapes: Mapping[str, Sequence[int]], deadlines: Deadlines
    ) -> dict[str, Checksum] | None:
        return None  # /get_weights_by_name is each model's own, and most have none

    def _load(self, client: HttpClient, folder: str, label: str, deadlines: Deadlines, *, idle: bool) -> None:
        """The cache can be flushed when nothing runs, else the salt keeps it apart."""
        load = {"model_path": folder, "weight_version": label, "abort_all_requests": False, "flush_cache": idle}
        answer = client.post("/update_weights_from_disk", load, timeout_s=deadlines.push)
        if not (isinstance(answer, dict) and answer.get("success")):
            raise ServerError(f"The server at {client.url} did not load the weights in {folder}: {answer}")


def _names(name: str, num_samples: int) -> list[str]:
    """Request ids of a group's samples; the stop ends the group's name, because SGLang aborts by prefix.

    >>> _names("ab-1", 2)
    ['ab-1.0', 'ab-1.1']
    """
    return [f"{name}.{index}" for index in range(num_samples)]


def _sample(info: Mapping[str, Any], order: Order, versions: Versions) -> Sample:
    reason = info["finish_reason"]["type"]
    if reason not in ("stop", "length"):
        raise ServerError(f"The server ended a sample with finish_reason={info['finish_reason']}.")
    log_probs, token_ids = zip(*((entry[0], entry[1]) for entry in info["output_token_logprobs"]))
    if "weight_versions" in info:
        token_versions = versions.per_token(info["weight_versions"], len(token_ids))
    else:
        token_versions = torch.full((len(token_ids),), order.version)
    return finite_sample(token_ids, log_probs, token_versions, truncated=reason == "length")
