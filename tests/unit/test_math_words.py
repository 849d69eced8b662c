"""Words, choices, units, money, delimiters and fonts: compared where they say something, else read over."""

from __future__ import annotations

from tests.unit.test_math_equal import wrong_rows

TABLE = r"""
\text{Tuesday} <=> Tuesday
\text{Tuesday} <=> \text{tuesday}
\text{Tuesday} <=> \mathrm{Tuesday}
\text{Tuesday} <=> \mbox{Tuesday}
\text{Tuesday} <=> \textbf{Tuesday}
\text{Tuesday} <=> \text{ Tuesday }
\text{Tuesday} <=> **Tuesday**
\text{even} <=> even
\text{odd} <=> odd
\text{neither} <=> Neither
\text{A} <=> A
\text{(A)} <=> A
\text{(A)} <=> (A)
\text{(A)} <=> \text{A}
\textbf{(C)} <=> C
\mathrm{E} <=> E
A <=> a
\text{Yes} <=> yes
\text{True} <=> \text{true}
\text{I and II} <=> \text{I and II}
\text{hyperbola} <=> \text{Hyperbola}
\text{Ellipse} <=> ellipse
\text{no solution} <=> \emptyset
\text{all real numbers} <=> \mathbb{R}
(-\infty,\infty) <=> \text{all real numbers}
\text{13} <=> 13
AB <=> \overline{AB}
5\text{ cm} <=> 5
5 <=> 5\text{ cm}
5\text{ cm} <=> 5 cm
5\text{ cm} <=> 5\,\mathrm{cm}
5\text{ cm} <=> 5\mbox{ cm}
5\text{ cm} <=> 5cm
5\text{ cm} <=> 5\text{ centimeters}
5\text{ m} <=> 5 m
5\text{ meters} <=> 5\text{ m}
15\mbox{ cm}^2 <=> 15
15\text{ cm}^2 <=> 15\text{ square centimeters}
15\text{ cm}^{2} <=> 15 cm^2
45 \text{ units}^2 <=> 45
12\text{ square units} <=> 12
864 \mbox{ inches}^2 <=> 864 \text{ in}^2
\frac{68}{3}\text{ pounds} <=> \frac{68}{3}
\frac{270}7\text{ degrees} <=> \frac{270}{7}^\circ
17\text{ meters} <=> 17
0.25\,\text{ cm} <=> \frac14
5.4 \text{ cents} <=> 5.4
210\text{ ways} <=> 210
81\text{ teachers} <=> 81
18 apples <=> 18
3 hours <=> 3
60 \text{ mph} <=> 60\text{ miles per hour}
5\text{ km/h} <=> 5
10\pi\text{ cm} <=> 10\pi
2\sqrt{3}\text{ units} <=> 2\sqrt3
10^\circ <=> 10
90^{\circ} <=> 90^\circ
90^{\circ} <=> 90\text{ degrees}
45° <=> 45^\circ
25^\circ\text{C} <=> 25
\$5 <=> 5
\$5 <=> 5\text{ dollars}
\$1,000 <=> 1000
\$18.90 <=> 18.9
\$16,\!386.16 <=> 16386.16
$7.50 <=> 7.5
3\text{ million} <=> 3000000
2.5 billion <=> 2,500,000,000
4:30 \text{ p.m.} <=> \text{4:30 PM}
$5$ <=> 5
$$5$$ <=> 5
\(5\) <=> 5
\[5\] <=> 5
5. <=> 5
\boxed{5} <=> 5
{5} <=> 5
\displaystyle\frac12 <=> \frac12
\,5 <=> 5
\!\sqrt{33} <=> \sqrt{33}
x\ =\ 5 <=> 5
\left(\frac{1}{2}\right) <=> \frac12
\bigl(1,2\bigr) <=> (1,2)
\Big( 1,2 \Big) <=> (1,2)
\frac{7}{5} + \frac{1}{5} i. <=> \frac{7+i}{5}
\mathbf{v} <=> v
(1,\ 2) <=> (1,2)
1 \text{ and } 2 \text{ and } 3 <=> 1,2,3
5 \mathrm{~cm} <=> 5
5\ \text{cm}^3 <=> 5
9.8 \text{ m/s}^2 <=> 9.8
9.8\ m/s^2 <=> 9.8
\approx 3.14 <=> 3.14
B) <=> B
\text{B} <=> (B).
x \in (-\infty, 2] \cup [3, \infty) <=> x\le2 \text{ or } x\ge3
x \equiv 3 \pmod{7} <=> 3 \pmod 7
x \equiv 3 \pmod{7} <=> 3
(1, 2) \text{ and } (3, 4) <=> (3,4),(1,2)
2\operatorname{cis}60^\circ <=> 2 \text{cis} 60^\circ
x=1+\sqrt2 \text{ or } x=1-\sqrt2 <=> 1\pm\sqrt2
\text{4 and 5} <=> 4,5
4\frac{1}{2}\text{ hours} <=> 4.5
7\text{ days} <=> 7
\text{7 days} <=> 7
1.50 <=> \$1.5
x \le -1 \text{ or } x \ge 1 <=> (-\infty,-1]\cup[1,\infty)
all real numbers <=> \mathbb{R}
\text{one} <=> one
\textbf{(C)}\ 42 <=> C
\text{the answer is } 5 <=> 5
x = 2 \text{ and } y = 3 <=> (2,3)
3\pi \text{ cm}^2 <=> 3\pi
25\text{ degrees} <=> 25^\circ
5 \text{ hours} <=> 5
5 \text{ hours} <=> 5 hours
\$3.50 <=> 3.5
\$3.50 <=> 3.50 dollars
\$12,345.67 <=> 12345.67
\text{(B)} <=> B
\text{(B)} <=> \text{B}
\text{yes} <=> \text{Yes}
\text{Saturday} <=> saturday
\text{undefined} <=> undefined
\text{DNE} <=> DNE
x = 1 \text{ or } x = -1 <=> x = \pm 1
77_8 <=> 77_{\text{eight}}
42 <=> \boxed{42}
42 <=> 42\,
42 <=> \text{42}
42 <=> \mathbf{42}
42 <=> { 42 }
42 <=> \large 42
42 <=> \textcolor{red}{42}
\dfrac{\,1\,}{\,2\,} <=> \frac12
1\ \text{or}\ 2 <=> 1,2
\text{1 or 2} <=> 1,2
12 \text{ inches} <=> 12 in
12 \text{ sq. units} <=> 12
30 \text{ mph} <=> 30
\text{Tuesday} <!> \text{Thursday}
\text{Tuesday} <!> \text{Tues or Wed}
\text{even} <!> \text{odd}
\text{odd} <!> \text{oddd}
\text{A} <!> \text{B}
\text{(A)} <!> \text{(B)}
A <!> B
\text{Yes} <!> \text{No}
\text{True} <!> \text{False}
\text{east} <!> \text{west}
\text{east} <!> \text{north-east}
\text{ellipse} <!> \text{circle}
\text{I and II} <!> \text{I and III}
\text{A} <!> \text{A and B}
\text{none} <!> 0
n\text{ odd} <!> n\text{ even}
5\text{ cm} <!> 6\text{ cm}
5\text{ cm} <!> 5\text{ m}
5\text{ hours} <!> 5\text{ minutes}
5 <!> 5x
5 <!> 5y
5\text{ apples} <!> 6\text{ apples}
10^\circ <!> 100
\$5 <!> 50
\$1,000 <!> 100
3\text{ million} <!> 3
4:30 \text{ p.m.} <!> 4:30 \text{ a.m.}
4:30 <!> 4:31
12:00 <!> 1:00
5 <!> five apples
5 <!> 5 or 6
5 <!> 5, 6
5 <!> \text{5 and 6}
5 <!> \boxed{}
5 <!> ?
5 <!> 5 + 
5 <!> I do not know
5 <!> x = 5, y = 6
R-r <!> r-R
3 \pmod 7 <!> 3 \pmod 5
\text{between 4 and 5} <!> 4,5
\text{Monday} <!> Sunday
\text{rectangle} <!> \text{square}
13 \text{ and } 14 <!> 13 \text{ and } 15
10\text{ feet} <!> 10\text{ inches}
5 \text{ hours} <!> 5 \text{ days}
\text{B} <!> \text{D}
\text{B} <!> \textbf{(C)}\ 42
A <!> \text{the answer is } B
\text{blue} <!> \text{red}
1 \text{ or } 2 <!> 1
"""


def test_words_units_and_delimiters_are_read_over_or_compared() -> None:
    assert wrong_rows(TABLE) == []
