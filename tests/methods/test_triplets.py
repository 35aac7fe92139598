"""Code triplets and Absolute Zero: what is proposed is run, answers are graded by the program, and what everybody is
paid."""

import json
import random
import string

import pytest
from scripted_training import recipe_values, rows, scripted_trainer

from maporl import Example, TaskError, Triplets
from maporl.config.parse import read_yaml
from maporl.config.recipes import recipe_file
from maporl.errors import ConfigError
from maporl.methods.triplets import TripletTool
from maporl.run import ResolvedRun
from maporl.sandbox.pool import SandboxPool
from maporl.sandbox.triplets import induction, pair, same
from maporl.tasks import build_task
from maporl.validation.load import from_dict

HALVES = "```python\ndef f(x):\n    return x // 2\n```"
INPUTS = "".join(f"```input\n{n}\n```\n" for n in range(10))


@pytest.fixture(scope="module")
def pool():
    made = SandboxPool(workers=1)
    yield made
    made.close()


# -- proposals --------------------------------------------------------------------------------------------------------


def test_a_program_is_run_for_its_output(pool):
    made, program = (
        pair(pool, f"I think so:\n{HALVES}\n```input\n 7 \n```", "deduction"),
        "def f(x):\n    return x // 2",
    )
    assert made["answer"] == "3" and "3" not in made["question"]
    assert "f(7)" in made["question"] and program in made["question"]
    assert made["meta"] == {"kind": "deduction", "program": program, "input": "7", "output": "3"}
    found = pair(pool, f"{HALVES}```input\n7\n```", "abduction")
    assert found["answer"] == "7" and "f have the value 3" in found["question"] and "7" not in found["question"]


@pytest.mark.parametrize(
    "said, words",
    [
        ("no program", "expected a ```python block"),
        (HALVES, "and an ```input block"),
        (f"{HALVES}\n```input\nprint(1)\n```", "no arguments that are literals"),
        (f"{HALVES}\n```input\n'a'\n```", "the program fails"),
        ("```python\nf = lambda x: f\n```\n```input\n1\n```", "value is not a literal"),
        ("```python\nimport random\ndef f(x):\n    random.seed()\n    return x\n```\n```input\n1\n```", "chance that nobody seeds"),
        ("```python\ndef f(x):\n    while x: pass\n```\n```input\n1\n```", "the program fails"),
    ],
    ids=["nothing", "no-input", "no-literal", "error", "no-value", "chance", "endless"],
)  # fmt: skip
def test_what_is_not_valid_is_refused(pool, said, words):
    with pytest.raises(ValueError, match=words):
        pair(pool, said, "deduction")


def test_a_program_that_has_another_value_each_time_is_refused(pool):
    """By two runs, where its text does not tell: here by the clock, under another name."""
    said = "```python\ndef f(x):\n    return getattr(__import__('time'), 'monotonic' + '_ns')()\n```\n```input\n1\n```"
    with pytest.raises(ValueError, match="another value each time"):
        pair(pool, said, "deduction")


def test_induction_needs_ten_inputs_and_a_message(pool):
    program = "def f(x):\n    return x // 2"
    made = induction(pool, f"{INPUTS}```message\nHalves.\n```", program)
    assert made["answer"] == program and made["question"].startswith("Halves.\n\nf(0) == 0\nf(1) == 0\n")
    assert "f(4) == 2" in made["question"] and "f(5)" not in made["question"] and "//" not in made["question"]
    assert made["meta"]["shown"] == [["0", "0"], ["1", "0"], ["2", "1"], ["3", "1"], ["4", "2"]]
    assert made["meta"]["hidden"] == [["5", "2"], ["6", "3"], ["7", "3"], ["8", "4"], ["9", "4"]]
    for said in (INPUTS, f"{INPUTS}```input\n1\n```\n```message\nm\n```", f"{INPUTS}```message\n \n```"):
        with pytest.raises(ValueError, match="expected 10 ```input blocks"):
            induction(pool, said, program)


