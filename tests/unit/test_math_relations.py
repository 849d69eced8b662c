"""Intervals, equations and inequalities: compared by what they say; an unsolved one answers nothing."""

from __future__ import annotations

import random

from sota_grpo.rewards.maths.parse import Node, parse_answer
from sota_grpo.rewards.maths.values import RealSets, Values
from tests.unit.test_math_equal import wrong_rows

TABLE = r"""
(x,y) = (1,2) <=> (1,2)
(x,y)=(1,2) <=> (x, y) = (1, 2)
(p,q,r) = (6,31,-1) <=> (6,31,-1)
[1,2,3] <=> (1,2,3)
x=1, y=2 <=> y=2, x=1
x=1,y=2 <=> (1,2)
x = 1, y = 2 <=> 1, 2
x = 2 \text{ or } x = -3 <=> -3, 2
x=2,-3 <=> x=-3, x=2
x=2 \text{ or } 3 <=> \{2,3\}
x = \pm 2 <=> x=2, x=-2
[0,1) <=> [ 0 , 1 )
[0,1] <=> \left[0,1\right]
(-\infty,3) <=> (-\infty, 3)
(2,\infty) <=> (2,+\infty)
(2,∞) <=> (2,\infty)
[-2,7] <=> x \in [-2,7]
x \in [-2,7] <=> [-2,7]
(-\infty,-8)\cup (8,\infty) <=> (8,\infty)\cup(-\infty,-8)
(-\infty,-8)\cup (8,\infty) <=> (-\infty, -8) ∪ (8, \infty)
(-\infty,2) U (3,\infty) <=> (-\infty,2)\cup(3,\infty)
[-1, -\frac{1}{2}) \cup (-\frac{1}{2}, 0) <=> [-1, -\tfrac12) \cup (-0.5, 0)
\{-1\} \cup [0,7) <=> [0,7)\cup\{-1\}
(1,2)\cup\{2\} <=> (1,2]
[1,3] \cup [2,5] <=> [1,5]
(0,5) \cap (3,8) <=> (3,5)
(-\infty,\infty) <=> \mathbb{R}
\mathbb R <=> \mathbb{R}
\mathbb{R}\setminus\{2\} <=> (-\infty,2)\cup(2,\infty)
x>3 <=> (3,\infty)
(3,\infty) <=> x>3
x \ge 3 <=> [3,\infty)
x \geq 3 <=> x>=3
x\le 2 <=> (-\infty,2]
x \leqslant 2 <=> 2 \geq x
x<3 <=> 3>x
1<x<2 <=> (1,2)
1 < x \le 2 <=> (1,2]
2>x>1 <=> 1<x<2
-2 \le x \le 7 <=> x \in [-2,7]
x<1 \text{ or } x>2 <=> (-\infty,1)\cup(2,\infty)
x < 1, x > 2 <=> x>2 \text{ or } x<1
x>1 \text{ and } x<3 <=> (1,3)
x \ne 2 <=> (-\infty,2)\cup(2,\infty)
x \neq 2 <=> x != 2
-x > -1 <=> x<1
\{x \mid x > 2\} <=> (2,\infty)
\{x : -1 \le x < 4\} <=> [-1,4)
0<f(x)<1 <=> (0,1)
[a,b] <=> [a, b]
f(2) < f(1) < f(4) <=> f(4)>f(1)>f(2)
x=5 <=> 5
5 <=> x = 5
x=5 <=> 5 = x
k = 15 <=> 15
y = -2x <=> -2x
y=2x+1 <=> 2x+1
f(x)=2x+3 <=> 2x+3
f(x) = 2x+3 <=> y=2x+3
f^{-1}(x)=\frac{x-1}{2} <=> \frac{x-1}{2}
a_1 = 4 <=> 4
AB = 5 <=> 5
|AB|=1 <=> 1
\angle ABC = 30^\circ <=> 30
P(A) = \frac12 <=> 0.5
m = 2+3 = 5 <=> 5
2+2=4 <=> 4
\frac{\sqrt{3}}{3} \approx 0.577 <=> \frac{\sqrt3}{3}
x \approx 11 <=> 11
x^2+y^2=1 <=> x^2+y^2-1=0
x^2+y^2=1 <=> y^2+x^2=1
34x+45y-20z+100=0 <=> -34x-45y+20z-100=0
2x+4y-3=0 <=> y=-\frac{1}{2}x+\frac{3}{4}
x^2/4 + y^2/3 = 1 <=> x^2/16 + y^2/12 = 1/4
y - 3 = 2(x-1) <=> y=2x+1
x-2y+z-1=0 <=> x - 2y + z = 1
E=mc^2 <=> E = m c^2
V_1:V_2=11:21 <=> 11:21
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} <=> \left[\begin{matrix}1&2\\3&4\end{matrix}\right]
\begin{cases} x=1 \\ y=2 \end{cases} <=> x=1, y=2
x = \frac{-b \pm \sqrt{b^2-4ac}}{2a} <=> \frac{-b\pm\sqrt{b^2-4ac}}{2a}
\left\{ x \in \mathbb{R} : x > 0 \right\} <=> (0,\infty)
\{x\,|\,x>2\} <=> (2,\infty)
x=3,y=-1 <=> (x,y)=(3,-1)
\frac{dy}{dx}=2x <=> 2x
f'(x)=2x <=> 2x
x\in\{1,2\} <=> \{1,2\}
y - 2 = 3(x - 1) <=> y = 3x - 1
3x-y=1 <=> y=3x-1
a=1,b=2,c=3 <=> (a,b,c)=(1,2,3)
x=\{1,2\} <=> 1,2
x \in \{1,2\} <=> x=1,2
x_1=2,x_2=3 <=> 3,2
x = \frac{10}{2} = 5 <=> 5
-x>-1 <=> x<1
1 \le x < \infty <=> [1,\infty)
-\infty < x < 3 <=> (-\infty,3)
2x^2 - 3x + 1 = 0 <=> 4x^2-6x+2=0
y=\frac{1}{2}x^2 <=> y=\frac{x^2}{2}
x^2+y^2=25 <=> x^2+y^2=5^2
(x-1)^2+(y+2)^2=9 <=> x^2+y^2-2x+4y-4=0
\frac{x^2}{9}+\frac{y^2}{4}=1 <=> 4x^2+9y^2=36
z=3-2i <=> 3-2i
|z|=5 <=> 5
r=2\cos\theta <=> 2\cos(\theta)
\theta=\frac\pi3 <=> \pi/3
x>0 <=> (0,\infty)
x > 0 <=> x\in(0,+\infty)
(-\infty,0)\cup(0,\infty) <=> \mathbb{R}\setminus\{0\}
(-\infty,0)\cup(0,\infty) <=> x\neq0
\sqrt[3]{27} <=> 3
[0, 1] \cup [2, 3] <=> [2, 3] \cup [0, 1]
(-\infty, 5] <=> x \leq 5
x \in (2, 5) <=> 2 < x < 5
x > 2 <=> 2 < x
x \geq -1 <=> -1 \leq x
x = 2, y = 3 <=> (2, 3)
y = 3, x = 2 <=> x=2,y=3
y = mx + b <=> mx + b
2x + 3y = 6 <=> 4x + 6y = 12
2x + 3y = 6 <=> 3y + 2x = 6
y = (x-1)(x-2) <=> y = x^2 - 3x + 2
[[1,2],[3,4]] <=> \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
\infty <=> \infty
\frac{a}{b} = \frac{2}{3} <=> \frac{2}{3}
\mathbb{Z} <=> \mathbb{Z}
f(x) = x^2 + 1 <=> x^2+1
p(x) = 2x - 1 <=> p(x)=2x-1
a_n = 2n+1 <=> 2n+1
S_n = \frac{n(n+1)}{2} <=> \frac{n^2+n}{2}
(x-3)^2 + (y+1)^2 = 4 <=> (y+1)^2+(x-3)^2=4
42 <=> x=42
x^2 - 1 <=> (x-1)(x+1) = x^2 - 1
\left[ -2, 3 \right) <=> [-2,3)
]1,2[ <=> ]1,2[
2x < 6 <!> x<3
(1,2) <!> [1,2]
[1,2,3] <!> (1,3,2)
x=1, y=2 <!> 2, 1
x=1, y=2 <!> x=2, y=1
(1,2) <!> x=1 or x=2
(1,2) <!> x=1, x=2
(1,2) <!> 1 or 2
x=1,y=2 <!> (2,1)
[0,1) <!> (0,1)
[0,1) <!> [0,1]
[0,1] <!> (0,1)
[0,1) <!> (0,1]
[0,9) <!> [0,1)
[1,2] <!> 1,2
[-2,7] <!> [-7,2]
(2,\infty) <!> [2,\infty)
(2,\infty) <!> (-\infty,2)
(2,\infty) <!> (2,3)
(-\infty,-8)\cup (8,\infty) <!> (-\infty,-8]\cup [8,\infty)
(-\infty,-8)\cup (8,\infty) <!> (-8,8)
(-\infty,-8)\cup (8,\infty) <!> (-\infty,-8)
(1,4)\cup(5,7) <!> (1,7)
\mathbb{R}\setminus\{2\} <!> \mathbb{R}
x>3 <!> x<3
x>3 <!> x\ge 3
x>3 <!> y>3
x>3 <!> [3,\infty)
x \ge 3 <!> (3,\infty)
x>3 <!> 3
x \ne 2 <!> 2
1<x<2 <!> [1,2]
1<x<2 <!> 1<x<3
x<1 \text{ or } x>2 <!> (1,2)
-2 \le x \le 7 <!> -2 < x < 7
2x<6 <!> x<6
-x > -1 <!> x>1
f(2) < f(1) < f(4) <!> f(1) < f(2) < f(4)
x=5 <!> y=5
x=5 <!> x=-5
x=5 <!> x=6
5 <!> x=6
y=2x+1 <!> y=2x-1
y=2x+1 <!> x=2y+1
y = 2x <!> 2y
x^2+y^2=1 <!> x^2-y^2=1
x^2+y^2=1 <!> x^2+y^2=2
x^2+y^2=1 <!> 1
2x+z=1 <!> 1
5x - 7y + 11z + 4 = 0 <!> x + y - z + 2 = 0
a^2 + b = 0 <!> 0
\sin(x)=\frac{42}{59} <!> \cos(x)=\frac{42}{59}
7 = 11a+c <!> 11a+c
x=2 <!> 2x+3=7
x<3 <!> 2x<6
x=2 <!> x^2=4
x^2=4 <!> 4
|x|<2 <!> (0,2)
[0, 1] \cup [2, 3] <!> [0, 3]
(-\infty, 5] <!> (-\infty, 5)
(-\infty, 5] <!> [-\infty, 4]
2x + 3y = 6 <!> 2x - 3y = 6
y = x^2 <!> y = x^3
-\infty <!> \infty
\mathbb{Z} <!> \mathbb{R}
\mathbb{N} <!> \mathbb{Z}
f(x) = x^2 + 1 <!> x^2 - 1
a_n = 2n+1 <!> 2n-1
\left[ -2, 3 \right) <!> (-2,3]
x+2 = 0 <!> x - 2 = 0
x^2 - 1 <!> x^2 = x^2 - 1
x^2 - 1 <!> (x-1)(x+1) < x^2 - 1
"""


