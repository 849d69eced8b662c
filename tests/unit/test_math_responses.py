"""Answers where a response has them: in one box or several, corrected later, or said in a sentence.

What a careful reader says decides: the first 208 and 121 rows were written before the extraction was read, the others
before it was tried on them. ``⏎`` is a new line.
"""

from __future__ import annotations

from sota_grpo.rl.records import Example
from sota_grpo.tasks.math import MathTask

BOXED = r"""
42 <=> So the answer is \boxed{42}.
42 <=> $\boxed{42}$
42 <=> $$\boxed{42}$$
42 <=> \[\boxed{42}\]
42 <=> \[ \boxed{42}. \]
42 <=> \(\boxed{42}\).
42 <=> **Final Answer:** $\boxed{42}$
42 <=> ### Final answer⏎⏎\[⏎\boxed{42}⏎\]
42 <=> \fbox{42}
42 <=> The total is $\fbox{42}$ apples.
42 <=> \boxed{ 42 }
42 <=> \boxed{42.}
42 <=> \boxed{42,}
42 <=> \boxed{$42$}
42 <=> \boxed{\(42\)}
42 <=> \boxed{{42}}
42 <=> \boxed{\text{42}}
42 <=> \boxed{\mathbf{42}}
42 <=> \boxed{x = 42}
42 <=> \boxed{\text{The answer is } 42}
42 <=> \boxed{42 \text{ apples}}
42 <=> \boxed{42}\text{ apples}
42 <=> $\boxed{42}$ square meters.
42 <=> \boxed{\boxed{42}}
42 <=> \boxed{\begin{aligned} 42 \end{aligned}}
42 <=> \boxed {42}
42 <=> \boxed 42
42 <=> \boxed{\displaystyle 42}
42 <=> $6\cdot7=\boxed{42}$
42 <=> \begin{align*}⏎6\cdot 7 &= 40+2\\⏎&= \boxed{42}.⏎\end{align*}
42 <=> \boxed{42}⏎⏎I hope it is correct.
42 <=> \boxed{42}, as $41 < 42 < 43$.
42 <=> \boxed{42}⏎⏎\boxed{42}
42 <=> The answer is $\boxed{42}$. To repeat: \boxed{42}.
42 <=> \boxed{41}, no wait, \boxed{42}
42 <=> First I got \boxed{41}. That forgets the last apple, so it is \boxed{42}.
42 <=> \boxed{41}⏎⏎Let me check: 41 + 1 = 42.⏎⏎\boxed{42}
42 <=> $\boxed{41}$. Hmm, and this cannot be right, because it is odd. $\boxed{42}$
42 <=> It is not \boxed{41} but \boxed{42}.
42 <=> \boxed{41} or rather \boxed{42}
42 <=> \boxed{41}, or more exactly \boxed{42}.
42 <=> \boxed{41}? No, \boxed{42}!
42 <=> Correction of \boxed{41}: \boxed{42}
42 <=> Step 1: $a = \boxed{6}$.⏎Step 2: $b = \boxed{7}$.⏎Step 3: $ab = \boxed{42}$.
42 <=> With $\boxed{6}$ rows and $\boxed{7}$ columns there are $\boxed{42}$ cells.
42 <=> \boxed{6} times \boxed{7} is \boxed{42}
42 <=> \boxed{42} and then \boxed{
42 <=> \boxed{42}. An unfinished \boxed{43
2,6 <=> \boxed{2} and \boxed{6}
2,6 <=> $\boxed{2}$ and $\boxed{6}$
2,6 <=> $\boxed{2}$ and $\boxed{6}$.
2,6 <=> $x = \boxed{2}$ or $x = \boxed{6}$.
2,6 <=> \boxed{2} or \boxed{6}
2,6 <=> \boxed{2}, \boxed{6}
2,6 <=> \boxed{6},\boxed{2}
2,6 <=> $\boxed{2}$, $\boxed{6}$
2,6 <=> $\boxed{2}, \boxed{6}$
2,6 <=> \(\boxed{2}\) and \(\boxed{6}\)
2,6 <=> \boxed{2} \text{ and } \boxed{6}
2,6 <=> \[\boxed{2}\quad\text{and}\quad\boxed{6}\]
2,6 <=> \[\boxed{2}\text{ or }\boxed{6}.\]
2,6 <=> \boxed{2}; \boxed{6}
2,6 <=> \boxed{2},\ \boxed{6}
2,6 <=> \boxed{2}⏎and⏎\boxed{6}
2,6 <=> \fbox{2} and \fbox{6}
2,6 <=> \boxed{2} \& \boxed{6}
2,6 <=> **\boxed{2}** and **\boxed{6}**
2,6 <=> \boxed{2}\text{ cm and }\boxed{6}\text{ cm}
2,6 <=> First I took \boxed{3}. But the roots are \boxed{2} and \boxed{6}.
2,6 <=> \boxed{2,6}
2,6 <=> \boxed{2 \text{ and } 6}
2,6 <=> \boxed{x = 2 \text{ or } x = 6}
2,6 <=> \boxed{x_1 = 2, x_2 = 6}
2,6 <=> \boxed{\{2, 6\}}
1,2,3 <=> \boxed{1}, \boxed{2}, \boxed{3}
1,2,3 <=> \boxed{1}, \boxed{2} and \boxed{3}.
1,2,3 <=> $\boxed{1}$, $\boxed{2}$, and $\boxed{3}$
1,2,3 <=> \boxed{3}, \boxed{1}, \text{ and } \boxed{2}
1,2,3 <=> \boxed{1, 2} and \boxed{3}
(2,2), (6,2) <=> \boxed{(2,2)} \text{ and } \boxed{(6,2)}
(2,2), (6,2) <=> $\boxed{(6,2)}$ and $\boxed{(2,2)}$
(2,2), (6,2) <=> The points are $\boxed{(2,2)}, \boxed{(6,2)}$.
(2,2), (6,2) <=> \boxed{(2, 2), (6, 2)}
1 \pm \sqrt{2} <=> \boxed{1+\sqrt{2}} and \boxed{1-\sqrt{2}}
1 \pm \sqrt{2} <=> $x=\boxed{1-\sqrt2}$ or $x=\boxed{1+\sqrt2}$
\pm 3 <=> \boxed{3}, \boxed{-3}
\frac12 <=> \boxed{0.5} or \boxed{\frac{1}{2}}
0.5 <=> \boxed{\frac{1}{2}} = 0.5
\frac{1}{2} <=> \boxed{\frac{1}{2}}
\frac{1}{2} <=> $\boxed{\dfrac{1}{2}}$
\frac{1}{2} <=> \boxed{1/2}
\frac{1}{2} <=> \boxed{\frac12.}
\frac{3}{4} <=> The probability is $1 - \frac14 = \boxed{\frac{3}{4}}$.
\frac{3}{4} <=> \boxed{\left(\frac{3}{4}\right)}
-\frac{7}{3} <=> \boxed{-\dfrac{7}{3}}
-\frac{7}{3} <=> \boxed{\frac{-7}{3}}
\frac{\sqrt{3}}{2} <=> \boxed{\dfrac{\sqrt{3}}{2}}
\frac{\sqrt{3}}{2} <=> \boxed{\frac{{\sqrt{{3}}}}{2}}
2\sqrt{13} <=> \boxed{\sqrt{52}}
\frac{1}{1+\frac{1}{x}} <=> \boxed{\frac{x}{x+1}}
5 <=> \boxed{5\text{ cm}}
5 <=> \boxed{5} cm
5\text{ cm} <=> \boxed{5}
5 <=> \boxed{\$5}
5 <=> \$\boxed{5}
5 <=> It costs \boxed{\$5.00}.
30 <=> \boxed{30^\circ}
30^\circ <=> $\boxed{30}$ degrees
25\% <=> \boxed{25\%}
25 <=> \boxed{25}\%
1000 <=> \boxed{1,000}
1000000 <=> \boxed{1{,}000{,}000}
x^2+2x+1 <=> \boxed{(x+1)^2}
x^2+2x+1 <=> $f(x) = \boxed{x^2+2x+1}$
y=2x+1 <=> \boxed{y = 2x + 1}
y=2x+1 <=> $y = \boxed{2x+1}$
(3,4) <=> \boxed{(3,4)}
(3,4) <=> \boxed{\left(3,\,4\right)}
(3,4) <=> \boxed{(x,y) = (3,4)}
(3,4) <=> \boxed{x=3, y=4}
\left(3, \frac{\pi}{2}\right) <=> \boxed{\left(3,\frac{\pi}{2}\right)}
[0,1) <=> \boxed{[0,1)}
[0,1) <=> $x \in \boxed{[0,1)}$
[0,1) <=> \boxed{0 \le x < 1}
(-\infty,2)\cup(3,\infty) <=> \boxed{(-\infty, 2) \cup (3, \infty)}
(-\infty,2)\cup(3,\infty) <=> \boxed{x<2 \text{ or } x>3}
(-\infty,2)\cup(3,\infty) <=> $\boxed{(-\infty,2)} \cup \boxed{(3,\infty)}$
\{1,2,3\} <=> \boxed{\{3,2,1\}}
\{1,2,3\} <=> \boxed{\left\{1,2,3\right\}}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} <=> \boxed{\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} <=> \[⏎\boxed{⏎\begin{bmatrix}⏎1 & 2 \\⏎3 & 4⏎\end{bmatrix}⏎}⏎\]
\begin{pmatrix} -1/2 \\ 3 \end{pmatrix} <=> $\mathbf{v} = \boxed{\begin{pmatrix} -\frac12 \\ 3 \end{pmatrix}}.$
\text{Tuesday} <=> \boxed{\text{Tuesday}}
\text{Tuesday} <=> \boxed{Tuesday}
\text{Tuesday} <=> It is a \boxed{\text{tuesday}}.
\text{(B)} <=> \boxed{B}
B <=> \boxed{\textbf{(B)}}
B <=> \boxed{\text{B. } 42}
\text{(C)} <=> \boxed{\text{C}}
\text{Yes} <=> \boxed{\text{yes}}
\text{odd} <=> \boxed{\textbf{odd}}
3+4i <=> \boxed{3 + 4i}
3+4i, 3-4i <=> \boxed{3+4i} \text{ and } \boxed{3-4i}
10\pi <=> \boxed{10\pi\text{ cm}^2}
\infty <=> \boxed{\infty}
\emptyset <=> \boxed{\text{no solution}}
3^{10} <=> \boxed{59049}
\log_2 3 <=> \boxed{\frac{\ln 3}{\ln 2}}
11,\! 111 <=> \boxed{11111}
2:3 <=> \boxed{2:3}
101_2 <=> \boxed{101_2}
4:30\text{ p.m.} <=> \boxed{4:30 \text{ PM}}
42 <!> So the answer is \boxed{24}.
42 <!> \boxed{}
42 <!> \boxed{42
42 <!> The answer is 42.
42 <!> \boxed{4}2
42 <!> \boxed{42x}
42 <!> \boxed{42 \text{ or } 43}
42 <!> \boxed{42}, no wait, \boxed{41}
42 <!> First I got \boxed{42}. That counts one apple twice, so it is \boxed{41}.
42 <!> \boxed{42}⏎⏎Let me check: 42 - 1 = 41.⏎⏎\boxed{41}
42 <!> It is not \boxed{42} but \boxed{41}.
42 <!> \boxed{42} or rather \boxed{41}
42 <!> \boxed{42} and \boxed{43}
42 <!> \boxed{43} and \boxed{42}
42 <!> \boxed{42}, \boxed{43}
42 <!> $\boxed{41}$ or $\boxed{42}$
42 <!> \boxed{1}, \boxed{2}, \boxed{3}, \boxed{42}
42 <!> \boxed{40}, \boxed{41} and \boxed{42}
42 <!> \boxed{\text{unknown}}
42 <!> \boxed{?}
42 <!> \boxed{-42}
42 <!> \boxed{42\%} \cdot \boxed{2}
2,6 <!> \boxed{2}
2,6 <!> \boxed{2} and \boxed{7}
2,6 <!> \boxed{2} and \boxed{6} and \boxed{7}
2,6 <!> \boxed{2}, no wait, \boxed{6}
2,6 <!> \boxed{26}
2,6 <!> The roots are \boxed{2} and \boxed{6}. Only one is positive and even: \boxed{2}
1,2,3 <!> \boxed{1}, \boxed{2} and \boxed{4}
1,2,3 <!> \boxed{1}, \boxed{2}
(2,2), (6,2) <!> \boxed{(2,2)}
(2,2), (6,2) <!> \boxed{(2,2)} and \boxed{(2,6)}
(2,2), (6,2) <!> \boxed{(2,6)} \text{ and } \boxed{(2,2)}
(3,4) <!> \boxed{(4,3)}
(3,4) <!> \boxed{4} and \boxed{3}
1 \pm \sqrt{2} <!> \boxed{1+\sqrt{2}}
1 \pm \sqrt{2} <!> \boxed{1+\sqrt{2}} and \boxed{1+\sqrt{3}}
\frac{1}{2} <!> \boxed{\frac{1}{3}}
\frac{1}{2} <!> \boxed{\frac{2}{1}}
\frac{1}{2} <!> \boxed{1}/2 and then \boxed{2}
\frac{3}{4} <!> \boxed{0.7}
2\sqrt{13} <!> \boxed{2\sqrt{3}}
5\text{ cm} <!> \boxed{5\text{ m}}
5 <!> \boxed{\$6}
[0,1) <!> \boxed{(0,1)}
[0,1) <!> \boxed{0 < x < 1}
(-\infty,2)\cup(3,\infty) <!> \boxed{(-\infty,2)}
(-\infty,2)\cup(3,\infty) <!> \boxed{(2,3)}
\{1,2,3\} <!> \boxed{\{1,2\}}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} <!> \boxed{\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}}
\text{Tuesday} <!> \boxed{\text{Thursday}}
\text{(B)} <!> \boxed{\text{(D)}}
B <!> \boxed{A} and \boxed{B}
3+4i <!> \boxed{3-4i}
x^2+2x+1 <!> \boxed{(x-1)^2}
y=2x+1 <!> \boxed{y = 2x - 1}
7 <=> Let's verify: $2\cdot 7 = 14$. ✓⏎⏎$$\boxed{7}$$
7 <=> Hence the final answer is $\boxed{7}$ (seven).
7 <=> \[⏎x = \boxed{7} \text{ or } \boxed{7.0}⏎\]
7 <=> \boxed{7 \text{ (exactly)}}
7 <=> **Answer**: \boxed{\ 7\ }
7 <=> \boxed{~7~}
7 <=> \boxed{\large 7}
7 <=> \boxed{{\color{blue} 7}}
7 <=> So \(\displaystyle \boxed{7}\).
7 <=> My first try, \boxed{8}, was wrong. \boxed{7}
7 <=> \boxed{8}.⏎⏎Wait, let me recompute.⏎⏎\boxed{7}
7 <=> \boxed{8} → \boxed{7}
7 <=> \boxed{8} = \boxed{7}+1, so the answer is \boxed{7}
7 <=> \boxed{8} - actually \boxed{7}
7 <=> \boxed{8} is too large; and \boxed{7} fits.
7 <=> The answer is \boxed{7}, i.e. seven, and \boxed{7} only.
30,60 <=> \boxed{30^\circ} \text{ and } \boxed{60^\circ}
30,60 <=> $\boxed{30}^\circ$ and $\boxed{60}^\circ$
30,60 <=> \boxed{30}° and \boxed{60}°
20,30 <=> \boxed{20\%} and \boxed{30\%}
3,-3 <=> $x = \boxed{3}$, $x = \boxed{-3}$
3,-3 <=> \[x_1 = \boxed{3}, \quad x_2 = \boxed{-3}\]
3,-3 <=> \[x = \boxed{3} \quad \text{or} \quad x = \boxed{-3}\]
3,-3 <=> The solutions are \boxed{x = 3} and \boxed{x = -3}.
3,-3 <=> \boxed{3}⏎⏎and⏎⏎\boxed{-3}
3,-3 <=> \boxed{3}, or \boxed{-3}
3,-3 <=> \boxed{3}, and also \boxed{-3}
3,-3 <=> \(\boxed{3}\), \(\boxed{-3}\)
(1,2),(3,4),(5,6) <=> \boxed{(1,2)}, \boxed{(3,4)}, and \boxed{(5,6)}
(1,2),(3,4),(5,6) <=> $\boxed{(5,6)}$; $\boxed{(1,2)}$; $\boxed{(3,4)}$
2, \frac12 <=> $\boxed{\frac{1}{2}}$ and $\boxed{2}$
x<1 \text{ or } x>2 <=> \boxed{x<1} or \boxed{x>2}
x<1 \text{ or } x>2 <=> \boxed{x<1} \text{ or } \boxed{x>2}
\text{Alice and Bob} <=> \boxed{\text{Alice}} and \boxed{\text{Bob}}
(2,3) <=> $x = \boxed{2}$ and $y = \boxed{3}$
(2,3) <=> \boxed{x = 2}, \boxed{y = 3}
\frac{5}{6} <=> \boxed{\cfrac{5}{6}}
\frac{5}{6} <=> \boxed{\frac{5}{6} \approx 0.833}
\frac{5}{6} <=> \boxed{P = \frac{5}{6}}
[-1,1] <=> \boxed{x \in [-1, 1]}
[-1,1] <=> \boxed{-1 \leq x \leq 1}
\mathbb{R} <=> \boxed{(-\infty, \infty)}
\{-1,1\} <=> \boxed{\pm 1}
\begin{pmatrix} 0 & 1 \\ 1 & 0 \end{pmatrix} <=> \boxed{\left(\begin{array}{cc} 0 & 1 \\ 1 & 0 \end{array}\right)}
12\text{ m/s} <=> \boxed{12~\mathrm{m/s}}
E <=> \boxed{\textbf{(E) } 25}
D <=> $\boxed{\textbf{(D)}\ \frac{1}{2}}$
D <=> \boxed{D) 12}
9 <=> \boxed{\begin{array}{c} 9 \end{array}}
9 <=> \boxed{\text{Area} = 9}
9 <=> \boxed{9 \text{ sq units}}.
x+y <=> \boxed{y+x}
7 <!> \boxed{7} and \boxed{8}, so both
7 <!> \boxed{7.1}
7 <!> \boxed{7}. Hmm, no. \boxed{8}
7 <!> \boxed{7}, thus \boxed{14}
7 <!> \boxed{7} or \boxed{-7}
7 <!> \boxed{\text{about } 7 \text{ or } 8}
30,60 <!> \boxed{30} and then \boxed{60} is wrong: \boxed{30}
3,-3 <!> \boxed{3} and \boxed{3}
x<1 \text{ or } x>2 <!> \boxed{x<1} and \boxed{x>3}
D <!> \boxed{\textbf{(C)}\ D}
\{-1,1\} <!> \boxed{1}
"""

