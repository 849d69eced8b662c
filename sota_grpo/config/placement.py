"""Which device holds what: one pure function from counts or indices to a set of devices for each role."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sota_grpo.errors import UserError


@dataclass(frozen=True)
class Role:
    """What one role asks for: a count, or explicit indices, or neither (one device, shared where none is left)."""

    name: str
    num_devices: int | None = None
    devices: Sequence[int] | None = None
    default: int = 1

    @property
    def asked(self) -> bool:
        """Whether the user said anything; a role that was left alone may share a device."""
        return self.num_devices is not None or self.devices is not None

    @property
    def option(self) -> str:
        """The option that says how many devices this role takes."""
        return f"{self.name}.{'devices' if self.devices is not None else 'num_devices'}"

    @property
    def count(self) -> int:
        return len(self.devices) if self.devices is not None else (self.num_devices or self.default)


@dataclass(frozen=True)
class Placement:
    """Device indices of each role; ``colocated`` when the engine stands on a device of the learner."""

    train: tuple[int, ...]
    inference: tuple[int, ...]
    ref: tuple[int, ...]
    colocated: bool


def place(train: Role, inference: Role, ref: Role | None, *, available: int, concurrent: bool = False) -> Placement:
    """Devices for the roles: disjoint for those that ask for devices, shared by those that ask for nothing.

    An engine that asks for nothing shares the learner's devices, because in lockstep the two never work at the same
    time. A reference that asks for nothing takes the first free device, or the learner's where none is free. A machine
    with one device has it shared by all.

    Args:
        available: devices there are; 0 stands for the CPU, where the indices of a role only count its workers.
        concurrent: engine and learner work at the same time, so the engine has its own devices where there are two.

    Raises:
        UserError: more devices asked for than there are, an index that does not exist, or one index asked for twice.

    Example:
        >>> place(Role("train_model"), Role("inference_model"), Role("ref_model"), available=2)
        Placement(train=(0,), inference=(0,), ref=(1,), colocated=True)
        >>> place(Role("train_model"), Role("inference_model", num_devices=1), None, available=4)
        Placement(train=(1,), inference=(0,), ref=(), colocated=False)
        >>> place(Role("train_model", num_devices=2), Role("inference_model", num_devices=2), None, available=0)
        Placement(train=(0, 1), inference=(0, 1), ref=(), colocated=True)
    """
    if available == 0:
        counted = [tuple(role.devices or range(role.count)) if role else () for role in (train, inference, ref)]
        return Placement(counted[0], counted[1], counted[2], colocated=True)
    total = available
    # The engine chooses first: vLLM inside this process can only take the first device.
    roles = [role for role in (inference, train, ref) if role is not None]
    _check_indices(roles, total)
    if total == 1 and all(role.count == 1 for role in roles):
        return Placement((0,), (0,), (0,) if ref else (), colocated=True)
    needed = [role for role in roles if role.asked or role is train or (concurrent and role is inference)]
    _check_amount(needed, total)
    taken = {index for role in needed for index in role.devices or ()}
    free = [index for index in range(total) if index not in taken]
    found: dict[str, tuple[int, ...]] = {}
    for role in needed:
        found[role.name] = tuple(role.devices) if role.devices is not None else tuple(free[: role.count])
        free = [index for index in free if index not in found[role.name]]
    own = found[train.name]
    found.setdefault(inference.name, own)
    reference = () if ref is None else found.get(ref.name, tuple(free[:1]) or own[:1])
    engine = found[inference.name]
    return Placement(own, engine, reference, colocated=bool(set(engine) & set(own)))


def describe(placement: Placement, device_type: str) -> str:
    """The plan in one line, for the log.

    >>> describe(Placement((0,), (1, 2), (), colocated=False), "cuda")
    'learner cuda:0, engines cuda:1 cuda:2'
    >>> describe(Placement((0, 1), (0, 1), (0,), colocated=True), "cpu")
    '2 learner ranks, 2 engines, 1 reference worker on the CPU'
    """
    roles = (("learner", placement.train), ("engines", placement.inference), ("reference", placement.ref))
    if device_type == "cpu":
        names = ("learner rank", "engine", "reference worker")
        counts = [(len(indices), name) for name, (_, indices) in zip(names, roles) if indices]
        return ", ".join(f"{count} {name}{'s' if count > 1 else ''}" for count, name in counts) + " on the CPU"
    return ", ".join(f"{name} {' '.join(f'cuda:{i}' for i in indices)}" for name, indices in roles if indices)


def _check_indices(roles: Sequence[Role], total: int) -> None:
    """Every index exists, and on a machine with several devices no two roles name the same one."""
    taken: dict[int, str] = {}
    for role in roles:
        for index in role.devices or ():
            if not 0 <= index < total:
                raise UserError(
                    f"{role.name}.devices names device {index}, and this machine has {total} (0 to {total - 1}); "
                    f"use {role.name}.devices=[{total - 1}] or leave it out."
                )
            if index in taken and total > 1:
                raise UserError(f"Device {index} is named by {taken[index]} and by {role.name}; give each its own.")
            taken[index] = role.name


def _check_amount(needed: Sequence[Role], total: int) -> None:
    asked = sum(role.count for role in needed)
    if asked <= total:
        return
    counts = ", ".join(f"{role.name}={role.count}" for role in needed)
    largest = max(needed, key=lambda role: role.count)
    if largest.count > 1:
        fix = f"{'lower' if largest.devices is None else 'shorten'} {largest.option}"
    else:
        shared = next((role for role in needed if role.asked), largest)
        fix = f"leave {shared.option} out, so that {shared.name} shares a device"
    raise UserError(f"{asked} devices are asked for ({counts}) and this machine has {total}; {fix}.")
