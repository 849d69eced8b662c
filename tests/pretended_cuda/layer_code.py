"""What Inductor makes of decoder layers for an H100, on a machine without one: ``python -m ... --shape qwen3-0.6b``.

Nothing is run. Tensors have shapes alone, torch is told of a GPU of compute capability 9.0, and the code that Inductor
writes is read: one line of JSON with, for the forward and the backward pass, how many Triton kernels, matrix products,
sums of partial sums and other operators it calls, and the bytes that the Triton kernels read and write once; and the
same of the fused loss.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from collections import Counter
from functools import partial
from math import prod
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.pretended_cuda import guard

if __name__ == "__main__":
    guard.load()  # before torch

import torch

SIZES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "i64": 8, "i32": 4, "i1": 1}
PROMPT, RESPONSES = 1024, (8, 6)  # two prompts, and responses as long as they
ROWS = PROMPT * (len(RESPONSES) + sum(RESPONSES))  # packed tokens: 16,384


def pretend_h100() -> list[str]:
    """Make torch, Triton and Inductor find an H100; return a list that gets each generated module's code."""
    answers: dict[str, Any] = {
        "get_device_properties": SimpleNamespace(**guard.H100), "get_device_capability": (9, 0), "is_available": True,
        "current_device": 0, "device_count": 1, "get_device_name": "NVIDIA H100", "_lazy_init": None,
        "synchronize": None, "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None,
        "current_stream": SimpleNamespace(cuda_stream=0), "_exchange_device": 0, "_maybe_exchange_device": 0,
        "is_bf16_supported": True,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, _answer=answer, **kwargs: _answer)
    # Inductor keeps some of these functions as it finds them
    import triton
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.fx_passes import fuse_attention, misc_patterns, pad_mm
    from torch._subclasses import fake_tensor
    from triton.backends.compiler import GPUTarget

    C: Any = torch._C
    C._cuda_getCurrentRawStream = C._cuda_getDevice = lambda *args: 0
    torch.accelerator.is_available = lambda: False
    fake_tensor.init_gpu_context = lambda device: None
    driver: Any = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_device_interface=lambda: torch.cuda,
    )
    triton.runtime.driver.set_active(driver)
    for module, name in (
        (fuse_attention, "_sfdp_init"),
        (pad_mm, "_pad_mm_init"),
        (misc_patterns, "_misc_patterns_init"),
    ):
        setattr(module, name, lambda *args, **kwargs: None)  # patterns that are found by running them
    inductor_config.joint_graph_constant_folding = False
    inductor_config.force_disable_caches = True
    inductor_config.compile_threads = 1
    functorch_config.force_non_lazy_backward_lowering = True  # the backward pass without running one
    AsyncCompile.triton = lambda *args, **kwargs: SimpleNamespace(run=lambda *given, **named: None)
    codes: list[str] = []

    def load(key: str, path: str, *args: Any, **kwargs: Any) -> ModuleType:
        codes.append(Path(path).read_text())
        module: Any = ModuleType("generated")
        module.__file__, module.call = path, lambda given: [None] * 64
        return module

    PyCodeCache.load_by_key_path = staticmethod(load)
    return codes


