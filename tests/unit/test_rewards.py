"""Answers are found where the prompt requires them, numbers compare exactly, and hostile text costs linear time."""

from __future__ import annotations

import pickle
import random
from fractions import Fraction

import pytest

from sota_grpo.rewards.expressions import MAX_DEPTH, MAX_EXPRESSION_CHARS, ExpressionError, parse_expression
from sota_grpo.rewards.extract import ANSWER_FORMATS, extract_answer, find_last_number, numbers_equal, parse_number
from sota_grpo.rl.records import SampledText

LENGTH = 100_000

NUMBERS = r"""
18 == 18 | .5 == 1/2 | 1,080 == 1080 | 1{,}000{,}000 == 1000000 | $1,080.50 == 2161/2 | -$7 == -7 | $-7 == -7
−7 == -7 | - 7 == -7 | –7 == -7 | 20% == 20 | 3/4 == 3/4 | -3/4 == -3/4 | \frac{3}{4} == 3/4 | \dfrac{-3}{4} == -3/4
1.5e3 == 1500 | 5 m2 == 5 | x = 5 == 5 | x = - 5 == -5 | 3 1/2 == 7/2 | -3 1/2 hours == -7/2 | <<6*3=18>>18 == 18
4½ == 9/2 | ¾ cup == 3/4 | x = -½ == -1/2 | about ½ == 1/2 | $1.8k == 1800 | 18 million dollars == 18000000
18-million == 18000000 | 2 dozen eggs == 24 | 6*3 = 18 == 18 | 6 \times 3 = 18 == 18 | $2 x 3 = $6 == 6
1 800 == 1800 | 1,00,000 == 100000 | -\frac{3}{4} == -3/4 | $x = -\dfrac{3}{4}$ == -3/4 | 2\frac{1}{2} == 5/2
a.\frac{1}{2} == 1/2 | 18 m^2 == 18 | 18m^2 == 18 | 18 meters^2 == 18 | 18\text{ cm}^2 == 18
18 \, \mathrm{m}^{3} == 18
"""
NO_NUMBERS = r"""
5 or 6 | 2*3 | x^2 = 9 | 6*3 = | 18² | 5! | 18.0.0 | 10**10**10 | 1/2/3 | 1,234,5678 | 1e99999 | ٣ | 10 - 5
3\cos^2 | 0,\frac{125}{2}
"""


def entries(table: str) -> list[str]:
    return table.strip().replace("\n", " | ").split(" | ")


def test_numbers_are_read_and_anything_else_is_none() -> None:
    for text, _, value in (entry.rpartition(" == ") for entry in entries(NUMBERS)):
        assert parse_number(text) == Fraction(value), text
    assert parse_number("1\u202f080\u202f000") == 1_080_000
    for text in (*entries(NO_NUMBERS), "", "9" * 257):
        assert parse_number(text) is None, text


def test_the_last_number_has_its_sign_and_is_no_power_of_a_unit() -> None:
    for unit in ("m^2", "cm^{2}", "\\text{ cm}^2", "square meters"):
        assert find_last_number(f"2 * 9 is 18, so the area is 18 {unit}.") == "18"
    assert find_last_number("So x = - 5.") == "-5"
    for text in ("from 3\u20135", "so $x$ - 5 apples", "Items:\n- 5 pens", "10 - 5", "- 5 pens", "x =\n- 5"):
        assert find_last_number(text) == "5", text


def test_equality_is_exact_and_needs_two_numbers() -> None:
    assert numbers_equal("0.1", "1/10")
    assert not numbers_equal("0.3333333333", "1/3")
    assert not numbers_equal("none", "none")
    assert not numbers_equal("", "")


