"""Which answers to mathematics problems are the same: a table of pairs with reasons, and laws over random texts."""

from __future__ import annotations

import builtins
import random
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from itertools import pairwise
from unittest.mock import Mock

import pytest

from benchmarks.math_pairs import responses, tables
from sota_grpo.rewards.maths import MAX_ANSWER_CHARS, math_equal, tidy

TABLES = tables()  # what a careful reader says
PAIRS = TABLES["pairs"]
LOST = {("3:4:5", "6:8:10"), ("5\\text{ m}", "5 m")}  # of them, what ours gets wrong
MORE = (
    ("10^{60}", "10^{60}+1", False),
    ("1,234.5", "1234.5", True),
    ("1,1,2", "1,2,2", False),
    ("2x+3y=6", "4x+6y=12", True),
    ("\\text{Tuesday}", "tuesday", True),
    ("\\log_2 8", "3", True),
    ("\\ln_2 8", "\\ln_2 8", True),
    *((f"{name}_2 8", f"{name} 8", False) for name in ("\\ln", "\\sin", "\\exp", "\\tanh", "\\log")),
    ("\\log_2_3 8", "\\log_3 8", False),
    ("\\sin^2^3 x", "\\sin^3 x", False),
)


def test_pairs_are_equal_or_not_in_both_directions() -> None:
    assert len(PAIRS) > 900
    for gold, answer, equal in (*PAIRS, *MORE):
        expected = equal != ((gold, answer) in LOST)
        assert math_equal(gold, answer) is expected, (gold, answer)
        assert math_equal(answer, gold) is expected, (answer, gold)


@pytest.mark.parametrize(("table", "answer_format"), [("boxed responses", "boxed"), ("answers in sentences", "any")])
def test_answers_in_responses_are_read_as_a_careful_reader_would(table: str, answer_format: str) -> None:
    """In one box or several, corrected later, or said in a sentence."""
    is_right = responses(answer_format)
    for gold, response, equal in TABLES[table]:
        assert is_right(gold, response) is equal, (gold, response)


def test_a_numeral_of_the_asked_base_may_leave_the_base_out() -> None:
    assert math_equal("101_2", "101")
    assert not math_equal("101", "101_2")


def fraction() -> Fraction:
    return Fraction(random.randint(-999, 999), random.choice((1, 2, 3, 4, 5, 7, 8, 12, 125)))


def latex(value: Fraction) -> str:
    sign = "-" if value < 0 else ""
    return f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}" if value.denominator > 1 else str(value)


def expression(depth: int) -> str:
    """A random expression in x and y, whole by itself."""
    if depth == 0:
        return random.choice(("x", "y", "2", "7", "\\frac{1}{3}", "\\sqrt{5}", "\\pi"))
    left, right = expression(depth - 1), expression(depth - 1)
    forms = ("({} + {})", "({} - {})", "{} \\cdot {}", "\\frac{{{}}}{{{} + 11}}", "{}({})^2")
    return random.choice(forms).format(left, right)


DRESSES = ("${}$", "\\({}\\)", "\\left({}\\right)", "{{{}}}", " {}.", "\\displaystyle {}", "\\boxed{{{}}}", "x = {}")


def test_one_value_in_every_notation_is_one_answer() -> None:
    for _ in range(25):
        value, other = fraction(), fraction()
        gold, sign = latex(value), "-" if value < 0 else ""
        whole, rest = divmod(abs(value), 1)
        forms = [f"{value.numerator}/{value.denominator}", gold.replace("frac", "dfrac"), f"{gold}\\text{{ cm}}"]
        forms += [f"{sign}{whole}{latex(rest)}"] if rest and whole else []
        forms += [f"{float(value):.6f}"] if value.denominator in (1, 2, 4, 5, 8, 125) else []
        for form in forms:
            dressed = form if "text" in form else random.choice(DRESSES).format(form)
            assert math_equal(gold, dressed), (gold, dressed)
            assert math_equal(latex(other), dressed) is (other == value), (other, dressed)


def test_an_expression_equals_itself_rearranged_and_nothing_shifted() -> None:
    for _ in range(15):
        first, second = expression(2), expression(2)
        gold = f"{first} + 3({second})"
        assert math_equal(gold, f"\\frac{{6({second})+2({first})}}{{2}}"), gold
        assert not math_equal(gold, f"{gold} + \\frac{{1}}{{1000000}}"), gold
        assert not math_equal(gold, f"-({gold}) + 1"), gold


