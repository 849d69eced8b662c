"""Device sets are disjoint, complete, and never invented."""

from __future__ import annotations

import itertools

import pytest

from sota_grpo.errors import UserError
from sota_grpo.placement import Role, place


@pytest.mark.parametrize("counts", list(itertools.product((1, 2, 3), repeat=3)))
def test_counts_give_disjoint_sets_of_that_size(counts: tuple[int, int, int]) -> None:
    train, inference, ref = (Role(name, count) for name, count in zip(("train", "inference", "ref"), counts))
    found = place(train, inference, ref, available=9)
    sets = (found.train, found.inference, found.ref)
    assert tuple(map(len, sets)) == counts
    assert len(set().union(*sets)) == sum(counts)


def test_too_many_gives_both_numbers_and_the_fix() -> None:
    with pytest.raises(UserError, match=r"5 devices .* has 4; lower inference_model.num_devices"):
        place(Role("train_model", 1), Role("inference_model", 3), Role("ref_model", 1), available=4)


def test_explicit_devices_are_kept_and_the_others_go_around_them() -> None:
    found = place(Role("train_model", devices=[2]), Role("inference_model", 2), None, available=3)
    assert (found.train, found.inference, found.ref) == ((2,), (0, 1), ())


@pytest.mark.parametrize(("devices", "message"), [([7], "device 7"), ([0], "named by")])
def test_wrong_indices_are_refused(devices: list[int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        place(Role("train_model", devices=[0]), Role("inference_model", devices=devices), None, available=2)


@pytest.mark.parametrize("available", [0, 1])
def test_one_device_is_shared_by_all(available: int) -> None:
    found = place(Role("a"), Role("b"), Role("c"), available=available)
    assert found.colocated
    assert found.train == found.inference == found.ref == (0,)
