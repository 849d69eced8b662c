"""The checks of IFEval, one per instruction (:data:`INSTRUCTIONS`): the text and kwargs under their official names.

Each check takes time linear in the length of the text. If the official regular expression does not, another method
finds the same matches. Sentences, tokens and words are those of the installed NLTK, so results agree with an official
evaluator that uses the same NLTK version (versions differ in curly quotes and Indic letters). Without NLTK's Punkt
data, sentences are split almost as with them. Nothing is ever downloaded.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import Any

_FOLDER = Path("tokenizers", "punkt_tab", "english")
_MAX_CHARS = 100_000  # about 17,000 words, longer than any sampled text; bounds the time of hostile text
_LOWER_CASE_INSIDE = 1 << 5  # Punkt's flag of a word that was seen in lower case inside a sentence

# A replacement for Punkt's data: abbreviations, which rarely end a sentence, and common words that, after an
# abbreviation, begin one (unlike names).
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


def find_punkt() -> Path | None:
    """Return the folder of Punkt's English data in ``nltk.data.path``, or None if there is none."""
    import nltk.data

    folders = (Path(str(root), _FOLDER) for root in nltk.data.path)
    return next((folder for folder in folders if folder.is_dir()), None)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of the first 100,000 characters of a text."""
    text = text[:_MAX_CHARS]
    for begin, end in _splitter().span_tokenize(text):
        yield text[begin:end]


@lru_cache(maxsize=256)  # a response and its loose readings share sentences
def num_capital_tokens(sentence: str) -> int:
    """Return how many tokens of a sentence, split as by ``nltk.word_tokenize``, are upper case (``str.isupper``)."""
    from nltk.tokenize import NLTKWordTokenizer

    if not any(map(str.isupper, sentence)):
        return 0
    return sum(token.isupper() for token in NLTKWordTokenizer().tokenize(sentence))


@cache
def _splitter() -> Any:
    from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer

    folder, parameters = find_punkt(), PunktParameters()
    # a Counter as context, because NLTK's own table grows with every unknown word of a text
    if folder is None:
        parameters.abbrev_types = set(_ABBREVIATIONS.split())
        parameters.sent_starters = set(_COMMON_WORDS.split())
        parameters.ortho_context = Counter(dict.fromkeys(parameters.sent_starters, _LOWER_CASE_INSIDE))
    else:  # the four tables; NLTK's reader changes with its versions and accepts only its own folders
        parameters.abbrev_types = set(_lines(folder / "abbrev_types.txt"))
        parameters.sent_starters = set(_lines(folder / "sent_starters.txt"))
        parameters.collocations = {tuple(line.split("\t")) for line in _lines(folder / "collocations.tab")}
        flags = (line.split("\t") for line in _lines(folder / "ortho_context.tab"))
        parameters.ortho_context = Counter({word: int(number) for word, number in flags})
    return PunktSentenceTokenizer(parameters)


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").split("\n") if line]


def _tolerance(threshold: int) -> int:
    return max(round(threshold / 10), 1)


RELATIONS: Mapping[str, Callable[[int, int], bool]] = {
    "less than": lambda count, threshold: count < threshold,
    "at least": lambda count, threshold: count >= threshold,
    # the benchmark has the two above, training data also these
    "at most": lambda count, threshold: count <= threshold,
    "exactly": lambda count, threshold: count == threshold,
    "around": lambda count, threshold: abs(count - threshold) <= _tolerance(threshold),  # a tenth, at least 1
}


def compare_number_of(items: Iterable[object], relation: str, threshold: int) -> bool:
    """Return whether there are ``relation`` ``threshold`` items, such as "at least 3"; reads hardly more than these."""
    enough = threshold + _tolerance(threshold) + 1  # for this number and above no relation changes
    return RELATIONS[relation](sum(1 for _ in islice(items, enough)), threshold)


@lru_cache(maxsize=4096)
def pattern_of(keyword: str, before: str = "", after: str = "", *, ignore_case: bool = True) -> re.Pattern[str]:
    """Compile ``before + keyword + after``; an invalid regular expression ``keyword`` is used as plain text."""
    flags = re.IGNORECASE if ignore_case else re.NOFLAG
    try:
        return re.compile(before + keyword + after, flags)
    except (re.error, RecursionError, OverflowError):
        return re.compile(before + re.escape(keyword) + after, flags)


_CODES = """
    af ar bg bn ca cs cy da de el en es et fa fi fr gu he hi hr hu id it ja kn ko lt lv mk ml mr ne nl no pa pl pt ro ru
    sk sl so sq sv sw ta te th tl tr uk ur vi zh-cn zh-tw
