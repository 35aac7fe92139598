"""Grading faults of the original, tasks from files, and evaluation by hand."""

import dataclasses
import json
import random

import pytest

from maporl import Arithmetic
from maporl.evaluation.metrics import evaluate_dialogues
from maporl.grading import canonical, find_label, grade_mathematics, same_answer
from maporl.studies.crossplay.result import final_right
from maporl.tasks import ANLI, GSM8K, Mathematics, TaskError, TinyGSM
from maporl.types import Dialogue, Example, Grade, Utterance


@pytest.mark.parametrize(
    ("text", "truth", "answer", "correct"),
    [
        ("2 + 3 = 5 apples", "235", "5", False),
        ("The answer is 1,234.", "1234", "1234", True),
        (r"\boxed{\frac{1}{2}}", "0.5", "1/2", True),
        (r"\boxed{\frac{\sqrt{4}}{2}}", "1", r"\frac{\sqrt{4}}{2}", True),
        ("so #### 1,200", "1200", "1200", True),
        ("#### -7", "7", "-7", False),
        (r"first \boxed{3}, then \boxed{4}", "4", "4", True),
        (r"\boxed{12 \text{ apples}}", "12", "12", True),
        ("Answer: $18 dollars", "18", "18", True),
        ("The final answer is **42**.", "42", "42", True),
        ("Answer: 10-4", "6", "6", True),
        ("Answer: 110\n10", "110", "110", True),
        ("I think it is 42", "42", None, False),
        ("", "42", None, False),
        ("Answer:", "42", None, False),
    ],
)  # fmt: skip
def test_a_final_answer_is_what_the_grammar_says(text, truth, answer, correct):
    grade = grade_mathematics(text, truth)
    assert (grade.answer, grade.correct) == (answer, correct)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 5. No wait, the final answer is 6.", "6"),
        ("Answer: 5\n\nI hope the answer is correct.", "5"),
        ("#### Step 1: add\n2+3=5\nAnswer: 5", "5"),
        ("Answer: 6\nI do not think the answer is 5.", "6"),
        ("Answer: 5\nNo, the answer is 6 because 5+1=6.", "6"),
        ("Answer: x = 5", "5"),
        (r"Answer: $7 \times 3 = 21$", "21"),
        ("7*3 = 21", "21"),
        ("Answer: 2 + 3 = 5 apples", "5"),
        ("The answer is $5$ dollars.", "5"),
        ("1=2=3=4=5", None),
        ("Answer: 4 = 5", None),
        ("Answer: $5$ $6$ $7$", None),
        ("Answer: 5 because 4+2=6", None),
        ("Answer: 5 6", None),
        ("Answer: 5?", None),
        ("5\napples", None),
        ("Answer: " + "9" * 5000, None),
        ("9" * 5000, None),
        ("Answer: 9^{9^{9}}", None),
        ("Answer: (x+y+z)^{9^{99}}", None),
        ("Answer: ((99!)!)", None),
    ],
)
def test_a_mark_counts_if_one_answer_follows_it(text, answer):
    grade = grade_mathematics(text, "5")
    assert (grade.answer, grade.correct) == (answer, answer == "5")
    assert grade.reason


@pytest.mark.parametrize(
    "written",
    [
        "5 thousand", "5 hundred", "5 million", "5 minus three", "5 squared", "5 halves", "5 thirds", "5 or six",
        "5 not six", "5 to six", "5 plus", "5 point five", "5 too few", "5 is wrong", "5 dozen", "5 k", "5K", "5x", "5 x",
        "5xy", "5²", "5½", "5 pi", "5+", "5...", "–5", "5 (six)", "5 1/2", "5/2 cups", "5e1", "5 & 6", "5, 6", "<5", "±5",
        r"5 \cup 6", "5_6", "x+y=5", "5 万", r"5 \text{ or } 6", "-–5", "5..6", "5 feet nine inches",
    ],
)  # fmt: skip
def test_what_only_begins_with_the_right_number_is_wrong(written):
    for text in (f"Answer: {written}", f"#### {written}", rf"\boxed{{{written}}}", written):
        assert grade_mathematics(text, "5").correct is False


