"""Invariants of the comparison of mathematical answers: random ones, what is written around them, hostile ones."""

from __future__ import annotations

import builtins
import random
import subprocess
import sys
import threading
from fractions import Fraction

import pytest

from sota_grpo.rewards.maths import MAX_ANSWER_CHARS, math_equal, verified

SEED = random.randrange(1 << 30)
RNG = random.Random(SEED)
DRESSES = (
    "${}$",
    "\\({}\\)",
    "$${}$$",
    "\\left({}\\right)",
    "{{{}}}",
    " {} ",
    "{}.",
    "\\displaystyle {}",
    "\\boxed{{{}}}",
)


def wrong_rows(table: str) -> list[str]:
    """The rows of a table that come out wrong, in either direction.

    ``gold <=> answer`` is a row of equal answers, ``gold <!> answer`` one of different answers.
    """
    wrong = []
    for row in table.strip().splitlines():
        equal = " <=> " in row
        gold, answer = row.split(" <=> " if equal else " <!> ")
        if math_equal(gold, answer) is not equal or math_equal(answer, gold) is not equal:
            wrong.append(row)
    return wrong


def fraction() -> Fraction:
    return Fraction(RNG.randint(-999, 999), RNG.choice((1, 2, 3, 4, 5, 7, 8, 12, 125)))


def latex(value: Fraction) -> str:
    sign = "-" if value < 0 else ""
    return f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}" if value.denominator > 1 else str(value)


def expression(depth: int) -> str:
    """A random expression in x and y, whole by itself."""
    if depth == 0:
        return RNG.choice(("x", "y", "2", "7", "\\frac{1}{3}", "\\sqrt{5}", "\\pi"))
    left, right = expression(depth - 1), expression(depth - 1)
    forms = ("({} + {})", "({} - {})", "{} \\cdot {}", "\\frac{{{}}}{{{} + 11}}", "{}({})^2")
    return RNG.choice(forms).format(left, right)


def test_one_value_in_every_notation_is_one_answer() -> None:
    for _ in range(200):
        value, other = fraction(), fraction()
        gold = latex(value)
        whole, rest = divmod(abs(value), 1)
        forms = [
            f"{value.numerator}/{value.denominator}",
            gold.replace("frac", "dfrac"),
            f"x = {gold}",
            f"{gold}\\text{{ cm}}",
        ]
        if rest and whole:
            forms.append(f"{'-' if value < 0 else ''}{whole}{latex(rest)}")
        if value.denominator in (1, 2, 4, 5, 8, 125):
            forms.append(f"{float(value):.6f}")
        for form in forms:
            dressed = form if "=" in form or "text" in form else RNG.choice(DRESSES).format(form)
            assert math_equal(gold, dressed), (SEED, gold, dressed)
            assert math_equal(latex(other), dressed) is (other == value), (SEED, other, dressed)


def test_an_expression_equals_itself_rearranged_and_nothing_shifted() -> None:
    for _ in range(150):
        first, second = expression(2), expression(2)
        gold = f"{first} + 3({second})"
        assert math_equal(gold, f"3({second})+{first}"), (SEED, gold)
        assert math_equal(gold, f"\\frac{{2({first}) + 6({second})}}{{2}}"), (SEED, gold)
        assert math_equal(gold, gold.replace("\\cdot", "\\times").replace("frac", "tfrac")), (SEED, gold)
        assert not math_equal(gold, f"{gold} + \\frac{{1}}{{1000000}}"), (SEED, gold)
        assert not math_equal(gold, f"-({gold}) + 1"), (SEED, gold)


def test_polynomials_equal_their_factors() -> None:
    for _ in range(60):
        roots = [RNG.randint(-9, 9) for _ in range(3)]
        total, pairs, product = (
            sum(roots),
            sum(roots[i] * roots[i - 1] for i in range(3)),
            roots[0] * roots[1] * roots[2],
        )
        factored = "".join(f"(x - {root})" if root >= 0 else f"(x + {-root})" for root in roots)
        assert math_equal(f"x^3 + {-total}x^2 + {pairs}x + {-product}".replace("+ -", "- "), factored), (SEED, roots)
        assert not math_equal(f"x^3 + {-total}x^2 + {pairs}x + {1 - product}".replace("+ -", "- "), factored)


def test_lists_and_sets_have_no_order_and_points_have_one() -> None:
    for _ in range(100):
        members = [latex(value) for value in {fraction() for _ in range(RNG.randint(2, 6))}]
        shuffled = RNG.sample(members, len(members))
        assert math_equal(", ".join(members), " , ".join(shuffled)), (SEED, members)
        assert math_equal(f"\\{{{','.join(members)}\\}}", ",".join(shuffled)), (SEED, members)
        assert math_equal(f"({','.join(members)})", f"({','.join(shuffled)})") is (members == shuffled), (SEED, members)
        assert not math_equal(",".join(members), ",".join(members[:-1])), (SEED, members)
        assert not math_equal(",".join(members), ",".join([*members[:-1], "1001"])), (SEED, members)


