"""The evaluator agrees with exact arithmetic on what it accepts, and refuses the rest at once."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from sota_grpo.rewards.expressions import MAX_DEPTH, MAX_EXPRESSION_CHARS, ExpressionError, parse_expression

SEED = random.randrange(1 << 30)


def random_expression(rng: random.Random, depth: int) -> tuple[str, Fraction | None, list[Fraction]]:
    """A text, its value (None for a division by zero), and its numbers; built bottom up, so nothing here parses."""
    if depth == 0 or rng.random() < 0.2:
        number = rng.choice([str(rng.randint(0, 99)), f"{rng.randint(0, 9)}.{rng.randint(0, 99):02d}"])
        return number, Fraction(number), [Fraction(number)]
    if rng.random() < 0.15:
        text, value, numbers = random_expression(rng, depth - 1)
        return f"-({text})", None if value is None else -value, numbers
    (left, a, first), (right, b, second) = (random_expression(rng, depth - 1) for _ in range(2))
    sign = rng.choice("+-*/")
    space = rng.choice(["", " ", "\n"])
    text, numbers = f"({left}){space}{sign}{space}({right})", first + second
    if a is None or b is None or (sign == "/" and b == 0):
        return text, None, numbers
    return text, {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}[sign], numbers


def test_the_value_is_that_of_exact_arithmetic() -> None:
    rng = random.Random(SEED)
    values = 0
    for _ in range(3000):
        text, value, numbers = random_expression(rng, rng.randint(0, 3))
        if len(text) > MAX_EXPRESSION_CHARS:
            continue
        if value is None:
            with pytest.raises(ExpressionError, match="division by zero"):
                parse_expression(text)
        else:
            found = parse_expression(text)
            assert (found.value, list(found.numbers)) == (value, numbers), f"{text!r}, seed {SEED}"
            values += 1
    assert values > 1500


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 + 3 * 4", 14),
        ("(2 + 3) * 4", 20),
        ("100 - 30 - 7", 63),
        ("96 / 8 / 3", 4),
        ("−3 × −4", 12),
        ("55 ÷ 5 – 1", 10),
        ("2⋅3·4∗5∕6", 20),
        ("- -+-5", -5),
        ("0.1 + 0.2", Fraction(3, 10)),
        (".5*4", 2),
        (" ( 7 ) ", 7),
        ("1/3*3", 1),
    ],
)
def test_by_hand(text: str, value: Fraction) -> None:
    assert parse_expression(text).value == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it ends too early"),
        ("(3 + 4", "it ends too early"),
        ("3 + 4)", r"unexpected '\)'"),
        ("3 + 4 = 7", "unexpected '='"),
        ("2(3)", r"unexpected '\('"),
        ("* 3", r"unexpected '\*'"),
        ("10**10**10", r"unexpected '\*'"),
        ("1e9", "unexpected 'e'"),
        ("1,000", "unexpected ','"),
        ("1.2.3", r"unexpected '\.'"),
        ("٣ + 1", "unexpected '٣'"),
        ("__import__('os')", "unexpected '_'"),
        ("\x003", r"unexpected '\\x00'"),
        ("1/(5-5)", "division by zero"),
        ("(" * 33 + "1" + ")" * 33, "more than 32 deep"),
        ("1+" * 100 + "1", "more than 200 characters"),
    ],
)
def test_what_is_refused_and_why(text: str, reason: str) -> None:
    with pytest.raises(ExpressionError, match=reason):
        parse_expression(text)


def test_the_bounds_are_inclusive() -> None:
    assert parse_expression("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH).value == 1
    assert parse_expression("9" * MAX_EXPRESSION_CHARS).value == 10**MAX_EXPRESSION_CHARS - 1


def reason_of(text: str) -> str:
    try:
        parse_expression(text)
    except ExpressionError as error:
        return str(error)
    return ""


@pytest.mark.timeout(120)  # about a second
def test_hostile_text_is_refused_in_linear_time() -> None:
    rng = random.Random(SEED)
    pieces = [*"()+-*/.×÷−", " ", "9" * 50, "1", "__import__", "\x00", "٣", "\U0001f600", "<answer>", "**"]
    texts = ["(" * 1_000_000, "9" * 1_000_000, "-" * 1_000_000, "1/" * 99 + "3", " " * 1_000_000]
    texts += ["".join(rng.choices(pieces, k=rng.randint(1, 80))) for _ in range(5000)]
    reasons = [reason for reason in map(reason_of, texts) if reason]
    assert len(reasons) > 4000
    assert max(map(len, reasons)) < 60, f"seed {SEED}"