@pytest.mark.parametrize(
    ("written", "truth"),
    [
        ("1e3", "1000"), ("1/2 cup", "0.5"), ("–5", "-5"), ("−5", "-5"), ("about 5", "5"), ("5 (five)", "5"),
        ("42 (forty-two) days", "42"), ("3 1/2", "3.5"), ("-3 1/2 hours", "-3.5"), ("2 dozen", "24"), ("5 thousand", "5000"),
        ("$1.5 million", "1500000"), ("5 hundred dollars", "500"), ("5€", "5"), ("5 km/h", "5"), ("12km", "12"),
        ("5 m²", "5"), ("20%", "20"), (r"45^\circ", "45"), ("5 times", "5"), ("$3 a day", "3"), ("5 of the apples", "5"),
        (r"5\text{ cm}", "5"), (r"\frac12", "0.5"), ("10:1", "10:1"), ("(2+4)/3", "2"), ("10^{3}", "1,000"),
    ],
)  # fmt: skip
def test_a_number_is_read_in_all_its_spellings(written, truth):
    assert grade_mathematics(rf"\boxed{{{written}}}", truth).correct is True


def test_votes_compare_values():
    spellings = ["5", "5.0", "5€", "$5", "5 apples", "2+3", "10/2", "(1+4)*1", "–-5"]
    assert [canonical(s) for s in spellings] == ["5"] * 8 + ["–-5"]
    assert canonical("1/(2-2)") == "1/(2-2)"
    assert canonical("2**99999") == "2**99999"


def test_what_would_compute_for_ever_is_not_computed():
    """Without the limits on what is computed this test does not end."""
    assert same_answer("9^{9^{9}}", "5") is False
    assert same_answer("99999999!", "5") is False
    assert same_answer("5", "9^{9^{9}}") is None
    assert same_answer("x" * 201, "5") is False
    assert grade_mathematics(r"\boxed{" * 20_000, "5").answer is None
    assert grade_mathematics("the answer is " * 5_000, "5").answer is None
    assert grade_mathematics("Answer: " + "**a " * 25_000, "5").answer is None


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("not entailment, it is a contradiction", "contradiction"),
        ("It isn't neutral. Answer: entailment", "entailment"),
        (r"\boxed{neutral}", "neutral"),
        ("Neither an entailment nor a contradiction: neutral", "neutral"),
        ("entailment", "entailment"),
        ("neither entailment nor neutral but contradiction", "contradiction"),
        ("Answer: neutral because the premise does not say so", "neutral"),
        ("Answer: **Neutral** (the premise is not clear)", "neutral"),
        ("Answer: neutral\nI hope the answer is correct.", "neutral"),
        ("It is entailment rather than neutral", "entailment"),
        ("This is not necessarily entailment.", None),
        ("I don't think it is entailment", None),
        ("I do not think the answer is entailment", None),
        ("It cannot be entailment", None),
        ("non-entailment", None),
        ("anything but neutral", None),
        ("entailment: no", None),
        ("Is it entailment? I cannot say", None),
        ("entailment or neutral", None),
        ("The contradictions are many", None),
        ("", None),
    ],
)
def test_a_label_is_asserted_once_and_not_negated(text, label):
    assert find_label(text, ("entailment", "neutral", "contradiction")) == label