def test_intervals_differ_by_one_end() -> None:
    for _ in range(100):
        low, high = sorted({fraction(), fraction() + 1000})
        kinds = [left + right for left in "([" for right in ")]"]
        first, second = RNG.choice(kinds), RNG.choice(kinds)
        interval = f"{first[0]}{latex(low)}, {latex(high)}{first[1]}"
        again = f"{second[0]}{latex(low)},{latex(high)}{second[1]}"
        assert math_equal(interval, again) is (first == second), (SEED, interval, again)
        signs = ["\\le" if bracket in "[]" else "<" for bracket in first]
        assert math_equal(interval, f"{latex(low)} {signs[0]} x {signs[1]} {latex(high)}"), (SEED, interval)
        assert not math_equal(interval, f"{first[0]}{latex(low)}, {latex(high + 1)}{first[1]}"), (SEED, interval)


def test_a_numeral_of_the_asked_base_may_leave_the_base_out() -> None:
    assert math_equal("101_2", "101")
    assert not math_equal("101", "101_2")


def test_only_kinds_that_we_cannot_compare_go_to_math_verify() -> None:
    assert verified("12", "\\gcd(24, 36)")
    assert verified("\\begin{pmatrix}6 & 8\\end{pmatrix}", "2\\begin{pmatrix}3 & 4\\end{pmatrix}")
    assert not verified("12", "\\gcd(24, 35)")
    assert not verified("5", "5")  # not asked
    for text in (
        "\\gcd(9^{99}, 3)",
        "\\max(10^5, 123456)",
        "\\gcd" + "(" * 9 + ")" * 9,
        "\\det(\\int_0^1 x)",
        "\\gcd(9!, 1)",
    ):
        assert not verified(text, text), text


HOSTILE = (
    "10**10**10",
    "9^{9^{9^9}}",
    "(10^9)!",
    "((((99!)!)!)!)",
    "\\binom{10^9}{10^8}",
    "\\sum_{i=1}^{10^9} i",
    "\\int_0^1 x^x dx",
    "\\sqrt[10^9]{2}",
    "1e999999",
    "9" * MAX_ANSWER_CHARS,
    "\\frac{1}{" * 90 + "1" + "}" * 90,
    "\\frac{1}{" * 30 + "x+1" + "}" * 30,
    "(" * 500 + ")" * 500,
    "2^" * 400 + "2",
    "1/" * 400 + "1",
    "x!" + "!" * 400,
    "|" * 401,
    "-" * 500 + "1",
    "\\begin{pmatrix}" + "&".join(["1"] * 300) + "\\end{pmatrix}",
    ",".join(map(str, range(200))),
    "\\pm" + "1\\pm" * 100 + "1",
    "x^{99999999}",
    "\\log_{1}{2}",
    "0^{-1}",
    "\\frac{1}{0}",
    "__import__('os').system('true')",
    "eval('1')",
    "\\operatorname{eye}(10^6)",
    "\ud800",
    "\x00",
    "\u202e",
    "\\",
    "{",
    "}",
    "$",
    "\\text{",
    "\\begin{",
    "\\left",
    "_",
    "^",
)


def test_hostile_answers_cost_milliseconds_and_run_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("text was executed")

    math_equal("12", "\\gcd(24, 36)")  # what is imported lazily is imported now
    monkeypatch.setattr(builtins, "eval", refuse)
    monkeypatch.setattr(builtins, "exec", refuse)
    for hostile in HOSTILE:
        math_equal(hostile, hostile)
        for gold in ("5", "\\frac{1}{2}", "x^2+1", "(1,2]", "\\{1,2\\}", "x=5", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"):
            assert not math_equal(gold, hostile), (gold, hostile)
            assert not math_equal(hostile, gold), (gold, hostile)


@pytest.mark.timeout(60)
def test_comparisons_are_right_in_threads() -> None:
    wrong: list[int] = []

    def compare() -> None:
        for _ in range(50):
            if not math_equal("\\sin\\frac{\\pi}{7}", "\\cos\\frac{5\\pi}{14}") or math_equal("\\ln 2", "0.69314"):
                wrong.append(1)

    threads = [threading.Thread(target=compare) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_grader_starts_without_sympy_and_torch() -> None:
    code = (
        "import sys; from sota_grpo.rewards.maths import math_equal; math_equal('2\\\\pi', '\\\\sqrt2');"
        "print([name for name in ('sympy', 'torch', 'transformers', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_is_written_around_an_answer_or_named_in_it_does_not_count() -> None:
    assert math_equal("7", "\\#7")
    assert not math_equal("17", "1\\#7")
    assert math_equal("(3,2)", "y=2, x=3")  # what the letters stand for, in the order of the alphabet
    assert not math_equal("(2,3)", "y=2, x=3")
    assert not math_equal("(2,3)", "b=2, a=3")
