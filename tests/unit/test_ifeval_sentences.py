"""With Punkt's data sentences are NLTK's own, without them nearly; every check is linear, whatever the text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sota_grpo.rewards.ifeval import INSTRUCTIONS, checks, follow_lists, read_kwargs
from sota_grpo.rewards.ifeval.checks import find_punkt, num_capital_tokens, sentences
from tests.data_files import shared_data
from tests.unit.test_ifeval_checks import CASES
from tests.unit.test_ifeval_torchrl import random_text

SEED = random.randrange(1 << 30)
COUNTED = ["sentences", "words", "placeholders", "highlights", "sections"]
# no check stops early
UNREACHED = dict.fromkeys((*map("num_{}".format, COUNTED), "frequency", "capital_frequency"), 10**9)
SHAPES = [*'[\n "\u2028\ud800', *["<<a", "*\n", "A. ", "a.", "<<", ">>", "](", "* ", "aaaa@", "P. P. ", "{[("]]


@pytest.fixture
def punkt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path | None], None]]:
    """A function that sets the folder of NLTK's data, or none."""
    import nltk.data

    def found_in(folder: Path | None) -> None:
        monkeypatch.setattr(nltk.data, "path", [] if folder is None else [str(folder)])
        checks._splitter.cache_clear()

    yield found_in
    checks._splitter.cache_clear()


@pytest.mark.data
def test_sentences_and_tokens_equal_nltks(punkt: Callable[[Path | None], None]) -> None:
    import nltk

    punkt(shared_data("nltk_data"))
    tokenizer, rng = nltk.tokenize.PunktTokenizer(), random.Random(SEED)
    for _ in range(200):
        text = random_text(rng)
        assert list(sentences(text)) == tokenizer.tokenize(text), (SEED, text)
        capitals = sum(token.isupper() for token in nltk.word_tokenize(text))
        assert sum(map(num_capital_tokens, sentences(text))) == capitals, (SEED, text)
        num_words = len(nltk.RegexpTokenizer(r"\w+").tokenize(text))
        assert checks.word_count(text, "exactly", num_words)


@pytest.mark.data
def test_without_the_data_realistic_text_has_nearly_the_same_sentences(punkt: Callable[[Path | None], None]) -> None:
    folder = shared_data("nltk_data")
    rows = [json.loads(line) for line in (folder.parent / "gsm8k" / "train.jsonl").open(encoding="utf-8")][:300]
    texts = [text for row in rows for text in (row["question"], row["answer"])]
    punkt(folder)
    theirs = [len(list(sentences(text))) for text in texts]
    punkt(None)
    ours = [len(list(sentences(text))) for text in texts]
    thresholds = [(count, max(0, count + shift)) for count in theirs for shift in (-1, 0, 1, 2)]
    same = sum((a < k) == (b < k) for a, (b, k) in zip((a for a in ours for _ in range(4)), thresholds))
    assert same / len(thresholds) > 0.99


def test_tables_of_punkt_decide_where_sentences_end(tmp_path: Path, punkt: Callable[[Path | None], None]) -> None:
    punkt(tmp_path)
    assert find_punkt() is None
    folder = tmp_path / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    assert find_punkt() == folder
    tables = {
        "abbrev_types.txt": "zq\n",
        "sent_starters.txt": "now\n",
        "collocations.tab": "vol\t##number##\n",
        "ortho_context.tab": "then\t32\n",
    }
    for name, table in tables.items():
        (folder / name).write_text(table)
    for text, count in (
        ("A zq. Bar sat.", 1),  # an abbreviation
        ("A bar. Bar sat.", 2),
        ("A zq. Now it sat.", 2),  # a word that starts sentences
        ("A zq. Then it sat.", 2),  # a word that is no name
        ("In vol. 3 it sat.", 1),  # a collocation
        ("In bar. 3 it sat.", 2),
    ):
        assert len(list(sentences(text))) == count, text


def test_no_more_sentences_are_split_than_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Splitter:
        def span_tokenize(self, text: str) -> Iterator[tuple[int, int]]:
            yield from [(0, 2), (2, 4), (4, 6), (6, 8)]
            raise AssertionError("a fifth sentence was asked for")

    monkeypatch.setattr(checks, "_splitter", lambda: Splitter())
    assert checks.sentence_count("A.B.C.D.E.", "at least", 2)
    assert not checks.sentence_count("A.B.C.D.E.", "less than", 2)
    assert checks.capital_word_count("A.B.C.D.E.", "at least", 2)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("shape", SHAPES, ids=repr)
def test_a_long_hostile_text_takes_no_check_long(shape: str) -> None:
    """What is quadratic takes a minute and more here; the longest check takes half a second."""
    text = (shape * 150_000)[:150_000]
    text = text[:50_000] + "\n" + text[50_000:]
    for name, cases in CASES.items():
        kwargs = {key: UNREACHED.get(key, value) for key, value in cases[0][0].items()}
        INSTRUCTIONS[name].follows(text, **read_kwargs(name, kwargs))
    follow_lists(text, ["detectable_format:title"], [{}])  # and its loose readings
