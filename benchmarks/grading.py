r"""Which answers the graders pay and refuse on real labels, and how long they take against another checkout.

    python benchmarks/grading.py                                        # answers in hard forms: a second
    python benchmarks/grading.py DATA                                   # what is paid and refused: some minutes
    python benchmarks/grading.py DATA --other ANOTHER_CHECKOUT          # the time too, as a ratio
    python benchmarks/grading.py DATA --out benchmarks/results/grading.json

``DATA`` is a folder with files of JSON lines (``question``, ``answer``, ``meta``): ``math``, ``math500``,
``olympiadbench``, ``minerva_math`` and ``gsm8k``, and ``anli_r1`` to ``anli_r3``. A folder that is missing is named
before anything is measured.

- **Hard forms**: ``benchmarks/answers.txt`` has right answers as models write them, and near misses. Where math-verify
  is installed, it grades them too.
- **Labels**: each label is graded as an answer to itself.
- **Changes**: one sign, digit, bracket or part of a label is changed (``--changes`` of each label, drawn by
  ``--seed``). An accepted change is judged by :func:`written_the_same`, which knows nothing of the grader: it rewrites
  texts. Those that it does not call the same are wrongly accepted. Both lists are written to ``--out``.
- **Forms**: a right answer in each way in which models write it, on ``--each`` labels.
- **ANLI and multiple choice**: the right label in each form, and every wrong label in the same forms.
- **Time**: each row is graded with its right answer in two forms and with the next row's answer. The two checkouts take
  turns, and the fastest of the rounds counts, because a shared machine only ever adds time. The other checkout needs
  the packages that it names itself.
"""

import argparse
import importlib.util
import json
import os
import platform
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

from machine import processor

from maporl.grading import find_label
from maporl.grading.answers import label_of
from maporl.grading.benchmarks import grade_benchmark
from maporl.grading.numbers import number

HERE = Path(__file__).resolve().parents[1]
ANSWERS = HERE / "benchmarks" / "answers.txt"
MATHEMATICS = ("math", "math500", "olympiadbench", "minerva_math")
INFERENCE = ("anli_r1", "anli_r2", "anli_r3")
LABELS = ("entailment", "neutral", "contradiction")
GRADE = """
import hashlib, json, sys, time
from maporl.tasks import GSM8K, Mathematics
from maporl.grading import same_answer
rows = [json.loads(line) for line in open(sys.argv[1], encoding="utf-8")][:int(sys.argv[3])]
task = {"gsm8k": GSM8K, "math": Mathematics}[sys.argv[2]](source=sys.argv[1])
examples = list(task)[:len(rows)]
texts = [
    (example, text)
    for example, other in zip(examples, [*examples[1:], examples[0]])
    for text in (f"So it is.\\nAnswer: {example.answer}", f"\\\\boxed{{{example.answer}}}", f"\\\\boxed{{{other.answer}}}")
]
started = time.perf_counter()
same_answer("x+1", "1+x")
loaded = time.perf_counter()
grades = [task.grade(example, text) for example, text in texts]
seconds = time.perf_counter() - loaded
right = sum(g.correct is True for g in grades)
print(json.dumps({"grades": len(grades), "right": right, "seconds": seconds, "start": loaded - started}))
"""  # noqa: E501
WORDS = re.compile(r"\\(?:text|mbox|mathrm|textnormal)\s*\{[^{}]*\}")
LAYOUT = frozenset(str.split(r"\left \right \text \mbox \mathbf \textnormal \phantom \quad \mathrm"))
TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\d+|[A-Za-z]|[^\s]")


def rows_of(data: Path, folder: str) -> list[dict[str, Any]]:
    """The rows of the files in a folder of the data."""
    return [
        json.loads(line) for file in sorted((data / folder).glob("*.jsonl")) for line in file.open(encoding="utf-8")
    ]


def read_answers(file: Path = ANSWERS) -> Iterator[tuple[str, bool, str, str]]:
    """The family of each answer in a hard form, whether it is right, its label, and the text, in which ⏎ ends lines."""
    family = ""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            family = line[2:]
        elif line:
            sign, label, text = line.split(" | ", 2)
            yield family, sign == "+", label, text.replace("⏎", "\n")


