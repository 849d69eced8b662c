"""Weights for a server on another machine: every bit lands or nothing does, for who has the key, and no file stays."""

from __future__ import annotations

import hashlib
import tempfile
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sota_grpo.engines import EngineOptions, weight_upload
from sota_grpo.engines import server_engine as server_module
from sota_grpo.engines.server_engine import ServerEngine, server_engine
from sota_grpo.engines.weight_upload import DIGEST, PATH, ReceivedPush, WeightUpload
from sota_grpo.errors import UserError
from sota_grpo.http import HttpClient, ServerError
from sota_grpo.policy.lora import MergedWeights
from tests.process_rigs import wait_for
from tests.unit.fake_servers import KEY, FakeServer, FakeSGLang, FakeVLLM, FarVLLM

SHAPES = {"embed": torch.Size([50, 3]), "head": torch.Size([50, 3]), "norm": torch.Size([3])}
BUCKET = 256  # bytes; a push of SHAPES in bfloat16 has four
TIED = {"head": "embed"}


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    embed = torch.randn(50, 3, generator=generator)
    return {"embed": embed, "head": embed, "norm": torch.randn(3, generator=generator)}


class Far:
    """A server elsewhere, whose own folder for files is :attr:`folder`."""

    def __init__(self, server: FarVLLM, folder: Path):
        self.server, self.folder = server, folder

    def engine(self, **options: object) -> ServerEngine:
        chosen = {"engine": "vllm_server", "eos_token_ids": [1], "url": self.server.url, "api_key": KEY} | options
        return server_engine(EngineOptions("tiny", **chosen))  # type: ignore[arg-type]

    def upload(self, session: str = "mine", **limits: float) -> WeightUpload:
        client = HttpClient(self.server.url, api_key=KEY)
        upload = WeightUpload.to(client, session, **({"timeout_s": 10.0, "keep_s": 600.0} | limits))
        assert upload is not None
        return upload

    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.rglob("*"))


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Far]:
    """Nothing that the engine writes can be read there: the engine's files go to shared memory, the server's do not."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.setattr(weight_upload, "_MEMORY", folder)
    monkeypatch.setattr(weight_upload, "BUCKET_BYTES", BUCKET)
    monkeypatch.setattr(weight_upload, "_PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(server_module, "expected_weights", lambda *_, **__: (SHAPES, TIED))
    monkeypatch.setattr(server_module, "is_own_address", lambda host: False)
    with FarVLLM().running() as server:
        yield Far(server, folder)


@pytest.mark.parametrize("fault", ["", "flipped", "torn", "hung up"])
def test_every_bit_lands_in_the_servers_dtype_however_a_bucket_came(fault: str, far: Far):
    engine = far.engine()
    far.server.faults = {"0": [fault], "2": [fault, fault]}
    far.server.calls.clear()
    engine.update_weights(weights(1).items(), 7)
    assert engine.version == 7
    assert engine.weight_dtype == torch.bfloat16
    assert all(torch.equal(far.server.weights[name], value.bfloat16()) for name, value in weights(1).items())
    folder = Path(far.server.bodies("/collective_rpc")[0]["kwargs"]["weights_path"])
    assert folder.parent == far.folder
    last = max(index for index, (path, _) in enumerate(far.server.calls) if path.endswith("/whole"))
    assert far.server.paths().index("/pause?mode=keep&clear_cache=false") > last  # it samples while weights travel
    assert far.files() == []
    assert list(engine._weights.path.iterdir()) == []
    engine.close()


def test_a_bucket_that_never_comes_whole_is_never_loaded(far: Far):
    engine = far.engine()
    engine.update_weights(weights(1).items(), 1)
    far.server.faults = {"1": ["flipped"] * 9}
    with pytest.raises(
        ServerError, match=r"PUT .*/1 was answered with status 422: .*Bucket 1 came damaged: 256 bytes of"
    ):
        engine.update_weights(weights(2).items(), 2)
    assert len(far.server.loads) == 1
    assert not far.server.paused
    assert far.files() == []
    with pytest.raises(RuntimeError, match="is broken and has to be built anew"):
        engine.update_weights(weights(2).items(), 2)
    engine.close()


def test_nobody_without_the_key_can_say_anything(far: Far):
    with pytest.raises(UserError, match=r"refused the key; set engine\.api_key"):
        far.engine(api_key="wrong")
    for key in (None, "wrong"):
        client = HttpClient(far.server.url, api_key=key)
        for ask in (
            lambda: client.post(f"{PATH}/a/1", {"num_bytes": 5, "keep_s": 60}, timeout_s=5),  # noqa: B023
            lambda: client.put(f"{PATH}/a/1/0", b"12345", headers={}, timeout_s=5),  # noqa: B023
            lambda: client.delete(f"{PATH}/a/1", timeout_s=5),  # noqa: B023
        ):
            with pytest.raises(ServerError) as caught:
                ask()
            assert caught.value.status == 401
    assert far.files() == []


def test_the_newest_push_is_taken_and_no_other(far: Far, tmp_path: Path):
    file = tmp_path / "file"
    file.write_bytes(bytes(range(200)) * 3)
    mine, client = far.upload("mine"), HttpClient(far.server.url, api_key=KEY)
    first = mine.send(file, 3)
    assert (Path(first) / "model.safetensors").read_bytes() == file.read_bytes()

    def put(session: str, number: int, data: bytes = b"x" * BUCKET) -> None:
        headers = {DIGEST: hashlib.sha256(data).hexdigest()}
        client.put(f"{PATH}/{session}/{number}/0", data, headers=headers, timeout_s=5)

    with pytest.raises(ServerError, match="takes no more buckets"):
        put("mine", 3)
    mine.send(file, 4)
    assert not Path(first).exists()
    for late in (lambda: mine.send(file, 3), lambda: put("mine", 3)):
        with pytest.raises(ServerError) as caught:
            late()
        assert caught.value.status == 409
    second = far.upload("other").send(file, 1)
    with pytest.raises(ServerError, match="not the one that this server is taking"):
        put("mine", 4)
    mine.forget(4)  # somebody else's by now
    assert (Path(second) / "model.safetensors").read_bytes() == file.read_bytes()


def test_a_file_with_holes_is_never_whole(far: Far):
    client = HttpClient(far.server.url, api_key=KEY)
    far.upload()
    client.post(f"{PATH}/a/1", {"num_bytes": 600, "keep_s": 60}, timeout_s=5)
    for index, data in ((0, b"x" * BUCKET), (2, b"z" * 88)):
        headers = {DIGEST: hashlib.sha256(data).hexdigest()}
        client.put(f"{PATH}/a/1/{index}", data, headers=headers, timeout_s=5)
    half = hashlib.sha256(b"half").hexdigest()
    with pytest.raises(ServerError, match=r"status 422: .*4 bytes of 256"):
        client.put(f"{PATH}/a/1/1", b"half", headers={DIGEST: half}, timeout_s=5)
    with pytest.raises(ServerError, match="1 buckets of this push are missing, the first is 1"):
        client.post(f"{PATH}/a/1/whole", timeout_s=5)
    for beyond in (3, -1):
        with pytest.raises(ServerError, match=f"status 404: .*There is no bucket {beyond} of 600 bytes"):
            client.put(f"{PATH}/a/1/{beyond}", b"beyond", headers={}, timeout_s=5)
    assert "model.safetensors" not in far.files()


def test_a_push_of_which_nothing_more_is_heard_is_deleted(far: Far):
    client = HttpClient(far.server.url, api_key=KEY)
    client.post(f"{PATH}/a/1", {"num_bytes": 600, "keep_s": 0.05}, timeout_s=5)
    wait_for(lambda: far.files() == [])
    with pytest.raises(ServerError, match="not the one that this server is taking"):
        client.put(f"{PATH}/a/1/0", b"x", headers={}, timeout_s=5)


def test_what_a_killed_server_left_goes_with_the_next_push_and_a_living_ones_stays(far: Far):
    living = ReceivedPush(10)
    dead = Path(tempfile.mkdtemp(prefix="sota-grpo-pushed-", dir=far.folder))
    (dead / "model.part").write_bytes(b"weights")
    other = ReceivedPush(10)
    assert not dead.exists()
    assert living.folder.exists()
    for push in (living, other):
        push.drop()
        push.drop()
    assert far.files() == []


def test_a_push_that_has_no_room_there_says_so(far: Far, monkeypatch: pytest.MonkeyPatch):
    usage = namedtuple("usage", "total used free")
    engine = far.engine()
    monkeypatch.setattr(weight_upload.shutil, "disk_usage", lambda path: usage(9, 0, 9))
    with pytest.raises(ServerError, match=r"status 507: .*a push takes 0.00 GiB, and neither .*elsewhere nor .* free"):
        engine.update_weights(weights(1).items(), 1)
    engine.close()


@pytest.mark.parametrize(("fake", "name", "remedy"), [
    (FakeVLLM(), "vllm_server", r"--middleware sota_grpo\.engines\.weight_upload\.ReceiveWeights .* on this machine"),
    (FakeSGLang(), "sglang_server", "start it on this machine, or use engine=vllm_server"),
])  # fmt: skip
def test_a_server_elsewhere_without_a_way_for_weights_is_refused(
    fake: FakeServer, name: str, remedy: str, far: Far, monkeypatch: pytest.MonkeyPatch
):
    with fake.running() as server:
        with pytest.raises(UserError, match=rf"is on another machine and takes no weights there; .*{remedy}"):
            far.engine(engine=name, url=server.url, api_key=None)
        monkeypatch.setattr(server_module, "is_own_address", lambda host: True)
        far.engine(engine=name, url=server.url, api_key=None).close()


def test_of_merged_weights_only_those_with_an_adapter_travel_again(far: Far):
    engine, base = far.engine(), object()
    names = [set(SHAPES), {"norm"}, {"norm"}, set(SHAPES), set(SHAPES), {"norm"}, set(SHAPES), set(SHAPES)]

    def merged(seed: int, over: object) -> MergedWeights:
        return MergedWeights((weights(0) | {"norm": weights(seed)["norm"]}).items(), {"norm"}, over)

    other = object()
    pushes = [merged(1, base), merged(2, base), merged(3, base), weights(0).items(), merged(4, other), merged(5, other)]
    for version, push in enumerate([*pushes, merged(6, base)], 1):
        engine.update_weights(push, version)
    far.server.label = "default"  # as of a server that was started anew behind the same url
    engine.update_weights(merged(7, base), 8)
    assert [set(load) for load in far.server.loads] == names
    assert torch.equal(far.server.weights["norm"], weights(7)["norm"].bfloat16())
    engine.close()
