"""A group that travels arrives as it was sent, in few bytes and tensors."""

from __future__ import annotations

import io
import pickle
from copy import copy
from dataclasses import fields

import cloudpickle
import pytest
import torch

import sota_grpo.workers.rollout  # noqa: F401  (every rollout worker sends groups in this form)
from sota_grpo.rl.records import GroupOutput, Sample


def some_group(*lengths: int, dialogs: bool = False) -> GroupOutput:
    def mask(length: int) -> torch.Tensor | None:
        return torch.rand(length) < 0.5 if dialogs and length % 2 else None

    samples = []
    for length in lengths:
        ids, versions = (torch.randint(least, 1 << 40, (length,)) for least in (0, -1))
        said = {"record": {"replies": [length]}, "parents": torch.arange(length) if length > 1 else None}
        more = said if dialogs else {}
        samples.append(Sample(ids, torch.randn(length), versions, bool(length % 3), mask(length), **more))
    return GroupOutput(1 << 50, tuple(samples), (5, 6) if dialogs else None)


def out_of_band(group: GroupOutput) -> GroupOutput:
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(group, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(body, buffers=buffers)


@pytest.mark.parametrize("dialogs", [False, True])
@pytest.mark.parametrize(
    "travel",
    [out_of_band, lambda g: pickle.loads(pickle.dumps(g)), lambda g: pickle.loads(cloudpickle.dumps(g)), copy],
    ids=["out of band", "pickle", "cloudpickle", "copy"],
)
def test_a_group_arrives_as_it_was_sent(travel, dialogs: bool):
    group = some_group(1, 7, 3, 4, dialogs=dialogs)
    actual = travel(group)
    assert (actual.group_id, actual.prompt_ids) == (group.group_id, group.prompt_ids)
    assert actual.samples[0].truncated is group.samples[0].truncated
    for sample, expected in zip(actual.samples, group.samples, strict=True):
        for name in (field.name for field in fields(Sample)):
            one, other = getattr(sample, name), getattr(expected, name)
            if isinstance(other, torch.Tensor):
                assert one.dtype == other.dtype
                assert torch.equal(one, other)
            else:
                assert one == other


def test_samples_are_not_described_one_by_one():
    """20 bytes a token and little else, whatever the number of samples."""
    sizes = [len(pickle.dumps(some_group(*[6] * count), protocol=5)) for count in (1, 100)]
    assert sizes[1] - sizes[0] < 99 * (6 * 20 + 16)


def test_a_group_from_memory_that_is_read_only_can_be_written_to():
    group = some_group(3, 2)
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(group, protocol=5, buffer_callback=buffers.append)
    actual = pickle.load(io.BytesIO(body), buffers=[bytes(buffer) for buffer in buffers])
    actual.samples[0].log_probs.zero_()
    assert torch.equal(actual.samples[1].log_probs, group.samples[1].log_probs)


def test_a_group_without_samples_travels_too() -> None:
    assert pickle.loads(pickle.dumps(GroupOutput(3, ()))) == GroupOutput(3, ())