def test_sums_are_held_out_and_never_trained_on():
    train, held_out = Arithmetic(largest=49), Arithmetic(largest=49, split="eval")
    assert (len(train), len(held_out)) == (2000, 500)
    assert not {e.id for e in train} & {e.id for e in held_out}
    operands = [{frozenset(map(int, e.id.split("+"))) for e in task} for task in (train, held_out)]
    assert not operands[0] & operands[1], "3+4 and 4+3 are on the same side"
    assert len(operands[0]) + len(operands[1]) == 1275
    example = train[0]
    assert train.grade(example, example.answer).correct
    wrong = train.write_answer(example, random.Random(0), right=False)
    assert train.grade(example, wrong).correct is False
    assert train.grade(example, "").answer is None


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("largest", "held_out", "count"), [(1, 0.2, 1), (4, 0.2, 5), (9, 0.2, 20), (49, 0.1, 250)])
@pytest.mark.parametrize("operation", ["sum", "times"])
def test_the_share_of_held_out_pairs_is_kept(operation, largest, held_out, count, seed):
    options = {"operation": operation, "largest": largest, "held_out": held_out, "seed": seed}
    train, evaluation = Arithmetic(**options), Arithmetic(**options, split="eval")
    assert (len(train), len(evaluation)) == ((largest + 1) ** 2 - count, count)
    told = [
        {tuple(sorted(e.id.split("+" if operation == "sum" else "*"))) for e in task} for task in (train, evaluation)
    ]
    assert not told[0] & told[1]


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
        ('{"question": "?", "answer": ""}', r"row 1 \(gsm8k-0\) has no answer; remove or fill it"),
        (
            '{"answer": "3"}',
            "no column 'question'; it has answer: set task.question_column: the one with the questions",
        ),
        (
            '{"problem": "?", "final": "3", "level": 1}',
            "no column 'question' and 'answer'; it has problem, final, level: set task.question_column: "
            "problem and task.answer_column: final",
        ),
        ('{"question": "?", "anwser": "3"}', "no column 'answer'; .*: set task.answer_column: anwser"),
        ("{broken", "line 1: cannot be read as JSON"),
        (
            json.dumps({"question": "?", "answer": "5" * 10_001}),
            "has an answer of 10001 characters; expected at most 10000",
        ),
        ("[1, 2]", "line 1: expected an object with a field for each column, got list"),
    ],
)
def test_rows_that_cannot_serve_are_named(tmp_path, content, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(TaskError, match=message):
        len(GSM8K(source=str(path)))
    with pytest.raises(TaskError, match="no such file"):
        len(GSM8K(source=str(tmp_path / "absent.jsonl")))


@pytest.mark.parametrize(
    "content, message",
    [
        (rb'{"id": "a\ud800", "question": "1+1=", "answer": "#### 2"}', "line 1 has half of a surrogate pair"),
        (rb'{"question": "1\udfff1=", "answer": "#### 2"}', "line 1 has half of a surrogate pair"),
        (
            rb'{"question": "1+1=", "answer": "#### 2", "more": {"a": ["\ud800"]}}',
            "line 1 has half of a surrogate pair",
        ),
        (b'{"question": "\xff", "answer": "#### 2"}', "cannot be read: .*; save it as UTF-8"),
        (b"[" * 100_000, "line 1: cannot be read as JSON"),
        (b'{"question": ' + b"9" * 5000 + b"}", "line 1: cannot be read as JSON"),
    ],
    ids=lambda value: repr(value[:30]),
)
def test_a_line_that_no_tokenizer_can_read_is_named_before_a_run(tmp_path, content, message):
    (tmp_path / "rows.jsonl").write_bytes(content + b"\n")
    with pytest.raises(TaskError, match=message) as caught:
        len(GSM8K(source=str(tmp_path / "rows.jsonl")))
    assert str(caught.value).isprintable()


def test_whole_characters_and_odd_names_are_read(tmp_path):
    names = ["\U0001f600", "a literal \\ud83d", "a\x00b", "\x1b[31m", 5, {"a": 1}, "x" * 10_000]
    rows = [json.dumps({"id": name, "question": "1+1=", "answer": "#### 2"}) for name in names]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    assert [example.id for example in GSM8K(source=str(tmp_path / "rows.jsonl"))] == [str(name) for name in names]


def test_anli_reads_both_forms(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"uid": "u", "premise": "P.", "hypothesis": "H.", "label": 2}))
    (example,) = ANLI(source=str(path))
    assert (example.question, example.answer) == ("Premise: P.\nHypothesis: H.", "contradiction")
    assert ANLI(source=str(path)).grade(example, "Answer: contradiction").correct


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"question": "?", "answer": "maybe"},
            r"rows\.jsonl: row 2 \(anli-1\) has the label 'maybe'; expected entailment, ne",
        ),
        ({"premise": "P.", "hypothesis": "H.", "label": -1}, r"row 2 \(anli-1\) has the label -1; expected entailment"),
        ({"premise": "P.", "hypothesis": "H."}, r"row 2 \(anli-1\) has no answer"),
    ],
)
def test_a_label_that_anli_does_not_know_is_refused_at_load(tmp_path, row, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "?", "answer": "neutral"}) + "\n" + json.dumps(row))
    with pytest.raises(TaskError, match=message):
        len(ANLI(source=str(path)))