def test_lists_and_sets_have_no_order_and_points_have_one() -> None:
    for _ in range(25):
        members = [latex(value) for value in {fraction() for _ in range(random.randint(2, 6))}]
        shuffled = random.sample(members, len(members))
        assert math_equal(", ".join(members), " , ".join(shuffled)), members
        assert math_equal(f"\\{{{','.join(members)}\\}}", ",".join(shuffled)), members
        assert math_equal(f"({','.join(members)})", f"({','.join(shuffled)})") is (members == shuffled), members
        assert not math_equal(",".join(members), ",".join([*members[:-1], "1001"])), members
        assert not math_equal(",".join([*members, members[0]]), ",".join([*members, members[1]])), members


HOSTILE = (
    *("10**10**10", "9^{9^{9^9}}", "(10^9)!", "((((99!)!)!)!)", "\\binom{10^9}{10^8}", "\\sum_{i=1}^{10^9} i"),
    *("\\int_0^1 x^x dx", "\\sqrt[10^9]{2}", "1e999999", "9" * MAX_ANSWER_CHARS, "\\log_{1}{2}", "0^{-1}", "\\frac.1"),
    *("\\frac{1}{" * 90 + "1" + "}" * 90, "\\frac{1}{" * 30 + "x+1" + "}" * 30, "(" * 500 + ")" * 500, "|" * 401),
    *("2^" * 400 + "2", "1/" * 400 + "1", "x!" + "!" * 400, "-" * 500 + "1", "\\pm" + "1\\pm" * 100 + "1", "x_{" * 99),
    *(",".join(map(str, range(200))), "\\cup".join(f"({n},{n + 1})" for n in range(99)), "\\begin{matrix}" * 40),
    *("\\{" + ",".join(f"\\sqrt{{{n}}}" for n in range(2, 60)) + "\\}", "x^{99999999}", "(x+1)^{9999}", "\\arccos 5"),
    *("\\frac{1}{0}", "__import__('os').system('true')", "eval('1')", "\\operatorname{eye}(10^6)"),
    *("\\text{" + "1" * 900, "\ud800", "\x00", "\u202e", "\\", *"{}$_^", "5_"),
    *("\\text{", "\\begin{", "\\left", "\\sqrt[", "\\{x|"),
)
GOLDS = ("5", "\\frac{1}{2}", "x^2+1", "(1,2]", "\\{1,2\\}", "x=5", "\\begin{pmatrix}1\\\\2\\end{pmatrix}")


@pytest.mark.timeout(120)  # some seconds; a comparison has a budget
def test_hostile_answers_are_wrong_and_run_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in ("eval", "exec"):
        monkeypatch.setattr(builtins, function, Mock(side_effect=AssertionError("text was executed")))
    for hostile in HOSTILE:
        math_equal(hostile, hostile)
        for gold in GOLDS:
            assert not math_equal(gold, hostile), (gold, hostile)


SOUP = r"""
\frac \sqrt { } ( ) [ ] \{ \} | , ; = < \le \in \cup + - * / ! \% ^\circ \pm \pi \infty e i x y 1 12 0.5 1,000 ' :
\text{ cm} \binom \log \sin \begin{pmatrix} \end{pmatrix} & \\ \mathbb{R} $ or and \overline{ . ... \sum^{ \pmod \approx
\ne \lfloor < > ^{ \cap \setminus \arcsin \choose \mid million
"""


def test_equality_is_reflexive_symmetric_and_total() -> None:
    golds = [text for gold, answer, _ in PAIRS for text in (gold, answer)]
    for _ in range(60):
        damaged = list(random.choice(golds))
        damaged[random.randrange(len(damaged))] = random.choice(SOUP.split())
        soup = "".join(random.choices(SOUP.split(), k=random.choice((2, 5, 12))))
        texts = (soup, "".join(damaged), random.choice(golds))
        for first, second in pairwise(texts):
            if "_" not in first + second:  # a numeral without its base is right, another base is not
                assert math_equal(first, second) is math_equal(second, first), (first, second)
        assert all(math_equal(text, f" {text} ") or not tidy(text) for text in texts), texts


def test_comparisons_are_right_in_threads() -> None:
    golds = ("\\sin\\frac{\\pi}{7}", "\\ln 2") * 40
    answers = ("\\cos\\frac{5\\pi}{14}", "0.69314") * 40
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(math_equal, golds, answers)) == [True, False] * 40
