"""Numbers: equal in value is equal, however they are written; near misses and rounded values are not."""

from __future__ import annotations

from tests.unit.test_math_equal import wrong_rows

TABLE = r"""
0.5 <=> \frac12
0.5 <=> \frac{1}{2}
\dfrac{1}{2} <=> 1/2
\tfrac{3}{4} <=> 0.75
\cfrac{25}{16} <=> 25/16
\frac 59 <=> \frac{5}{9}
\frac1{10} <=> .1
\frac{360}7 <=> \frac{360}{7}
\frac{2}{4} <=> \frac{1}{2}
\frac{-1}{2} <=> -\frac12
\frac{1}{-2} <=> -0.5
-\frac{-3}{4} <=> \frac34
0.50 <=> .5
7 <=> 7.0
7 <=> +7
-7 <=> - 7
3 <=> 03
1.25 <=> \frac{5}{4}
12.5\% <=> 12.5\%
50\% <=> 0.5
50\% <=> \frac{1}{2}
50\% <=> 50
50 \% <=> 50\text{ percent}
28\% <=> 28 percent
\frac{1}{3} <=> 0.\overline{3}
\frac{1}{6} <=> 0.1\overline{6}
0.\overline{142857} <=> \frac17
1\frac{1}{2} <=> 1.5
1 \frac12 <=> \frac32
1\frac{1}{2} <=> \frac{3}{2}
1 1/2 <=> 1.5
-2\frac{1}{3} <=> -\frac73
33 \frac{1}{3} <=> \frac{100}{3}
8\frac47 <=> 60/7
1,000 <=> 1000
1{,}000 <=> 1000
1,\!000 <=> 1000
11,\! 111,\! 111,\! 100 <=> 11111111100
12,345,678.5 <=> 12345678.5
1 000 000 <=> 1000000
10\,000 <=> 10000
1.5\times10^3 <=> 1500
1.5 \times 10^{3} <=> 1500
1.5 \cdot 10^{-2} <=> 0.015
1.5e3 <=> 1500
2E-3 <=> 0.002
6.02\times10^{23} <=> 602\times10^{21}
2^{10} <=> 1024
2**10 <=> 1024
2^10 <=> 1024
4^{-1} <=> \frac14
(-2)^3 <=> -8
-2^2 <=> -4
8^{1/3} <=> 2
27^{2/3} <=> 9
5! <=> 120
\frac{7!}{5!} <=> 42
\binom{5}{2} <=> 10
\dbinom{6}{3} <=> 20
{7 \choose 3} <=> 35
2^3 \cdot 3^2 <=> 72
2+3 <=> 5
3 \times 4 <=> 12
12 \div 4 <=> 3
3 * 4 <=> 12
\lfloor 3.7 \rfloor <=> 3
\lceil -3.7 \rceil <=> -3
|-4| <=> 4
\left|-4\right| <=> 4
101_2 <=> 101_{2}
2516_8 <=> 2516_{8}
\sqrt{4} <=> 2
\sqrt4 <=> 2
\sqrt{8} <=> 2\sqrt{2}
\sqrt{\frac{3}{4}} <=> \frac{\sqrt3}{2}
\sqrt3/2 <=> \frac{\sqrt{3}}{2}
\frac{\sqrt3}{2} <=> \frac{\sqrt3}{2}
\frac{1}{\sqrt2} <=> \frac{\sqrt{2}}{2}
\frac{6}{\sqrt{3}} <=> 2\sqrt3
5\sqrt{2} <=> \sqrt{50}
sqrt(2) <=> \sqrt2
√2 <=> \sqrt{2}
2√3 <=> 2\sqrt{3}
\sqrt[3]{8} <=> 2
\sqrt[3]{-27} <=> -3
\sqrt[3]{16} <=> 2\sqrt[3]{2}
\sqrt[4]{16} <=> 2
\sqrt{3+2\sqrt2} <=> 1+\sqrt{2}
1+\sqrt5 <=> \sqrt{5}+1
\frac{1+\sqrt{5}}{2} <=> \frac12+\frac{\sqrt5}{2}
\frac{\sqrt{2}+\sqrt{6}}{4} <=> \cos 15^\circ
2\pi <=> 2*\pi
2\pi <=> \pi \cdot 2
\frac{\pi}{2} <=> \pi/2
\frac{\pi}{2} <=> 0.5\pi
\frac{2\pi}{3} <=> \frac{2}{3}\pi
π <=> \pi
pi/4 <=> \frac{\pi}{4}
\sin 30^\circ <=> \frac12
\sin\frac{\pi}{6} <=> \frac{1}{2}
\tan(45^{\circ}) <=> 1
\cos 58^\circ <=> \sin 32^\circ
\arctan 1 <=> \frac{\pi}{4}
\sin^{-1}(1) <=> \frac{\pi}{2}
\log_2 8 <=> 3
\log_{10} 1000 <=> 3
\log 100 <=> 2
\ln e^2 <=> 2
\ln 8 <=> 3\ln 2
\log_2 3 <=> \frac{\ln 3}{\ln 2}
e^{\ln 5} <=> 5
\mathrm{e} <=> e
\exp(1) <=> e
3+4i <=> 4i+3
3 + 4i <=> 3+4\mathrm{i}
(1+2i)^2 <=> -3+4i
\frac{1}{1+i} <=> \frac{1-i}{2}
\frac34i <=> \frac{3i}{4}
e^{i\pi} <=> -1
\sqrt{-4} <=> 2i
\infty <=> +\infty
-\infty <=> - \infty
\frac{1}{3} <=> 0.333333
\frac{2}{3} <=> 0.6666667
\sqrt{2} <=> 1.41421356
2^{-1/2} <=> \frac{\sqrt2}{2}
\frac{3}{2} <=> 150\%
10^{-3} <=> 0.001
i <=> \sqrt{-1}
2^{2^3} <=> 256
0.1+0.2 <=> 0.3
\sin^2\theta <=> (\sin\theta)^2
-(-5) <=> 5
\frac{\sqrt{6}+\sqrt{2}}{4} <=> \frac{1+\sqrt3}{2\sqrt2}
\frac{1}{4} <=> 25\%
\frac{7}{8} <=> 0.875
12! <=> 479001600
1-\frac{1}{e} <=> 1-e^{-1}
\frac{e-1}{e} <=> 1-\frac1e
\ln\frac12 <=> -\ln2
\log_3\frac19 <=> -2
\tan^{-1}\frac{3}{4} <=> \arctan 0.75
\sqrt{5-2\sqrt6} <=> \sqrt3-\sqrt2
2\times 3^2\times 5 <=> 90
720^\circ <=> 720
-7/2 <=> -3.5
-7/2 <=> -3\frac12
3\cdot\frac12 <=> 1.5
12:30 <=> 12:30
(3-2i) <=> -2i+3
\frac{5}{2} <=> 2.5
\frac{5}{2} <=> 2\frac{1}{2}
\frac{5}{2} <=> 5 / 2
\frac{5}{2} <=> \frac{10}{4}
-\frac{5}{2} <=> \frac{5}{-2}
1.0 <=> 1
0.1 <=> \frac{1}{10}
0.10 <=> 10\%
3/4 <=> 75\%
0.75 <=> 75 \%
3.0 \times 10^8 <=> 300000000
3 \times 10^{-4} <=> 0.0003
1.2e-3 <=> 0.0012
10^{6} <=> 1000000
6! <=> 720
\sqrt{16} <=> 4
\sqrt{2} \cdot \sqrt{3} <=> \sqrt{6}
\frac{\sqrt{12}}{2} <=> \sqrt{3}
\sqrt{0.25} <=> 0.5
\frac{2}{\sqrt{5}} <=> \frac{2\sqrt{5}}{5}
3^{1/2} <=> \sqrt{3}
2^{3/2} <=> 2\sqrt{2}
\log_{2}{8} <=> 3
\log_5(125) <=> 3
\ln(e^3) <=> 3
\ln(1) <=> 0
e^0 <=> 1
e^{2} <=> e \cdot e
\cos(\pi) <=> -1
\sin(\pi/2) <=> 1
\tan(\pi/4) <=> 1
\cos 60^\circ <=> 0.5
|{-5}| <=> 5
12\pi <=> 12 \pi
120^\circ <=> 120
3 + 2i <=> 2i + 3
(1+i)^2 <=> 2i
i^3 <=> -i
\frac{1}{i} <=> -i
|3+4i| <=> 5
2e^{i\pi/3} <=> 1+i\sqrt{3}
\frac{-1 + i\sqrt{3}}{2} <=> -\frac{1}{2} + \frac{\sqrt{3}}{2}i
1011_2 <=> 1011_{2}
77_8 <=> 77_{8}
0 <=> 0.0
0 <=> -0
100 <=> 1 \cdot 10^2
42 <=> 42.
2^{-3} <=> 0.125
(-3)^2 <=> 9
-3^2 <=> -9
7 \bmod 3 <=> 7 \bmod 3
0.333 <!> \frac{1}{3}
0.3333 <!> \frac13
0.33 <!> 1/3
0.6667 <!> \frac23
2\pi <!> 6.28
2\pi <!> 6.2832
\pi <!> 3.14
\pi <!> \frac{22}{7}
\sqrt{2} <!> 1.414
0.5 <!> 0.5000001
0.125 <!> 0.13
5 <!> 5.001
10 <!> 9
100 <!> 1000
1000 <!> 10000
7 <!> -7
\frac12 <!> -\frac12
\frac{1}{2} <!> \frac{2}{1}
\frac{3}{4} <!> \frac{4}{3}
1\frac{1}{2} <!> \frac{1}{2}
1\frac{1}{2} <!> 1.2
2\frac{1}{3} <!> \frac{2}{3}
50\% <!> 5
50\% <!> 0.05
0.5 <!> 50
50\% <!> 50.5\%
1.5\times10^3 <!> 1.5\times10^2
1.5\times10^{-3} <!> 1.5\times10^3
2^{10} <!> 20
2^{10} <!> 1023
2^{99} <!> 2^{98}
10^{20} <!> 10^{20}+1
5! <!> 60
\frac{1}{2004!} <!> \frac{1}{2006!}
\binom{5}{2} <!> 20
\binom{5}{2} <!> \frac{5}{2}
101_2 <!> 101_3
101_2 <!> 110_2
101_2 <!> 5
\sqrt{3} <!> 3
\sqrt{3} <!> -\sqrt{3}
2\sqrt{3} <!> 3\sqrt{2}
\sqrt{12} <!> 2\sqrt{2}
\sqrt{2}+\sqrt{3} <!> \sqrt{5}
\sqrt[3]{9} <!> \sqrt{9}
\frac{\sqrt{3}}{2} <!> \frac{\sqrt{2}}{3}
\frac{1+\sqrt{5}}{2} <!> \frac{1-\sqrt{5}}{2}
\frac{\pi}{2} <!> \frac{\pi}{3}
\pi <!> 2\pi
180 <!> \pi
\sin 30^\circ <!> \sin 60^\circ
\sin 30 <!> \frac12
\log_2 8 <!> 8
\ln 2 <!> \log 2
3+4i <!> 3-4i
3+4i <!> 4+3i
3+4i <!> 7
i <!> -i
e <!> 2.718
\infty <!> -\infty
\infty <!> 10^{100}
0 <!> \emptyset
2+\sqrt{3} <!> 2-\sqrt3
\frac14 <!> 25
0.875 <!> \frac{8}{7}
2^3\cdot 3 <!> 2\cdot 3^3
3\frac12 <!> 3.2
0.\overline{3} <!> 0.3
5:3 <!> 3:5
\frac{5}{2} <!> \frac{2}{5}
12\pi <!> 37.7
12\pi <!> 12
3 + 2i <!> 3 - 2i
1011_2 <!> 1011_{3}
0 <!> 1
42 <!> 24
42 <!> 4.2
42 <!> -42
42 <!> 420
42 <!> 42i
42 <!> \sqrt{42}
42 <!> 42^2
"""


def test_numbers_are_compared_by_their_exact_value() -> None:
    assert wrong_rows(TABLE) == []
