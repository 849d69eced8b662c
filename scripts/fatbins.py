"""Zero what a GPU of compute capability 9.0 does not run in shared libraries: ``python scripts/fatbins.py FILE ...``.

The files keep their size and compress to a part of it. A CUDA fatbin is a header (magic, version 1, 16 bytes, length)
and entries (kind 1 for PTX, 2 for machine code; lengths of the entry's header and data; architecture): the data of all
entries but machine code for 9.0 becomes zeros. An entry that cannot be read ends its fatbin unchanged.
"""

from __future__ import annotations

import mmap
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

MAGIC = struct.pack("<IHH", 0xBA55ED50, 1, 16)
MACHINE_CODE, ARCHITECTURE = 2, 90


def unused(data: mmap.mmap | bytes) -> Iterator[tuple[int, int]]:
    """Yield the ranges of other architectures' code and of PTX.

    >>> code = lambda kind, arch: struct.pack("<HHIQIIHHI", kind, 0, 64, 4, 0, 0, 0, 0, arch).ljust(64, b".") + b"code"
    >>> body = code(2, 80) + code(2, 90) + code(1, 90)
    >>> list(unused(b"ELF." + MAGIC + struct.pack("<Q", len(body)) + body))
    [(84, 88), (220, 224)]
    """
    begin = data.find(MAGIC)
    while begin >= 0:
        at = begin + 16
        end = at + struct.unpack_from("<Q", data, begin + 8)[0]
        while at + 64 <= min(end, len(data)):
            kind, _, header, size, *_, architecture = struct.unpack_from("<HHIQIIHHI", data, at)
            if kind not in (1, MACHINE_CODE) or not 64 <= header <= 1024 or at + header + size > end:
                break
            if (kind, architecture) != (MACHINE_CODE, ARCHITECTURE):
                yield at + header, at + header + size
            at += header + size
        begin = data.find(MAGIC, max(at, begin + 4))


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
            ranges = list(unused(data))
            for begin, end in ranges:
                data[begin:end] = bytes(end - begin)
        print(
            f"{path.name}: {sum(end - begin for begin, end in ranges):,} of {path.stat().st_size:,} bytes are zeros now"
        )


if __name__ == "__main__":
    main()
