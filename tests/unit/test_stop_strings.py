"""Stop strings: every response is the one without them, cut behind the token that completes the first of them."""

from __future__ import annotations

import random
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from sota_grpo.engines import EngineOptions, make_engine
from sota_grpo.engines.stepping import SteppingEngine, StopStrings
from sota_grpo.envs.dialogs import DialogEngine, GradedTurns, Rules, TurnTokens
from sota_grpo.policy.load import TINY, load_tokenizer
from sota_grpo.rl.records import Example, GroupRequest, Sample, Sampling, Score
from tests.engine_rigs import generate

TOKENIZER = load_tokenizer(TINY)
EOS = TOKENIZER.eos_token_id
HALF_CHARACTER = "\ufffd"  # until the token with its other half comes, so no stop string that stays said


def engine_with(*stop: str, name: str = "transformers", **options: object) -> SteppingEngine:
    engine = make_engine(EngineOptions(TINY, engine=name, device="cpu", eos_token_ids=[EOS], stop=stop, **options))
    if name == "transformers":
        engine._model.double()  # float32 rounds otherwise in a batch of fewer rows: other tokens, once in 10,000
    return engine


def some_requests(count: int = 4) -> list[GroupRequest]:
    texts = [f"{random.randrange(100)} apples and {random.randrange(100)} pears are" for _ in range(count)]
    prompts = TOKENIZER(texts)["input_ids"]
    return [GroupRequest(i, tuple(ids), 6, random.getrandbits(40)) for i, ids in enumerate(prompts)]


def plain_cut(sample: Sample, stop: tuple[str, ...]) -> tuple[list[int], list[float], bool]:
    """By looking at every beginning, the shortest first."""
    ids, log_probs = sample.token_ids.tolist(), sample.log_probs.tolist()
    for length in range(1, len(ids) + 1):
        if any(text in TOKENIZER.decode(ids[:length]) for text in stop):
            return ids[:length], log_probs[:length], False
    return ids, log_probs, sample.truncated


@pytest.mark.parametrize(("name", "ignore_eos"), [("transformers", False), ("transformers", True), ("scripted", False)])
def test_a_response_is_the_one_without_them_cut_at_the_first(name: str, ignore_eos: bool) -> None:
    requests, sampling = some_requests(), Sampling(max_tokens=24, temperature=1.5, ignore_eos=ignore_eos)
    whole = generate(engine_with(name=name), requests, sampling)
    texts = [TOKENIZER.decode(sample.token_ids[2:-1]) for output in whole.values() for sample in output.samples]
    pairs = [text[at : at + 2] for text in texts for at in range(1, len(text) - 2)]
    stop = tuple(random.sample([pair for pair in pairs if HALF_CHARACTER not in pair], 3))
    ended = generate(engine_with(*stop, name=name), requests, sampling)
    num_cut = 0
    for group, output in whole.items():
        for before, after in zip(output.samples, ended[group].samples, strict=True):
            ids, log_probs, truncated = plain_cut(before, stop)
            assert after.token_ids.tolist() == ids
            assert after.truncated == truncated
            assert len(after.versions) == len(ids)
            torch.testing.assert_close(after.log_probs, torch.tensor(log_probs))
            num_cut += len(ids) < len(before.token_ids)
    assert num_cut


def test_the_embedded_engine_samples_nothing_behind_them() -> None:
    engine = engine_with("e")
    steps, step = [], engine._step
    engine._step = lambda: steps.append(1) or step()  # type: ignore[method-assign]
    outputs = generate(engine, some_requests(1), Sampling(max_tokens=64, ignore_eos=True))
    assert len(steps) == max(len(sample.token_ids) for sample in outputs[0].samples)


def test_a_text_of_several_tokens_and_of_half_ones_is_seen_when_its_last_token_comes() -> None:
    for text in ("</answer>", "\n\n", "42.", "é€", "<|im_end|>", "a" * 40):
        stops, ids = StopStrings(TOKENIZER, ["never said", text]), TOKENIZER(f"so {text} and on")["input_ids"]
        seen = [stops.is_complete(ids[:length]) for length in range(1, len(ids) + 1)]
        assert stops.end(ids) == seen.index(True) + 1
        assert text in TOKENIZER.decode(ids[: stops.end(ids)])
        assert text not in TOKENIZER.decode(ids[: stops.end(ids) - 1])
    assert StopStrings(TOKENIZER, ["x"]).end(TOKENIZER("so")["input_ids"]) is None


def test_none_is_missed_beside_an_incomplete_character_by_a_decoder_with_byte_fallback() -> None:
    core = Tokenizer(models.BPE(vocab={f"<0x{byte:02X}>": byte for byte in range(256)}, merges=[], byte_fallback=True))
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    stops = StopStrings(SimpleNamespace(decode=lambda ids, **options: core.decode([*ids])), ["\n\n"])
    ids = [*"日本語日本\n\n🙂語".encode()]  # as Llama 2 writes them: the stop string ends with the 17th token
    assert [stops.end(ids[:length]) for length in (16, 17, 18, 21, len(ids))] == [None, 17, 17, 17, 17]
    assert stops.is_complete(ids[:17])
    assert not stops.is_complete(ids[:16])


def test_a_turn_that_they_end_gets_its_end_token_from_the_template() -> None:
    """A tool's answer is a reply like any other: between the turns is all that the template writes there."""
    token_ids = TOKENIZER("call 7!", add_special_tokens=False)["input_ids"]
    engine = engine_with("7!", name="scripted", script=lambda request, sample, version: token_ids)
    reply = {"role": "user", "content": "Again?"}
    graded: Future[list[Score]] = Future()
    graded.set_result([Score({}, False, reply=reply)])
    turns = TurnTokens(TOKENIZER)
    responder = GradedTurns(SimpleNamespace(scores=lambda pairs: graded), turns)
    dialogs = DialogEngine(engine, {None: Rules(responder, turns, 2, engine.max_model_len)})
    request = GroupRequest(0, (5, 6), num_samples=1, seed=0, example=Example("?", "!"))
    ((sample,),) = [output.samples for output in dialogs.generate([request], Sampling(max_tokens=40))]
    inserted = sample.token_ids[~sample.assistant_mask]
    assert TOKENIZER.decode(inserted) == "<|im_end|>\n<|im_start|>user\nAgain?<|im_end|>\n<|im_start|>assistant\n"
    assert sample.token_ids[sample.assistant_mask].tolist() == 2 * token_ids
    assert not sample.truncated
