"""A CUDA device that is not there: tensors that say ``cuda:0``, compute on the CPU and refuse operands of two devices.

    python -m tests.pretended_cuda grpo.py --config-name grpo_cpu device=cuda engine=transformers
    python -m tests.pretended_cuda -m benchmarks.trainer --device cuda

What runs on it takes every branch that it would take on an H100: packed rows through the variable-length kernel (stood
in for), autocast, fused AdamW, CUDA's own random stream, in child processes too. It counts how often the host would
wait for the device, and the device's memory. It says nothing about time, and its kernels round as the CPU's do.

- ``guard.cpp``, :mod:`guard`: what torch asks of a device before Python is reached; compiled by g++ when first needed.
- ``site/``, :mod:`imports`: installs all this when a process imports torch.
- :mod:`tensor`: the tensors, and what every operation with one of them passes through.
- :mod:`kernels`: operations that the CPU has not.
- :mod:`counters`: waits, copies, memory.
- :mod:`host`: ``torch.cuda``, and what is set once in a process.
"""
