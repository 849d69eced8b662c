"""What untrusted text may not do, of any origin, wherever it is shown."""

from __future__ import annotations

import io
import json
import random
import unicodedata

import pytest

from sota_grpo.text import first_line, json_line, one_line, readable, say, sentence

ODD = (
    *map(chr, (*range(0x20), *range(0x7F, 0xA0))),  # control characters
    *("\u2028", "\u2029", "\ud800", "\udfff", "\x1b[31m", "\x1b]0;title\x07", "\r\n"),
    *map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A))),  # bidirectional overrides and isolates
)
PLAIN = "Ångström 漢字\u3000かな 😀👩\u200d🔬 \u0646\u0645\u06cc\u200c\u062e\u0648 1\u00a0000 {'a': [1]} <b>&</b> \\x1b"


def harmless(text: str, keep: str = "") -> bool:
    """Whether no character drives a terminal, breaks a line, changes the direction of writing or lacks an encoding."""
    text.encode("utf-8")
    classes = ("B", "LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    signs = [sign for sign in text if sign not in keep]
    lines = {"Cc", "Zl", "Zp"} & {unicodedata.category(sign) for sign in signs}
    return not lines and not any(unicodedata.bidirectional(sign) in classes for sign in signs)


def test_nothing_gets_through_and_json_reads_back() -> None:
    for text in (*ODD, *("".join(random.choices((*ODD, *PLAIN), k=random.randrange(60))) for _ in range(200))):
        assert harmless(readable(text), keep="\n\t")
        for line in (one_line(text), one_line(text, None), first_line(OSError(text)), sentence(OSError(text))):
            assert harmless(line)
        for html in (False, True):
            line = json_line([text, {text: 1}], html=html)
            assert harmless(line)
            assert len(line.splitlines()) == 1
            assert json.loads(line) == json.loads(json.dumps([text, {text: 1}]))
            assert not (html and set(line) & set("<>&"))


@pytest.mark.parametrize("encoding", ["ascii", "koi8-r", "utf-8"])
def test_a_character_that_the_console_lacks_is_escaped(encoding: str) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    say("Run directory: /caf\udce9 é 漢", stream)
    written = stream.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert written == "Run directory: /caf\\udce9 " + ("é 漢" if encoding == "utf-8" else "\\xe9 \\u6f22") + "\n"


def test_what_has_a_picture_is_left_alone_and_lengths_are_bounded() -> None:
    assert readable(f"{PLAIN}\n\t") == f"{PLAIN}\n\t"
    assert one_line(PLAIN) == PLAIN
    assert json_line(PLAIN) == json.dumps(PLAIN, ensure_ascii=False)
    assert one_line("x" * 10_000) == first_line(OSError("x" * 10_000)) == "x" * 500
    assert len(one_line("\U000e0041" * 10_000)) <= 10 * 500  # an escape has ten characters at most
