"""Expressions: equal wherever both are defined is equal, near misses are not."""

from __future__ import annotations

from tests.unit.test_math_equal import wrong_rows

TABLE = r"""
x^2+2x+1 <=> (x+1)^2
x^2+2x+1 <=> 1+2x+x^2
(x-2)(x+2) <=> x^2-4
\left(x-2\right)\left(x+2\right) <=> (x+2)(x-2)
x(x+1) <=> x^2+x
3(x+2) <=> 3x+6
2x+3 <=> 3+2x
2x <=> x+x
2x <=> 2*x
2 x <=> 2 \cdot x
x² <=> x^2
x^{2} <=> x^2
x**2 <=> x^2
x^3-1 <=> (x-1)(x^2+x+1)
\frac{x+2}{7} <=> \frac{x}{7}+\frac{2}{7}
\frac{x^2-1}{x-1} <=> x+1
\frac{1}{x}+\frac{1}{y} <=> \frac{x+y}{xy}
\frac{a}{b} <=> a/b
\frac{8-7x}{6} <=> 4/3-7x/6
-\frac{1}{2x} <=> -\frac1{2x}
11z^{7}(5+11z^{7}) <=> 121z^{14}+55z^7
6p^4+5p^2-4 <=> (2p^2-1)(3p^2+4)
3qr + 6q - 15r -30 <=> 3(q-5)(r+2)
ab+ac <=> a(b+c)
a b <=> ba
x^{1/2} <=> \sqrt{x}
\sqrt{x^2} <=> |x|
\sqrt{x^4} <=> x^2
36x \sqrt{35x} <=> 36\sqrt{35}x^{\frac32}
\frac{1}{\sqrt{x}} <=> x^{-1/2}
2^{n+1} <=> 2\cdot 2^n
4^x <=> 2^{2x}
e^{x+y} <=> e^x e^y
\frac{n!}{(n-1)!} <=> n
\binom{n}{2} <=> \frac{n(n-1)}{2}
\sin^2 x + \cos^2 x <=> 1
\tan x <=> \frac{\sin x}{\cos x}
\cot x <=> \frac{1}{\tan x}
\sec^2 y <=> \tan^2 y + 1
2 \sin b \cos a <=> 2\cos a\sin b
\sin 2x <=> 2\sin x\cos x
\sin(2x) <=> \sin 2x
\cos\theta <=> \cos(\theta)
sin(x) <=> \sin x
\log(x^2) <=> 2\log x
\ln(xy) <=> \ln x+\ln y
x_1+x_2 <=> x_{2}+x_{1}
a_{10} <=> a_{10}
2^{\frac{1}{2}}x <=> \sqrt2 x
\frac{\pi r}{h+r} <=> \pi\frac{r}{r+h}
\alpha + \beta <=> \beta + \alpha
\pi r^2 <=> r^2\pi
\frac{4}{3}\pi r^3 <=> \frac{4\pi r^3}{3}
|x-3| <=> |3-x|
-x+3 <=> 3-x
-(x-3) <=> 3-x
\frac{h^2}{m} <=> h^2/m
5a^2b <=> 5ba^2
2X+3 <=> 2x+3
\frac{1}{2}x+3 <=> 0.5x+3
\frac12 x + 3 <=> \frac{x+6}{2}
e^{2x} <=> (e^x)^2
\sqrt[3]{x} <=> x^{1/3}
x^2+C <=> x^2+c
\binom{n}{k} <=> \frac{n!}{k!(n-k)!}
-\frac{b}{2a} <=> \frac{-b}{2a}
\sqrt{x} \cdot \sqrt{y} <=> \sqrt{xy}
2\cos^2 x-1 <=> \cos 2x
\frac{\sin 2x}{2} <=> \sin x\cos x
\sqrt{a^2b} <=> |a|\sqrt{b}
(x+y)^3 <=> x^3+3x^2y+3xy^2+y^3
3^{x+2} <=> 9\cdot3^x
2n(2n-1)! <=> (2n)!
a+bi <=> bi+a
\left| x \right| <=> |x|
(x+1)(x-1) <=> x^2 - 1
x^2 + 2xy + y^2 <=> (x+y)^2
a^2 - b^2 <=> (a-b)(a+b)
\frac{x^2 + x}{x} <=> x + 1
\frac{1}{x+1} - \frac{1}{x} <=> \frac{-1}{x(x+1)}
x^{-2} <=> \frac{1}{x^2}
\sqrt{x^2 + 2x + 1} <=> |x+1|
2(x+3) <=> 2x+6
3x - 2y <=> -2y + 3x
x + y + z <=> z + y + x
\frac{2x}{4} <=> \frac{x}{2}
x/2 <=> 0.5x
n(n+1)/2 <=> \frac{n^2+n}{2}
\frac{n(n+1)}{2} <=> \binom{n+1}{2}
2^n \cdot 2 <=> 2^{n+1}
\sin^2 x <=> 1 - \cos^2 x
\sin(2x) <=> 2 \sin(x) \cos(x)
\sec x <=> \frac{1}{\cos x}
12\pi <=> 12*pi
A3_{16} <=> A3_{16}
\frac{1}{2} x <=> \frac{x}{2}
\frac12x^2 <=> \frac{x^2}{2}
x^2+2x+1 <!> x^2+2x-1
x^2+2x+1 <!> x^3+2x+1
x^2+2x+1 <!> (x-1)^2
x^2-4 <!> (x-2)^2
2x+3 <!> 3x+2
2x+3 <!> 2x-3
2x <!> x^2
2x <!> 2y
2x <!> 2
3x <!> 3
x <!> y
x+y <!> x-y
x+1 <!> x+2n+1
(a+5)(b+2) <!> (+5)(b+2)
\frac{a}{b} <!> \frac{b}{a}
\frac{1}{x}+\frac{1}{y} <!> \frac{1}{x+y}
\sqrt{x^2} <!> x
\sqrt{x+y} <!> \sqrt{x}+\sqrt{y}
(x+y)^2 <!> x^2+y^2
2^{n+1} <!> 2^{n}+1
x^{10} <!> x^{11}
x_1 <!> x_2
\sin x <!> \cos x
\sin 2x <!> 2\sin x
\sin^2 x <!> \sin x^2
\ln(x+y) <!> \ln x+\ln y
\log x <!> \ln x
a^b <!> b^a
\pi(R^2-r^2) <!> \pi(r^2-R^2)
\frac{x}{y} <!> \frac{x}{2y}
e^x <!> x^e
|x-3| <!> x-3
42 <!> 42x
"""


def test_expressions_are_compared_by_their_values() -> None:
    assert wrong_rows(TABLE) == []
