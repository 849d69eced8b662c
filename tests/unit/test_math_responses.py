"""Answers where a response has them: in one box or several, corrected later, or said in a sentence.

What a careful reader says decides. ``⏎`` is a new line; all rows, of which these are some, are in
``benchmarks/math_pairs.txt``.
"""

from __future__ import annotations

import pytest

from sota_grpo.rl.records import Example
from sota_grpo.tasks.math import MathTask

BOXED = r"""
42 <=> \boxed{\begin{aligned} 42 \end{aligned}}
42 <=> \boxed 42
42 <=> \boxed{42}⏎⏎\boxed{42}
2,6 <=> \[\boxed{2}\quad\text{and}\quad\boxed{6}\]
2,6 <=> \boxed{2}; \boxed{6}
2,6 <=> \boxed{2},\ \boxed{6}
2,6 <=> \boxed{2} \& \boxed{6}
2,6 <=> \boxed{2}\text{ cm and }\boxed{6}\text{ cm}
2,6 <=> \boxed{x_1 = 2, x_2 = 6}
2,6 <=> \boxed{\{2, 6\}}
1,2,3 <=> \boxed{1}, \boxed{2}, \boxed{3}
(2,2), (6,2) <=> $\boxed{(6,2)}$ and $\boxed{(2,2)}$
1 \pm \sqrt{2} <=> \boxed{1+\sqrt{2}} and \boxed{1-\sqrt{2}}
1 \pm \sqrt{2} <=> $x=\boxed{1-\sqrt2}$ or $x=\boxed{1+\sqrt2}$
\frac12 <=> \boxed{0.5} or \boxed{\frac{1}{2}}
\frac{1}{2} <=> $\boxed{\dfrac{1}{2}}$
5 <=> \boxed{5\text{ cm}}
30 <=> \boxed{30^\circ}
30^\circ <=> $\boxed{30}$ degrees
(3,4) <=> \boxed{x=3, y=4}
[0,1) <=> \boxed{0 \le x < 1}
(-\infty,2)\cup(3,\infty) <=> \boxed{x<2 \text{ or } x>3}
(-\infty,2)\cup(3,\infty) <=> $\boxed{(-\infty,2)} \cup \boxed{(3,\infty)}$
\{1,2,3\} <=> \boxed{\{3,2,1\}}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} <=> \[⏎\boxed{⏎\begin{bmatrix}⏎1 & 2 \\⏎3 & 4⏎\end{bmatrix}⏎}⏎\]
\begin{pmatrix} -1/2 \\ 3 \end{pmatrix} <=> $\mathbf{v} = \boxed{\begin{pmatrix} -\frac12 \\ 3 \end{pmatrix}}.$
\text{(B)} <=> \boxed{B}
\text{Yes} <=> \boxed{\text{yes}}
3+4i, 3-4i <=> \boxed{3+4i} \text{ and } \boxed{3-4i}
\log_2 3 <=> \boxed{\frac{\ln 3}{\ln 2}}
4:30\text{ p.m.} <=> \boxed{4:30 \text{ PM}}
42 <!> \boxed{}
42 <!> \boxed{\text{unknown}}
42 <!> \boxed{?}
(2,2), (6,2) <!> \boxed{(2,2)}
(2,2), (6,2) <!> \boxed{(2,2)} and \boxed{(2,6)}
(2,2), (6,2) <!> \boxed{(2,6)} \text{ and } \boxed{(2,2)}
(3,4) <!> \boxed{4} and \boxed{3}
1 \pm \sqrt{2} <!> \boxed{1+\sqrt{2}}
1 \pm \sqrt{2} <!> \boxed{1+\sqrt{2}} and \boxed{1+\sqrt{3}}
5\text{ cm} <!> \boxed{5\text{ m}}
[0,1) <!> \boxed{0 < x < 1}
(-\infty,2)\cup(3,\infty) <!> \boxed{(-\infty,2)}
(-\infty,2)\cup(3,\infty) <!> \boxed{(2,3)}
\{1,2,3\} <!> \boxed{\{1,2\}}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} <!> \boxed{\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}}
\text{Tuesday} <!> \boxed{\text{Thursday}}
B <!> \boxed{A} and \boxed{B}
3+4i <!> \boxed{3-4i}
x^2+2x+1 <!> \boxed{(x-1)^2}
y=2x+1 <!> \boxed{y = 2x - 1}
7 <=> \[⏎x = \boxed{7} \text{ or } \boxed{7.0}⏎\]
7 <=> \boxed{8} → \boxed{7}
30,60 <=> $\boxed{30}^\circ$ and $\boxed{60}^\circ$
30,60 <=> \boxed{30}° and \boxed{60}°
20,30 <=> \boxed{20\%} and \boxed{30\%}
3,-3 <=> \[x = \boxed{3} \quad \text{or} \quad x = \boxed{-3}\]
3,-3 <=> \(\boxed{3}\), \(\boxed{-3}\)
(1,2),(3,4),(5,6) <=> $\boxed{(5,6)}$; $\boxed{(1,2)}$; $\boxed{(3,4)}$
\frac{5}{6} <=> \boxed{\cfrac{5}{6}}
\frac{5}{6} <=> \boxed{\frac{5}{6} \approx 0.833}
[-1,1] <=> \boxed{x \in [-1, 1]}
[-1,1] <=> \boxed{-1 \leq x \leq 1}
\mathbb{R} <=> \boxed{(-\infty, \infty)}
D <=> \boxed{D) 12}
9 <=> \boxed{\begin{array}{c} 9 \end{array}}
9 <=> \boxed{\text{Area} = 9}
7 <!> \boxed{7}, thus \boxed{14}
x<1 \text{ or } x>2 <!> \boxed{x<1} and \boxed{x>3}
D <!> \boxed{\textbf{(C)}\ D}
"""