"""
LANGUAGES = frozenset(_CODES.split())  # the languages that langdetect detects


def is_language(text: str, language: str) -> bool:
    """Return whether the text is in the language with this code; True if none is detected (the official rule).

    langdetect samples the first 10,000 characters at random; a fixed seed makes its result repeatable.
    """
    from langdetect.lang_detect_exception import LangDetectException

    detector = _factory().create()
    detector.append(text)
    try:
        return detector.detect() == language
    except LangDetectException:  # no letters that it knows
        return True


@lru_cache(maxsize=1)
def _factory() -> Any:
    """Return a separate langdetect factory, because the package's own one and its seed are shared with other users."""
    from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory

    factory = DetectorFactory()
    factory.load_profile(PROFILES_DIRECTORY)
    factory.set_seed(0)
    return factory


CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
DIVIDER = "***"

_BRACKET = re.compile(r"[\[\]\n]")
# Spaces before a bullet must be on its line. The official \s* also crosses empty lines; the bullets are the same.
_STAR_BULLET = re.compile(r"^[^\S\n]*+\*[^*].*", re.MULTILINE)
_DASH_BULLET = re.compile(r"^[^\S\n]*+-", re.MULTILINE)
_HIGHLIGHT = re.compile(r"\*([^\n*]*)\*")
_DOUBLE_HIGHLIGHT = re.compile(r"\*\*([^\n*]*)\*\*")
_FENCES = ("```json", "```Json", "```JSON", "```")
_POSTSCRIPTS = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}  # the official \s* before and .* after match nothing
_FIRST_WORD = re.compile(r"[^.,?!'\"]*")


def sentence_count(text: str, relation: str, num_sentences: int) -> bool:
    """Return whether the text has ``relation`` ``num_sentences`` sentences, split by Punkt."""
    return compare_number_of(sentences(text), relation, num_sentences)


def word_count(text: str, relation: str, num_words: int) -> bool:
    """Return whether the text has ``relation`` ``num_words`` words: NLTK's runs of letters, digits and underscores."""
    from nltk.tokenize import RegexpTokenizer  # its words include vowel signs, such as Hindi's; those of re do not

    return RELATIONS[relation](len(RegexpTokenizer(r"\w+").tokenize(text)), num_words)


def paragraph_count(text: str, num_paragraphs: int, divider: str = DIVIDER) -> bool:
    """Return whether dividers split the text into ``num_paragraphs``, none of them empty; empty ends are ignored."""
    paragraphs = [paragraph.strip() for paragraph in text.split(divider)]
    inner = paragraphs[1:-1]
    return all(inner) and sum(map(bool, paragraphs)) == num_paragraphs