# -- the task ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["deduction", "abduction", "induction"])
def test_every_right_answer_of_the_task_is_right(kind):
    train, held_out = (build_task({"name": "triplets", "kind": kind}, split, 3) for split in ("train", "eval"))
    assert (len(train), len(held_out)) == ((18, 6) if kind == "induction" else (180, 60))
    assert not {e.meta["program"] for e in train} & {e.meta["program"] for e in held_out}
    for example in random.Random(1).sample(list(train), 9):
        assert train.grade(example, train.solution(example)).correct is True, example
    told = train[0].meta["document"]
    assert told.count("```output") == (0 if kind == "induction" else 6)


def graded(kind, text, **meta):
    known = {
        "kind": kind,
        "program": "def f(x, y=0):\n    return abs(x) + y",
        "output": "3",
        "shown": [["-4", "4"]],
        "hidden": [["3", "3"], ["-2, 1", "3"]],
    }
    grade = Triplets().grade(Example("e", "q", "", known | meta), text)
    return grade.answer, grade.correct


def test_answers_are_graded_by_the_program():
    assert graded("deduction", "<answer>3</answer>") == ("3", True)
    assert graded("deduction", "<answer>1</answer> no, <answer>```output\n3\n```</answer>") == ("3", True), (
        "the last one"
    )
    assert graded("deduction", "<answer>1 + 2</answer>") == ("1 + 2", False), "a value and no computation"
    assert graded("deduction", "3") == (None, False)
    assert graded("deduction", "<think><answer>3</answer></think>") == (None, False)
    assert graded("abduction", "<answer>-3</answer>") == ("-3", True), "any input with this output"
    assert graded("abduction", "<answer>1, 2</answer>")[1] and not graded("abduction", "<answer>4</answer>")[1]
    assert graded("abduction", "<answer>3) or (f(</answer>")[1] is False
    right = "<answer>```python\ndef f(x, y=0):\n    return max(x, -x) + y\n```</answer>"
    assert graded("induction", right)[1] is True
    assert graded("induction", right.replace("max(x, -x)", "x"))[1] is False, "one hidden output differs"
    assert graded("induction", "<answer>abs</answer>") == ("abs", False)
    constant = right.replace("max(x, -x) + y", "3")
    assert graded("induction", constant)[1] is False, "it has the hidden outputs, and not the one that is shown"
    assert graded("induction", constant, shown=[["5", "3"]])[1] is True


def test_values_are_compared_and_not_texts():
    assert same("{'a': 1, 'b': [2]}", "{'b': [2],'a':1}") and not same("1", "'1'") and not same("x", "x")
    assert not same("[" * 9999, "[" * 9999)


def test_a_source_of_ones_own(tmp_path):
    file = tmp_path / "programs.jsonl"
    row = {"program": "def f(a, b):\n    return a + b", "inputs": [f"{n}, 1" for n in range(10)], "message": "Sum."}
    file.write_text("\n".join(json.dumps(row | {"program": row["program"] + f" + {n}"}) for n in range(4)))
    task = Triplets(kind="induction", source=str(file))
    assert len(task) == 3 and task[0].question.startswith("Sum.\n\nf(0, 1) == ")
    file.write_text(json.dumps(row | {"inputs": ["1"]}))
    with pytest.raises(TaskError, match="row 1: expected a program that defines f, and 10 inputs"):
        len(Triplets(source=str(file)))
    file.write_text(json.dumps(row | {"program": "def f(a): return a"}))
    with pytest.raises(TaskError, match="row 1: the program fails"):
        len(Triplets(source=str(file)))
    with pytest.raises(ValueError, match="references: expected a whole number of at least 1, got 0"):
        Triplets(references=0)
    with pytest.raises(ValueError, match="held_out: expected a number above 0 and below 1, got 1"):
        Triplets(held_out=1)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"workers": 1.5}, r"tools.triplet.options.workers: expected a whole number, got 1.5"),
        ({"workers": 0}, r"tools.triplet.options: workers: expected at least 1, got 0"),
    ],
)
def test_options_of_a_tool_have_types(options, words, tmp_path):
    values = recipe_values("absolute_zero", tmp_path)
    values["tools"]["triplet"] = {"use": "triplet", "options": options}
    with pytest.raises(ConfigError, match=words):
        ResolvedRun(from_dict(values, "test")).open_tools()