def compile_layers(shape: str, number: int) -> None:
    """Run a block of layers over tensors without memory, as the learner does; the compiler may read their shapes."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoModelForCausalLM
    from transformers.models.auto import CONFIG_MAPPING

    from benchmarks.trainer_work import SHAPES
    from sota_grpo.policy import decoder_layer
    from sota_grpo.policy.causal import decoder_layers
    from sota_grpo.policy.shared_prompt import Block, Run, attention_tables

    family, sizes = SHAPES[shape]
    config = CONFIG_MAPPING[family](**{**sizes, "num_hidden_layers": number, "vocab_size": 64})
    blocks, length = [], 0
    for count in RESPONSES:
        end, stop = length + PROMPT, length + (1 + count) * PROMPT
        blocks.append(Block(length, end, stop, (Run(end, count, PROMPT),)))
        length = stop
    tables = attention_tables(blocks, length)
    options = decoder_layer.compile_options()
    decoder_layer.compile_options = lambda: {**options, "dynamic": False}  # so that the code names its sizes
    decoder_layer.takes_kernels = lambda device, dtype, width: True
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = decoder_layers(model)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in [module for layer in layers for module in layer.modules()]:
            for name, weight in module._parameters.items():
                if weight is not None:
                    module._parameters[name] = torch.nn.Parameter(torch.empty(weight.shape, device="cuda"))
        decoder_layer.join_products(layers, [None] * number)
        hidden = torch.empty(1, length, config.hidden_size, device="cuda", requires_grad=True)
        width = layers[0].self_attn.head_dim
        rotary = tuple(torch.empty(1, length, width, device="cuda") for _ in range(2))
        tables = type(tables)(torch.empty(tables.flat.shape, dtype=torch.int32, device="cuda"), tables.sizes)
        copies = decoder_layer.HalfWeights(layers, torch.bfloat16, True, SimpleNamespace(), hidden)
        in_half = torch.autocast("cuda", torch.bfloat16)
        results_are_none = contextlib.suppress(AttributeError, AssertionError)  # code that is only read returns None
        with copies, in_half, results_are_none:
            decoder_layer._computed_block(layers, hidden, rotary, None, tables, torch.bfloat16)


def compile_loss() -> None:
    """Fuse GRPO's loss of 16,384 tokens in eight rows, with every diagnostic that needs no reference."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from sota_grpo.policy.decoder_layer import compile_options
    from sota_grpo.rl.objectives import GRPOLoss, losses_with_slopes

    loss = GRPOLoss(torch.nn.Identity(), clip_epsilon=(0.2, 0.28), entropy_bonus=False)
    with FakeTensorMode(), contextlib.suppress(AssertionError):  # code that is only read returns None
        empty = partial(torch.empty, 8, 2 * PROMPT, device="cuda")
        entries = {name: empty() for name in ("behaviour", "weight", "log_prob", "entropy")}
        entries |= {"advantage": empty()[:, :1], "mask": empty(dtype=torch.bool)}
        torch.compile(losses_with_slopes, **compile_options())(loss, entries)


def counted(code: str) -> dict[str, float]:
    """Calls of one generated module, and the bytes of its Triton kernels' arguments."""
    signatures = {}
    for name, source in re.findall(r"(triton_\w+) = async_compile\.triton\('\w+', '''(.*?)'''", code, re.S):
        of_arguments = re.search(r"'signature': \{(.*?)\}", source)
        assert of_arguments is not None
        signatures[name] = [
            pair for pair in re.findall(r"'(\w+)': '([^']+)'", of_arguments[1]) if pair[1] != "constexpr"
        ]
    sizes: dict[str, int] = {}
    calls: Counter[str] = Counter()
    num_bytes = 0
    for line in map(str.strip, code[code.index("def call") :].splitlines()):
        if made := re.match(r"(\w+) = (?:empty_strided_cuda|reinterpret_tensor)\((?:\w+, )?\(([^)]*)\)", line):
            sizes[made[1]] = numel(made[2])
        elif given := re.match(r"assert_size_stride\((\w+), \(([^)]*)\)", line):
            sizes[given[1]] = numel(given[2])
        elif renamed := re.match(r"(\w+) = (\w+); del", line):
            sizes[renamed[1]] = sizes.get(renamed[2], 0)
        elif run := re.match(r"(triton_\w+)\.run\((.*), stream=", line):
            calls["kernels"] += 1
            arguments = re.findall(r"reinterpret_tensor\([^()]*\([^)]*\), \([^)]*\), \d+\)|[\w.()]+", run[2])
            for (role, kind), argument in zip(signatures[run[1]], arguments):
                view = re.match(r"reinterpret_tensor\(\w+, \(([^)]*)\)", argument)
                size = numel(view[1]) if view else sizes.get(argument, 0)
                times = 2 if role.startswith("in_out") else 1
                num_bytes += times * size * SIZES[kind.removeprefix("*")] if kind.startswith("*") else 0
        elif re.search(r"extern_kernels\.\w+\(", line):
            calls["products"] += 1
        elif re.match(r"(\w+ = )?torch\.ops\.\w+\.\w+", line):
            calls["operators"] += 1
        elif re.match(r"\w+ = workspace_\d+\[.*\.sum\(dim=0\)", line):  # second half of a reduction
            calls["sums"] += 1
    return {**calls, "gigabytes": round(num_bytes / 1e9, 3)}


def numel(shape: str) -> int:
    return prod(map(int, re.findall(r"\d+", shape)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, default=1, help="of one compiled function")
    args = parser.parse_args()
    codes = pretend_h100()
    compile_layers(args.shape, args.layers)
    compile_loss()
    print(json.dumps(dict(zip(("forward", "backward", "loss"), map(counted, codes)))))


if __name__ == "__main__":
    main()
