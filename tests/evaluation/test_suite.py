"""The mathematics suite: grading the benchmarks' labels, unbiased pass@k, one table."""

import json
import math

import pytest
from folders import GOLDEN
from processes import maporl

from maporl.datasets.mathematics import SUITES, Mathematics, suite_tasks
from maporl.evaluation.suite import SuiteResult, markdown, pass_at_k, summarise
from maporl.grading.benchmarks import grade_benchmark
from maporl.tasks.base import TaskError
from maporl.types import Dialogue, Example, Grade, Utterance


@pytest.mark.parametrize(
    ("answer", "truth", "meta", "correct"),
    [
        # what a reader that drops what it cannot read takes for another number
        ("6", "10-4 n", {}, False), ("10-4n", "10-4 n", {}, True), ("3.5", "3,5,7", {}, False), ("3,5,7", "3,5,7", {}, True),
        ("2", "2:3", {}, False), ("2:3", "2:3", {}, True),
        ("2", r"\begin{pmatrix}1\\2\end{pmatrix}", {}, False),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", {}, True),
        # typesetting that carries no meaning
        (r"\frac{12}{5525}", r"\frac{12}{5,\!525}", {}, True), (r"\frac{12}{5552}", r"\frac{12}{5,\!525}", {}, False),
        ("30^\\circ", r"30^\circ.", {}, True), ("43_5", "43_5.", {}, True), ("E", r"\text{(E)},", {}, True),
        ("D", r"\text{(E)},", {}, False), ("7", r"7\text{ hours}.", {}, True), (r"\dfrac{14}{3}", r"\frac{14}{3}", {}, True),
        # several answers, in any order, all of them; a tolerance
        ("-2, 1", "1, -2", {"is_multiple_answer": True}, True), ("1", "1, -2", {"is_multiple_answer": True}, False),
        ("1, 1", "1, -2", {"is_multiple_answer": True}, False),
        ("(2,1), (1,2)", "(1,2), (2,1)", {"is_multiple_answer": True}, True),
        ("0.34", "0.33", {"error": "0.02"}, True), ("0.36", "0.33", {"error": "0.02"}, False), ("0.34", "0.33", {"error": ""}, False),
    ],
)  # fmt: skip
def test_traps_of_labels(answer, truth, meta, correct):
    assert grade_benchmark(rf"so \boxed{{{answer}}}", truth, meta).correct is correct


def test_the_question_may_hold_a_box_but_only_the_answer_is_read():
    task = Mathematics(eval_source="x.jsonl")
    example = Example("m", r"Earlier you found \boxed{5}. What is twice that?", "10")
    assert task.grade(example, "I do not know.").correct is False
    assert task.grade(example, r"\boxed{10}").correct is True


@pytest.mark.parametrize("name", SUITES["math"])
def test_every_label_of_the_suite_equals_itself_and_differs_from_the_next(data, name):
    task = suite_tasks("math", data, None)[name]
    (file,) = (data / SUITES["math"][name].folder).glob("test*.jsonl")
    assert len(task) == file.read_text().count("\n") >= 8
    examples = [task[i] for i in range(min(len(task), 300))]
    for example, other in zip(examples, [*examples[1:], examples[0]], strict=True):
        assert task.grade(example, rf"\boxed{{{example.answer}}}").correct is True, example.id
        verdict = task.grade(example, rf"\boxed{{{other.answer}}}").correct
        assert verdict is False or example.answer.replace(" ", "") == other.answer.replace(" ", ""), (
            example.answer,
            other.answer,
        )