SENTENCES = r"""
3 <=> The final answer is $x=3$.
\frac{3}{4} <=> Therefore \(\frac{3}{4}\) is what we want.
12 <=> so we get \[ 12 \]
12 <=> The answer is 12.
12 <=> The answer is $12$.
12 <=> The answer is $$12$$
12 <=> The answer is \(12\).
12 <=> The answer is: \[12\]
12 <=> So, the answer is 12!
12 <=> Final answer: 12
12 <=> **Final Answer:** 12
12 <=> Answer: $12$
12 <=> Hence $n = 12$.
12 <=> We find $n=\frac{24}{2}=12$.
12 <=> Thus there are $12$ ways in all.
12 <=> There are \(3 \cdot 4 = 12\) ways.
12 <=> Adding $5$ and $7$ gives $12$.
12 <=> The apples cost $5 and $7, so he pays $12.
12 <=> They cost $5 and $7. The answer is 12 dollars.
12 <=> He pays $5 + $7 = $12
12 <=> The total is $12.00.
1200 <=> In all she earned $1,200.
12 <=> The total cost is \$12.
12 <=> So the answer is $\boxed{12}$.
12 <=> I get \boxed{12}, which is what we want.
12 <=> First I got 11. But the answer is $12$.
12 <=> The answer is $11$. Wait, I forgot one: the answer is $12$.
12 <=> The answer is $12$ because $5 + 7 = 12$.
12 <=> The final answer is $12$. I hope it is correct.
12 <=> Therefore, the value of $x$ is $12$.
12 <=> Therefore the length of the side is $12$ cm.
12 <=> so that⏎$$⏎x = 12.⏎$$
12 <=> we obtain⏎\[⏎x = 12⏎\]⏎as desired.
12 <=> <think>maybe 13</think>The answer is 12.
12 <=> #### 12
12 <=> <answer>12</answer>
-5 <=> The minimum is $-5$.
-5 <=> The minimum is -5.
-5 <=> Thus \(y = -5\).
0.25 <=> The probability is $\frac{1}{4}$.
0.25 <=> The probability is 1/4.
0.25 <=> So we have 0.25 as the answer.
\frac{3}{4} <=> Thus the ratio is $\dfrac{3}{4}$.
\frac{3}{4} <=> The final answer is \[\frac{3}{4}.\]
\frac{3}{4} <=> $\frac{3}{4}$ is the probability.
\frac{3}{4} <=> The probability equals 3/4.
-\frac{1}{2} <=> Hence the slope is $m = -\frac{1}{2}$.
\frac{\pi}{6} <=> The angle is therefore $\theta = \frac{\pi}{6}$.
2\sqrt{3} <=> The height of the triangle is $2\sqrt{3}$.
2\sqrt{3} <=> The distance is \(\sqrt{12} = 2\sqrt{3}\) units.
10\pi <=> The area is $10\pi$ square centimeters.
45 <=> The angle measures $45^\circ$.
45 <=> It is 45 degrees.
25 <=> So the share is $25\%$.
x^2+1 <=> So the polynomial is $f(x) = x^2+1$.
x^2+1 <=> This simplifies to \(x^2 + 1\).
y=2x+1 <=> The equation of the line is $y = 2x+1$.
(x-1)(x-2) <=> It factors as $$x^2-3x+2=(x-1)(x-2).$$
(3,4) <=> The point is $(3,4)$.
(3,4) <=> The lines meet at \((3, 4)\).
(3,4) <=> The solution is $(x,y)=(3,4)$.
[0,1) <=> The domain is $[0,1)$.
[0,1) <=> The function is defined for $0 \le x < 1$.
(-\infty,2)\cup(3,\infty) <=> The solution set is \[(-\infty,2)\cup(3,\infty).\]
2,6 <=> The roots are $2$ and $6$.
2,6 <=> The solutions are $x=2$ and $x=6$.
2,6 <=> The solutions are $x = 2, 6$.
2,6 <=> The solutions are \(2\) or \(6\).
2,6 <=> Thus $x=2$ or $x=6$.
1,2,3 <=> The possible values are $1$, $2$, and $3$.
(2,2),(6,2) <=> The points are $(2,2)$ and $(6,2)$.
\pm 3 <=> We obtain $x = \pm 3$.
\{1,2,3\} <=> The set is $\{1,2,3\}$.
\begin{pmatrix} 1 \\ 2 \end{pmatrix} <=> The vector is $\begin{pmatrix} 1 \\ 2 \end{pmatrix}$.
\begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix} <=> The matrix is⏎\[ \begin{bmatrix} 1 & 0 \\ 0 & 1 \end{bmatrix} \]
3+4i <=> The number is $z = 3+4i$.
\text{Tuesday} <=> The answer is Tuesday.
\text{Tuesday} <=> The answer is $\text{Tuesday}$.
\text{(B)} <=> The correct answer is (B).
\text{(B)} <=> The answer is $\textbf{(B)}$.
B <=> The answer is B.
\text{odd} <=> Therefore the function is $\text{odd}$.
\sqrt{2} <=> Hence the answer is $\sqrt{2} \approx 1.414$.
3 <=> $x=3$
\frac{1}{2} <=> $\frac12$
12 <!> The answer is 13.
12 <!> The answer is $13$.
12 <!> so we get \[ 13 \]
12 <!> Therefore \(x = 13\) is what we want.
12 <!> The answer is $12$. Wait, I forgot one: the answer is $13$.
12 <!> The apples cost $5 and $7, so he pays $13.
12 <!> The apples cost $12 and $7, so he pays $19.
12 <!> I do not know.
12 <!> The answer is unknown.
12 <!> The solutions are $12$ and $13$.
12 <!> The roots are $11$ and $12$.
12 <!> The answer is $-12$.
12 <!> The answer is $12x$.
12 <!> The answer is $12^2$.
12 <!> The answer is 1.2.
\frac{3}{4} <!> Therefore \(\frac{4}{3}\) is what we want.
\frac{3}{4} <!> The probability is 3/5.
\frac{3}{4} <!> The answer is $4$.
2,6 <!> The roots are $2$ and $7$.
2,6 <!> The only root is $2$.
2,6 <!> The only root is $6$.
(3,4) <!> The point is $(4,3)$.
(3,4) <!> The point is $(3,5)$.
[0,1) <!> The domain is $(0,1)$.
[0,1) <!> The domain is $[0,1]$.
\{1,2,3\} <!> The set is $\{1,2\}$.
2\sqrt{3} <!> The height is $3\sqrt{2}$.
y=2x+1 <!> The line is $y=2x-1$.
x^2+1 <!> The polynomial is $x^2-1$.
\begin{pmatrix} 1 \\ 2 \end{pmatrix} <!> The vector is $\begin{pmatrix} 2 \\ 1 \end{pmatrix}$.
\text{Tuesday} <!> The answer is Thursday.
\text{(B)} <!> The correct answer is (C).
B <!> The answer is $\textbf{(A)}$.
\sqrt{2} <!> The answer is $\sqrt{3} \approx 1.732$.
3+4i <!> The number is $z = 3-4i$.
10\pi <!> The area is $10$.
7 <=> Thus, we conclude that the answer is $\displaystyle 7$.
7 <=> The final answer is therefore 7.
7 <=> Answer: 7 (since 3 + 4 = 7)
7 <=> The correct answer is **7**.
7 <=> Our answer is: $$7$$⏎Let me know if anything is unclear!
7 <=> So $x$ must be 7.
7 <=> We get $2x = 14$, hence $x = 7$.
7 <=> She needs 7 more apples to have $15$... that is, the answer is 7 apples.
7 <=> Tom pays $3 for tea and $4 for cake; that makes $7 in total.
7 <=> Tom pays $3.50 twice. The answer is $7.
7 <=> = 7
7 <=> x = 7
7 <=> After $n=7$ steps we stop.
7 <=> Since $a^2=49$ and $a>0$, we have $a=7$.
\frac{5}{6} <=> Since the events are independent, $P = 1 - \frac{1}{6} = \frac{5}{6}$.
\frac{5}{6} <=> Adding up, \(\frac12+\frac13=\frac56\).
\frac{5}{6} <=> Answer: \(\dfrac{5}{6}\)
\frac{5}{6} <=> \frac{5}{6}
\frac{5}{6} <=> ## Final Answer⏎⏎$\frac{5}{6}$
\frac{5}{6} <=> The answer is 5/6.
x^2-1 <=> Expanding gives $(x-1)(x+1) = x^2-1$.
x^2-1 <=> We therefore get⏎$$⏎x^2 - 1⏎$$
[1,\infty) <=> Hence the domain is $x \ge 1$.
[1,\infty) <=> In interval notation: \([1, \infty)\).
3,-3 <=> The equation has the two solutions $x=3$ and $x=-3$.
3,-3 <=> So the answers are $3$ and $-3$.
3,-3 <=> So $x = \pm 3$.
(2,3) <=> The graphs intersect at $(2, 3)$.
(2,3) <=> We have $x = 2$ and $y = 3$.
B <=> So the correct option is (B).
B <=> Answer: B
B <=> The answer is **B**.
\text{no solution} <=> The answer is no solution.
90 <=> The angle is $90^{\circ}$.
6 <=> The volume is $6\text{ cm}^3$.
6 <=> The volume is $6$ cubic centimetres.
2\pi <=> So the period is $2\pi$.
\begin{pmatrix} 1 \\ 0 \end{pmatrix} <=> Therefore $\mathbf{v} = \begin{pmatrix} 1 \\ 0 \end{pmatrix}$.
7 <!> The final answer is therefore 8.
7 <!> After 7 steps we get $x=8$.
7 <!> She had $7 and spent $3, so she has $4.
7 <!> So the answers are $7$ and $-7$.
7 <!> Answer: $7x$
7 <!> We know $2x = 7$.
\frac{5}{6} <!> The answer is 6/5.
\frac{5}{6} <!> The probability is $\frac{1}{6}$, not $\frac{5}{6}$... so the answer is $\frac16$.
[1,\infty) <!> The domain is $x > 1$.
(2,3) <!> The graphs intersect at $(3, 2)$.
B <!> The answer is (C).
"""


def wrong_rows(table: str, answer_format: str) -> list[str]:
    """The rows of a table that are graded wrong: ``gold <=> response`` is right, ``gold <!> response`` is not."""
    task, wrong = MathTask(answer_format=answer_format), []
    for row in table.strip().splitlines():
        equal = " <=> " in row
        gold, response = row.split(" <=> " if equal else " <!> ")
        if task.score(response.replace("⏎", "\n"), Example("?", gold)).success is not equal:
            wrong.append(row)
    return wrong


def test_boxed_answers_are_read_as_a_careful_reader_would() -> None:
    assert wrong_rows(BOXED, "boxed") == []


def test_answers_in_a_sentence_are_read_wherever_they_stand() -> None:
    assert wrong_rows(SENTENCES, "any") == []