@pytest.mark.parametrize(
    ("text", "answer_format", "answer"),
    [
        ("####", "hash", None),
        ("####\n\n18\nbye", "hash", "18"),
        ("#### 18 ####", "hash", "18"),
        ("#### 17\n#### 18 eggs ####\n", "hash", "18 eggs"),
        ("They sold 18 million.", "last_number", "18 million"),
        ("6*3=18\nA: 18\n", "hash", "18"),
        ("A: 17\n#### 18", "hash", "18"),
        ("#### 18\nA: 17", "hash", "18"),
        ("\\fbox{7}", "boxed", "7"),
        ("\\boxed\n{7}", "boxed", "7"),
        ("<answer>1</answer><answer> 2 </answer><answer>3", "tags", "2"),
        ("<answer>1<answer>2</answer></answer>", "tags", "2"),
        ("\\boxed{1} and $\\boxed{2}$", "boxed", "1 and 2"),
        ("\\boxed{0}. \\boxed{1}, $x = \\boxed{2}$; or \\fbox{3} cm.", "boxed", "1, 2 or 3"),
        ("\\boxed{1}\\text{ cm}, \\text{and }\\boxed{2}\\text{ cm}", "boxed", "1 and 2"),
        ("\\boxed{1}\\text{ orange and }\\boxed{2}", "boxed", "1 and 2"),
        ("\\boxed{1}, wait and \\boxed{2}", "boxed", "2"),
        ("\\boxed{1}, " + " " * 99 + "\\boxed{2}", "boxed", "2"),
        ("\\boxed{1} \\boxed{ }", "boxed", "1"),
        ("so \\boxed -7.5.", "boxed", "-7.5"),
        ("write it in \\boxed form", "boxed", None),
        ("\\boxed{\\frac{1}{2}} and \\boxed{3", "boxed", "\\frac{1}{2}"),
        ("\\boxed{\\{1\\}}", "boxed", "\\{1\\}"),
        ("\\boxed{\\boxed{5}}", "boxed", "5"),
        ("first 3, then 4 apples", "last_number", "4"),
        ("<answer>1</answer> \\boxed{2} #### 3", "any", "1"),
        ("#### 3 or \\boxed{2}", "any", "2"),
        ("#### 3\nso 4", "any", "3"),
        ("it is 4", "any", "4"),
        ("#### Step 1: Add\n2 + 2 = 4\n\n#### Step 2: Conclude\nSo it is 4.", "any", "4"),
        ("#### 1. Add\n2 + 2 = 4\n##### **2. Conclude**\nSo it is 4.", "any", "4"),
        ("#### 4\n\n#### Explanation\n2 + 2", "any", "4"),
        ("#### The final answer:\n4 eggs, of 6", "any", "6"),
        ("#### 4 eggs\nof 6", "any", "4 eggs"),
        ("#### The answer is 4\nof 6", "any", "The answer is 4"),
        ("4\n#### Step 2", "any", "Step 2"),
        ("#### Step 2\nSo it is 4.", "hash", "Step 2"),
    ],
)
def test_answers_are_found(text: str, answer_format: str, answer: str | None) -> None:
    assert extract_answer(text, answer_format) == answer


@pytest.mark.parametrize("wrapped", ["#### 5", "\\boxed{5}", "<answer>5</answer>", "5"])
def test_thinking_is_no_answer(wrapped: str) -> None:
    for text in ("<think>{}</think> I am not sure", "{}</think> I am not sure", "Hm <think>{}"):
        assert extract_answer(text.replace("{}", wrapped), "any") is None
    assert extract_answer(f"<think>7</think>{wrapped}", "any") == "5"
    assert extract_answer(f"[THINK]{wrapped}[/THINK]No box.", "boxed") is None
    thought = SampledText(f"So {wrapped}", thinks=True)
    assert (extract_answer(thought, "any"), extract_answer(str(thought), "any")) == (None, "5")
    assert extract_answer(SampledText(f"Hm.</think>{wrapped}", thinks=True), "any") == "5"
    assert pickle.loads(pickle.dumps(thought)).thinks


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is $x$, as $1+1=2$.", "x"),
        ("It is $12$. I hope the answer is correct.", "12"),
        ("### Final answer\n\n\\[\\frac12\\]", "\\frac12"),
        ("**Answer:** 12 apples, because $3 + 9 = 12$.", "12 apples"),
        ("The answer is option B.", "B"),
        ("It costs $5 and $7, $x$ less than $20.", "$20"),
        ("It costs $5 or \\$7, and $ x = 12 $ is left.", "x = 12"),
        ("It costs $ 5 or $ 7.", "7"),
        ("The answer is left to the kind reader. So 12.", "12"),
        ("Let $x = 1$. So it is 12.", "12"),
        ("So $x = 12$ by rule 3. Done.", "x = 12"),
        ("so\n\\frac{3}{4}", "\\frac{3}{4}"),
        ("Unclosed \\( 3 and $4", "$4"),
        ("So the area is 2π.", "2π"),
        ("It is √2/2 cm.", "√2/2"),
        ("It is 3 + 2π.", "2"),
    ],
)
def test_answers_in_sentences_are_found_where_mathematics_is_required(text: str, answer: str) -> None:
    assert extract_answer(text, "any", mathematics=True) == answer
    assert extract_answer(f"#### 1\n{text}", "any", mathematics=True) == "1"
    assert extract_answer(text, "any") == find_last_number(text)