def is_paid(text: str, label: str) -> bool:
    """Whether the grader of the label pays a text."""
    return find_label(text, LABELS) == label if label in LABELS else grade_benchmark(text, label).correct is True


def verified(text: str, label: str) -> bool:
    """Whether math-verify calls a text right."""
    from math_verify import parse, verify

    return bool(verify(parse(f"\\boxed{{{label}}}"), parse(text)))


def measure_answers() -> dict[str, Any]:
    """How many right answers in hard forms are refused, how many near misses are paid, and which."""
    measured = {}
    graders = {"maporl": is_paid} | ({"math-verify": verified} if importlib.util.find_spec("math_verify") else {})
    for name, paid in graders.items():
        rows = [(*row, paid(row[3], row[2])) for row in read_answers()]
        measured[name] = {
            "right": sum(right for _, right, *_ in rows), "refused": [row for row in rows if row[1] and not row[4]],
            "wrong": sum(not right for _, right, *_ in rows), "paid": [row for row in rows if not row[1] and row[4]],
        }  # fmt: skip
    return measured


def meta_of(row: dict[str, Any]) -> dict[str, Any]:
    return {
        key: row["meta"][key] for key in ("is_multiple_answer", "error") if row.get("meta", {}).get(key) is not None
    }


def changes(label: str, rng: random.Random, most: int) -> list[tuple[str, str]]:
    """At most so many texts that differ from ``label`` in one sign, digit, bracket or part, each with the kind of
    change."""
    found = {("sign", label[1:] if label.startswith("-") else "-" + label)}
    for match in re.finditer(r"(?<![eE_{])[+-]", label):
        found.add(("sign", label[: match.start()] + ("-" if match[0] == "+" else "+") + label[match.end() :]))
    for match in re.finditer(r"\d", label):
        digit = rng.choice([digit for digit in "0123456789" if digit != match[0]])
        found.add(("digit", label[: match.start()] + digit + label[match.end() :]))
    for match in re.finditer(r"[()\[\]]", label):
        other = {"(": "[", "[": "(", ")": "]", "]": ")"}[match[0]]
        found |= {("bracket", label[: match.start()] + new + label[match.end() :]) for new in (other, "")}
    words = [match.span() for match in WORDS.finditer(label)]
    found |= {("part", label[:start] + r"\text{ kilometers}" + label[end:]) for start, end in words}
    for match in TOKEN.finditer(label):
        token = match[0]
        in_words = any(start <= match.start() < end for start, end in words)
        if token in "+-()[]{}$\\.;" or token in LAYOUT or re.fullmatch(r"\\[^A-Za-z]", token) or in_words:
            continue
        found.add(("part", label[: match.start()] + label[match.end() :]))
        if re.fullmatch("[A-Za-z]", token):
            letter = rng.choice([letter for letter in "abcknxyz" if letter != token])
            found.add(("part", label[: match.start()] + letter + label[match.end() :]))
    if "," in label:
        parts = label.split(",")
        left_out = rng.randrange(len(parts))
        found.add(("part", ",".join(part for place, part in enumerate(parts) if place != left_out)))
        first, second = rng.sample(range(len(parts)), 2)
        parts[first], parts[second] = parts[second], parts[first]
        found.add(("part", ",".join(parts)))
    changed = sorted((kind, text) for kind, text in found if text.strip() and text != label)
    rng.shuffle(changed)
    return changed[:most]


def written_the_same(changed: str, label: str) -> bool:
    r"""Whether two texts are the same once they are rewritten by rules that keep what mathematics means.

    The rules: blanks, commands that only set the type and a closing full stop go. So do a zero before a decimal point,
    zeros and a point at the end of a decimal, the sign of a zero, commas between thousands, a percent sign, brackets
    around the letter of an option, and the bracket signs of a group. The parts of a list have no order. The argument of
    a function has any name.
    """
    return _rewritten(changed) == _rewritten(label)