def test_answers_are_graded_under_the_limits_of_the_tool():
    """150 MiB are too much where the tool allows 128, and not where it allows 512: what a tool can run, a solver can
    answer."""
    code = "def f(x):\n    return len(bytearray(150 << 20)) // x"
    said = f"```python\n{code}\n```\n```input\n1024\n```"
    wide, narrow = TripletTool(memory_mb=512, workers=1), TripletTool(memory_mb=128, workers=1)
    made = wide.tools()[0].run(said=said, kind="abduction").value
    with pytest.raises(ValueError, match="the program fails"):
        narrow.tools()[0].run(said=said, kind="abduction")
    example = Example("e", made["question"], made["answer"], made["meta"])
    assert Triplets(kind="abduction").grade(example, "<answer>1024</answer>").correct is True
    tight = example.meta | {"limits": example.meta["limits"] | {"memory_mb": 128}}
    assert Triplets(kind="abduction").grade(Example("e", "", "", tight), "<answer>1024</answer>").correct is False
    wide.close()
    narrow.close()


def test_what_the_tool_is_told_must_be_in_the_example(tmp_path):
    message = r"check_about: question \w+/.* has no 'level' in its meta, but \['document', 'input', 'kind'"
    with pytest.raises(ConfigError, match=message):
        batch_of(tmp_path, lambda request: "no", protocol={"check_about": ["level"]})


# -- Absolute Zero ----------------------------------------------------------------------------------------------------


KINDS = {kind: {"name": "triplets", "kind": kind} for kind in ("deduction", "abduction")}


def batch_of(tmp_path, script, tasks=KINDS, questions=1, **sections):
    """The scored batch of the recipe with its own tool and these tasks, and its trainer."""
    values = recipe_values("absolute_zero", tmp_path, questions, **sections)
    own = read_yaml(recipe_file("absolute_zero"))
    values |= {
        "protocol": own["protocol"] | sections.get("protocol", {}),
        "tools": {"triplet": {"use": "triplet", "options": {"workers": 1, "wall_seconds": 60.0}}},  # of a busy machine
    }
    values["task"] = {"name": "mixture", "tasks": tasks}
    values["agent_defaults"]["tiny"]["alphabet"] = string.printable[:95] + "\n"
    trainer = scripted_trainer(values, script)
    return trainer, trainer.score(trainer.collected())


def by_kind(right):
    """A script that proposes a valid triplet for each kind, of whose eight tries the first ``right[kind]`` are right,
    then some wrong, and the last one unreadable."""
    answers = {"deduction": "3", "abduction": "6"}

    def script(request):
        kind = request.example.meta["kind"]
        if request.ask.role == "proposer":
            return f"{HALVES}\n```input\n7\n```"
        if request.turn < right[kind]:
            return f"<answer>{answers[kind]}</answer>"
        return "<answer>99</answer>" if request.turn < 7 else "?"

    return script


@pytest.mark.parametrize("right, paid", [(2, 0.75), (7, 0.125), (0, -0.5), (8, -0.5)])
def test_absolute_zero_pays_both_roles_as_the_published_code(tmp_path, right, paid):
    """Shares 1/4, 7/8, 0 and 1 of right tries: .75, .125, -.5 and -.5. Tries: 1, -.5 if wrong, -1 if unreadable."""
    _, batch = batch_of(tmp_path, by_kind({"deduction": right, "abduction": right}))
    proposal, *tries = batch.dialogues[0].utterances
    assert proposal.rewards["credit"] == pytest.approx(paid) and batch.dialogues[0].outcome == "asked"
    wrong = [-0.5] * (7 - right) + [-1.0] if right < 8 else []
    assert [u.rewards["credit"] for u in tries] == [1.0] * right + wrong