def test_gsm8k_takes_the_number_after_the_hashes_and_not_another(data):
    rows = [json.loads(line) for line in (data / "gsm8k/train.jsonl").open()]
    task = Mathematics(source=str(data / "gsm8k/train.jsonl"))
    flagged = {
        json.loads(line)["id"] for line in (data / "FLAGS.jsonl").open() if '"mv_wrong_on_own_rationale"' in line
    }
    checked = [
        (row, task[i]) for i, row in enumerate(rows) if row["id"] in flagged and row["id"].startswith("gsm8k-train")
    ]
    assert len(checked) >= 15
    for row, example in checked:
        # also in gsm8k-train-00356, whose rationale computes 64 and then says 66, as its label does
        assert task.grade(example, row["meta"]["solution"]).correct is True, row["id"]


def test_pass_at_k_is_unbiased():
    """Over all ways to choose k of n samples of which c are right, the share with a right one."""
    from itertools import combinations

    for n, c, k in ((5, 2, 3), (6, 1, 2), (4, 4, 1), (4, 0, 4)):
        chosen = list(combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))


def answered(prompt, rollout, *answers):
    utterances = [Utterance(i, f"a{i}", "p", 0, 0, [], a, grade=Grade(a, a == "4", "")) for i, a in enumerate(answers)]
    return Dialogue(Example(str(prompt), "2+2=", "4"), utterances, prompt=prompt, rollout=rollout)


def test_averages_passes_and_majorities():
    dialogues = [answered(0, 0, "4"), answered(0, 1, "5"), answered(0, 2, "4"), answered(0, 3, "6")]
    dialogues += [answered(1, r, "5") for r in range(3)] + [answered(1, 3, "4")]
    result = summarise("toy", dialogues, 4)
    assert (result.questions, result.samples) == (2, 4)
    assert result.average.value == pytest.approx((0.5 + 0.25) / 2)
    assert {k: share.value for k, share in result.passed.items()} == pytest.approx(
        {1: 0.375, 2: (1 - 1 / 6 + 0.5) / 2, 4: 1.0}
    )
    assert result.majority.value == pytest.approx(0.5)
    low, high = result.average.interval()
    assert low < 0.375 < high
    table = markdown([result, result])
    assert "| benchmark | questions | avg@4 | pass@1 | pass@2 | pass@4 | maj@4 |" in table
    assert table.splitlines()[-1].startswith("| mean | | 37.5 | 37.5 | 66.7 | 100.0 | 50.0 |")
    assert json.loads(json.dumps(result.to_json()))["pass@4"]["value"] == 1.0


def test_a_team_answers_with_its_plurality():
    result = summarise("toy", [answered(0, 0, "4", "4", "5"), answered(1, 0, "4", "5")], 1)
    assert result.average.value == pytest.approx((1 + 0.5) / 2) and math.isclose(result.passed[1].value, 0.5)
    assert isinstance(result, SuiteResult)


def test_a_folder_without_a_benchmark_is_named(tmp_path):
    with pytest.raises(TaskError, match=r"gsm8k: no test\*\.jsonl there; expected a folder for each of gsm8k, math500"):
        suite_tasks("math", tmp_path, None)


@pytest.mark.slow
def test_the_command_prints_one_table_or_json(tmp_path):
    from maporl.config.parse import to_yaml
    from maporl.methods.tiny_versions import tiny_version
    from maporl.validation.load import from_dict

    file = tmp_path / "c.yaml"
    file.write_text(to_yaml(from_dict(tiny_version("grpo", str(tmp_path / "run")))))

    def evaluate(suite, *options):
        return maporl("eval", file, "--suite", suite, "--suite-data", GOLDEN / "data", "--limit", 2, *options)

    done = evaluate("math", "--samples", 2)
    rows = [line.split("|")[1].strip() for line in done.stdout.strip().splitlines()]
    assert rows == ["benchmark", "---", *SUITES["math"], "mean"], done.stderr
    records = json.loads(evaluate("math", "--samples", 2, "--json").stdout)
    assert [r["benchmark"] for r in records] == list(SUITES["math"]) and records[0]["samples"] == 2
    wrong = evaluate("mat")
    assert wrong.returncode == 2 and "--suite: unknown 'mat'; did you mean 'math'" in wrong.stderr