def _rewritten(text: str) -> Any:
    text = re.sub(
        r"\\(?:left|right|quad|[,;:!])(?![A-Za-z])|\\(?:text|mbox|mathbf|textnormal)(?=\s*\{)|[$\s]", " ", text
    )
    text = re.sub(r"\\ |\band\b|\bor\b|\\approx", lambda match: "," if match[0] in ("and", "or") else " ", text)
    text = re.sub(r"(?<=\d),\s*(?=\d{3}(?!\d))", "", text) if "(" not in text and text.count(",") == 1 else text
    text = re.sub(r"(?<=\d)\s*,\s*(?=\d{3}(?!\d))", "", text) if re.fullmatch(r"[\s\d,.\\$]*", text) else text
    text = re.sub(r"\s+", "", text).rstrip(".,").replace("\\%", "").replace("%", "").replace("\\$", "")
    text = re.sub(r"[({]*([A-Za-z])[)}]*", r"\1", text) if re.fullmatch(r"[({]*[A-Za-z][)}]*", text) else text
    text = re.sub(r"(?<![\d.])0+(?=\.\d)", "", text)
    text = re.sub(r"(\.\d*?)0+(?!\d)", r"\1", text)
    text = re.sub(r"\.(?!\d)", "", text)
    text = re.sub(r"(?<![\d.])-0(?![\d.])", "0", text)
    if match := re.match(r"([a-z])\(([a-z])\)=", text):
        text = f"{match[1]}(x)=" + text[match.end() :].replace(match[2], "x")
    parts, depth, part = [], 0, ""
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        if sign in ",;" and depth == 0:
            parts.append(part)
            part = ""
        else:
            part += sign
    return sorted(part.strip("{}").lower() for part in [*parts, part] if part.strip("{}"))


def measure_changes(data: Path, most: int, seed: int) -> dict[str, Any]:
    """How many labels grade themselves right, and how many changed labels are accepted, by data set."""
    measured = {}
    for folder in MATHEMATICS:
        rng, counted, accepted, refused, rows = random.Random(seed), Counter[str](), [], [], rows_of(data, folder)
        for row in rows:
            label, meta = row["answer"], meta_of(row)
            if not grade_benchmark(f"\\boxed{{{label}}}", label, meta).correct:
                refused.append(label)
            for kind, text in changes(label, rng, most):
                counted[kind] += 1
                if grade_benchmark(f"\\boxed{{{text}}}", label, meta).correct:
                    accepted.append((kind, text, label))
        wrong = [change for change in accepted if not written_the_same(*change[1:])]
        measured[folder] = {
            "labels": len(rows), "labels_refused": refused, "changes": dict(counted), "accepted": len(accepted),
            "wrongly_accepted": len(wrong), "share_wrongly_accepted": len(wrong) / counted.total(), "wrong": wrong,
            "judged_the_same": [change for change in accepted if change not in wrong],
        }  # fmt: skip
    return measured


def _first(labels: list[str], fits: Callable[[str], bool], each: int) -> list[str]:
    return [label for label in dict.fromkeys(labels) if fits(label)][:each]