SENTENCES = r"""
12 <=> There are \(3 \cdot 4 = 12\) ways.
12 <=> They cost $5 and $7. The answer is 12 dollars.
12 <=> The total cost is \$12.
12 <=> #### 12
12 <=> <answer>12</answer>
0.25 <=> The probability is 1/4.
\frac{\pi}{6} <=> The angle is therefore $\theta = \frac{\pi}{6}$.
25 <=> So the share is $25\%$.
x^2+1 <=> So the polynomial is $f(x) = x^2+1$.
(x-1)(x-2) <=> It factors as $$x^2-3x+2=(x-1)(x-2).$$
\begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix} <=> The matrix is⏎\[ \begin{bmatrix} 1 & 0 \\ 0 & 1 \end{bmatrix} \]
3+4i <=> The number is $z = 3+4i$.
\text{Tuesday} <=> The answer is Tuesday.
\text{odd} <=> Therefore the function is $\text{odd}$.
\sqrt{2} <=> Hence the answer is $\sqrt{2} \approx 1.414$.
12 <!> I do not know.
12 <!> The answer is $12^2$.
\frac{3}{4} <!> The probability is 3/5.
\begin{pmatrix} 1 \\ 2 \end{pmatrix} <!> The vector is $\begin{pmatrix} 2 \\ 1 \end{pmatrix}$.
\sqrt{2} <!> The answer is $\sqrt{3} \approx 1.732$.
3+4i <!> The number is $z = 3-4i$.
7 <=> Answer: 7 (since 3 + 4 = 7)
7 <=> So $x$ must be 7.
7 <=> She needs 7 more apples to have $15$... that is, the answer is 7 apples.
7 <=> = 7
\frac{5}{6} <=> \frac{5}{6}
x^2-1 <=> Expanding gives $(x-1)(x+1) = x^2-1$.
3,-3 <=> So $x = \pm 3$.
(2,3) <=> We have $x = 2$ and $y = 3$.
B <=> Answer: B
7 <!> We know $2x = 7$.
\frac{5}{6} <!> The answer is 6/5.
\frac{5}{6} <!> The probability is $\frac{1}{6}$, not $\frac{5}{6}$... so the answer is $\frac16$.
B <!> The answer is (C).
"""


@pytest.mark.parametrize(("table", "answer_format"), [(BOXED, "boxed"), (SENTENCES, "any")])
def test_answers_are_read_as_a_careful_reader_would(table: str, answer_format: str) -> None:
    task = MathTask(answer_format=answer_format)
    for row in table.strip().splitlines():
        equal = " <=> " in row
        gold, response = row.split(" <=> " if equal else " <!> ")
        assert task.score(response.replace("⏎", "\n"), Example("?", gold)).success is equal, row
