"""Grading faults of the original, tasks from files, and evaluation by hand."""

import json
import random
from pathlib import Path

import pytest

from maporl.evaluation import evaluate_dialogues
from maporl.grading import find_label, grade_label, grade_mathematics
from maporl.tasks import ANLI, GSM8K, Arithmetic, TaskError
from maporl.types import Dialogue, Example, Grade, Utterance

DATA = Path(__file__).parents[2] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.exists(), reason="the real data are not in this checkout")


@pytest.mark.parametrize(
    ("text", "truth", "answer", "correct"),
    [
        ("2 + 3 = 5 apples", "235", "5", False),
        ("2 + 3 = 5 apples", "5", "5", True),
        ("The answer is 1,234.", "1234", "1234", True),
        ("Answer: 3.0", "3", "3", True),
        (r"\boxed{\frac{1}{2}}", "0.5", "1/2", True),
        (r"\boxed{\frac{\sqrt{4}}{2}}", "1", r"\frac{\sqrt{4}}{2}", True),
        ("so #### 1,200", "1200", "1200", True),
        ("#### -7", "7", "-7", False),
        (r"first \boxed{3}, then \boxed{4}", "4", "4", True),
        (r"\boxed{12 \text{ apples}}", "12", "12", True),
        ("Answer: $18 dollars", "18", "18", True),
        ("The final answer is **42**.", "42", "42", True),
        ("Answer: 10-4", "6", "10-4", True),
        ("Answer: 110\n10", "110", "110", True),
        ("I think it is 42", "42", None, False),
        ("42", "42", "42", True),
        ("", "42", None, False),
        ("Answer:", "42", None, False),
    ],
)  # fmt: skip
def test_a_final_answer_is_what_the_grammar_says(text, truth, answer, correct):
    grade = grade_mathematics(text, truth)
    assert (grade.answer, grade.correct) == (answer, correct)


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("not entailment, it is a contradiction", "contradiction"),
        ("It isn't neutral. Answer: entailment", "entailment"),
        (r"\boxed{neutral}", "neutral"),
        ("Neither an entailment nor a contradiction: neutral", "neutral"),
        ("entailment", "entailment"),
        ("entailment or neutral", None),
        ("The contradictions are many", None),
        ("", None),
    ],
)
def test_a_label_is_asserted_once_and_not_negated(text, label):
    assert find_label(text, ("entailment", "neutral", "contradiction")) == label


def test_a_label_outside_the_set_cannot_be_graded():
    assert grade_label("neutral", "maybe", ("neutral",)).correct is None


def test_sums_are_held_out_and_never_trained_on():
    train, held_out = Arithmetic(largest=49), Arithmetic(largest=49, split="eval")
    assert (len(train), len(held_out)) == (2000, 500)
    assert not {e.id for e in train} & {e.id for e in held_out}
    example = train[0]
    assert train.grade(example, example.answer).correct
    wrong = train.write_answer(example, random.Random(0), right=False)
    assert train.grade(example, wrong).correct is False
    assert train.grade(example, "").answer is None


def test_local_rows_are_read_as_the_hub_writes_them(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        json.dumps({"question": "How many?", "answer": "2 and 3 make 1,205\n#### 1,205"}) + "\n\n"
        + json.dumps({"id": "x", "question": "More?", "answer": "7"}) + "\n"
    )  # fmt: skip
    task = GSM8K(source=str(path))
    assert [(e.id, e.answer) for e in task] == [("gsm8k-0", "1205"), ("x", "7")]
    assert task.question(task[1]).startswith("More?\n\n") and "Answer: <number>" in task.question(task[1])
    with pytest.raises(TaskError, match=r"is one file and has no test split; set task\.eval_source"):
        len(GSM8K(source=str(path), split="eval"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no rows"),
        ('{"question": "?", "answer": ""}', r"row 1 \(gsm8k-0\) has no answer; remove the row or fill it in"),
        ('{"answer": "3"}', "row 1 .* has no question"),
        ("{broken", "line 1 is not JSON"),
        ("[1, 2]", "line 1: expected an object with 'question' and 'answer', got list"),
    ],
)
def test_rows_that_cannot_serve_are_named(tmp_path, content, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(TaskError, match=message):
        len(GSM8K(source=str(path)))
    with pytest.raises(TaskError, match="no such file"):
        len(GSM8K(source=str(tmp_path / "absent.jsonl")))


def test_anli_reads_both_forms(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"uid": "u", "premise": "P.", "hypothesis": "H.", "label": 2}))
    (example,) = ANLI(source=str(path))
    assert (example.question, example.answer) == ("Premise: P.\nHypothesis: H.", "contradiction")
    assert ANLI(source=str(path)).grade(example, "Answer: contradiction").correct


@needs_data
def test_every_gold_solution_of_gsm8k_is_right():
    task = GSM8K(source=str(DATA / "gsm8k/train.jsonl"))
    assert len(task) == 7473
    wrong = [e.id for e in task if not task.grade(e, f"Reasoning.\nAnswer: {e.answer}").correct]
    assert wrong == []


@needs_data
def test_every_gold_label_of_anli_is_right():
    task = ANLI(source=str(DATA / "anli_r1/dev_dev.jsonl"))
    assert all(task.grade(e, f"Because.\nAnswer: {e.answer}").correct for e in task)


def dialogue(number, *turns):
    """``turns``: for each turn, agent -> answer; the truth is 4."""
    utterances = [
        Utterance(
            i, agent, agent, turn, turn, [], answer or "", grade=Grade(answer, answer == "4", ""), response_ids=[1, 2]
        )
        for turn, answers in enumerate(turns)
        for i, (agent, answer) in enumerate(answers.items())
    ]
    return Dialogue(Example(str(number), "2+2=", "4"), utterances)


def test_an_evaluation_counts_accuracy_votes_agreement_and_flips():
    result = evaluate_dialogues([
        dialogue(0, {"a": "4", "b": "5"}, {"a": "4", "b": "4"}),
        dialogue(1, {"a": "5", "b": "5"}, {"a": "4", "b": "5"}),
        dialogue(2, {"a": "4", "b": None}, {"a": "5", "b": "4"}),
    ])  # fmt: skip
    first, last = result.turns
    assert (first.agents["a"].value, first.agents["b"].value, first.team.value) == pytest.approx((2 / 3, 0.0, 1 / 3))
    # ties: 4 against 5 is worth one half; 4 against nothing wins; 5 and 5 is wrong
    assert (first.majority.count, last.majority.count) == (0.5 + 0 + 1, 1 + 0.5 + 0.5)
    assert (first.agreement.count, last.agreement.count) == (1, 1)
    flips = result.flips[0]
    assert (flips.wrong_to_right, flips.right_to_wrong, flips.stayed_right, flips.stayed_wrong) == (3, 1, 1, 1)
    assert (result.questions, result.tokens, result.final().value) == (3, 24, pytest.approx(4 / 6))
    assert type(result).from_json(result.to_json()) == result
    low, high = result.final().interval()
    assert (round(low, 3), round(high, 3)) == (0.300, 0.903)