def nth_paragraph_begins(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Return whether the text has ``num_paragraphs``, split by empty lines, and the n-th begins with ``first_word``.

    ``num_paragraphs`` counts paragraphs that are not blank, ``nth_paragraph`` all of them, from 1 to
    ``num_paragraphs``. Case and quotation marks before the first word are ignored; a punctuation mark ends it.
    """
    paragraphs = text.split("\n\n")
    num_full = sum(1 for paragraph in paragraphs if paragraph.strip())
    if num_full != num_paragraphs or nth_paragraph > num_full:
        return False
    words = paragraphs[nth_paragraph - 1].split(maxsplit=1)  # empty paragraphs count here, as in the official code
    if not words:
        return False
    word = _FIRST_WORD.match(words[0].lstrip("'").lstrip('"'))
    return word is not None and "".join(letter.lower() for letter in word[0]) == first_word.lower()


def placeholder_count(text: str, num_placeholders: int) -> bool:
    """Return whether the text has at least ``num_placeholders`` texts in square brackets, each on one line.

    As the official ``\\[.*?\\]``, from the first ``[`` to the next ``]``, but in linear time if brackets never close.
    """
    is_open, count = False, 0
    for mark in _BRACKET.finditer(text):
        count += is_open and mark[0] == "]"
        is_open = mark[0] == "["
    return count >= num_placeholders


def has_postscript(text: str, postscript_marker: str) -> bool:
    """Return whether the marker (a regular expression) occurs in any case; ``P.S.`` and ``P.P.S`` may have spaces."""
    marker = _POSTSCRIPTS.get(postscript_marker, postscript_marker.lower())
    return pattern_of(marker, ignore_case=False).search(text.lower()) is not None


def bullet_count(text: str, num_bullets: int) -> bool:
    """Return whether exactly ``num_bullets`` lines begin with ``*`` (one, not two) or ``-``, perhaps after spaces."""
    return len(_STAR_BULLET.findall(text)) + len(_DASH_BULLET.findall(text)) == num_bullets


def highlight_count(text: str, num_highlights: int) -> bool:
    """Return whether there are at least ``num_highlights`` non-empty ``*highlights*`` or ``**highlights**``."""
    highlights = _HIGHLIGHT.findall(text) + _DOUBLE_HIGHLIGHT.findall(text)
    return sum(1 for inside in highlights if inside.strip()) >= num_highlights


def section_count(text: str, section_spliter: str, num_sections: int) -> bool:
    """Return whether there are at least ``num_sections`` headings: ``section_spliter`` (a regex) and a number."""
    sections = pattern_of(section_spliter, r"\s?", r"\s?\d+\s?", ignore_case=False).split(text)
    return len(sections) > num_sections


def is_json(text: str) -> bool:
    """Return whether the whole text is JSON, with or without a fence of three backticks around it."""
    text = text.strip()
    for fence in _FENCES:
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def has_title(text: str) -> bool:
    """Return whether some line has a ``<<title>>`` that is not empty.

    As the official ``<<[^\\n]+>>``, from a line's first ``<<`` to its last ``>>``, but in linear time.
    """
    for line in text.split("\n"):
        begin, end = line.find("<<"), line.rfind(">>")
        if begin >= 0 and end > begin + 2 and line[begin : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


def has_two_responses(text: str) -> bool:
    """Return whether the text is two different responses with six asterisks between them."""
    responses = [response.strip() for response in text.split("******")]
    full = [response for response in responses if response]
    return all(responses[1:-1]) and len(full) == 2 and full[0] != full[1]


def capital_word_count(text: str, capital_relation: str, capital_frequency: int) -> bool:
    """Return whether e.g. "at least" ``capital_frequency`` tokens (:func:`num_capital_tokens`) are upper case."""
    capitals = (token for sentence in sentences(text) for token in range(num_capital_tokens(sentence)))
    return compare_number_of(capitals, capital_relation, capital_frequency)


@dataclass(frozen=True)
class Instruction:
    """One of the benchmark's instructions."""

    func_name: str  # name of the same constraint in RLVR-IFeval
    follows: Callable[..., bool]  # the check: (text, **kwargs) -> bool
    splits_sentences: bool = False

    @cached_property
    def kwargs(self) -> dict[str, bool]:
        """Names of the kwargs; True: required, as in the benchmark; False: used only by training data."""
        _, *parameters = signature(self.follows).parameters.values()
        return {parameter.name: parameter.default is parameter.empty for parameter in parameters}


#: The instructions by their official names; keywords are regular expressions and ignore case.
INSTRUCTIONS: Mapping[str, Instruction] = {
    "keywords:existence": Instruction(  # also inside a word
        "verify_keywords", lambda text, keywords: all(pattern_of(keyword).search(text) for keyword in keywords)
    ),
    "keywords:frequency": Instruction(
        "verify_keyword_frequency",
        lambda text, keyword, relation, frequency: compare_number_of(
            pattern_of(keyword).finditer(text), relation, frequency
        ),
    ),
    "keywords:forbidden_words": Instruction(  # as whole words
        "validate_forbidden_words",
        lambda text, forbidden_words: not any(pattern_of(word, r"\b", r"\b").search(text) for word in forbidden_words),
    ),
    "keywords:letter_frequency": Instruction(  # ignores case
        "verify_letter_frequency",
        lambda text, letter, let_relation, let_frequency: RELATIONS[let_relation](
            text.lower().count(letter.lower()), let_frequency
        ),
    ),
    "language:response_language": Instruction("validate_response_language", is_language),
    "length_constraints:number_sentences": Instruction("verify_sentence_constraint", sentence_count, True),
    "length_constraints:number_paragraphs": Instruction("verify_paragraph_count", paragraph_count),
    "length_constraints:number_words": Instruction("validate_word_constraint", word_count),
    "length_constraints:nth_paragraph_first_word": Instruction("validate_paragraphs", nth_paragraph_begins),
    "detectable_content:number_placeholders": Instruction("validate_placeholders", placeholder_count),
    "detectable_content:postscript": Instruction("verify_postscript", has_postscript),
    "detectable_format:number_bullet_lists": Instruction("verify_bullet_points", bullet_count),
    "detectable_format:constrained_response": Instruction(
        "validate_choice", lambda text, options=CHOICES: any(option in text for option in options)
    ),
    "detectable_format:number_highlighted_sections": Instruction("validate_highlighted_sections", highlight_count),
    "detectable_format:multiple_sections": Instruction("validate_sections", section_count),
    "detectable_format:json_format": Instruction("validate_json_format", is_json),
    "detectable_format:title": Instruction("validate_title", has_title),
    "combination:two_responses": Instruction("validate_two_responses", has_two_responses),
    "combination:repeat_prompt": Instruction(
        "validate_repeat_prompt",
        lambda text, prompt_to_repeat: text.strip().lower().startswith(prompt_to_repeat.strip().lower()),
    ),
    "startend:end_checker": Instruction(  # before white space and quotation marks
        "validate_end",
        lambda text, end_phrase: text.strip().strip('"').lower().endswith(end_phrase.strip().lower()),
    ),
    "change_case:capital_word_frequency": Instruction("validate_frequency_capital_words", capital_word_count, True),
    "change_case:english_capital": Instruction(
        "validate_uppercase", lambda text: text.isupper() and is_language(text, "en")
    ),
    "change_case:english_lowercase": Instruction(
        "validate_lowercase", lambda text: text.islower() and is_language(text, "en")
    ),
    "punctuation:no_comma": Instruction("validate_no_commas", lambda text: "," not in text),
    "startend:quotation": Instruction(
        "validate_quotation", lambda text: text.strip()[:1] == '"' == text.strip()[1:][-1:]
    ),
}