def test_what_is_not_valid_costs_one_and_is_not_asked(tmp_path):
    said = "```python\ndef f(x):\n    return x + y\n```\n```input\n7\n```"
    _, batch = batch_of(tmp_path, lambda request: said)
    (proposal,) = batch.dialogues[0].utterances
    assert proposal.rewards["credit"] == -1.0 and batch.dialogues[0].outcome == "refused"
    assert proposal.calls[0].result.error == "raised" and "the program fails" in proposal.calls[0].result.text


def test_proposals_are_run_and_answers_graded_in_the_sandbox(tmp_path):
    """Induction of absolute_zero: the solver sees the message and five pairs, and its program is tried on the others."""
    asked = []

    def script(request):
        if request.ask.role == "proposer":
            return f"{INPUTS}```message\nIt is small.\n```"
        asked.append(request.ask.messages[-1]["content"])
        program = request.example.meta["program"] if request.turn % 2 else "def f(x): return 0"
        return f"<answer>```python\n{program}\n```</answer>"

    ints = {"name": "triplets", "kind": "induction", "source": str(tmp_path / "ints.jsonl")}
    row = {"inputs": [str(n) for n in range(10)], "message": "m"}
    programs = [json.dumps(row | {"program": f"def f(x): return x + {n}"}) for n in (1, 2, 3)]
    (tmp_path / "ints.jsonl").write_text("\n".join(programs))
    _, batch = batch_of(tmp_path, script, {"a": ints, "b": ints})
    proposal, *tries = batch.dialogues[0].utterances
    assert [u.grade.correct for u in tries] == [False, True] * 4 and proposal.rewards["credit"] == 0.5
    assert len(set(asked)) == 1 and asked[0].startswith("It is small.\n\nf(0) == ") and "return" not in asked[0]
    assert all("document" not in u.example.meta and u.example.meta["task"] in ("a", "b") for u in tries)


def test_absolute_zero_whitens_over_the_tokens_of_each_role_and_kind(tmp_path):
    """Solver rewards 1 1 -.5 -.5 of 2, 6, 2 and 6 tokens in one kind: mean .25, unbiased std over tokens .7746."""
    script = by_kind({"deduction": 1, "abduction": 2})
    trainer, batch = batch_of(tmp_path, script, questions=8, protocol={"tries": 4})
    numbers = [(1.0, 2), (1.0, 6), (-0.5, 2), (-0.5, 6)]
    kinds = [d.example.meta["task"] for d in batch.dialogues]
    assert {"deduction", "abduction"} == set(kinds)
    for dialogue, kind in zip(batch.dialogues, kinds, strict=True):
        for u, (credit, length) in zip(dialogue.utterances[1:], numbers, strict=True):
            u.rewards["credit"] = credit + (10 if kind == "abduction" else 0)  # another mean, which is taken off
            u.response_ids = (u.response_ids * 10)[:length]
    found = [row for row in rows(trainer.advantage(batch)) if row.utterance.role == "solver"]
    tokens = 16 * kinds.count("deduction"), 16 * kinds.count("abduction")
    for dialogue, kind in zip(batch.dialogues, kinds, strict=True):
        count = tokens[kind == "abduction"]
        spread = 0.75 * (count / (count - 1)) ** 0.5
        own = [row for row in found if row.dialogue is dialogue]
        assert [row.advantage for row in own] == pytest.approx([0.75 / spread] * 2 + [-0.75 / spread] * 2, abs=1e-4)
        assert [row.weight for row in own] == [0.25] * 4, "together they count as much as the proposal"
