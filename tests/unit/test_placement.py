"""Device sets that are asked for are disjoint and complete, none is invented, and the defaults fit every machine."""

from __future__ import annotations

import itertools

import pytest

from sota_grpo.assembly.devices import Role, place
from sota_grpo.errors import UserError


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


@pytest.mark.parametrize(
    ("roles", "available", "fix"),
    [
        (({"num_devices": 1}, {"num_devices": 1}, {"num_devices": 1}), 2, "leave inference_model.num_devices out"),
        (({}, {"devices": [0]}, {"num_devices": 1}), 2, "leave inference_model.devices out"),
        (({"devices": [0, 1]}, {"num_devices": 1}, {}), 2, "shorten train_model.devices"),
    ],
)
def test_the_fix_names_an_option_that_helps(roles: tuple[dict, dict, dict], available: int, fix: str) -> None:
    named = [Role(name, **role) for name, role in zip(("train_model", "inference_model", "ref_model"), roles)]
    with pytest.raises(UserError, match=rf"3 devices .* has {available}; {fix}"):
        place(*named, available=available)


@pytest.mark.parametrize("available", range(6))
@pytest.mark.parametrize("with_reference", [True, False])
def test_the_defaults_fit_every_machine(available: int, with_reference: bool) -> None:
    ref = Role("ref_model") if with_reference else None
    found = place(Role("train_model"), Role("inference_model"), ref, available=available)
    spare = 1 if available > 1 else 0
    assert (found.train, found.inference, found.colocated) == ((0,), (0,), True)
    assert found.ref == ((spare,) if with_reference else ())


def test_an_engine_with_a_device_of_its_own_takes_the_first() -> None:
    found = place(Role("train_model"), Role("inference_model", 1), Role("ref_model"), available=2)
    assert (found.train, found.inference, found.ref, found.colocated) == ((1,), (0,), (1,), False)


def test_explicit_devices_are_kept_and_the_others_go_around_them() -> None:
    found = place(Role("train_model", devices=[2]), Role("inference_model", 2), None, available=3)
    assert (found.train, found.inference, found.ref) == ((2,), (0, 1), ())


@pytest.mark.parametrize(("devices", "message"), [([7], "device 7"), ([0], "named by")])
def test_wrong_indices_are_refused(devices: list[int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        place(Role("train_model", devices=[0]), Role("inference_model", devices=devices), None, available=2)


@pytest.mark.parametrize("name", ["train_model", "inference_model", "ref_model"])
def test_an_index_that_does_not_exist_is_refused_where_there_is_one_device(name: str) -> None:
    roles = [
        Role(role, devices=[2] if role == name else None) for role in ("train_model", "inference_model", "ref_model")
    ]
    said = rf"{name}\.devices names device 2, and this machine has 1 .*use {name}\.devices=\[0\]"
    with pytest.raises(UserError, match=said):
        place(*roles, available=1)


@pytest.mark.parametrize("counts", list(itertools.product((1, 2, 3), repeat=3)))
def test_on_the_cpu_a_device_is_a_worker(counts: tuple[int, int, int]) -> None:
    names = ("train_model", "inference_model", "ref_model")
    counted = place(*(Role(name, count) for name, count in zip(names, counts)), available=0)
    assert (len(counted.train), len(counted.inference), len(counted.ref)) == counts
    named = place(*(Role(name, devices=range(2, 2 + count)) for name, count in zip(names, counts)), available=0)
    assert (len(named.train), len(named.inference), len(named.ref)) == counts


@pytest.mark.parametrize("available", [2, 3, 8])
@pytest.mark.parametrize("with_reference", [True, False])
def test_concurrent_engines_never_share_the_learners_device(available: int, with_reference: bool) -> None:
    ref = Role("ref_model") if with_reference else None
    found = place(Role("train_model"), Role("inference_model"), ref, available=available, concurrent=True)
    assert not found.colocated
    assert not set(found.train) & set(found.inference)
    assert found.ref == (((2,) if available > 2 else found.train) if with_reference else ())


@pytest.mark.parametrize(("available", "reference"), [(0, (0,)), (4, (0,)), (6, (4,))])
def test_shared_engines_stand_on_all_devices_of_the_learner(available: int, reference: tuple[int, ...]) -> None:
    engines = Role("inference_model", default=2, shared=True)
    found = place(Role("train_model", 4), engines, Role("ref_model"), available=available, concurrent=True)
    assert (found.train, found.inference, found.ref) == ((0, 1, 2, 3), (0, 1, 2, 3), reference)
    assert found.colocated
    listed = place(Role("train_model", devices=[3, 1]), engines, None, available=4, concurrent=True)
    assert listed.train == listed.inference == (3, 1)


def test_shared_engines_ask_for_no_further_device() -> None:
    engines = Role("inference_model", shared=True)
    with pytest.raises(UserError, match=r"9 devices .*train_model=8, ref_model=1.* has 8; lower train_model"):
        place(Role("train_model", 8), engines, Role("ref_model", 1), available=8, concurrent=True)


def test_a_copy_over_several_devices_asks_for_all_of_them() -> None:
    found = place(Role("train_model"), Role("inference_model", default=2), None, available=4, concurrent=True)
    assert (found.train, found.inference) == ((2,), (0, 1))


@pytest.mark.parametrize("available", [0, 1])
def test_one_device_is_shared_by_all(available: int) -> None:
    found = place(Role("a"), Role("b"), Role("c"), available=available)
    assert found.colocated
    assert found.train == found.inference == found.ref == (0,)
