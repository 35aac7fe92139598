"""Run folders that are written by hand, with hostile texts, and pages that are read back.

Other texts are made to keep whoever reads them busy: one thing again and again, things opened and never closed, and
short mathematics that takes for ever to compute.
"""

import base64
import gzip
import json
import re
from collections.abc import Callable

from maporl.evaluation.metrics import evaluate_dialogues
from maporl.report.read import read_run
from maporl.types import Dialogue, Example, Grade, Utterance, to_json, to_record


def again(unit: str) -> Callable[[int], str]:
    """A function from a length to ``unit`` again and again up to this length."""
    return lambda length: (unit * (length // len(unit) + 1))[:length]


def between(before: str, unit: str, after: str) -> Callable[[int], str]:
    """As :func:`again`, with something else at both ends."""
    return lambda length: before + again(unit)(length) + after


def nested(depth: int) -> list:
    """A list in a list, and so on, ``depth`` deep."""
    value: list = [0]
    for _ in range(depth - 1):
        value = [value]
    return value


UNITS = [
    "a", "9", "0", " ", "\t", "\n", "\r\n", ".", ",", ";", ":", "!", "?", "-", "–", "—", "_", "*", "#", "$", "€", "%", "&",
    "/", "\\", "|", "=", "^", "+", "~", "'", '"', "`", "(", ")", "[", "]", "{", "}", "<", ">", "()", "[]", "{}", "({[", ")}]",
    "n't ", "n’t ", "not ", "never the ", "not that ", "neither nor ", "but ", "rather than ", "because ", "no ", "yes ",
    "neutral ", "neutral, ", "not neutral. ", "entailment or neutral ", "non-", "well-known-", "a-", " - ", " -- ", "? ",
    "answer ", "answer is ", "Answer: ", "the final answer is 5. ", "Answer: 5 or 6\n", "answer\n", "final ", "answer:**",
    "#### ", "####5", "####\n", "Answer: x = ", "= 5 ", "1=", "\\boxed{", "\\boxed{}", "\\boxed{5}", "\\boxed{{", "\\text{",
    "\\text{a}", "\\mathrm ", "\\frac", "\\frac{1}{", "\\dfrac12", "\\sqrt{", "\\left(", "\\begin{pmatrix}", "1 & 2 \\\\ ",
    "1, ", "1,234,", "(1, 2), ", "[1, 2) \\cup ", "{1, 2, ", "1 1/2 ", "3 km ", "5% ", "$5 ", "1e9", "1.", ".5", "10^", "10^{",
    "x^", "x_", "x_{", "x!", "9!", "**", "5 × ", "5x ", "- 5 ", "−", "٣", "５", "½", "²", "e\u0301", "\u200b", "\u202e", "\ud800",
    "\0", "\x1b[31m", "🙂", "ﬀ", "İ", "ß", "million ", "twenty ", "about ", "Score: ", "Score: 9", "Better: ", "<call>",
    "<call></call>", "<score>", "<score> 1 ", "<verify>", "<verify> approve ", "<<", "<<2+3", "<<1>>", "```", "```\n", "```python\n",
    "U ", "UDLR", "def f", "def f(x):\n", "here is ", "here is a b c d ", "as you ", "rewrite ", "my answer is ", "<|", "<|a|>", "[/INST]",
    "user:", "\n#", "#\n", "| a | b |\n",
]  # fmt: skip
MADE = {
    **{f"again {unit!r}": again(unit) for unit in UNITS},
    "semicolons and a letter": between("", ";", "x"),
    "a digit, blanks, a letter": between("5", " ", "!"),
    "a minus, blanks, a letter": between("-", " ", "x"),
    "a minus, blanks, digits": lambda length: "-" + " " * (length // 2) + "9" * (length // 2) + "x",
    "digits and a letter": between("", "9", "x"),
    "a decimal and a letter": between("0.", "9", "x"),
    "digits before an equals sign": between("", "1", "x = 5"),
    "an exponent of many digits": between("1e", "9", ""),
    "a power of ten of many digits": between("10^{", "9", "}"),
    "one long box": between("\\boxed{", "x+", "1}"),
    "boxes within boxes": lambda length: "\\boxed{" * (length // 8) + "5" + "}" * (length // 8),
    "one long sentence": between("Answer: ", "word ", "."),
    "one long mark": between("answer", "*", "x"),
    "blanks after a mark": between("final", " ", "answer"),
    "a heading of blanks": between("####", " ", "\n"),
    "a negation far away": between("not ", "word ", "that"),
    "a negation that goes on": between("", "n't ", "is, neutral"),
    "a mention, a negation, reasons": between("neutral ", "because not ", ""),
    "an equation of signs": between("", "+", "= 5"),
    "an equation of factors": between("", "x ", "= 5"),
    "a tuple": between("\\boxed{(", "1, ", "1)}"),
    "a set": between("\\boxed{\\{", "1, ", "1\\}}"),
    "a matrix": between("\\boxed{\\begin{pmatrix}", "1 & 2 \\\\", "\\end{pmatrix}}"),
    "an interval": between("\\boxed{(", "\\frac{1}{2}, ", "\\infty)}"),
    "fractions within fractions": lambda length: "\\frac{" * (length // 10) + "1" + "}{2}" * (length // 10),
    "roots within roots": lambda length: "\\sqrt{" * (length // 7) + "2" + "}" * (length // 7),
    "brackets within brackets": lambda length: "(" * (length // 2) + "1" + ")" * (length // 2),
    "a program that never ends": between("```python", "\n", "x"),
    "lines of marks": between("\n", "*\n", "answer"),
}
"""For each name, a function from a length to a hostile text of about this length."""
MATHEMATICS = [
    "(x+y+z+w+a+b+c+d)^{12}", "(x+y+z+w+a+b+c+d)^{12}-(x-y-z)^{12}", "(a+b+c+d+e+f+g+h+i+j+k+l)^{11}", "(x+1)^{12}(y+1)^{12}",
    "9^9^9", "9**9**9", "9^{9^{9}}", "10^{(10^8)}", "2^{99999}", "2^{9999}", "7^{2007}", "999!", "99!", "(9!)!", "9!!!!", "999!/998!",
    "\\sqrt{\\sqrt{\\sqrt{\\sqrt{\\sqrt{\\sqrt{x+\\sqrt{y}}}}}}}", "\\sqrt{2+\\sqrt{3+\\sqrt{5+\\sqrt{7+\\sqrt{11+\\sqrt{13}}}}}}",
    "\\sqrt{2}+\\sqrt{3}+\\sqrt{5}+\\sqrt{7}+\\sqrt{11}+\\sqrt{13}+\\sqrt{17}+\\sqrt{19}", "\\sqrt{x+\\sqrt{x+\\sqrt{x+\\sqrt{x}}}}",
    "\\sin(\\sin(\\sin(\\sin(\\sin(x)))))", "\\sin(99x)\\cos(99y)\\tan(99z)", "\\tan(x)\\tan(2x)\\tan(3x)\\tan(4x)\\tan(5x)",
    "\\frac{1}{\\frac{1}{\\frac{1}{\\frac{1}{\\frac{1}{x+1}+1}+1}+1}+1}", "\\frac{(x+y)^{11}-(x-y)^{11}}{(x+z)^{11}}",
    "\\log(\\log(\\log(\\log(99))))", "e^{e^{e^{e}}}", "e^{99}", "\\exp(\\exp(9))", "x^{99}-1", "(x^{99}-1)(x^{98}-1)", "x^{y^{z}}",
    "9" * 190, "0." + "9" * 190, "1/" + "9" * 150, "9" * 90 + "^{99}", "(x+0." + "1" * 90 + ")^{12}", "(((((((((((((((x)))))))))))))))",
    "(x+y)(x-y)" * 18, "x+" * 90 + "1", "(x,y,z),(y,z,x),(z,x,y)", "1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20",
    "\\{1,2,3\\}\\cup\\{4,5,6\\}\\cup(7,8)\\cup[9,10]", "(0,1)\\cup(1,2)\\cup(2,3)\\cup(3,4)\\cup(4,5)\\cup(5,6)", "1<x<2", "x^2+y^2=z^2",
    "\\sin(x)=\\cos(x^2)+\\tan(x^3)", "x\\in(0,1)", "x^{12}+y^{12}=(z+w)^{12}", "|x|+|y|+|z|+|w|", "\\lfloor x\\rfloor+\\lceil y\\rceil",
    "\\begin{pmatrix}x&y\\\\z&w\\end{pmatrix}^{12}", "\\begin{pmatrix}1&2&3\\\\4&5&6\\\\7&8&9\\end{pmatrix}", "\\frac{x}{0}", "0^{0}", "1/0",
    "\\infty-\\infty", "\\infty^{\\infty}", "i^{i^{i}}", "(1+i)^{99}", "\\pi^{\\pi^{\\pi}}", "1.0e999", "1e-999", "5%%%%", "x!", "(x+y)!", "2\\pm\\sqrt{3}",
    "\\sqrt[99]{2}", "\\sqrt[x]{y}", "\\log_{2}(3)", "\\sum_{i=1}^{9}i", "\\int_0^1 x dx", "\\prod_{i=1}^{9}i", "\\lim_{x\\to0}x",
]  # fmt: skip
"""Short mathematics that takes long, or that a parser of mathematics may stumble over."""


def of_group(name, seconds, learner, engines):
    """The metrics of a group in which the processes do this for so many seconds, and nothing in the rest."""
    found = {f"group/{name}/seconds": seconds}
    for part, own in (("learner", learner), ("engines", engines)):
        if own is not None:
            found |= {f"group/{name}/{part}/{what}": value for what, value in own.items()}
            found[f"group/{name}/{part}/idle"] = 1 - sum(own.values()) / seconds
    return found


LEARNS = {"learning": 7.0, "sending": 0.5, "saving": 0.0, "dead": 0.0}
SAMPLES = {"sampling": 2.0, "sending": 0.5, "dead": 0.0}


def run_with(folder, updates):
    folder = write_run(folder, updates=0)
    lines = [json.dumps({"step": number, "episode": 16 * number, **own}) for number, own in enumerate(updates, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return read_run(folder)


HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>\u202e<b>&amp;\x1b[31m"


def utterance(number, agent, turn, answer, right, **more):
    text = more.pop("text", f"Answer: {answer}")
    return Utterance(
        number, agent, agent, turn, turn, [{"role": "user", "content": "1+1="}], text,
        grade=Grade(answer, right, "" if right else "differs from the label"), rewards={"score": float(right)}, **more,
    )  # fmt: skip


def debate(name, first, second, label="2", **more):
    """ann and bob, two turns; each turn a pair of (answer, right)."""
    utterances = [
        utterance(i, agent, turn, answer, right, **more)
        for i, (turn, agent, (answer, right)) in enumerate(
            (t, a, one) for t, pair in enumerate((first, second)) for a, one in zip(("ann", "bob"), pair, strict=True)
        )
    ]
    return Dialogue(Example(name, f"{name}=", label), utterances)


RIGHT, WRONG, NOTHING = ("2", True), ("3", False), (None, False)
BEFORE = [debate(f"q{n}", (WRONG, NOTHING), (WRONG, WRONG)) for n in range(10)]
AFTER = [
    *(debate(f"q{n}", (WRONG, RIGHT), (RIGHT, RIGHT)) for n in range(7)),
    debate("q7", (RIGHT, RIGHT), (RIGHT, WRONG)),
    debate("q8", (WRONG, WRONG), (WRONG, ("12", False)), label="2"),
    debate("q9", (NOTHING, NOTHING), (NOTHING, NOTHING), label="12"),
]


def write_run(folder, updates=4, dialogues=(), before=BEFORE, after=AFTER, **config):
    """A run folder as the trainer leaves it."""
    folder.mkdir(parents=True)
    shown = {
        "updates": updates, "task": {"name": "toy_sum"}, "protocol": {"name": "debate", "turns": 2}, "evaluation": {"questions": 10},
        "agents": {"ann": {"tiny": {"architecture": "llama", "layers": 2}}, "bob": {"model": "org/model", "lora": {"r": 8}}}, **config,
    }  # fmt: skip
    (folder / "config.yaml").write_text(json.dumps(shown))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, updates + 1):
            values = {
                "accuracy/turn_1": 0.1, "accuracy/turn_2": min(1.0, step / 10), "reward/score": 0.5, "ann/objective/kl": 0.01 * step,
                "bob/objective/kl": float("nan"), "ann/grad_norm": 1.0, "time/update": 2.0, "tokens_per_second": 100.0, "episode": 8 * step,
                "memory/peak": 1.0,
            }  # fmt: skip
            file.write(json.dumps({"step": step, **values}) + "\n")
            if step % 2 == 0:
                file.write(json.dumps({"step": step, "eval_accuracy/turn_1": 0.2, "eval_accuracy/turn_2": 0.3}) + "\n")
    lines = [json.dumps({"step": 1 + n % updates, **to_record(d)}) for n, d in enumerate(dialogues)]
    (folder / "dialogues.jsonl").write_text("".join(line + "\n" for line in lines))
    for when, played in (("before", before), ("after", after)):
        if played:
            (folder / f"evaluation_{when}.json").write_text(json.dumps(evaluate_dialogues(played).to_json()))
            (folder / f"evaluation_{when}.jsonl").write_text("".join(to_json(d) + "\n" for d in played))
    if after:
        (folder / "final").mkdir()
        (folder / "final/config.json").write_text("{}")
    return folder


def data_of(page):
    """The data in a written page."""
    packed = re.search(r'<script type="application/octet-stream" id="data" data-live="no">([^<]*)</script>', page)[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)))