def test_relations_are_compared_by_what_they_say() -> None:
    assert wrong_rows(TABLE) == []


def random_set(rng: random.Random, depth: int) -> tuple[Node, frozenset[float]]:
    """A tree of intervals and operations, and which halves from -1 to 9 it contains, one by one."""
    points = [n / 2 for n in range(-2, 19)]
    if depth == 0:
        low, high = sorted(rng.sample(range(9), 2))
        left, right = rng.choice("(["), rng.choice(")]")
        inside = [p for p in points if low < p < high or (p == low and left == "[") or (p == high and right == "]")]
        return parse_answer(f"{left}{low},{high}{right}"), frozenset(inside)
    (first, of_first), (second, of_second) = random_set(rng, depth - 1), random_set(rng, rng.randrange(depth))
    kind = rng.choice(("union", "inter", "minus"))
    together = {"union": of_first | of_second, "inter": of_first & of_second, "minus": of_first - of_second}
    return Node(kind, (first, second)), together[kind]


def test_sets_of_reals_have_the_members_of_their_parts() -> None:
    seed = random.randrange(10**6)
    rng = random.Random(seed)
    for _ in range(300):
        node, members = random_set(rng, rng.randrange(1, 4))
        pieces = RealSets(Values()).read(node)
        found = {
            n / 2 for n in range(-2, 19) if any(low <= (n / 2, False) and (n / 2, True) <= high for low, high in pieces)
        }
        assert found == members, (seed, node)