def test_an_unknown_format_is_named() -> None:
    with pytest.raises(ValueError, match="'last' is not one of tags, boxed, hash, last_number, any"):
        extract_answer("5", "last")


HOSTILE = [
    "\\boxed{", "{", "}", "\\", "1", "1,", "12,", "1,111", ",111", "1/", "-", "$-", " ", "\n", ".1", "1e", "a1",
    "<answer>", "</answer>", "####", "#### Step 1 a", "#### Step 1\n", "<think>", "</think>", "<", "\\boxed ",
    "\\frac{1}{",
    "\\boxed{1},", "\\boxed{1} and ", "\\boxed{\\boxed{", "$", "$x$", "$x$,", "$$", "\\$", "$ ", "\\(", "\\[x\\]",
    "\\[", "answer", "answer is ", "answer is 5 or", "answer:", "x ", "\\x",
]  # fmt: skip


@pytest.mark.timeout(15)  # a sixth of a second; quadratic time would be half a minute and more
@pytest.mark.parametrize("unit", [*HOSTILE, None])
def test_a_long_text_of_anything_takes_linear_time(unit: str | None) -> None:
    text = "".join(random.choices(HOSTILE, k=LENGTH // 4)) if unit is None else unit * (LENGTH // len(unit))
    for answer_format in ANSWER_FORMATS[:-1]:  # the last, any, is these one after the other
        answer = extract_answer(text, answer_format)
        assert answer is None or len(answer) < 64 or parse_number(answer) is None
    extract_answer(text, "any", mathematics=True)


def test_a_number_may_fill_an_answer_and_none_is_the_end_of_a_longer_list() -> None:
    for number, value in (("1" + ",000" * 63, 10**189), ("1" + ",00" * 83 + ",000", 10**169)):
        assert parse_number(number) == value
        assert find_last_number(f"so {number}.") == number
    for longer in ("1" + ",00" * 20_000 + ",000", "1" + ",123" * 90 + ",12" * 3 + ",123", "7" + ",123" * 20_000):
        assert parse_number(find_last_number(longer)) is None


VALUES = """
2 + 3 * 4 == 14 | (2 + 3) * 4 == 20 | 100 - 30 - 7 == 63 | 96 / 8 / 3 == 4 | −3 × −4 == 12 | 55 ÷ 5 – 1 == 10
2⋅3·4∗5∕6 == 20 | - -+-5 == -5 | 0.1 + 0.2 == 3/10 | .5*4 == 2 | ( 7 ) == 7 | 1/3*3 == 1
"""


def test_expressions_by_hand() -> None:
    for text, _, value in (entry.rpartition(" == ") for entry in entries(VALUES)):
        assert parse_expression(f" {text} ").value == Fraction(value), text
    assert parse_expression("3 - -(2 * 4)").numbers == (3, 2, 4)
    assert parse_expression("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH).value == 1
    assert parse_expression("9" * MAX_EXPRESSION_CHARS).value == 10**MAX_EXPRESSION_CHARS - 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it ends too early"),
        ("(3 + 4", "it ends too early"),
        ("3 + 4 = 7", "unexpected '='"),
        ("2(3)", r"unexpected '\('"),
        ("* 3", r"unexpected '\*'"),
        ("10**10**10", r"unexpected '\*'"),
        ("1,000", "unexpected ','"),
        ("1.2.3", r"unexpected '\.'"),
        ("٣ + 1", "unexpected '٣'"),
        ("__import__('os')", "unexpected '_'"),
        ("\x003", r"unexpected '\\x00'"),
        ("1/(5-5)", "division by zero"),
        ("(" * 33 + "1" + ")" * 33, "nest over 32 deep"),
        ("1+" * 100 + "1", "more than 200 characters"),
        ("\U0001f600" * 99, "unexpected '\U0001f600'$"),
    ],
)
def test_what_is_refused_and_why(text: str, reason: str) -> None:
    with pytest.raises(ExpressionError, match=reason):
        parse_expression(text)
