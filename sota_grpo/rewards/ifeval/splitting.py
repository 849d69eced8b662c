"""Sentences, tokens and words as the installed NLTK splits them; sentences nearly so where its Punkt data are missing.

The official evaluator uses NLTK, whose rules for curly quotes and for Indic letters have changed over its versions: to
follow the installed one is to agree with the evaluator beside it. Nothing is ever downloaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from sota_grpo.errors import UserError

_FOLDER = Path("tokenizers", "punkt_tab", "english")
_MAX_CHARS = 100_000  # some 17,000 words, longer than what is sampled; keeps hostile text within a deadline
_MAX_KEPT_CHARS = 500  # of a sentence whose count is kept
_LOWER_CASE_INSIDE = 1 << 5  # Punkt's flag of a word that was seen in lower case inside a sentence

# What stands in for Punkt's data: abbreviations, which seldom end a sentence, and words that are no names, which after
# an abbreviation begin one.
_ABBREVIATIONS = """
    mr mrs ms messrs dr prof rev gen sen rep gov lt col sgt capt maj adm jr sr st inc co corp ltd bros vs ave ft mt yr
    jan feb aug sept sep oct nov dec tues wed fri u.s u.k u.n u.s.a a.m p.m ph.d d.c n.y c d e f g h k l m n p r s t v w
"""
_COMMON_WORDS = """
    the this that these those it he she they we you i in on at a an but and or so if when while as for with from by
    to of there here what who how why where after before since although though however not is are was be can will
    would let each all any some one two our your their his her its use used using then thus therefore hence because
    more most such other into over under let's find given step answer question example number first second next
    final about above according actually add adding additionally again also always another apply applying ask based
    become begin both calculate call check choose come consider create determine do does don't either every
    everything explain finally follow following get give go good have having help imagine include including instead
    it's just keep know later like look make many may maybe meanwhile much my never no nothing now often once only
    out overall people perhaps please put read remember right say see set show simple simply solve sometimes start
    still substitute suppose sure take tell thank thanks that's think time today together try until up very want
    well whether which within without work write yes yet
"""


def find_punkt(nltk_data: str | None = None) -> Path | None:
    """The folder of Punkt's English data, or None where there is none.

    Args:
        nltk_data: folder that holds ``tokenizers/punkt_tab``; None asks NLTK's usual places (``NLTK_DATA``,
            ``~/nltk_data`` and the others of ``nltk.data.path``).

    Raises:
        UserError: the folder that was named does not hold them.
    """
    if nltk_data is not None:
        folder = Path(nltk_data, _FOLDER)
        if folder.is_dir():
            return folder
        raise UserError(f"there is no folder {folder}; correct nltk_data, or leave it out to search NLTK's own places.")
    import nltk.data

    folders = (Path(str(root), _FOLDER) for root in nltk.data.path)
    return next((folder for folder in folders if folder.is_dir()), None)


def sentences(text: str, nltk_data: str | None = None) -> Iterator[str]:
    """The sentences of a text, one by one as they are asked for; of the first 100,000 characters.

    Args:
        nltk_data: see :func:`find_punkt`.

    >>> list(sentences("Dr. Brown is here. Run!"))
    ['Dr. Brown is here.', 'Run!']
    """
    text = text[:_MAX_CHARS]
    for begin, end in _splitter(nltk_data).span_tokenize(text):
        yield text[begin:end]


def num_capital_tokens(sentence: str) -> int:
    """How many of its tokens, as ``nltk.word_tokenize`` splits words and marks, are all in capital letters.

    >>> num_capital_tokens("NASA's U.S. team IS 1st, I think.")
    4
    """
    if not any(map(str.isupper, sentence)):
        return 0
    return (_kept_count if len(sentence) <= _MAX_KEPT_CHARS else _count_capital_tokens)(sentence)


def words(text: str) -> list[str]:
    """Runs of letters, digits and underscores, the words that the benchmark counts.

    >>> words("It's a_b, 3.5!")
    ['It', 's', 'a_b', '3', '5']
    """
    return _word_finder().tokenize(text)


@lru_cache(maxsize=8)
def _splitter(nltk_data: str | None) -> Any:
    from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer

    folder, parameters = find_punkt(nltk_data), PunktParameters()
    if folder is not None:
        _read_punkt(folder, parameters)
    else:
        parameters.abbrev_types = set(_ABBREVIATIONS.split())
        parameters.sent_starters = set(_COMMON_WORDS.split())
        parameters.ortho_context = _Flags.fromkeys(parameters.sent_starters, _LOWER_CASE_INSIDE)
    return PunktSentenceTokenizer(parameters)


def _read_punkt(folder: Path, parameters: Any) -> None:
    """Read the four tables ourselves: NLTK's own reader changes with its versions, and accepts its own places only."""
    parameters.abbrev_types = set(_lines(folder / "abbrev_types.txt"))
    parameters.sent_starters = set(_lines(folder / "sent_starters.txt"))
    parameters.collocations = {tuple(line.split("\t")) for line in _lines(folder / "collocations.tab")}
    flags = (line.split("\t") for line in _lines(folder / "ortho_context.tab"))
    parameters.ortho_context = _Flags({word: int(number) for word, number in flags})


class _Flags(dict[str, int]):
    """How words were seen; 0 for one that never was, and it is not kept: NLTK's own table grows with every text."""

    def __missing__(self, word: str) -> int:
        return 0


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").split("\n") if line]


def _count_capital_tokens(sentence: str) -> int:
    return sum(token.isupper() for token in _tokenizer().tokenize(sentence))


_kept_count = lru_cache(maxsize=16384)(_count_capital_tokens)  # a response and its loose readings share sentences


@lru_cache(maxsize=1)
def _tokenizer() -> Any:
    from nltk.tokenize import NLTKWordTokenizer

    return NLTKWordTokenizer()


@lru_cache(maxsize=1)
def _word_finder() -> Any:
    from nltk.tokenize import RegexpTokenizer

    return RegexpTokenizer(r"\w+")
