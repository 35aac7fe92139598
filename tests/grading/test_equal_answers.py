"""Which answers are the same as a label, and which are not: literal pairs, and what must hold for all."""

import json
import random
import threading
from fractions import Fraction

import grading as hard_forms
import pytest

from maporl.grading import final_answer, find_label, grade_mathematics, same_answer
from maporl.grading.answers import boxed, label_of
from maporl.grading.benchmarks import grade_benchmark
from maporl.grading.expressions import read
from maporl.grading.spans import grade_span
from maporl.grading.values import Budget, NotComputed, same
from maporl.rewards.judges import last_match
from maporl.tasks import GSM8K, Mathematics, TaskError
from maporl.text import code_of, spoken
from trl_ext.chat.thoughts import THINKING


def graded(answer, label, meta=None):
    return grade_benchmark(rf"So \boxed{{{answer}}}", label, meta).correct


WRONG = {
    "words": [("three fourths", "3/41"), ("one half", "1/21"), ("two and one third", "7/31")],
    "roots": [(r"\sqrt[-3]{8}", r"\frac12"), (r"\sqrt[\pi]{2}", r"2^{1/\pi}"), ("f^{'}(x)", "f(x)")],
    "absolute values": [("|x-1|", "x-1"), ("|x", "|x|"), ("|x|", "x"), (r"|x-11|\sqrt{x-10}", r"(x-11)\sqrt{x-10}")],
    "depth": [("(" * 20 + "1+1" + ")" * 20, "2")],
    "degrees": [
        (r"180^\circ - 60^\circ", "60"), (r"2\cdot 30^\circ", "30"), (r"85^\circ, 75^\circ", r"75^\circ, 75^\circ"),
        (r"90^\circ+\theta", r"90^\circ-\theta"), (r"\frac{\pi}{6}", r"60^\circ"), (r"60\text{ radians}", r"60^\circ"),
        (r"\cos 60^\circ", "60"), (r"60^\circ", r"60\pi"), (r"\sin 30", r"\frac12"),
    ],
    "large": [
        ("(x+1)^{20}", "(x-1)^{20}"), ("(a+b)^{99}", "(a-b)^{99}"), ("2^{99999}+1", "2^{99999}-1"), ("2^{99998}", "2^{99999}"),
        ("-10^{10^{10}}", "10^{10^{10}}"), ("9^{9^9}+1", "9^{9^9}-1"), ("100!", "101!"), ("2^{2007}", "2^{2007}+1"),
        ("2^{5000}+1", "2^{5000}+3"), ("10000!+1", "10000!-1"),
    ],
    "bases": [
        ("101_2", "101"), ("101", "101_2"), ("5", "101_2"), ("20412_9", "20412_5"), ("1011_5", "1011_2"), ("40_{4}", "40_9"),
        ("20413_5", "20412_5"), ("A6_{11}", r"\text{A5}_{11}"), ("-37_8", "37_8"), ("102_2", "2"), (r"101_{\text{two}}", "101_3"),
    ],
    "tiny and rounded": [
        ("3.1415926", r"\pi"), ("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899", r"\pi"),
        ("3/2^{98}", "1/2^{98}"), ("0", "10^{-30}"), ("10^{-30}", "0"), ("1e-20", "1e-21"), ("0.333333", r"\frac13"),
        ("0.33333333333333333333", r"\frac13"), ("1.41421356", r"\sqrt2"), ("2.718281828", "e"), ("10^{-12}+1", "1"),
        (r"\pi\cdot 10^{-400}", r"2\pi\cdot 10^{-400}"), (r"10^{-50}+\sqrt2", r"\sqrt2"), ("3.14", "3.1416"), (r"\pi", "3.1415"),
        (r"e^{\pi\sqrt{163}}", "262537412640768744"), ("22/7", r"\pi"), ("0.5000001", "0.5"), (r"\approx 3.14", r"\pi"),
    ],
    "half read": [
        (r"4\sqrt(2)", "4"), (r"2307 + \frac\pi 2", r"2007 + \frac\pi 2"), (r"2+\frac\pi 2", "2"), ("5x'", "5x"), ("10:1", "10"),
        ("2(3)", "5"), ("2 3", "5"), ("12!", "12"), ("5''", "5"), (r"x^2\text{ for }x>0", "x^2"), (r"5\unknown{2}", "5"),
        (r"I(0)e^{-t}", "0"), (r"\sum_{k=1}^{3} k", "3"), ("5 or 6", "5"), (r"\frac12\text{ or }\frac13", r"\frac12"), ("5 because", "5"),
        (r"\sqrt[3]{8}x", r"\sqrt{8}x"), ("3^2^2", "81"), (r"\frac{1}{2}{3}", "0.5"), ("(5", "5"), ("5)", "5"), ("1/2/", "1/2"),
    ],
    "parts": [
        ("(1,2)", "1,2"), ("(2,1)", "(1,2)"), ("[0,1)", "[0,1]"), ("(100101)", "(100,101)"), ("48,48", "48,048"), ("250,31", "31,250"),
        ("a=1, b=2", "2, 1"), ("b=1, a=2", "a=1, b=2"), ("y=5", "x=5"), ("x>3", "x<3"), (r"x\le 3", "x<3"), ("1<x<3", "(1,3]"),
        (r"\{1,3\}", "1,2"), ("1, 1", "1"), ("1", "1, 1"), (r"\pm 5", "5"), ("5", r"\pm 5"), (r"\lvert x\rvert", "x"), (r"\sqrt{x^2}", "x"),
        ("2:3", "3:2"), ("0.56 = 57\\%", "0.56 = 56\\%"), ("N/2", "n/2"), (r"\log_3 2", r"\log_2 3"), ("2+3i", "2-3i"), ("f(x)=3x", "f(x)=2x"),
        (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"), ("y=2x-1", "2x-y+1=0"), ("Evelin", "Evelyn"),
        (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"), ("CABD", r"\text{CBAD}"), ("8:35 p.m.", "8:34 p.m."),
        (r"\begin{vmatrix}2&4\\6&8\end{vmatrix}", r"2\begin{vmatrix}1&2\\3&4\end{vmatrix}"), (r"2x\approx 10", "10"),
    ],
    "units": [
        ("80 cents", "80 dollars"), (r"\$80", "80 cents"), ("5 cm", "5 m"), (r"5\text{ cm}", r"5\text{ inches}"), ("20 apples", "20 miles"),
        (r"6:30\text{ PM}", r"6:30\text{ AM}"), ("6:30 p.m.", "6:30 a.m."), (r"5\text{ wins}", r"5\text{ losses}"), (r"5\text{ profit}", r"5\text{ loss}"),
        (r"5\text{ left}", r"5\text{ right}"), (r"5\text{ less}", "5"), (r"5\text{ pairs}", "5"), (r"5\text{ K}", "5"), (r"5\text{ permille}", "5"), ("5‰", "5"),
        ("18 integers", "18 ways"), ("5 square feet", "5 feet"), (r"5\,\text{cm}^2", r"5\text{ cm}^3"), ("5 thousand", "5"), (r"25\%", "0.025"), (r"25\%", "4"), (r"3 \text{ dozen}", "3"),
    ],
    "signs": [
        (r"a\pm b\mp c", "a+b+c,a-b-c"), (r"5\mp2\pm1", "2,8"), ("2*-3^2", "18"), ("-2^2", "4"), ("1-2+3", "-4"), ("6/-3*2", "-1"), ("5-3-1", "3"),
        ("2*3 1/2", "6.5"), (r"2\cdot 3\frac{1}{2}", "6.5"), (r"x\cdot 3\frac12", "3x/2"), ("-3 1/2", "-2.5"),
    ],
    "whole numbers": [
        ("(1/2)!", "1"), (r"\lfloor i\rfloor", "i"),
        (r"\lfloor n/2\rfloor+2", r"$\lceil n / 2\rceil+1$"), (r"\lceil\log_2 n\rceil", r"$\left\lfloor\log _{2} n\right\rfloor+1$"),
        (r"\lceil 2n/3\rceil", r"$N(n)=\left\lfloor\frac{2 n}{3}\right\rfloor+1$"), (r"mn-\lceil m/2\rceil+1", r"$m n-\lfloor m / 2\rfloor$"),
        (r"\lfloor x\rfloor", "x"), (r"\lfloor x\rfloor+1", r"\lceil x\rceil"), ("n!", "(n+1)!"), ("(-1)^n", "(-1)^{n+1}"), ("(-1)^n", "1"), (r"\binom{n}{k}", r"\binom{n}{k+1}"), (r"3\frac{2}{2}", "4"), (r"3\frac{5}{2}", "11/2"), (r"\begin{tabular}1\\2\end{tabular}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ],
    "options": [
        ("C) Paris", "B"), ("B) Paris or C) Rome", "B"), ("B) Rome", "(B) Paris"), ("B, C", "B"), ("not B", "B"), ("A", "B"), ("Paris", "B"),
        (r"\text{(B)} \text{ or } 17", r"\text{(B)}"), (r"\text{(B)}+1", r"\text{(B)}"), (r"\text{(B)}?", r"\text{(B)}"), (r"\text{(B)}-1", r"\text{(B)}"),
        ("C: never", "C"), ("A. not this one", "A"), ("A: 5; B: 6", "A"), ("A) maybe", "A"), ("C/D", "C"), ("C, not", "C"),
        (r"\text{(C)}", r"\text{(B)}"), ("B) not this but C", "B"), ("(A) and (B)", "A"),
    ],
}  # fmt: skip
RIGHT = {
    "words": [("three fourths", "3/4"), ("one half", "1/2"), ("two and one third", "7/3")],
    "absolute values": [("|x-1|", "|1-x|"), ("2|x|", "|2x|"), ("|-3|", "3"), ("|x|+1", "1+|x|")],
    "depth": [("(" * 19 + "1+1" + ")" * 19, "2")],
    "degrees": [
        (r"180^\circ - 60^\circ", "120"), (r"2\cdot 30^\circ", "60"), (r"60^\circ, 30^\circ", r"30^\circ, 60^\circ"), ("60 degrees", "60"),
        (r"(30^\circ, 60^\circ)", r"(30^\circ,60^\circ)"), ("60", r"60^{\circ}"), (r"60\text{ degrees}", r"60^\circ"),
        (r"\frac{\pi}{3}", r"60^\circ"), (r"30^\circ", r"\frac{\pi}{6}"), (r"\cos 60^\circ", "0.5"), (r"\tan^{-1}(1)", r"\frac{\pi}{4}"),
        (r"90^\circ-\theta", r"-\theta+90^\circ"), ("60°", "60"), (r"60\degree", "60"),
    ],
    "exact": [
        ("(1-x)^{20}", "(x-1)^{20}"), ("2^{99999}-1", "2^{99999}-1"), ("10^{10^{10}}", "10^{10^{10}}"), (r"20412_{5}", "20412_5"),
        (r"101_{\text{two}}", "101_2"), ("(101)_2", "101_2"), ("A5_{11}", r"\text{A5}_{11}"), ("11_{10}", "11"), (r"\pi", "3.1416"), (r"\sqrt{2}", "1.41421"),
        ("8.24", r"\approx 8.24 \text{ mph}"), (r"2\sqrt{17}", r"\approx 8.25"), (r"2\sqrt{17}\approx 8.246", r"2\sqrt{17}"), ("0.1+0.2", "0.3"), ("6÷2", "3"),
        (r"0.\overline{3}", r"\frac13"), (r"\sqrt{2}+\sqrt{3}", r"\sqrt{5+2\sqrt6}"), (r"\sqrt{5+2\sqrt6}-\sqrt2-\sqrt3", "0"), ("2.5e3", "2500"), (r"\sqrt{x}\sqrt{y}", r"\sqrt{xy}"), ("four", r"\mbox{four}"), ("4", r"\mbox{four}"), ("1+-2", "-1"), ("3.83 x 10^35", r"3.83 \times 10^{35}"), ("3.83 × 10³⁵", r"3.83 \times 10^{35}"), ("x²", "x^2"),
        (r"\frac{10!}{7!3!}", r"\binom{10}{3}"), (r"\binom{10}{3}", "120"), (r"\tbinom{10}{3}", "120"), (r"{10 \choose 3}", "120"), (r"x^{\frac12}", r"\sqrt{x}"), (r"\sin^2x+\cos^2x", "1"),
        (r"\ln(x^2)", r"2\ln x"), (r"\frac{\ln 3}{\ln 2}", r"\log_2 3"), ("i^2", "-1"), (r"e^{i\pi}", "-1"), (r"\lfloor 3.7\rfloor", "3"), ("1.0", "1"), (r"\frac13-\frac{\ln 2}{\ln 8}", "0"),
        (r"\sqrt[3]{8}", "2"), ("0^2", "0"), (r"\operatorname{lcm}(4,6)", "12"), (r"\{3\}", "3"), ("f^{'}(x)", "f'(x)"), ("f^'(x)", "f'(x)"),
    ],
    "layout": [
        (r"\displaystyle\frac{1}{2}", r"\frac{1}{2}"), (r"\cfrac{1}{2}", r"\frac{1}{2}"), (r"\tfrac34", "0.75"), (r"(1,\;2)", "(1,2)"),
        (r"(1,\:2)", "(1,2)"), (r"x \leqslant 3", r"x \le 3"), (r"\mathbf{5}", "5"), (r"\mathbf{\frac{3}{4}}", "0.75"), (r"\boldsymbol{(1,\frac12)}", "(1,0.5)"), (r"\text{$\frac{1}{2}$}", "0.5"), (r"{{12}}", "12"), (r"e^{at}+at^2", "e^{t a}+t^2a"), ("(776_8)", "776_8"), (r"\textrm{13}", "13"), (r"\log_2 3", r"\log_2{3}"),
        (r"\bigl(1, 2\bigr)", "(1,2)"), (r"\Big\{1,2\Big\}", r"\{1,2\}"), (r"\varnothing", r"\emptyset"), (r"\left(1,\ 2\right)", "(1,2)"), (r"\mbox{5}", "5"),
        (r"5\quad", "5"), (r"\mathrm{5}", "5"), (r"\,5\,", "5"), (r"\!5", "5"), (r"\frac\pi 2", r"\frac{\pi}{2}"), (r"2\sqrt3", r"2\sqrt{3}"), (r"4\sqrt(2)", r"4\sqrt{2}"),
        (r"\operatorname{sin} x", r"\sin x"), (r"{x}^{2}", "x^2"), (r"\boldsymbol{x+1}", "x+1"), (r"\color{red}5", "5"), (r"\phantom{0}5", "5"), (r"\hspace{1em}5", "5"),
        (r"\text{Evelyn}", "evelyn"), (r"\text{two lines}", "two  lines"), (r"\textbf{neither}", "neither"), ("$5$", "5"), ("\\(5\\)", "5"), ("５", "5"), ("+5", "5"),
    ],
    "thousands": [
        (r"10\,000", "10000"), (r"1\,234\,567", "1234567"), (r"10\ 000", "10000"), ("10 000", "10000"), ("10~000", "10000"), ("10{,}000", "10000"),
        (r"1\;000", "1000"), (r"12,\!345.6", "12345.6"), ("0{,}5", "0.5"), ("1,234", r"1,\!234"), ("1, 234", "1,234"),
    ],
    "units": [
        (r"5\,\text{cm}", "5"), (r"5~\mathrm{cm}", "5"), (r"5\ \mathrm{cm}^2", "5"), (r"5\text{ m}/\text{s}", "5"), (r"5\,\frac{\text{m}}{\text{s}}", "5"),
        (r"9.8\,\mathrm{m/s^2}", "9.8"), (r"5\,\mathrm{m\,s^{-1}}", "5"), (r"\$5", "5"), (r"12\pi\text{ cm}^3", r"12\pi"), (r"2\sqrt{3}\ \text{units}", r"2\sqrt3"),
        (r"3.5\times 10^5\,\text{J}", r"3.5\times10^5"), (r"x=5\text{ cm}", "5"), (r"480 + 480\sqrt{3}\text{ feet}", r"480(1+\sqrt3)"), ("5 ft^2", "5 square feet"),
        ("6:30 p.m.", r"6:30\text{ PM}"), ("6:30 pm", r"6:30\text{ PM}"), ("5 red apples", "5 apples"), ("20 min", "20 minutes"), (r"20^\circ\text{C}", "20"), ("25", r"25\%"), ("0.25", r"25\%"), (r"25\%", r"\frac14"), (r"1.85\ \text{USD}", r"\$1.85"), ("25%", r"25\%"),
    ],
    "lists": [
        ("1 and 2", "1,2"), ("2 and 1", "1, 2"), ("1, 2, and 3", "1,2,3"), (r"1,\ 2,\ \text{and } 3", "1,2,3"), ("a=1, b=2", "1, 2"), ("a = 1 and b = 2", "1,2"),
        ("b=2,a=1", "a=1,b=2"), (r"x=1\text{ or }x=2", "1,2"), ("x=1,y=2", "(1,2)"), ("(x,y)=(1,2)", "(1,2)"), (r"\{2,1\}", "1,2"), (r"x\in\{1,2\}", "1,2"),
        (r"3\pm\sqrt2", r"3+\sqrt2,3-\sqrt2"), (r"x=\pm5", "5,-5"), ("A, B", "B, A"), (r"\text{A and B}", "A, B"),
    ],
    "relations": [
        (r"x+1 \equiv y", r"1+x \equiv y"), (r"x \in A+B", r"x \in B+A"), ("x=5", "5"), ("5", "x=5"), (r"\text{Area}=12", "12"), (r"f^{-1}(x)=\frac{x-1}{2}", r"\frac{x-1}{2}"), ("5=x", "x=5"), ("y=2x+1", "2x+1"), ("2x+1", "y=2x+1"), ("y=2x+1", "2x-y+1=0"), ("f(n)=n", "f(x)=x"), ("x>3", r"(3,\infty)"),
        ("3<x", "x>3"), (r"0\le x\le1", "[0,1]"), (r"x\in[0,1]", "[0,1]"), (r"(-\infty,3)\cup(3,\infty)", r"x\ne3"), (r"\mathbb{R}", r"(-\infty,\infty)"), (r"\mathbb{R}\backslash\{3\}", r"x\ne3"),
        (r"x<-1 \text{ or } x>2", r"(-\infty,-1)\cup(2,\infty)"), ("2x>4", "x>2"), ("-x<-2", "x>2"), (r"\frac12\begin{pmatrix}2\\4\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
    ],
    "signs": [
        (r"a\pm b\mp c", "a+b-c,a-b+c"), (r"5\mp2\pm1", "4,6"), (r"1\mp 2", "-1,3"), ("2*-3^2", "-18"), ("-2^2", "-4"), ("(-2)^2", "4"), ("1-2+3", "2"),
        ("6/-3*2", "-4"), ("5-3-1", "1"), ("2*3 1/2", "7"), (r"2\cdot 3\frac{1}{2}", "7"), (r"x\cdot 3\frac12", "7x/2"), ("-3 1/2", "-3.5"),
        (r"2\cdot -3\frac12", "-7"), ("2*-3 1/2", "-7"),
    ],
    "whole numbers": [
        (r"\lfloor n \rfloor", "n"), ("n", r"\lfloor n \rfloor"),
        (r"\lfloor\frac{n+1}{2}\rfloor+1", r"\lceil n/2\rceil+1"), (r"\frac{2n+1-(-1)^n}{4}", r"\lceil n/2\rceil"), (r"\frac{n!}{k!(n-k)!}", r"\binom{n}{k}"), (r"\binom{n}{k}", r"\binom{n}{n-k}"), (r"\gcd(n,m)", r"\gcd(m,n)"), ("|x+|y||", "|x+|-y||"), ("101_{2}+x", "5+x"),
        (r"\lceil \log_2(n+1)\rceil", r"\lfloor\log_2 n\rfloor+1"), ("n(n-1)!", "n!"), (r"\binom{n}{2}", r"\frac{n(n-1)}{2}"), (r"\lceil x\rceil", r"-\lfloor -x\rfloor"),
    ],
    "options": [
        ("B) Paris", "B"), ("B) -5", "B"), ("B) none of these", "B"), ("B) It does not exist", "B"), ("(B) Paris", "B"), ("B. Paris", "B"), ("B: Paris", "B"), (r"\text{(B) Paris}", "B"), (r"\textbf{(B)}\ 12", "B"), ("b", "B"), ("(b)", "B"),
        ("B", "(B) Paris"), ("Paris", "B) Paris"), (r"\mathrm{B}", "B"), ("Option B", "B"), (r"\text{(E)}", r"\text{(E)},"), ("B) 12", "B) 12.0"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_no_wrong_answer_is_paid(kind):
    paid = [(answer, label) for answer, label in WRONG[kind] if graded(answer, label)]
    paid += [(answer, label) for answer, label in WRONG[kind] if same_answer(answer, label)]
    assert paid == []


@pytest.mark.parametrize("kind", RIGHT)
def test_no_right_answer_is_refused(kind):
    assert [(answer, label) for answer, label in RIGHT[kind] if graded(answer, label) is not True] == []


@pytest.mark.parametrize("kind", WRONG)
def test_every_label_equals_itself(kind):
    assert [label for _, label in [*WRONG[kind], *RIGHT.get(kind, [])] if graded(label, label) is not True] == []


@pytest.mark.parametrize(
    ("text", "label", "right"),
    [
        (r"The answer is \boxed {5}", "5", True), (r"\boxed5", "5", True), (r"\boxed 5", "5", True), (r"\boxed-5", "-5", True), (r"\fbox{5}", "5", True),
        (r"\boxed{5}. I put it into \boxed{}", "5", True), (r"\boxed{5} \boxed{ }", "5", True), (r"\boxed{5} \boxed{\phantom{0}}", "5", True),
        (r"\boxed{5} then \boxed{6}", "5", False), (r"\boxed{5} then \boxed{6}", "6", True), (r"$\boxed{1}$ and $\boxed{9}$", "1, 9", True),
        (r"\boxed{8} or \boxed{9}", "9", False), (r"\boxed{-b+2} or \boxed{2-b}", "2-b", True), (r"\boxed\frac{1}{2}", "0.5", True), (r"\boxed{\boxed{5}}", "5", True),
        ("Answer: <18>", "18", True), ("Answer：18", "18", True), ("**Answer**：18", "18", True), ("答案：18", "18", True), ("Answer: \"18\"", "18", True),
        ("Answer: B) Paris", "B", True), ("Answer: (B) Paris", "B", True), ("The answer is (B).", "B", True), ("Answer: C) Rome", "B", False),
        ("Answer: 1 and 2", "1,2", True), ("Answer: a=1, b=2", "1,2", True), ("Answer: x = 1 and y = 2", "1,2", True), ("#### 1 and 2", "1, 2", True),
        ("Answer: Evelyn", "Evelyn", True), ("Answer: Dana", "Evelyn", False), ("Answer: x = 5", "y = 5", False), ("Answer: x = 5", "5", True),
        (r"<think>Maybe \boxed{5}. No.</think>" "\nAnswer: 7", "7", True), (r"<think>Maybe \boxed{5}. No.</think>" "\nAnswer: 7", "5", False),
        (r"<think>Maybe \boxed{5}? Let me see", "5", False), ("<think>Answer: 5\nhm, let me see", "5", False), (r"\boxed{5}</think>\boxed{6}", "6", True),
        (r"\boxed{5}</think>", "5", False), (r"<think>a</think>\boxed{5}<think>\boxed{6}", "5", True), (r"<thinking>\boxed{5}", "5", False),
        (r"[THINK]\boxed{5}[/THINK]\boxed{6}", "5", False), (r"<|channel|>analysis<|message|>\boxed{5}", "5", False), ("<THINK>5</THINK>5", "5", True),
        (r"<|channel|>analysis<|message|>\boxed{5}<|end|><|start|>assistant<|channel|>final<|message|>\boxed{6}", "6", True), ("<think>5", "5", False),
        ("<think>5</think><answer>18</answer>", "18", True), ("<answer> 18", "18", True), ("<answer>19</answer>", "18", False), ("Answer: Total cost = $18", "18", True),
    ],
)  # fmt: skip
def test_where_an_answer_stands(text, label, right):
    assert grade_benchmark(text, label).correct is right


def test_right_answers_in_hard_forms_are_paid_and_near_misses_are_not():
    rows = list(hard_forms.read_answers())
    refused = [(label, text) for _, right, label, text in rows if right and not hard_forms.is_paid(text, label)]
    assert refused == [
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\boxed{\binom{1}{2}}"), (r"x \equiv 3 \pmod{7}", r"\boxed{x = 7k + 3}"),
        ("C", "The answer is definitely not A or B. Between C and D, C fits the passage better. So: C."),
        ("yes", 'It is not the case that the answer is "no": yes, the sum is even.'),
        ("C", "The answer is C. Option A says that the rate rises, which is false. Option B says that"),
        ("false", "**Answer:** False – 9 is odd but not prime."), ("7", "**Answer:** 7 – one for each day."),
        ("Paris", "The answer is Paris, France."), (r"\frac{2}{3}", r"Answer: $\frac{2}{3}$ (approximately 66.67%)"),
    ]  # fmt: skip
    assert [(label, text) for _, right, label, text in rows if not right and hard_forms.is_paid(text, label)] == []


UNREAD = [
    r"\boxed{5}\text{ or }6", r"$\boxed{5}$ or $6$", r"The answer is not \boxed{5}.", r"The answer is not $\boxed{5}$.", r"x \neq \boxed{5}", r"It isn't \boxed{5}",
    r"\boxed{5}\text{ million}", r"\boxed{5} million", r"-\boxed{5}", r"$-\boxed{5}$", r"\sqrt{\boxed{5}}", r"\sqrt[3]{\boxed{5}}", r"\frac{\boxed{5}}{2}", r"\boxed{5}\pi", r"2\boxed{5}",
    r"\boxed{5}x", r"\boxed{5}^2", r"\boxed{5}+1", r"\boxed{5}, or 6", r"$\boxed{5}$ or $\sqrt{3}$", r"\boxed{5} is wrong", r"\boxed{5}\cdot 2", r"2 \cdot \boxed{5}", r"\boxed{5}_6",
]  # fmt: skip
READ = [
    r"\boxed{5} is the answer.", r"- \boxed{5}", r"1. \boxed{5}", r"**\boxed{5}**", r"So $x = \boxed{5}$!", r"$\boxed{5}$ cm", r"$\boxed{5}\text{ cm}$", r"\boxed{5}^\circ", r"\boxed{5} - that is all",
    r"\boxed{5} or so I think", r"I think, not 6, but \boxed{5}", r"\[\boxed{5}\]", r"$\equiv \boxed{5} \pmod{7}$", r"$$\boxed{5}.$$", r"\text{Answer: }\boxed{5}", r"\textbf{\boxed{5}}",
    r"\boxed{5} and that is it", r"3! - 1 = 3!-1=\boxed{5}", r"$x \ge \boxed{5}$", r"$\boxed{5}$ or $5.0$", r"$x = \boxed{5}$, $\boxed{5}$",
]  # fmt: skip


@pytest.mark.parametrize(
    ("label", "texts"),
    [
        ("$2x+3y=5$", ["Answer: $2x+3y=5$", "The answer is $2x + 3y = 5$."]), ("$x^2+y^2=1$", ["The answer is $x^2+y^2=1$."]),
        (r"$\frac{dy}{dx}=2x$", [r"Answer: $\frac{dy}{dx}=2x$"]), ("$f^{-1}(x)=x+1$", ["Answer: $f^{-1}(x)=x+1$"]),
        ("5", ["Answer: 5 (since 2+3=5)", "The answer is therefore 5", "The answer is thus $5$", "The answer is equal to 5", "The answer would be 5"]),
        ("5", ["The answer is\n$$\n5\n$$", "**Final Answer**\n5", "### Answer\n5", "## Final Answer:\n\n5", "Ans: 5", "Answer: 5 ✅", r"\boxed{\text{Answer: }5}"]),
        ("18", [r"\boxed{18 (dollars)}"]), ("5", [r"\boxed{5^{\text{th}}}"]), ("1.5", [r"\boxed{1½}"]), ("(1,2)", [r"\boxed{\langle 1,2\rangle}"]),
        ("caf\u00e9", ["\\boxed{cafe\u0301}"]), ("B", ["The correct option is (B).", "(B)", "**B**"]),
    ],
)  # fmt: skip
def test_an_answer_has_many_ways_to_be_written(label, texts):
    assert [text for text in texts if not grade_benchmark(text, label).correct] == []


def test_these_ways_open_no_gap():
    for text, label in [
        ("The answer is not\n5", "5"), ("The answer would not be 5", "5"), ("Answer: 5 (or 6)", "5"), ("Answer: 5 (not sure)", "5"), ("Answer: 5 ❌", "5"),
        ("The answer is therefore not 5", "5"), ("The correct option is not (B).", "B"), ("Ans: 5 or 6", "5"), ("**Final Answer**\n5 or 6", "5"),
        ("Answer: $2x+3y=6$", "$2x+3y=5$"), ("Answer: $x^2+y^2=2$", "$x^2+y^2=1$"),
    ]:  # fmt: skip
        assert grade_benchmark(text, label).correct is False, text


FAMILIES = {
    "a word of arithmetic in the plural is a noun, and one that counts stands alone": [
        ("75", ["The answer is 75 points.", "Final Answer: The average is 75 points.", "Answer: 75 marks", "Answer: 75 goals", r"\boxed{75 \text{ points}}"],
         ["Answer: 75 points less", "Answer: 75 pairs", "Answer: 75 dozens", "Answer: 75 halves", "Answer: 75 quarters", "Answer: 75 thirds", "Answer: 75 points out of 100"]),
        ("900", ["Answer: 75 dozens"], ["Answer: 900 dozens"]), ("3", ["Answer: It has 3 roots.", "Answer: 3 positives"], ["Answer: 3 root", "Answer: 3 squared"]),
        ("1", ["Answer: He has 1 point."], ["Answer: 1 point five", "Answer: It is 1 point 1"]),
        ("5", ["Answer: He went 5 times.", "Answer: 5 times a week", "Answer: He went 5 times a week."], ["Answer: It is 5 times 5", "Answer: 5 times five", "Answer: 5 times a number"]),
        ("3%", [r"\boxed{3 \text{ percentage points}}"], [r"\boxed{3 \text{ basis points}}"]),
    ],
    "a later marked statement outweighs a box or a head": [
        ("7", [r"\boxed{7 \text{ weeks}} That is, the final answer is 49 days.", r"\boxed{7}. The answer is 7 because 3+4=7.", r"\boxed{7} is the answer.", r"The answer is $\boxed{7}$",
               r"the final answer is: $\boxed{7}$. I hope it is correct.", r"The answer is 8. \boxed{7}", r"\boxed{7}. The answer is 7 of the 8 slices.", r"\boxed{7}. The answer is clear.",
               r"\boxed{7}. If we had 2.5 more, the answer is 9.5.", r"\boxed{7}. A tempting answer is 9.", r"\boxed{7}. I don't think the answer is 9.", "\\boxed{7}\n#### Method 2",
               "#### 7\nThe answer is 7 apples.", r"\boxed{7}. Is it chance that the answer is 8?", r"\boxed{7}. We check our answer: $8+1=9$.", r"\boxed{7}. Answer: She has 7 apples."],
         [r"\boxed{7 \text{ weeks}} So he needs 49 days. The final answer is 49.", r"\boxed{7}. The answer is 8.", r"\boxed{7}. The answer is 7 or 8.", "\\boxed{7}\n#### 8", "#### 7\nThe answer is 8.",
          "\\boxed{7}\n<answer>8</answer>", "\\boxed{7}\n**Final Answer**\n8", r"\boxed{7}. The answer is 8, not 7.", r"\boxed{7}. Therefore, the answer is $x=8$."]),
        ("49", [r"\boxed{7 \text{ weeks}} So he needs 49 days. The final answer is 49.", "#### 5\n\\boxed{7}. The answer is 49."], [r"The answer is 49. \boxed{7}"]),
        (r"\sqrt2", [r"\boxed{\sqrt2}. The answer is about 1.41."], [r"\boxed{\sqrt2}. The answer is 1.42.", r"\boxed{\sqrt2}. The answer is $2\sqrt2$."]),
        ("B", [r"\boxed{B}. The answer is (B) Paris.", r"\boxed{B}. The answer is 12."], [r"\boxed{B}. The correct option is (C)."]),
        ("Paris", [r"\boxed{\text{Paris}}. The answer is a city.", "#### Paris\nThe answer is Paris."], [r"\boxed{\text{Paris}}. The answer is Lyon.", "#### Paris\nThe answer is Lyon."]),
        ("Yes", [r"\boxed{\text{Yes}}. The answer is yes."], [r"\boxed{\text{Yes}}. The answer is: no."]),
    ],
    "a statement goes on after a quotation": [
        ("No", ['The answer is "no".', 'The answer is "No", because 9 is odd.', '{"answer": "No", "why": "9 is yes"}', "The answer is 'no'.", 'The answer is “no”.', 'Answer: "No": 9 is odd'],
         ['So the final answer is "no" in some cases and "yes" in others.', 'Answer: "No" for x < 0 and "yes" for x > 0.', 'Answer: "no" or "yes"', "Answer: 'no' in some cases and 'yes' in others.",
          'Answer: “no” in some cases and “yes” in others.', 'Answer: "No" is wrong.', 'Answer: "no" sometimes', 'Answer: "No", it is "yes".']),
        ("18", ['Answer: "18"', '{"answer": "18", "unit": "cm"}', 'Answer: "18" dollars'], ['Answer: "18" or "19"', 'Answer: "18" times 2', "Answer: '18' minus 3"]),
        ("Emma", ['Answer: "Emma" by Jane Austen', "Answer: “Emma” by Jane Austen"], ['Answer: "Emma" or "Persuasion"', 'Answer: "Emma" in some editions and "Ann" in others']),
    ],
    "a time, a date or a quantity in two forms": [
        ("14:30", ["The answer is 2:30 PM (14:30).", "Answer: 14:30 (2:30 PM)", r"\boxed{2:30 PM (14:30)}"], ["Answer: 2:30 PM (15:30)", "Answer: 14:30 (3:30 PM)", "Answer: 14:30 (2:30 AM)"]),
        ("2021-05-03", ["Answer: 3 May 2021 (2021-05-03)", "Answer: 2021-05-03 (3 May 2021)"], ["Answer: 3 May 2021 (2021-05-04)", "Answer: 4 May 2021 (2021-05-03)"]),
        ("1.5 hours", ["Answer: 1.5 hours (90 minutes)", "Answer: 90 minutes (1.5 hours)"], ["Answer: 1.5 hours (95 minutes)", "Answer: 95 minutes (1.5 hours)"]),
        ("0.5", ["Answer: 1/2 (0.5)", "Answer: 1/2 (50%)", "Answer: 50% (1/2)"], ["Answer: 1/2 (0.6)", "Answer: 1/2 (60 percent)"]),
        ("5", ["Answer: 5 cm (2 inches)", "Answer: 5 pies (40 slices)", "Answer: 5 hours (30 minutes each)"], ["Answer: 5 hours (200 minutes)"]),
    ],
    "what is not the answer, and by whom": [
        ("Canberra", ["Answer: Canberra (not Sydney)", "Answer: Canberra, not Sydney", "Answer: Canberra — not Sydney", "Answer: The capital is Canberra (not Sydney)."],
         ["Answer: Sydney (not Canberra)", "Answer: not Canberra (Sydney)", "Answer: Canberra (not sure)", "Answer: Canberra (Sydney, not Canberra)"]),
        ("5", ["Answer: 5 (not 6)"], ["Answer: 6 (not 5)"]), ("B", ["Answer: B (not C)"], ["Answer: C (not B)"]),
        ("Paris", ["The answer is Paris (France)."], ["The answer is Paris, Lyon."]),
        ("Albert Einstein", ["Answer: The theory was proposed by Albert Einstein in 1905.", "Answer: It was first proposed by Albert Einstein, in Bern in 1905.", "Answer: In 1905 it was proposed by Albert Einstein."],
         ["Answer: It was not proposed by Albert Einstein in 1905.", "Answer: It was proposed by Lorentz and refined by Albert Einstein in 1905.", "Answer: Lorentz proposed it and it was refined by Albert Einstein.",
          "Answer: It was proposed by a student of Albert Einstein in 1905.", "Answer: It was proposed by Albert Einstein and Lorentz in 1905.", "Answer: It was proposed by Albert Einstein in 1905, Lorentz in 1904."]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_statements_and_their_wrong_twins(family):
    rows = FAMILIES[family]
    assert [text for label, right, _ in rows for text in right if not grade_benchmark(text, label).correct] == []
    assert [text for label, _, wrong in rows for text in wrong if grade_benchmark(text, label).correct] == []


def test_what_stands_beside_a_box_may_change_or_deny_it():
    assert [text for text in UNREAD if grade_benchmark(text, "5").correct] == []
    assert [text for text in READ if not grade_benchmark(text, "5").correct] == []


@pytest.mark.parametrize(
    ("text", "label", "right"),
    [
        (r"$x=\boxed{5}$ or $x=\boxed{6}$", "5,6", True), (r"$x=\boxed{5}$ or $x=\boxed{6}$", "6", False), ("\\[\\boxed{5}\\]\nand\n\\[\\boxed{6}\\]", "5, 6", True),
        ("\\[\\boxed{5}\\]\nand\n\\[\\boxed{6}\\]", "6", False), (r"$x=\boxed{5}$ and $y=\boxed{6}$", "5,6", False), (r"$-\boxed{5}$. Answer: -5", "-5", True),
        ("Answer: (C) is incorrect", "C", False), ("Answer: C) wrong", "C", False), ("Answer: C. No, D.", "C", False), ("Answer: A. That is wrong, it is B", "A", False),
        ("Answer: C? D", "C", False), ("Answer: (C). Wait, D.", "C", False), ("Answer: C or D", "C", False), ("Answer: (C). The other options are wrong.", "C", True),
        ("Answer: " + "of one " * 99 + "mind", "of one " * 99 + "mind", True),
        ("Answer: B. Paris", "B", True), (r"\boxed{B) It does not exist}", "(B) It does not exist", True), (r"\boxed{12}", "(1,2)", False),
    ],
)  # fmt: skip
def test_boxes_that_belong_together_and_options_that_are_taken_back(text, label, right):
    assert grade_benchmark(text, label).correct is right


def test_every_mark_of_a_thought_hides_it_also_cut_off():
    for opening, closing in [
        *THINKING.items(), ("<scratchpad>", "</scratchpad>"), ("<analysis>", "</analysis>"), ("< think >", "</ think >"), ('<think kind="x">', "</think>"),
        ("analysis", "assistantfinal"), ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"), ("<|channel>thought\n", "<channel|>"),
    ]:  # fmt: skip
        assert spoken(rf"{opening}\boxed{{5}}{closing}Answer: 6").endswith("Answer: 6"), opening
        assert grade_benchmark(rf"{opening}\boxed{{5}}{closing}I do not know.", "5").correct is False, opening
        assert grade_benchmark(rf"{opening}\boxed{{5}}", "5").correct is False, opening
    assert spoken("analysisLet me see, 5? No.assistantcommentaryHm.assistantfinalI cannot say.") == "I cannot say."
    for said in ("analysis: 5", "analysis of it", "An assistant. Final.", "5<|eot_id|>", "a <b> c", "final 5"):
        assert spoken(said) == said
    assert grade_benchmark("finalAnswer: 5", "5").correct is True


def test_texts_are_read_to_a_depth_of_forty():
    for opening, closing, deepest in ((r"\sqrt{", "}", 39), ("(", ")", 19)):
        assert read(opening * deepest + "x+1" + closing * deepest) is not None
        assert read(opening * (deepest + 1) + "x+1" + closing * (deepest + 1)) is None
    assert read("(" * 19 + r"\{\}" + ")" * 19) == ("set",), "the empty set is the fortieth"


def test_words_of_english_are_no_products_and_greek_is_read_by_name_and_by_letter():
    assert read("5 at") is None and read("5 is") is None
    assert read("at") is None and read("e^{at}") == read("e^{a*t}")
    names = "alpha beta gamma delta theta lambda mu sigma phi omega"
    assert [read("\\" + name) for name in names.split()] == [("symbol", letter) for letter in "αβγδθλμσφω"]
    assert same_answer(r"2\mu", "2μ") is True


def test_a_comparison_may_take_exactly_its_budget():
    budget = Budget(10)
    budget.spend(10)
    with pytest.raises(NotComputed, match="takes too long"):
        budget.spend(1)
    assert same(read("1+2"), read("3"), Budget(5 * 32 - 1)) is False
    assert same(read("1+2"), read("3"), Budget(5 * 32)) is True, "five fractions, each of which costs 32"
    assert same(read("(x+1)^2"), read("x^2+2x+1"), Budget(4000)) is False, (
        "it ends after six of eight points, all alike"
    )


def test_no_grader_reads_a_thought():
    labels = ("entailment", "neutral", "contradiction")
    assert find_label("<think>Answer: entailment</think>It is neutral", labels) == "neutral"
    assert find_label("<think>Answer: entailment", labels) is None
    assert find_label(r"\boxed{entailment}. The answer is neutral.", labels) == "neutral", "it is said later"
    assert find_label(r"The answer is neutral. \boxed{entailment}", labels) == "entailment"
    assert find_label(r"It is neutral. \boxed{}", labels) == "neutral" and find_label(r"\boxed{ }", labels) is None
    assert grade_mathematics("<think>Answer: 5", "5").correct is False
    assert grade_span("<think>Answer: Emma</think>Answer: Jane", "Jane").correct is True
    assert grade_span("<think>Answer: Emma", "Emma").correct is False
    assert code_of("<think>```python\nx = 1\n```</think>\n```python\nx = 2\n```") == "x = 2\n"
    assert code_of("<think>```python\nx = 1\n```") == ""
    assert last_match(r"Score: (\d)", "<think>Score: 9</think>Score: 3") == "3"
    assert final_answer("<think>5</think>7") == "7" and spoken("a < b, b > c") == "a < b, b > c"


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("Answer: Neutral, not contradiction.", "neutral"), ("Answer: entailment (not neutral)", "entailment"), ("Answer: neutral - not entailment", "neutral"),
        ("It is entailment, not neutral.", "entailment"), ("Answer: contradiction, no entailment", "contradiction"), ("Answer: neutral not contradiction", "neutral"),
        ("Answer: neutral, neither entailment nor contradiction", "neutral"), ("Answer: neutral and not contradiction", "neutral"), ("Answer: <neutral>", "neutral"),
        ("Answer：neutral", "neutral"), (r"\boxed {neutral}", "neutral"), ("Answer: not contradiction, neutral", "neutral"), ("Answer: entailment; that is wrong", None),
        ("Answer: not_entailment", None), ("Answer: !entailment", None), ("Answer: ≠ entailment", None), ("Answer: the opposite of entailment", None),
        ("I'd reject entailment", None), ("Answer: _entailment_", "entailment"), ("Answer: entailment!", "entailment"), ("Answer: neutral, no", None), ("Answer: not neutral", None), ("Answer: entailment, neutral", None), ("Answer: entailment is not neutral", None),
        ("neutral?", None), ("neutral?because it is open", None), ("neutral because wrong", "neutral"), ("neutral wrong because not sure", None),
        ("neutral and contradiction not", None), ("not entailment neutral", None), ("entailment not neutral not contradiction", "entailment"),
        ("contradiction because it is wrong", "contradiction"), ("neutral not contradiction entailment", "neutral"),
        ("Answer: neutral is not right", None), ("Answer: neither neutral nor contradiction", None), ("Answer: it is not the case that it is neutral", None),
    ],
)  # fmt: skip
def test_a_label_may_be_told_from_another(text, label):
    assert find_label(text, ("entailment", "neutral", "contradiction")) == label


def test_worked_solutions_give_their_last_box_or_are_refused():
    worked = "First $100+100=200$, and then $200+56 = \\boxed{256}$."
    assert label_of(worked) == ("256", worked) and label_of("We add. " * 50 + worked)[0] == "256"
    assert label_of(r"\boxed{256}") == ("256", None) and label_of("256") == ("256", None)
    for kept in (
        "two lines",
        r"$f(x)=a x+b$, where $b$ is an arbitrary integer, and $a$ is positive",
        "1,2",
        "B) The first of them.",
        "x = 5. ",
    ):
        assert label_of(kept) == (kept.strip(), None)
    for refused in (
        "First we add the two numbers. Then it is clear that the sum is large.",
        "She makes 9 * 2 = $18 every day at the market.",
        "First 3, then 4.\n\n7",
    ):
        with pytest.raises(ValueError, match=r"a worked solution as its answer, and neither"):
            label_of(refused)
    assert label_of("We get 3.\nAnswer: 3") == ("3", "We get 3.\nAnswer: 3")
    assert label_of("We add. Answer is 5.")[0] == "5" and label_of("Answer is 5.")[0] == "Answer is 5."
    labels = {"(1,2)": "(1,2)", "3,4": "3,4", "$1,234,567.50": "$1234567.50", "1,234, 5": "1,234, 5"}
    labels |= {"1,234": "1234", "(100,101)": "(100,101)"}
    assert {written: label_of(f"So\n#### {written}")[0] for written in labels} == labels
    assert label_of(r"The coefficient is $\boxed{19}x^3$.")[0] == "19", "an author's box is the answer"


def test_a_column_of_worked_solutions_is_told_or_refused_with_its_row(tmp_path):
    file = tmp_path / "rows.jsonl"
    worked = "We add the two numbers step by step. " * 6 + "So $100+156=\\boxed{256}$."
    file.write_text("\n".join(json.dumps({"id": str(n), "problem": "Add.", "solution": worked}) for n in range(2)))
    task = Mathematics(source=str(file), question_column="problem", answer_column="solution")
    assert [task.grade(example, r"\boxed{256}").correct for example in task] == [True, True]
    assert task.grade(task[0], r"\boxed{257}").correct is False and task[0].answer == "256"
    assert task.solution(task[0]).startswith("We add the two")
    assert task.remark() == (
        f"math: train: 2 of 2 labels are the last box or marked answer of a worked solution in {file}; if another "
        "column has the final answers, name it in task.answer_column"
    )
    file.write_text(json.dumps({"id": "7", "question": "Add.", "answer": worked.replace("\\boxed", "")}))
    message = r"rows\.jsonl: row 1 \(7\) has a worked solution as its answer, and neither .*; name task\.answer_column"
    with pytest.raises(TaskError, match=message):
        len(Mathematics(source=str(file)))
    with pytest.raises(
        TaskError, match=r"row 1 \(7\) has a worked solution as its answer, .*; put the number after ####"
    ):
        len(GSM8K(source=str(file)))
    file.write_text(json.dumps({"question": "Add.", "answer": worked}))
    assert GSM8K(source=str(file))[0].answer == "256"
    file.write_text(json.dumps({"id": "7", "question": "Add.", "answer": "So\n#### 1.23,5"}))
    with pytest.raises(
        TaskError, match=r"row 1 \(7\) has the answer '1\.23,5', not a number; write 1,234\.5 or 1234\.5"
    ):
        len(GSM8K(source=str(file)))
    file.write_text(json.dumps({"question": "Add.", "answer": "256"}))
    assert Mathematics(source=str(file)).remark() is None


def test_boxes_are_read_in_linear_work():
    assert boxed(r"\boxed{" * 50_000 + "5" + "}" * 50_000) == "5"
    assert boxed(r"\boxed{5}, " * 50_000) == "5"
    assert boxed(r"\boxed{5}" + "\n#### 5" * 9_000) == "5"


def test_many_blanks_take_no_time():
    assert same_answer(r"5\text{" + "\\ " * 900 + "} m", "5") is True


def shapes(rng):
    """A random expression in LaTeX, and its value if it is a number without a root or a logarithm."""
    a, b, c = (rng.randrange(2, 50) for _ in range(3))
    return rng.choice(
        [
            (rf"\frac{{{a}}}{{{b}}}", Fraction(a, b)), (f"{a}\\sqrt{{{b * b + 1}}}", None), (f"({a},{b})", None), (f"{a}x^2+{b}x+{c}", None),
            (f"{a}\\pi", None), (f"{a}^{{{b}}}", Fraction(a) ** b), (f"[{a},{a + b})", None), (f"{a},{a + b}", None), (f"{a}.{b}", Fraction(f"{a}.{b}")),
            (rf"\begin{{pmatrix}}{a}\\{b}\end{{pmatrix}}", None), (f"x={a}", None), (rf"\log_{{{a}}} {b * 50 + 1}", None), (f"{a}+{b}i", None),
            (f"{a} {b}/{b + c}", a + Fraction(b, b + c)), (f"{a}\\cdot 10^{{-{b}}}", a * Fraction(10) ** -b), (f"{a}^\\circ", None),
        ]
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_a_random_label_grades_itself_right_and_a_changed_one_wrong(seed):
    rng = random.Random(seed)
    for _ in range(100):
        label, value = shapes(rng)
        assert graded(label, label) and graded(rf"\displaystyle {label}\,", label), label
        place = rng.choice([n for n, sign in enumerate(label) if sign.isdigit()])
        other = label[:place] + rng.choice([d for d in "123456789" if d != label[place]]) + label[place + 1 :]
        assert not graded(other, label), (other, label)
        if value is not None:
            assert graded(f"{value.numerator}/{value.denominator}", label) and not graded(f"-{label}", label), label
            assert not graded(str(value + Fraction(1, 10**40)), label), label


@pytest.mark.parametrize("seed", range(4))
def test_equal_polynomials_are_equal_and_a_changed_sign_is_seen(seed):
    rng = random.Random(seed)
    for _ in range(25):
        roots = [rng.randrange(-9, 10) for _ in range(rng.randrange(1, 6))]
        factors = "".join(f"(x{-root:+d})" if root else "x" for root in roots)
        coefficients = [1]
        for root in roots:
            shifted = [*coefficients, 0]
            coefficients = [a - root * b for a, b in zip(shifted, [0, *coefficients], strict=True)]
        degree = len(roots)
        spelled = "".join(f"{c:+d}x^{{{degree - n}}}" for n, c in enumerate(coefficients))
        assert same_answer(spelled, factors) is True, (spelled, factors)
        place = rng.choice([n for n, c in enumerate(coefficients) if c])
        turned = [-c if n == place else c for n, c in enumerate(coefficients)]
        changed = "".join(f"{c:+d}x^{{{degree - n}}}" for n, c in enumerate(turned))
        assert same_answer(changed, factors) is False, (changed, factors)


def test_threads_compare_alike():
    found = {}
    pairs = [
        (r"\sqrt{5+2\sqrt6}", r"\sqrt2+\sqrt3"),
        (r"\pi+10^{-60}", r"\pi"),
        (r"\sin x", r"\cos x"),
        (r"10^{-300}\pi", r"10^{-300}\pi"),
    ]

    def compare(name):
        found[name] = [same_answer(answer, label) for answer, label in pairs * 20]

    threads = [threading.Thread(target=compare, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {name: [True, False, False, True] * 20 for name in range(4)}


def test_a_comparison_that_costs_too_much_ends():
    long = read("+".join(rf"\sin({n}x)^{{99}}" for n in range(1, 60)))
    assert same(long, ("add", long, ("number", Fraction(0))), Budget(10_000)) is False
    assert same(long, long, Budget(0)) is True, "what is written alike needs no computing"
    nested = r"\sqrt{" * 300 + "2" + "}" * 300
    assert read(nested) is None and same_answer(nested, "2") is False and same_answer("2", nested) is None
