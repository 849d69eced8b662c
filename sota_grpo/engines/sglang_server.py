"""SGLang behind HTTP: a server of its own on the loopback interface, or one that runs already.

Written against SGLang's documented HTTP interface (``/generate``, ``/update_weights_from_disk``, ``/pause_generation``,
``/continue_generation``, ``/abort_request``) and tested against a stand-in that speaks it. It was never run against a
real SGLang server: try a short run first, whose start-up checks compare log-probs before and after a push.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sota_grpo.engines.base import Deadlines, EngineOptions
from sota_grpo.engines.server_dialect import HttpClient, Order, ServerError, Versions, refusal
from sota_grpo.rl.records import GroupRequest, Sample, Sampling, sample_seed

_SEED_BITS = 31  # SGLang keeps seeds as int32


class SGLangDialect:
    """SGLang's own HTTP endpoints.

    Seeds hold only where the server runs with ``--enable-deterministic-inference``, as one that is started here does.
    SGLang reports log-probs after temperature but before top-p and top-k: sampling with these is refused. Where the
    server does not say which weights sampled which token, all tokens of a sample get the version of when it was sent,
    the oldest that is possible.
    """

    name = "sglang_server"
    package = "sglang"

    def command(self, options: EngineOptions, port: int, key: str, scratch: Path, *, on_cpu: bool) -> list[str]:
        """The key goes into a file that only this user can read: every user can read a command line."""
        settings = scratch / "server.yaml"
        settings.touch(mode=0o600)
        settings.write_text(json.dumps({"api-key": key}))  # JSON is YAML
        eager = on_cpu if options.enforce_eager is None else options.enforce_eager
        return [
            *(sys.executable, "-m", "sglang.launch_server", "--config", str(settings)),
            *("--host", "127.0.0.1", "--port", str(port), "--skip-tokenizer-init", "--enable-deterministic-inference"),
            *("--model-path", options.model_path, "--dtype", options.dtype, "--random-seed", str(options.seed)),
            *("--max-running-requests", str(options.max_rows), "--tp-size", str(options.tensor_parallel_size)),
            *(() if options.max_model_len is None else ("--context-length", str(options.max_model_len))),
            *("--mem-fraction-static", str(options.gpu_memory_utilization)),
            *(("--disable-cuda-graph",) if eager else ()),
            *(("--trust-remote-code",) if options.trust_remote_code else ()),
            *(("--device", "cpu") if on_cpu else ("--enable-memory-saver",)),
        ]

    def environment(self, options: EngineOptions, key: str, *, on_cpu: bool) -> dict[str, str]:
        """Log-probs after temperature, whatever this process's own environment says."""
        return {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}

    def connect(self, client: HttpClient, deadlines: Deadlines, label: str) -> int:
        """Check the endpoints that a trainer needs.

        Raises:
            UserError: the key is wrong, or an endpoint is missing.
            ServerError: the server has another fault.
        """
        try:
            context = client.get("/v1/models", timeout_s=deadlines.control)["data"][0]["max_model_len"]
            client.post("/continue_generation", {}, timeout_s=deadlines.control)  # a dead trainer's pause
            relabel = {"new_version": label, "abort_all_requests": False}
            client.post("/update_weight_version", relabel, timeout_s=deadlines.control)
        except ServerError as error:
            raise refusal(error, client.url, "use a newer SGLang") from error
        return int(context)

    def refuse(self, request: GroupRequest, sampling: Sampling) -> None:
        """Raise ValueError for top-p and top-k sampling."""
        if sampling.top_p < 1 or sampling.top_k > 0:
            raise ValueError(
                "SGLang reports log-probs before top-p and top-k, not those of what it samples from; use top_p=1 and "
                f"top_k=0 instead of top_p={sampling.top_p:g} and top_k={sampling.top_k}."
            )

    def generate(self, client: HttpClient, order: Order, versions: Versions, timeout_s: float) -> tuple[Sample, ...]:
        """One batched request of ``num_samples`` copies of the prompt, sample ``i`` with its own seed.

        ``n`` in the sampling parameters would give all siblings one seed, and so one response.
        """
        sampling, request = order.sampling, order.request
        common = {
            "temperature": sampling.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": order.room,
            "stop_token_ids": list(order.stop_token_ids),
            "ignore_eos": sampling.ignore_eos,
            "skip_special_tokens": False,
        }
        seeds = [sample_seed(request.seed, index) % (1 << _SEED_BITS) for index in range(request.num_samples)]
        body = {
            "rid": _names(order.name, request.num_samples),
            "input_ids": [list(request.prompt_ids)] * request.num_samples,
            "sampling_params": [common | {"sampling_seed": seed} for seed in seeds],
            "return_logprob": True,
            "extra_key": [order.cache_salt] * request.num_samples,
        }
        answers = client.post("/generate", body, timeout_s=timeout_s)
        try:
            return tuple(_sample(answer["meta_info"], order, versions) for answer in answers)
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(
                f"POST {client.url}/generate was answered in a form this client does not know ({error!r}): "
                f"{str(answers)[:300]}"
            ) from error

    def abort(self, client: HttpClient, name: str, num_samples: int, timeout_s: float) -> None:
        for rid in _names(name, num_samples):
            client.post("/abort_request", {"rid": rid}, timeout_s=timeout_s)

    def push(self, client: HttpClient, folder: str, label: str, deadlines: Deadlines, *, idle: bool) -> None:
        """Pause in place, load, go on; the cache can be flushed when nothing runs, else the salt keeps it apart."""
        client.post("/pause_generation", {"mode": "in_place"}, timeout_s=deadlines.control)
        load = {"model_path": folder, "weight_version": label, "abort_all_requests": False, "flush_cache": idle}
        try:
            answer = client.post("/update_weights_from_disk", load, timeout_s=deadlines.push)
            if not (isinstance(answer, dict) and answer.get("success")):
                raise ServerError(f"The server at {client.url} did not load the weights in {folder}: {answer}")
        except ServerError:
            with contextlib.suppress(ServerError):  # the first error is the cause
                client.post("/continue_generation", {}, timeout_s=deadlines.control)
            raise
        client.post("/continue_generation", {}, timeout_s=deadlines.control)

    def probe(self, client: HttpClient, timeout_s: float) -> None:
        client.get("/health_generate", timeout_s=timeout_s)

    def sleep(self, client: HttpClient, timeout_s: float) -> None:
        # The weights' memory stays: what it held would be lost until the next push.
        client.post("/release_memory_occupation", {"tags": ["kv_cache"]}, timeout_s=timeout_s)

    def wake(self, client: HttpClient, timeout_s: float) -> None:
        client.post("/resume_memory_occupation", {"tags": ["kv_cache"]}, timeout_s=timeout_s)


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
    kept = Sample(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        log_probs=torch.tensor(log_probs, dtype=torch.float32),
        versions=token_versions,
        truncated=reason == "length",
    )
    if not bool(kept.log_probs.isfinite().all()):
        raise ServerError("The server reports no finite log-prob for a token that it sampled.")
    return kept