def test_zero_is_an_answer(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "How many?", "answer": 0}')
    (example,) = GSM8K(source=str(path))
    assert example.answer == "0"
    assert GSM8K(source=str(path)).grade(example, "Answer: 0").correct


def test_every_gold_solution_of_gsm8k_is_right(data):
    file = data / "gsm8k/train.jsonl"
    task = GSM8K(source=str(file))
    assert len(task) == file.read_text().count("\n") > 50
    wrong = [
        e.id
        for e in task
        for text in (f"Reasoning.\nAnswer: {e.answer}", task.solution(e), e.meta["solution"])
        if not task.grade(e, text).correct
    ]
    assert wrong == []


def test_every_gold_label_of_anli_is_right(data):
    task = ANLI(source=str(data / "anli_r1/dev_dev.jsonl"))
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


def test_a_dialogue_in_which_nobody_answers_is_wrong():
    silent = Dialogue(Example("1", "2+2=", "4"), [Utterance(0, "a", "p", 0, 0, [], "", answers=False)])
    for dialogues, share in (([silent, dialogue(0, {"a": "4"})], 0.5), ([silent], 0.0)):
        found = evaluate_dialogues(dialogues)
        assert found.final().value == found.turns[0].majority.value == share
    assert (final_right(silent), final_right(dialogue(0, {"a": "4"}))) == (0.0, 1.0)
    open_ended = Dialogue(Example("1", "Write.", ""), silent.utterances)
    for other in (open_ended, dataclasses.replace(silent, lost=("shop",))):
        assert evaluate_dialogues([other, dialogue(0, {"a": "4"})]).turns[0].team.total == 1
        assert final_right(other) is None


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
    assert (round(low, 3), round(high, 3)) == (0.208, 0.939)  # Wilson's at 2/3 of 3 questions


STRANGE = [None, True, 5, -1, 10**30, 2.5, "", " ", [], [1], {}, {"a": 1}, "x", {"code": 5}, {"code": ["a"]}]
ROWS = {
    GSM8K: {"id": "1", "question": "q", "answer": "#### 5", "meta": {"a": 1}},
    Mathematics: {"id": "1", "question": "q", "problem": "q", "answer": "5", "solution": "5", "level": "Level 1"},
    TinyGSM: {"id": "1", "question": "q", "meta": {"code": "def f():\n    return 1"}},
    ANLI: {"uid": "1", "premise": "p", "hypothesis": "h", "label": 0},
}


@pytest.mark.parametrize("task", ROWS, ids=lambda task: task.__name__)
def test_a_row_with_a_strange_or_a_missing_value_serves_or_is_named(task, tmp_path, monkeypatch):
    monkeypatch.setenv("MAPORL_CACHE", str(tmp_path / "cache"))
    options = {"held_out": 1, "max_dropped": 0.99} if task is TinyGSM else {}
    row, refused, served = ROWS[task], 0, 0
    changed = [row | {key: value} for key in row for value in STRANGE]
    changed += [{name: value for name, value in row.items() if name != key} for key in row]
    for number, strange in enumerate(changed):
        others = [row | {"question": text, "problem": text} for text in ("other", "third")]
        file = tmp_path / f"{number}.jsonl"
        file.write_text("\n".join(json.dumps(one) for one in [strange, *others]))
        try:
            made = task(source=str(file), **options)
            for example in made:
                made.question(example)
                made.grade(example, "5")
            served += 1
        except TaskError as error:
            assert "\n" not in str(error)
            refused += 1
    assert (refused > 0) == (task is not TinyGSM) and served > 5  # TinyGSM counts what it drops