def forms(data: Path, each: int) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The name of each form, and pairs of a text with a right answer in this form and of its label."""
    everything = [row["answer"] for folder in MATHEMATICS for row in rows_of(data, folder) if not meta_of(row)]
    rng = random.Random(0)
    rng.shuffle(everything)
    gsm8k = [row["answer"] for row in rows_of(data, "gsm8k")]
    any_label = _first(
        everything, lambda label: "\\text" not in label and "mbox" not in label and "$" not in label, each
    )
    numbers = _first(
        everything, lambda label: number(label) is not None and bool(re.fullmatch(r"-?[\d./]+", label)), each
    )
    fractions = _first(everything, lambda label: "\\frac{" in label, each)
    brackets = _first(
        everything, lambda label: bool(re.fullmatch(r"\([^()]*,[^()]*\)", label)) and "\\left" not in label, each
    )
    large = [f"{n}" for n in rng.sample(range(10_000, 10**9), each)]
    short = _first(gsm8k, lambda label: label.isdigit(), each)
    pairs = [(str(a), str(b)) for a, b in (rng.sample(range(-60, 60), 2) for _ in range(each))]
    letters = [rng.choice("ABCDE") for _ in range(each)]
    options = ["Paris", "12", "The first of them", r"$\frac{1}{2}$", "none of these"]

    def boxed(labels: list[str], write: Callable[[str], str]) -> list[tuple[str, str]]:
        return [(f"So \\boxed{{{write(label)}}}.", label) for label in labels]

    for before in (r"\displaystyle ", r"\,", r"\!", r"\;", r"\quad ", r"\ "):
        yield f"{before.strip()} in front", boxed(any_label, lambda label, before=before: before + label)
    for after in (r"\,", r"\quad", ".", r"\ ", "~"):
        yield f"{after} at the end", boxed(any_label, lambda label, after=after: label + after)
    yield r"\dfrac", boxed(fractions, lambda label: label.replace("\\frac", "\\dfrac"))
    yield r"\tfrac", boxed(fractions, lambda label: label.replace("\\frac", "\\tfrac"))
    yield r"\cfrac", boxed(fractions, lambda label: label.replace("\\frac", "\\cfrac"))
    yield r"\left( \right)", boxed(brackets, lambda label: f"\\left{label[:-1]}\\right)")
    yield r"\bigl( \bigr)", boxed(brackets, lambda label: f"\\bigl{label[:-1]}\\bigr)")
    yield r"\; after a comma", boxed(brackets, lambda label: label.replace(",", ",\\;"))
    for command in ("mathbf", "boldsymbol"):
        yield f"\\{command}{{}}", boxed(any_label, lambda label, command=command: f"\\{command}{{{label}}}")
    for command in ("mbox", "text", "textrm", "mathrm"):
        yield f"\\{command}{{}}", boxed(numbers, lambda label, command=command: f"\\{command}{{{label}}}")
    for unit in (
        r"\text{ cm}",
        r"\,\text{cm}",
        r"~\mathrm{cm}^2",
        r"\ \text{square units}",
        r"\,\mathrm{m/s^2}",
        r"\text{ m}/\text{s}",
        r"^\circ",
        r"\%",
        " dollars",
    ):
        fits = [label for label in numbers if unit != r"\%" or abs(number(label)) >= 1]  # 0.15% is not 0.15
        yield f"the unit {unit.strip()}", boxed(fits, lambda label, unit=unit: label + unit)
    for blank in (r"\,", r"\;", r"\ ", " ", "~", "{,}", ",", r",\!"):
        yield f"thousands with {blank!r}", [(f"\\boxed{{{int(n):,}}}".replace(",", blank), n) for n in large]
    yield (
        r"\log_2 3",
        [
            (f"\\boxed{{\\log_{n % 8 + 2} {int(label) + 2}}}", f"\\log_{{{n % 8 + 2}}}{{{int(label) + 2}}}")
            for n, label in enumerate(short)
        ],
    )
    yield r"\boxed {}", [(f"So \\boxed {{{label}}}", label) for label in any_label]
    yield r"\boxed5", [(f"So \\boxed{label}", label) for label in short]
    yield r"\boxed 5", [(f"So $\\boxed {label}$", label) for label in short]
    yield r"\fbox{}", [(f"So \\fbox{{{label}}}", label) for label in any_label]
    yield r"a later \boxed{}", [(f"\\boxed{{{label}}}. It stands in \\boxed{{}}.", label) for label in any_label]
    yield "after a thought", [(f"<think>\\boxed{{0}}? No.</think>\\boxed{{{label}}}", label) for label in any_label]
    yield "1 and 2", [(f"\\boxed{{{a} and {b}}}", f"{a}, {b}") for a, b in pairs]
    yield r"1 \text{ and } 2", [(f"\\boxed{{{a} \\text{{ and }} {b}}}", f"{a}, {b}") for a, b in pairs]
    yield "Answer: 1 and 2", [(f"Answer: {a} and {b}", f"{a}, {b}") for a, b in pairs]
    yield "a=1, b=2", [(f"\\boxed{{a={a}, b={b}}}", f"{a}, {b}") for a, b in pairs]
    yield "Answer: a = 1, b = 2", [(f"Answer: a = {a}, b = {b}", f"{a}, {b}") for a, b in pairs]
    yield "x=1 or x=2", [(f"\\boxed{{x={a} \\text{{ or }} x={b}}}", f"{a}, {b}") for a, b in pairs]
    for option in ("{}) {}", "({}) {}", "{}. {}", "{}: {}"):
        texts = [option.format(letter, options[n % len(options)]) for n, letter in enumerate(letters)]
        yield (
            f"\\boxed{{{option.format('B', 'Paris')}}}",
            [(f"\\boxed{{{t}}}", letter) for t, letter in zip(texts, letters, strict=True)],
        )
        yield (
            f"Answer: {option.format('B', 'Paris')}",
            [(f"Answer: {t}", letter) for t, letter in zip(texts, letters, strict=True)],
        )
    for mark in (
        "Answer: <{}>",
        "Answer：{}",
        "**Answer**: {}",
        "Answer: **{}**",
        "Answer: ${}$",
        "Answer: {}.",
        "The answer is {}.",
        "#### {}",
    ):
        yield mark.format(18), [(f"So it is.\n{mark.format(label)}", label) for label in short]
    solutions = [row for folder in ("math", "math500") for row in rows_of(data, folder) if row["meta"].get("solution")]
    rng.shuffle(solutions)
    yield (
        "a worked solution as label",
        [
            (f"\\boxed{{{row['answer']}}}", label_of(row["meta"]["solution"])[0])
            for row in solutions[:each]
            if label_of(row["meta"]["solution"])[1] is not None
        ],
    )


def measure_forms(data: Path, each: int) -> dict[str, Any]:
    """For each form: how many labels, how many right answers in it are accepted, and which are not."""
    measured = {}
    for name, pairs in forms(data, each):
        refused = [(text, label) for text, label in pairs if not grade_benchmark(text, label).correct]
        measured[name] = {"labels": len(pairs), "accepted": len(pairs) - len(refused), "refused": refused}
    return measured


def measure_choices(data: Path, each: int) -> dict[str, Any]:
    """Right labels that are accepted and wrong ones that are, of ANLI and of multiple choice."""
    tellings = (
        "Answer: {0}", "Answer: {0}, not {1}", "Answer: {0} (not {1})", "It is {0}, not {1}.", "Answer: {0}, neither {1} nor {2}",  # noqa: E501
        "Answer：{0}", "Answer: <{0}>", r"\boxed {{{0}}}", "<think>Answer: {1}</think>Answer: {0}", "Answer: not {1}, {0}",  # noqa: E501
    )  # fmt: skip
    rows = [row for folder in INFERENCE for row in rows_of(data, folder)]
    random.Random(0).shuffle(rows)
    counted = {"right": 0, "right_accepted": 0, "wrong": 0, "wrong_accepted": 0}
    for row in rows[:each]:
        for told in LABELS:
            others = [label for label in LABELS if label != told]
            for telling in tellings:
                kind = "right" if told == row["answer"] else "wrong"
                counted[kind] += 1
                counted[f"{kind}_accepted"] += (
                    find_label(telling.format(told.capitalize(), *others), LABELS) == row["answer"]
                )
    choices = dict.fromkeys(counted, 0)
    rng = random.Random(0)
    for label in (rng.choice("ABCDE") for _ in range(each)):
        for told in "ABCDE":
            for text in (
                rf"\boxed{{{told}}}",
                rf"\boxed{{\text{{({told})}}}}",
                rf"\boxed{{{told}) Paris}}",
                f"Answer: ({told}) 12",
                f"Answer: {told}. Rome",
                f"The answer is {told}.",
            ):
                kind = "right" if told == label else "wrong"
                choices[kind] += 1
                choices[f"{kind}_accepted"] += grade_benchmark(text, label).correct is True
    return {"anli": counted, "multiple choice": choices}


def measure_time(data: Path, other: Path, rounds: int) -> dict[str, Any]:
    """The fastest seconds of this checkout and of another, for GSM8K and for mathematics, and their ratio."""
    measured = {}
    for name, file in (("gsm8k", "gsm8k"), ("math", "math500")):
        source = str(sorted((data / file).glob("*.jsonl"))[-1].resolve())
        runs: dict[str, list[dict]] = {"this": [], "other": []}
        for turn in range(rounds):
            for checkout in ("this", "other")[:: 1 if turn % 2 else -1]:
                path = {"this": HERE, "other": other}[checkout]
                command = [sys.executable, "-c", GRADE, source, name, "1319"]
                environment = os.environ | {"PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
                done = subprocess.run(command, cwd=path, env=environment, check=True, capture_output=True)
                runs[checkout].append(json.loads(done.stdout))
        best = {checkout: min(found, key=lambda run: run["seconds"]) for checkout, found in runs.items()}
        measured[name] = best | {"ratio": best["this"]["seconds"] / best["other"]["seconds"], "rounds": rounds}
    return measured


def show(result: dict[str, Any]) -> None:
    """Print the figures as lines for people."""
    for name, found in result["answers"].items():
        print(
            f"{name}: of {found['right']} right answers in hard forms {len(found['refused'])} are refused "
            f"({len(found['refused']) / found['right']:.1%}), and of {found['wrong']} near misses {len(found['paid'])} "
            f"are paid ({len(found['paid']) / found['wrong']:.1%})"
        )
    for folder, found in result.get("changes", {}).items():
        print(
            f"{folder}: {found['labels'] - len(found['labels_refused'])} of {found['labels']} labels grade themselves "
            f"right; of {sum(found['changes'].values())} changes {found['accepted']} are accepted, "
            f"{found['wrongly_accepted']} of them wrongly ({found['share_wrongly_accepted']:.3%})"
        )
    for name, found in result.get("forms", {}).items():
        print(f"{found['accepted']} of {found['labels']}: {name}")
    for name, found in result.get("choices", {}).items():
        print(
            f"{name}: {found['right_accepted']} of {found['right']} right, {found['wrong_accepted']} of "
            f"{found['wrong']} wrong accepted"
        )
    for name, found in result.get("time", {}).items():
        print(
            f"{name}: this {found['this']['seconds']:.3f} s, other {found['other']['seconds']:.3f} s: "
            f"{found['ratio']:.3f}"
        )


def main() -> None:
    """Measure, print the figures, and write them to ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?", help="the folder of the data sets; without it, only hard forms")
    parser.add_argument("--other", type=Path, help="another checkout of this project, whose time is measured too")
    parser.add_argument("--changes", type=int, default=12, help="at most so many changes of each label")
    parser.add_argument("--each", type=int, default=200, help="so many labels for each form")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    arguments = parser.parse_args()
    wanted = (*MATHEMATICS, *INFERENCE, "gsm8k") if arguments.data else ()
    missing = [name for name in wanted if not rows_of(arguments.data, name)]
    if missing:
        raise SystemExit(
            f"{arguments.data}: no *.jsonl with rows in {', '.join(missing)}; each is a folder of JSON lines with "
            "'answer'"
        )
    started = time.perf_counter()
    result = {
        "date": date.today().isoformat(),
        "machine": f"{processor()}, Python {platform.python_version()}",
        "answers": measure_answers(),
    }
    if arguments.data:
        result["changes"] = measure_changes(arguments.data, arguments.changes, arguments.seed)
        result["forms"] = measure_forms(arguments.data, arguments.each)
        result["choices"] = measure_choices(arguments.data, arguments.each)
    if arguments.other and arguments.data:
        result["time"] = measure_time(arguments.data, arguments.other.resolve(), arguments.rounds)
    result["seconds"] = round(time.perf_counter() - started)
    show(result)
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
