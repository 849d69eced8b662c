"""What fewer, larger kernels would move: chains of elementwise operations and reductions as one kernel each, in graphs
that are compiled.

A chain reads what comes from outside once, and writes what is used outside. What only other chains read again (the
backward pass) they make again themselves, where reading what it is made from costs no more. This is the best that a
compiler can do, not what one does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.roofline_trace import Kernel, Value


@dataclass
class Chain:
    """Kernels that become one.

    Attributes:
        members: in their order.
        reads: bytes of what comes from outside.
        makes: bytes of the values that are made inside, in their order.
        sources: of each value that is made inside, the values from outside that it is made from.
    """

    members: list[Kernel]
    reads: dict[Value, int]
    makes: dict[Value, int]
    sources: dict[Value, set[Value]]

    @property
    def joins(self) -> bool:
        return all(member.joins for member in self.members)


def fused(kernels: Sequence[Kernel], *, everywhere: bool = True) -> list[Kernel]:
    """The kernels with every chain as one; without ``everywhere`` only what is marked (``one_kernel``) is a chain.

    A chain ends where anything else runs, or where a marked region begins or ends.
    """
    chains: list[Chain] = []
    before: Kernel | None = None
    for kernel in kernels:
        together = before is not None and kernel.region == before.region and kernel.phase == before.phase
        together = together and kernel.graph == before.graph
        together = together and (kernel.region is not None or (everywhere and kernel.joins and before.joins))
        if not together:
            chains.append(Chain([], {}, {}, {}))
        _append(chains[-1], kernel)
        before = kernel
    return _without_what_stays_inside(chains)


def _append(chain: Chain, kernel: Kernel) -> None:
    sources: set[Value] = set()
    for value, size in kernel.reads.items():
        if value in chain.makes:
            sources |= chain.sources[value]
        else:
            sources.add(value)
            chain.reads[value] = max(size, chain.reads.get(value, 0))
    for value, size in kernel.writes.items():
        chain.makes[value], chain.sources[value] = size, sources
    chain.members.append(kernel)


def _without_what_stays_inside(chains: Sequence[Chain]) -> list[Kernel]:
    readers: defaultdict[Value, list[Chain]] = defaultdict(list)
    for chain in chains:
        for value in chain.reads:
            readers[value].append(chain)
    measured = []
    for chain in reversed(chains):  # what a later chain makes again is read from an earlier one
        inside = {value for member in chain.members for value in member.reads}
        writes = {}
        for value, size in reversed(chain.makes.items()):
            remade = [reader for reader in readers[value] if _makes_again(reader, chain, value)]
            for reader in remade:
                del reader.reads[value]
                for source in chain.sources[value] - reader.reads.keys():
                    reader.reads[source] = chain.reads[source]
                    readers[source].append(reader)
            last = not readers[value] and value not in inside  # a result that the step leaves behind
            if last or len(remade) < len(readers[value]):
                writes[value] = size
        measured.append((chain, writes))
    return [_joined(chain, writes) for chain, writes in reversed(measured)]


def _makes_again(reader: Chain, maker: Chain, value: Value) -> bool:
    """Whether ``reader`` reads no more when it makes ``value`` itself."""
    extra = sum(maker.reads[source] for source in maker.sources[value] - reader.reads.keys())
    return reader.joins and maker.joins and extra <= maker.makes[value]


def _joined(chain: Chain, writes: dict[Value, int]) -> Kernel:
    first = chain.members[0]
    if len(chain.members) == 1:
        return Kernel(
            first.name,
            first.kind,
            first.phase,
            chain.reads,
            writes or first.writes,
            first.flops,
            first.rate,
            first.joins,
        )
    largest = max(chain.members, key=lambda member: member.bytes)
    flops = sum(member.flops for member in chain.members)
    rate = next((member.rate for member in chain.members if member.rate), "")
    name = f"chain of {len(chain.members)} ({largest.name})"
    return Kernel(name, largest.kind, first.phase, chain.reads, writes, flops, rate, first.joins)
