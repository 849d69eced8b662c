"""Which device holds what: one pure function from counts or indices to disjoint device sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sota_grpo.errors import UserError


@dataclass(frozen=True)
class Role:
    """What one role asks for: a count, or explicit indices, or neither (one device)."""

    name: str
    num_devices: int | None = None
    devices: Sequence[int] | None = None

    @property
    def count(self) -> int:
        return len(self.devices) if self.devices is not None else (self.num_devices or 1)


@dataclass(frozen=True)
class Placement:
    """Device indices of each role; ``colocated`` when the roles share the only one."""

    train: tuple[int, ...]
    inference: tuple[int, ...]
    ref: tuple[int, ...]
    colocated: bool


def place(train: Role, inference: Role, ref: Role | None, *, available: int) -> Placement:
    """Disjoint device sets for the roles, or everything on the only device.

    Args:
        available: devices on this machine; 0 stands for the CPU, which is one device.

    Raises:
        UserError: more devices asked for than there are, an index that does not exist, or one index asked for twice.

    Example:
        >>> place(Role("train_model"), Role("inference_model"), None, available=4)
        Placement(train=(0,), inference=(1,), ref=(), colocated=False)
        >>> place(Role("train_model"), Role("inference_model"), Role("ref_model"), available=1).colocated
        True
    """
    roles = [role for role in (train, inference, ref) if role is not None]
    total = max(available, 1)
    if total == 1 and all(role.count == 1 for role in roles):
        return Placement((0,), (0,), (0,) if ref else (), colocated=True)
    asked = sum(role.count for role in roles)
    if asked > total:
        counts = ", ".join(f"{role.name}={role.count}" for role in roles)
        largest = max(roles, key=lambda role: role.count)
        raise UserError(
            f"{asked} devices are asked for ({counts}) and this machine has {total}; lower {largest.name}.num_devices."
        )
    taken: dict[int, str] = {}
    for role in roles:
        for index in role.devices or ():
            if not 0 <= index < total:
                raise UserError(f"{role.name}.devices names device {index}, and the machine has 0 to {total - 1}.")
            if index in taken:
                raise UserError(f"Device {index} is named by {taken[index]} and by {role.name}; give each its own.")
            taken[index] = role.name
    free = [index for index in range(total) if index not in taken]
    found: dict[str, tuple[int, ...]] = {}
    for role in roles:
        found[role.name] = tuple(role.devices) if role.devices is not None else tuple(free[: role.count])
        free = [index for index in free if index not in found[role.name]]
    return Placement(
        found[train.name], found[inference.name], found[ref.name] if ref is not None else (), colocated=False
    )
