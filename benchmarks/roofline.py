"""Predicted time of a training step: ``python -m benchmarks.roofline --shape qwen2.5-1.5b --device h100``.

The step is that of :mod:`benchmarks.trainer`, :meth:`sota_grpo.training.learner.Learner.update` with its own layout,
kernels and optimizer, on a device that is only pretended and whose floats have shapes but no numbers
(:mod:`tests.pretended_cuda`). So a change of the code changes the table, and no GPU is needed; g++ is.

Per phase and kind of kernel: launches, GB, TFLOP and ms at the rates in :data:`benchmarks.roofline_rates.DEVICES`; then
the kernels that take the most time, MFU (the operations of :mod:`sota_grpo.functional.flops`, nothing counted twice,
over time and peak rate), packed tokens per second, the peak of the device's memory without the allocator's losses, and
how often the host waits and copies from memory that is not pinned. Elementwise kernels of the decoder's layers are
those that Inductor makes of them (:mod:`tests.pretended_cuda.layer_code`), except under ``--eager`` and ``--lora``;
those of the loss are counted as in eager mode. Triton's kernels count as what they read and write. Time in which the
device has nothing to do is not predicted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence

from tests.pretended_cuda import guard


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shape", default="qwen2.5-1.5b", help="of benchmarks.trainer")
    made.add_argument("--device", default="h100", help="of benchmarks.roofline_rates.DEVICES")
    made.add_argument("--tokens", type=int, default=16_384, help="packed tokens of a step")
    made.add_argument("--prompt", type=int, default=1024, help="tokens of each prompt")
    made.add_argument("--response", type=int, default=1024, help="tokens of each response")
    made.add_argument("--group", type=int, default=8, help="responses of a prompt")
    made.add_argument("--lora", type=int, default=0, help="rank of the adapter; 0: all weights train")
    made.add_argument("--checkpointing", action="store_true", help="keep one activation per layer")
    made.add_argument("--micro-tokens", type=int, default=0, help="packed tokens of a micro-batch; 0: all of them")
    made.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the parameters")
    made.add_argument("--precision", choices=["fp32", "bf16"], default="bf16", help="autocast")
    made.add_argument("--eager", action="store_true", help="layers that are not compiled, as with an adapter")
    made.add_argument("--plain-head", action="store_true", help="the head without its kernels")
    made.add_argument("--top", type=int, default=12, help="kernels that take the most time")
    made.add_argument("--layer-code", type=json.loads, help=argparse.SUPPRESS)  # found before pretending
    made.add_argument("--json", action="store_true", help="one line of JSON instead of the table")
    return made


def layer_code(shape: str, checkpointing: bool) -> str:
    """What Inductor makes of a block of the shape's layers, as JSON, in a process of its own."""
    from benchmarks.trainer_work import SHAPES
    from sota_grpo.policy.decoder_layer import block_size

    layers = 1 if checkpointing else block_size(SHAPES[shape][1]["num_hidden_layers"])
    command = [sys.executable, "-m", "tests.pretended_cuda.layer_code", "--shape", shape, "--layers", str(layers)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.dumps({"layers": layers, **json.loads(done.stdout.splitlines()[-1])})


def main(arguments: Sequence[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    if not guard.pretending():
        given = [*(sys.argv[1:] if arguments is None else arguments)]
        code = [] if args.eager or args.lora else ["--layer-code", layer_code(args.shape, args.checkpointing)]
        guard.become(["-m", "benchmarks.roofline", *given, *code])
    from benchmarks.roofline_step import predict, table

    fields = ("shape", "tokens", "prompt", "response", "group", "lora", "checkpointing", "micro_tokens", "dtype")
    options = {name: getattr(args, name) for name in (*fields, "precision")}
    measured = predict(
        options,
        args.device,
        code=args.layer_code,
        plain_head=args.plain_head,
        top=args.top,
    )
    print(json.dumps(measured) if args.json else table(measured), flush=True)


if __name__ == "__main__":
    main()
