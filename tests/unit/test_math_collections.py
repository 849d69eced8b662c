"""Points, lists, sets, matrices, ratios: what has an order and what has none."""

from __future__ import annotations

from tests.unit.test_math_equal import wrong_rows

TABLE = r"""
(1,2) <=> ( 1 , 2 )
(1,2) <=> \left( 1, 2 \right)
\left(\frac34,5\right) <=> (0.75, 5)
(3, \frac{\pi}{2}) <=> \left(3,\frac\pi2\right)
(1, 4\sqrt3) <=> (1,\sqrt{48})
(6,31,-1) <=> ( 6 , 31 , - 1 )
(1,2) <=> 1,2
(100,200) <=> (100, 200)
\langle 1,2,3\rangle <=> (1,2,3)
1,2 <=> 2,1
1, 2, 3 <=> 3,1,2
-2,1 <=> 1,-2
7, -2, \text{ and } -5 <=> -5,-2,7
12\text{ and }13 <=> 12, 13
6 \text{ or } 8 <=> 6,8
3 and 5 <=> 3, 5
1; 2; 3 <=> 1,2,3
\frac{1}{2}, -\frac{1}{12} <=> -1/12, 0.5
0, \frac{2\pi}{3}, \frac{4 \pi}{3} <=> \frac{4\pi}{3},\frac{2\pi}{3},0
4^\circ, 20^\circ <=> 20, 4
\{1,2\} <=> \{2,1\}
\{1,2,3\} <=> \{3, 1, 2\}
\{1,2\} <=> 1,2
\{1, 2\} <=> \left\{2, 1\right\}
\{1,1,2\} <=> \{1,2\}
\{5\} <=> 5
\lbrace 1,2\rbrace <=> \{1,2\}
\{\frac12, 3\} <=> \{3, 0.5\}
\{1\pm\sqrt{5},-2\} <=> \{-2, 1-\sqrt5, 1+\sqrt5\}
\{(1,2),(3,4)\} <=> \{(3,4),(1,2)\}
(1,2),(3,4) <=> (3,4), (1,2)
\emptyset <=> \varnothing
\emptyset <=> \{\}
\pm 2 <=> 2, -2
\pm 2 <=> -2,2
\pm\sqrt{3} <=> \sqrt3,-\sqrt3
1 \pm \sqrt{19} <=> 1+\sqrt{19}, 1-\sqrt{19}
\frac{-1\pm\sqrt{5}}{2} <=> \frac{-1+\sqrt5}{2},\frac{-1-\sqrt5}{2}
±3 <=> \pm 3
(-\frac{3}{2},6) <=> (-1.5,6)
(-5,\sqrt{26}] <=> \left(-5,\sqrt{26}\right]
(-a,0) <=> ( -a , 0)
1:2 <=> 1 : 2
2:4 <=> 1:2
1:2 <=> \frac12
3:4:5 <=> 6:8:10
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} <=> \begin{pmatrix}1&2\\3&4\end{pmatrix}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} <=> \begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} <=> \left(\begin{array}{cc}1&2\\3&4\end{array}\right)
\begin{pmatrix} 1/5 \\ -3/5 \end{pmatrix} <=> \begin{pmatrix} 0.2 \\ -0.6 \end{pmatrix}
\begin{pmatrix} 2/5 \\ -1/5 \end{pmatrix} <=> \begin{pmatrix} \frac{2}{5} \\ -\frac{1}{5} \end{pmatrix}
\begin{pmatrix} 7 \\ -2 \end{pmatrix} <=> (7,-2)
\begin{pmatrix} x \\ 2x \end{pmatrix} <=> \begin{pmatrix} x \\ x+x \end{pmatrix}
\begin{pmatrix}6 & 8 \\ 10 & 12\end{pmatrix} <=> 2\begin{pmatrix}3 & 4 \\ 5 & 6\end{pmatrix}
\{2,4,6,\ldots\} <=> \{2, 4, 6, \dots\}
1,3,5,...,99 <=> 1, 3, 5, \ldots, 99
\left\lfloor \frac{n}{2} \right\rfloor <=> \lfloor n/2 \rfloor
(−3, 4) <=> (-3,4)
$(1,2)$ and $(3,4)$ <=> (1,2),(3,4)
\frac{3\pm\sqrt{5}}{2} <=> \frac{3}{2}\pm\frac{\sqrt5}{2}
(0,0),(1,1),(-1,1) <=> (-1,1),(0,0),(1,1)
\begin{bmatrix} 2 \\ 3 \end{bmatrix} <=> \begin{pmatrix} 2 \\ 3 \end{pmatrix}
\begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix} <=> \begin{vmatrix} 1&2\\3&4 \end{vmatrix}
\frac{1}{2}\begin{pmatrix} 1 \\ 2 \end{pmatrix} <=> \begin{pmatrix} 0.5 \\ 1 \end{pmatrix}
\left(\frac{1}{2}\right)^3 <=> \frac18
\left(\frac{2}{3}\right)^{-1} <=> 1.5
1{,}234{,}567 <=> 1234567
-1,234.5 <=> -1234.5
\left(2,\frac{\pi}{3}\right) <=> (2, \pi/3)
\left(-\frac12,\frac{\sqrt3}{2}\right) <=> (-0.5,\frac12\sqrt3)
\{-2,-1,0,1,2\} <=> -2,-1,0,1,2
\{a,b\} <=> \{b,a\}
10^{6} <=> 1,000,000
\{ 3, 1, 2 \} <=> \{ 1, 2, 3 \}
\{x, y\} <=> \{y, x\}
(0.5, 1.5) <=> (\frac{1}{2}, \frac{3}{2})
(2, -3) <=> \left(2, -3\right)
\begin{bmatrix} 1 & 0 \\ 0 & 1 \end{bmatrix} <=> \begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}
\begin{pmatrix} 1 \\ 2 \\ 3 \end{pmatrix} <=> \begin{bmatrix} 1 \\ 2 \\ 3 \end{bmatrix}
\begin{pmatrix} 0.5 \\ -1 \end{pmatrix} <=> \begin{pmatrix} \frac12 \\ -1 \end{pmatrix}
\pm \sqrt{2} <=> \sqrt{2}, -\sqrt{2}
\pm 3i <=> 3i, -3i
2 \pm \sqrt{5} <=> 2 - \sqrt{5}, 2 + \sqrt{5}
1, -1 <=> \pm 1
5:3 <=> 5 : 3
10:6 <=> 5:3
1,2,3 <=> 1, 2, 3
1,2,3 <=> 3,2,1
1,2,3 <=> \{1,2,3\}
\{\} <=> \emptyset
\frac{1}{2}, \frac{1}{3} <=> \frac{1}{3}, \frac{1}{2}
\frac{1}{2}, \frac{1}{3} <=> 0.5, \frac13
\left(\frac{1}{2}, -\frac{\sqrt{3}}{2}\right) <=> (0.5, -\sqrt{3}/2)
\left\{-2,3\right\} <=> \{-2,3\}
\left\{ -2, 3 \right\} <=> -2, 3
1 or 2 <=> 1, 2
0.5 <=> \frac12 \text{ or } 50\%
\begin{aligned} x &= 1 \end{aligned} <=> 1
\(1\) and \(2\) <=> 1, 2
(1,2) <!> (2,1)
(1,2) <!> (1,3)
(1,2) <!> (1,2,3)
(1,2) <!> (1,-2)
(1,2) <!> \{1,2\}
(1,2) <!> 2,1
(1,2) <!> 3
(6,31,-1) <!> (6,-1,31)
(100,200) <!> 100200
1,2 <!> 1
1,2 <!> 1,2,3
1,2 <!> 1,3
1, 2 <!> 12
32, 349 <!> 32349
-2,1 <!> 2,-1
12\text{ and }13 <!> 12
6 \text{ or } 8 <!> 6
\{1,2\} <!> \{1,2,3\}
\{1,2\} <!> \{1\}
\{1,2\} <!> \{1,3\}
\{1\pm\sqrt{5},-2\} <!> \{1+\sqrt{5},-2\}
(1,2),(3,4) <!> (1,3),(2,4)
(1,2),(3,4) <!> (2,1),(4,3)
\emptyset <!> \{0\}
\pm 2 <!> 2
\pm 2 <!> -2
1\pm\sqrt{19} <!> 1+\sqrt{19}
1\pm\sqrt{19} <!> \pm 1+\sqrt{19}
1:2 <!> 2:1
3:4:5 <!> 3:5:4
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} <!> \begin{pmatrix} 1 & 2 \\ 3 & 5 \end{pmatrix}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} <!> \begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}
\begin{pmatrix} 1 \\ 2 \end{pmatrix} <!> \begin{pmatrix} 2 \\ 1 \end{pmatrix}
\begin{pmatrix} 1 \\ 2 \end{pmatrix} <!> \begin{pmatrix} 1 & 2 \end{pmatrix}
\begin{pmatrix} 7 \\ -2 \end{pmatrix} <!> (-2,7)
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} <!> 1,2,3,4
\begin{pmatrix}6 & 8 \\ 10 & 12\end{pmatrix} <!> 2\begin{pmatrix}3 & 4 \\ 5 & 7\end{pmatrix}
1,234 <!> 1.234
12,34 <!> 1234
\{a,b\} <!> \{a,c\}
\sqrt{16} <!> \pm 4
\{1,2,3\} <!> (1,2,3)
(a, b) <!> (b, a)
0.5 <!> \frac12 \text{ or } 0.6
(1, 2, 3) <!> (1, 2)
(2, -3) <!> (-2, 3)
\begin{bmatrix} 1 & 0 \\ 0 & 1 \end{bmatrix} <!> \begin{bmatrix} 0 & 1 \\ 1 & 0 \end{bmatrix}
2 \pm \sqrt{5} <!> 2 + \sqrt{5}
1,2,3 <!> 1,2
1,2,3 <!> 1,2,4
"""


def test_points_have_an_order_and_lists_and_sets_have_none() -> None:
    assert wrong_rows(TABLE) == []
