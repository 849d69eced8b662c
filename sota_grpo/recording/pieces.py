"""The text of every token of a response, so that a reader can see tokens and not only their sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_HALF = "\ufffd"  # what a decoder writes for bytes that are not a whole character
_MOST_HELD = 64  # tokens that are decoded together before their text is given up as one


def text_pieces(
    ids: Sequence[int], decode: Callable[[Sequence[int]], str], alone: Callable[[int], str] | None = None
) -> list[str]:
    """What each token adds to ``decode(ids)``; joined, the pieces are exactly that text.

    A token that ends in the middle of a character adds nothing, and the one that completes it all of it. Where a
    decoder drops the space before a word that it is given alone, the space belongs to the word.

    Args:
        ids: of one response.
        decode: the tokenizer's, of several tokens.
        alone: the same of one token, perhaps remembered; None: ``decode``.

    >>> text_pieces([0xE2, 0x82, 0xAC, 0x35], lambda ids: bytes(ids).decode(errors="replace"))
    ['', '', '€', '5']
    """
    whole, at = decode(ids), 0
    pieces: list[str] = []
    held: list[int] = []
    for token in ids:
        held.append(token)
        end = None
        if len(held) <= _MOST_HELD:
            text = alone(token) if alone is not None and len(held) == 1 else decode(held)
            end = _end(whole, at, text)
        pieces.append("" if end is None else whole[at:end])
        if end is not None:
            at, held = end, []
    if pieces:
        pieces[-1] += whole[at:]
    return pieces


def _end(whole: str, at: int, text: str) -> int | None:
    """Where ``text`` ends if ``whole`` goes on with it at ``at``, perhaps behind spaces; None: not, or not yet."""
    if text.endswith(_HALF):
        return None
    while not whole.startswith(text, at):
        if not whole.startswith(" ", at):
            return None
        at += 1
    return at + len(text)
