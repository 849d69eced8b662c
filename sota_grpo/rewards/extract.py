"""Extract the final answer of a response, in the form that the task requests, and parse numbers exactly.

Model text is untrusted: nothing here calls ``eval`` or a computer algebra system, numbers are parsed only in texts of
bounded length, and the regular expressions take linear time (alternatives start differently or are bounded).
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import partial
from typing import NamedTuple

MAX_ANSWER_CHARS = 256  # an answer longer than this is not a number; also keeps integers small

# 1,080 and 1,00,000; the lookahead keeps the search linear: a list without a group of three digits nearby is not read
_GROUPED_AHEAD = rf"(?=(?:,\d{{2,3}}){{0,{MAX_ANSWER_CHARS // 3}}},\d{{3}}(?!\d))"
_MAGNITUDE = rf"(?:\d{{1,3}}{_GROUPED_AHEAD}(?:,\d{{2,3}})*,\d{{3}}(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_SCALES = {"k": 10**3, "m": 10**6, "b": 10**9, "dozen": 12, "hundred": 100}
_SCALES |= {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_NUMBER = re.compile(
    r"(?P<minus>(?<![\w.)\]}])-)?\$?(?P<minus2>(?<=\$)-)?"  # -5, -$5, $-5, but the 5 of 10-5 is not negative
    rf"(?<![\w.])(?P<magnitude>{_MAGNITUDE})(?P<exponent>[eE][+-]?\d+)?(?:/(?P<divisor>\d+)(?![\d/]))?"
    r"(?P<scale>[kKMB](?!\w)|[\s-]?(?:hundred|thousand|million|billion|trillion|dozen)(?=s?\b))?",  # 1.8k, 18 million
    re.ASCII,
)
_LATEX_FRACTION = re.compile(r"(-?)\\[dt]?frac\{(-?\d{1,80})\}\{(\d{1,80})\}", re.ASCII)
_MAX_EXPONENT_CHARS = 4  # e-99: a longer exponent would make an integer of thousands of digits
CALCULATION = re.compile(r"<<[^<>]*>>")  # GSM8K's calculator annotations
# cm^2 and \text{ cm}^2 have no number
_UNIT_POWER = re.compile(
    r"(?<![A-Za-z])([cmk]?m|[a-z]*met(?:er|re)s?|ft|feet|in|inches|yd|yards|mi|miles|units)(\}?) ?\^ ?(?:\d|\{\d\})",
    re.ASCII,
)
_MIXED_NUMBER = re.compile(r"(?<![\w.,/])(\d{1,80}) +(\d{1,80})/(\d{1,80})(?![\d/])", re.ASCII)
_LEADING_MINUS = re.compile(r"\A\s*-\s+(?=[$.\d])", re.ASCII)
_APART_MINUS = re.compile(r"([=(\[{]|\A\$)[^\S\n]*-[^\S\n]+(?=[$.\d])", re.ASCII)  # x = - 5
_WORKED = re.compile(r"\A[\s$]*\(?\$?\d[\d\s$.,%+*/×÷x·()=-]*=")  # 6*3 = 18: the last side is the number
_GROUPED = re.compile(r"(?<![\d.,/])(\d{1,3})((?:[ \u00a0\u202f]\d{3})+)(?![\d,/])", re.ASCII)  # 1 800
_VULGAR = re.compile(r"(-?)(\d?) ?([¼½¾⅐-⅞])")
_UNREAD = re.compile(r"[⁰¹²³⁴-⁹!]|\.\d")  # directly after a number: 18², 5!, 18.0.0 are other numbers
_REWRITES = (("{,}", ","), ("\\,", ""), ("\\!", ""), ("\\$", "$"), ("\\%", "%"), ("\\times", "×"), ("\\cdot", "·"))
_ALIKE = str.maketrans("\u2010\u2011\u2013\u2212“”‘’", "----\"\"''")  # hyphens, en dash and minus; quotation marks


def parse_number(text: str) -> Fraction | None:
    """Return the value of the number in ``text``; None unless ``text`` contains exactly one number.

    Thousands commas, a dollar sign, a percent sign, units and words around the number, and a trailing period are
    ignored; ``18%`` is 18, because problems ask for a percentage as a bare number. ``a/b`` and ``\\frac{a}{b}`` are
    fractions, ``3 1/2`` and ``3½`` mixed numbers; ``1.8k``, ``18 million`` and ``2 dozen`` are 1800, 18000000 and 24.
    Of a calculation such as ``6*3 = 18`` the last side counts. Two numbers (``"5 or 6"``, ``"2*3"``) give None, because
    a response may not hedge; nothing is computed (``5!`` and ``18²`` give None). None also for more than 256
    characters, an exponent of more than three (with its sign), and a division by zero.

    >>> parse_number("$1,080.50"), parse_number("-3/4"), parse_number("18.00 dollars.") == 18, parse_number("5 or 6")
    (Fraction(2161, 2), Fraction(-3, 4), True, None)
    """
    if len(text) > MAX_ANSWER_CHARS:
        return None
    text = text.translate(_ALIKE)
    for old, new in _REWRITES:
        text = text.replace(old, new)
    text = _UNIT_POWER.sub(r"\1\2", CALCULATION.sub("", text))
    text = _GROUPED.sub(lambda number: number[1] + re.sub(r"\s", "", number[2]), _WORKED.sub("", text))
    text = _VULGAR.sub(_plain_fraction, text)
    text = _LATEX_FRACTION.sub(lambda match: f"{match[1] or ' '}{match[2]}/{match[3]} ", text)
    text = _LEADING_MINUS.sub("-", _APART_MINUS.sub(r"\1-", text))
    text = _MIXED_NUMBER.sub(lambda mixed: f"{int(mixed[1]) * int(mixed[3]) + int(mixed[2])}/{mixed[3]}", text)
    matches = _NUMBER.finditer(text)
    number = next(matches, None)
    if number is None or next(matches, None) is not None or _UNREAD.match(text, number.end()):
        return None
    exponent, divisor = number["exponent"] or "", int(number["divisor"] or 1)
    if len(exponent) > _MAX_EXPONENT_CHARS or divisor == 0:
        return None
    value = Fraction(number["magnitude"].replace(",", "") + exponent) / divisor
    value *= _SCALES[number["scale"].strip().lstrip("-").casefold()] if number["scale"] else 1
    return -value if number["minus"] or number["minus2"] else value


def _plain_fraction(match: re.Match[str]) -> str:
    """Return a vulgar fraction as ``1/2``, apart from what precedes it, unless that is its sign."""
    sign, whole, fraction = match.groups()
    space = "" if sign and not whole else " "
    return f"{sign}{whole}{space}{unicodedata.normalize('NFKC', fraction).replace('⁄', '/')}"


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


def find_last_number(text: str) -> str | None:
    """Return the last number in ``text`` as it is written there, but with ``-`` for a Unicode minus sign; or None.

    The power of a unit (``cm^2``) is no number.

    >>> find_last_number("She sold 48/2 = 24 clips, so $1,072.50.")
    '$1,072.50'
    """
    text = _APART_MINUS.sub(r"\1-", _UNIT_POWER.sub(r"\1\2", text.translate(_ALIKE)))
    last = _last(_NUMBER, text)
    return last and last[0]


def numbers_equal(left: str, right: str) -> bool:
    """Return whether :func:`parse_number` returns the same value for both texts, and not None; without tolerance."""
    value = parse_number(left)
    return value is not None and value == parse_number(right)


_NAME = re.compile(r"\\?[^\W\d_]++(?! ?=)")  # not the x of "x ="; a LaTeX command, too
_NUMBER_FIRST = re.compile(r"[$\s\u2212-]*\.?\d")
_SPACED_SIGN = re.compile(r" ?([^\w ]) ?")
_STYLE = re.compile(r"\\(?:text(?:bf|it)?|math(?:rm|bf|it)|mbox) ?\{([^{}]*)\}")
_QUOTED = re.compile(r"(\*\*|[*\"'`$])(.+)\1")
_CHOICE = re.compile(r"[(\[{]?([^\W\d_])[)\]}:.]*")
_ALGEBRA = re.compile(r"\d(?![mgsLlhkKMBC])[A-Za-z](?![A-Za-z\d])")  # 2x
_LABELLED = re.compile(r"[(\[]?([A-Z])[)\].:] .+")  # C) Paris


def answers_equal(answer: str, gold: str) -> bool:
    """Return whether two answers are the same number, the same choice, or the same text.

    Ignored are letter case, repeated spaces, spaces beside signs, a final period, LaTeX's text commands, quotation
    marks, asterisks or dollar signs around the text, the form of quotation marks and hyphens, and how Unicode composes
    letters. If the gold answer is a letter, the answer may have it in brackets
    and its text after it. Of equal numbers, units are ignored if the gold answer has none, or if only the gold answer,
    a number, has one: ``11`` is wrong for ``Apollo 11``, and ``3 am`` for ``3 pm``.

    >>> answers_equal("18 dollars", "$18"), answers_equal("5", "5 apples"), answers_equal("5 pears", "5 apples")
    (True, True, False)
    >>> answers_equal(" new  york.", "New York"), answers_equal("C) Paris", "C"), answers_equal("C or D", "C")
    (True, True, False)
    """

    def folded(text: str) -> str:
        return _SPACED_SIGN.sub(r"\1", (_plain(text) or text).casefold())

    answer, gold = (unicodedata.normalize("NFC", text.translate(_ALIKE)) for text in (answer, gold))
    if folded(answer) == folded(gold):
        return True
    if choice := _CHOICE.fullmatch(folded(gold)):
        chosen = _CHOICE.fullmatch(folded(answer)) or _LABELLED.fullmatch(_plain(answer))
        return chosen is not None and chosen[1].casefold() == choice[1]
    if not numbers_equal(answer, gold):
        return False
    units, gold_units = _names(answer), _names(gold)
    return not gold_units or units == gold_units or (not units and is_number(gold))


def is_number(text: str) -> bool:
    """Return whether a text is one number, perhaps after ``x =`` or before a unit; False if a word precedes it.

    >>> is_number("5 apples"), is_number("x = 5"), is_number("Apollo 11"), is_number("F-16")
    (True, True, False, False)
    """
    if parse_number(text) is None or _ALGEBRA.search(text):
        return False
    return not _names(text) or _NUMBER_FIRST.match(text) is not None


def _plain(text: str) -> str:
    plain = " ".join(_STYLE.sub(r"\1", text).split()).rstrip(". ")
    quoted = _QUOTED.fullmatch(plain)
    return quoted[2].rstrip(". ") if quoted else plain


def _names(text: str) -> list[str]:
    """Return the words of a text, then the powers of its units."""
    words = [name.casefold() for name in _NAME.findall(text) if name[0] != "\\"]
    return words + [power[0].rstrip("}")[-1] for power in _UNIT_POWER.finditer(text)]


_TAGGED = re.compile(r"<answer>((?:(?!</?answer>).)*+)</answer>", re.IGNORECASE | re.DOTALL)
_CODE_BLOCK = re.compile(r"^([^\S\n]*)```+[^`\n]*\n((?:.*\n)*?)[^\S\n]*```", re.MULTILINE)
_BRACE = re.compile(  # \boxed 5 is a box too; \{ and \} are text, not braces
    r"\\(?:boxed|fbox)(?:\s{0,3}\{|\s{1,3}(?P<bare>-?\d+(?:\.\d+)?))|\\.|[{}]", re.DOTALL | re.ASCII
)
_MAX_GAP_CHARS = 80  # between two parts of one answer
# the unit of the first part: \boxed{1}\text{ cm and }\boxed{2}, "rows and", degrees, percent
_UNIT_BEFORE = re.compile(
    r"\A[\s$]*(?:\^\s?\{?\s?\\circ|°|\\?%|\\(?:text|mathrm|mbox)\s?\{\s?(?!(?:and|or)\b)[A-Za-z]{1,16}"
    r"|[A-Za-z]{1,16}(?=\s+and\b))"
)
_DRESS = re.compile(r"\\(?:text|mathrm|mbox)(?=\s?\{)|\\q?quad(?![A-Za-z])|\\[()\[\],;:! ]|[{}$*~\s]")
_JOINT = re.compile(  # what joins, and perhaps the name of the second part: "and x_2 ="
    r"(,|;|\\?&|\\cup|∪|(?:[,;] )?(?:and|or))(?: also)?(?: ?[A-Za-z](?: ?_ ?\w{1,2})? ?(?:=|\\in))?", re.ASCII
)
_INLINE = r"(?:[^$\\\n]|\\.|\n(?!\n))++"
_MATHEMATICS = re.compile(  # a dollar before a digit closes nothing, nor does one after a space: $5 and $7 are money
    rf"\\\$|\$\$(?P<shown>(?:[^$\\]|\\.)++)\$\$|\$(?!\s)(?P<tight>{_INLINE})(?<!\s)\$(?!\d)"
    rf"|\$(?=\s)(?P<spaced>{_INLINE})(?<=\s)\$(?!\s?\d)"
    r"|\\\((?P<round>(?:[^\\]|\\[^()])++)\\\)|\\\[(?P<square>(?:[^\\]|\\[^\[\]])++)\\\]",
    re.DOTALL,
)
_ANSWER_IS = re.compile(
    r"\b(?:answer|(?:correct|right|best) (?:option|choice))\b"
    r"(?:[^\n.:=$\\]{0,40}?\bis\b|\s?\*{0,2}\s?[:=]|\*{0,2}\s?\n)[\s:*]*"
    r"(?:(?:therefore|thus|then|simply|just|equal to|option|choice)\b,?\s?)?",
    re.IGNORECASE,
)
_MAX_SAID_CHARS, _MAX_SAID_WORDS = 120, 3
_QUOTES = " *`'\""
_SAID_END = re.compile(r"[.!?](?=[\s*]|\Z)|\n|,? \(?(?:because|since|as|which|where|so|for)\b")
_SAID_NUMBER = re.compile(r"[-+\u2212±√(\[{\\$.]|\d|[A-Za-z](?:'|\([A-Za-z]\))? ?[=<>^+-]")
_SAID_WORD = re.compile(r"[^\W\d_]{2,}")
_SAYS_NOTHING = re.compile(
    r"\b(?:correct|right|wrong|incorrect|below|above|clear|obvious|unique|here|not)\b", re.IGNORECASE
)
_BARE = re.compile(r"(?:\\(?:[A-Za-z]+|.)|(?<![A-Za-z])[A-Za-z](?![A-Za-z])|[^\\A-Za-z])+")
_CONSTANT = re.compile(  # a multiple of pi or a root as plain text, which is no operand of anything longer
    r"(?<![\w.()+/^×·−-])(?<![+/^×·−-] )(?<!\d )(?<!(?<!\*)\*)"
    r"[-−]?(?:\d+(?:\.\d+)?(?:/\d+)?\s?)?(?:π|√\s?\d+)(?:\s?/\s?\d+)?"
    r"(?![\w(^])(?! ?[-+/^×·−=]|\*(?!\*))"
)
_NEXT_SENTENCE = re.compile(r"[.!?]\s|\n")


THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


def without_thinking(text: str) -> str:
    """Return what follows the last ``</think>``, cut at a ``<think>`` after it; without these tags, all of ``text``.

    ``[THINK]`` and ``[/THINK]`` are such tags, too. Empty if the prompt has opened the thinking
    (:class:`~sota_grpo.rl.records.SampledText`) and the text does not end it.

    >>> without_thinking("18?</think>It is 18."), without_thinking("It is 18. <think>Or")
    ('It is 18.', 'It is 18. ')
    """
    if getattr(text, "thinks", False) and not any(ends in text for _, ends in THINKING):
        return ""
    for begins, ends in THINKING:
        text = text.rpartition(ends)[2].partition(begins)[0]
    return text


def _last_tagged(text: str) -> str | None:
    last = _last(_TAGGED, text)
    return last and last[1]


def last_code_block(text: str) -> str | None:
    """Return the content of the last closed code block, or None; lines that begin with three backticks enclose it.

    A line with further backticks (```` ```f``` ````) begins no block. If the first line is indented, as in a list, so
    much is removed from each line, if all have it.
    """
    block = _last(_CODE_BLOCK, text)
    if block is None:
        return None
    indent, lines = block[1], block[2].split("\n")[:-1]
    if all(line.startswith(indent) for line in lines if line.strip()):
        lines = [line.removeprefix(indent) for line in lines]
    return "\n".join(lines)


class _Span(NamedTuple):
    """A range of a text that is an answer; ``words``: the pieces of the answer and what joins them."""

    begin: int
    end: int
    words: list[str]

    @property
    def answer(self) -> str:
        return "".join(self.words)


def _boxes(text: str) -> list[_Span]:
    """Return the closed boxes that are not empty; of nested boxes the inner one."""
    open_braces: list[tuple[int, int] | None] = []  # start of a box and of its content; None for other braces
    boxes: list[_Span] = []
    for token in _BRACE.finditer(text):
        brace = token[0]
        if token["bare"]:
            boxes.append(_Span(*token.span(), [token["bare"]]))
        elif brace == "}":
            box = open_braces.pop() if open_braces else None
            if box and not (boxes and boxes[-1].begin > box[0]) and (answer := text[box[1] : token.start()].strip()):
                boxes.append(_Span(box[0], token.end(), [answer]))
        elif brace[-1] == "{" and len(brace) != 2:
            open_braces.append(token.span() if len(brace) > 2 else None)
    return boxes


def _joined(text: str, spans: Iterable[_Span]) -> list[_Span]:
    """Return the spans, merging those that only a comma, "and", "or" or a union separates into one answer.

    >>> text = "$x=1$ or $x=2$; so $3$."
    >>> [span.answer for span in _joined(text, _mathematics(text))]
    ['x=1 or x=2', '3']
    """
    joined: list[_Span] = []
    for span in spans:
        last = joined[-1] if joined else None
        joint: re.Match[str] | None = None
        if last is not None and span.begin - last.end <= _MAX_GAP_CHARS:
            gap = _DRESS.sub(" ", _UNIT_BEFORE.sub(" ", text[last.end : span.begin], count=1))
            joint = _JOINT.fullmatch(" ".join(gap.split()))
        if last is None or joint is None:
            joined.append(span)
        else:
            last.words.extend((", " if joint[1][-1] in ",;&" else f" {joint[1].lstrip(',; ')} ", *span.words))
            joined[-1] = last._replace(end=span.end)
    return joined


def _boxed(text: str) -> str | None:
    boxes = _joined(text, _boxes(text))
    return boxes[-1].answer if boxes else None


def _mathematics(text: str) -> list[_Span]:
    """Return the texts between ``$``, ``$$``, ``\\( \\)`` or ``\\[ \\]``."""
    matches = _MATHEMATICS.finditer(text)
    return [_Span(*match.span(), [match[match.lastgroup].strip()]) for match in matches if match.lastgroup]


def find_mathematics(text: str) -> str | None:
    """Return the answer in a text without a box, or None.

    The last "the answer is" (or "answer:") before LaTeX between delimiters, a number or a few words introduces the
    answer. Without such a phrase it is the last LaTeX between delimiters; without such LaTeX, the last line if that is
    all LaTeX, else the last multiple of π or square root. Without the phrase, LaTeX between delimiters, a multiple or a
    root is no answer if a number follows (in a later sentence, if the LaTeX has digits).

    >>> find_mathematics("The final answer is $x=3$, as $3+1=4$."), find_mathematics("They cost $5 and $7, so 12.")
    ('x=3', None)
    """
    spans = _joined(text, _mathematics(text))
    marked = {span.begin: span for span in spans}
    for cue in reversed(list(_ANSWER_IS.finditer(text))):
        span = marked.get(cue.end())
        if answer := span.answer if span else _said(text, cue.end(), plainly=True):
            return answer
    if not spans:
        last_line = text.rstrip().rpartition("\n")[2]
        if "\\" in last_line and _BARE.fullmatch(last_line):
            return last_line
        constant = _last(_CONSTANT, text)
        return constant[0] if constant and not _NUMBER.search(text, constant.end()) else None
    end, answer = spans[-1].end, spans[-1].answer
    if any(map(str.isdigit, answer)):  # then only a number of another sentence is a later answer
        after = _NEXT_SENTENCE.search(text, end)
        end = after.end() if after else len(text)
    return None if _NUMBER.search(text, end) else answer


def _said(text: str, begin: int, *, plainly: bool = False) -> str:
    """Return the rest of the sentence at ``begin``; with ``plainly`` only a number, a pair, a choice or a name."""
    phrase = _SAID_END.split(text[begin : begin + _MAX_SAID_CHARS], maxsplit=1)[0].strip(_QUOTES)
    if plainly and (len(_SAID_WORD.findall(phrase)) > _MAX_SAID_WORDS or _SAYS_NOTHING.search(phrase)):
        return ""
    return phrase if not plainly or _SAID_NUMBER.match(phrase) or not any(map(str.isdigit, phrase)) else ""


def _said_last(text: str) -> str | None:
    """Return the text after the last "the answer is", or None."""
    phrases = (_said(text, cue.end()) for cue in reversed(list(_ANSWER_IS.finditer(text))))
    return next(filter(None, phrases), None)


_HEADING = re.compile(  # with text below it: "2. Solve", "Step 2: Solve", "Final answer:"
    r"[ \t*]*+(?:(?:\d{1,2}[.):][ \t*]++(?=[^\W\d_]{3})"
    r"|(?:step|part|case|method|phase|stage|section|question|problem)[ \t]*+\d{1,2}(?!\d))[^\d\n]{0,120}+"
    r"|(?:(?:the )?(?:final )?answer|conclusion|solution|explanation|verification|summary|result)[ \t*:.]*+)\n\s*+\S",
    re.IGNORECASE,
)


def _hash(text: str, *, skips_headings: bool = False) -> str | None:
    stripped = text.rstrip("# \n")
    begin = stripped.rfind("####")
    while skips_headings and begin >= 0 and _HEADING.match(stripped, begin + 4):
        begin = stripped.rfind("####", 0, begin)
    if begin >= 0:
        return stripped[begin + 4 :].lstrip().partition("\n")[0].rstrip("#")
    last_line = text.rstrip().rpartition("\n")[2]
    return last_line[2:] if last_line.startswith("A:") else None  # the solutions released with GSM8K end so


_Finders = tuple[Callable[[str], str | None], ...]
_MARKED: _Finders = (_last_tagged, _boxed, partial(_hash, skips_headings=True))
_FINDERS: dict[str, _Finders] = {
    **{"tags": (_last_tagged,), "boxed": (_boxed,), "hash": (_hash,), "last_number": (find_last_number,)},
    "any": (*_MARKED, find_last_number),
}
ANSWER_FORMATS = tuple(_FINDERS)


def extract_answer(text: str, answer_format: str, *, mathematics: bool = False, words: bool = False) -> str | None:
    """Return the final answer of a response, stripped, or None if there is none or it is empty.

    Only :func:`without_thinking` of the text is read. ValueError: unknown format.

    Args:
        answer_format: ``tags``: the last complete ``<answer>...</answer>``; ``boxed``: the last closed ``\\boxed{...}``
            or ``\\fbox{...}`` that is not empty (the inner one if nested), joined with the boxes listed before it (see
            the example); ``hash``: the rest of the line after the last ``####``, else after ``A:`` at the start of the
            last line; ``last_number``; ``any``: the first of these, in this order, that is found, where a Markdown
            heading with text below it (``#### Step 2``) is no ``hash``.
        mathematics: the answer may be more than a number; ``any`` then tries :func:`find_mathematics` before the last
            number. It takes precedence over ``words``.
        words: the answer is not a number; ``any`` then uses the rest of the sentence after the last "the answer is" in
            place of the last number, or without it the whole text.

    >>> extract_answer("So 6*3=18.\\n#### 18", "hash"), extract_answer("#### 18", "boxed")
    ('18', None)
    >>> extract_answer("\\\\boxed{1}, no: $\\\\boxed{2}$ and $\\\\boxed{3}$", "boxed")
    '2 and 3'
    """
    if answer_format not in _FINDERS:
        raise ValueError(f"answer_format={answer_format!r} is not one of {', '.join(ANSWER_FORMATS)}.")
    finders = _FINDERS[answer_format]
    if answer_format == "any" and (mathematics or words):
        finders = (*_MARKED, *((find_mathematics, find_last_number) if mathematics else (_said_last, str)))
    visible = without_thinking(text)
    answers = (answer.strip() for find in finders if (answer := find(visible)) is not None)
    return next(filter(None, answers), None)
