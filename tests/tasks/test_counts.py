"""What a run's questions are is counted before it starts: labels, questions of both splits, and answers' lengths."""

import json
import time
from dataclasses import asdict, dataclass

import pytest

from maporl import (
    GSM8K,
    Arithmetic,
    Example,
    FANToM,
    Grade,
    HotpotQA,
    Mathematics,
    Parts,
    Prompts,
    Skills,
    Task,
    TinyHops,
)
from maporl.datasets.tiny_programs import TinyPrograms
from maporl.errors import ConfigError
from maporl.grading import grade_mathematics
from maporl.tasks import Mixture, build_task
from maporl.tasks.counts import MOST, SplitCounts, count_data, faults, overlap
from maporl.validation.load import from_dict
from maporl.validation.preflight import check_run

ALPHABET = "0123456789+-*=?[]' ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz:.,\n"


def write(tmp_path, name, pairs):
    rows = (json.dumps({"id": f"q{i}", "question": q, "answer": a}) + "\n" for i, (q, a) in enumerate(pairs))
    (tmp_path / name).write_text("".join(rows))
    return str(tmp_path / name)


def sums(first=0, count=8):
    return [(f"{a}+1=", str(a + 1)) for a in range(first, first + count)]


def checked(tmp_path, train, held_out, length=16, sources=None, **task):
    """Return what ``check`` says of two files of questions."""
    values = {
        "task": {"name": "gsm8k", "instruction": "{question}", "source": write(tmp_path, "train.jsonl", train)}
        | {"eval_source": write(tmp_path, "eval.jsonl", held_out)}
        | task,
        "agents": {"ann": {}, "bob": {}},
        "agent_defaults": {"tiny": {"alphabet": ALPHABET, "hidden_size": 32, "layers": 1, "heads": 2, "context": 512}},
        "protocol": {"name": "debate", "turns": 1},
        "output_dir": str(tmp_path / "run"),
        "ppo": {"response_length": length},
        "evaluation": {"questions": 8},
        "training": {"use_cpu": True},
    }
    if sources:
        values["reward"] = {"sources": sources}
    return "\n".join(check_run(from_dict(values)))


@pytest.mark.parametrize("label", [lambda i: f"['{i}']", lambda i: "see the wiki page"])
def test_a_split_of_which_no_label_can_be_read_is_refused(tmp_path, label):
    rows = [(f"{i}+1=", label(i)) for i in range(8)]
    said = "task gsm8k, train: 8 of 8 labels cannot be read, so answers that differ from them are not graded: "
    with pytest.raises(ConfigError) as refused:
        checked(tmp_path, rows, sums(8))
    assert str(refused.value).startswith(f"{said}{label(0)!r} (q0), {label(1)!r} (q1), {label(2)!r} (q2); correct")
    with pytest.raises(ConfigError, match="task gsm8k, eval: 8 of 8 labels cannot be read"):
        checked(tmp_path, sums(), rows)


def test_the_task_that_is_advised_reads_words(tmp_path):
    rows = [(f"who {i}?", "Evelyn") for i in range(8)]
    with pytest.raises(ConfigError, match="the task math takes words for labels"):
        checked(tmp_path, rows, sums(8))
    assert "cannot be read" not in checked(tmp_path, rows, sums(8), name="math")


def test_some_labels_that_cannot_be_read_are_counted(tmp_path):
    rows = [*sums(0, 6), ("who?", "Evelyn"), ("what?", "nobody")]
    said = checked(tmp_path, rows, sums(8))
    assert "warning: task gsm8k, train: 2 of 8 labels cannot be read" in said
    assert "'Evelyn' (q6), 'nobody' (q7); correct or remove them" in said


def test_labels_that_no_reward_reads_refuse_nothing(tmp_path):
    said = checked(tmp_path, [("who?", "Evelyn")], sums(8), sources={"majority": 1.0})
    assert "warning: task gsm8k, train: 1 of 1 labels cannot be read" in said


@pytest.mark.parametrize("text", ["Answer: 5", "no", r"\boxed{Rome}"])
def test_an_option_is_a_label_that_can_be_read(text):
    assert grade_mathematics(text, "B) Paris").correct is False


def test_training_questions_are_not_held_out(tmp_path):
    said = checked(tmp_path, sums(), [("  0+1=", "1"), ("1+1=", "7"), *sums(8, 2)])
    what = "warning: task gsm8k: 2 of 4 held-out questions are also training questions, 1 of them with another label; "
    assert what + "hold others out (task.eval_source" in said


def test_questions_that_evaluations_do_not_ask_do_not_count(tmp_path):
    assert "held-out questions" not in checked(tmp_path, sums(), [*sums(8), *sums()])


def test_blanks_and_case_tell_no_questions_apart(tmp_path):
    said = checked(tmp_path, [("What  is\n2?", "2"), *sums()], [("what is 2?", "2")])
    assert "1 of 1 held-out questions are also training questions; hold" in said


def test_equal_questions_with_other_labels_are_named(tmp_path):
    said = checked(tmp_path, [*sums(), ("0+1=", "1"), ("0+1=", "5")], sums(8))
    assert "warning: task gsm8k, train: 1 of 10 questions stand there again with another label" in said


def test_right_answers_longer_than_an_agent_may_write_are_counted(tmp_path):
    train = [*sums(), ("5*5*5*5=", "625")]
    said = checked(tmp_path, train, sums(20), length=2)
    assert "warning: agents.ann: 1 of 17 right answers have more than the 2 tokens that it may write; raise" in said
    assert "to 4, the longest" in said
    assert "right answers have more" not in checked(tmp_path, train, sums(20), length=4)


@pytest.mark.parametrize(
    ("kind", "options", "same"),
    [
        (Arithmetic, {"largest": 9}, 0),
        (Skills, {}, 0),
        (Parts, {}, 0),
        (TinyHops, {"size": 256}, 0),
        (TinyPrograms, {"told": 0}, 0),
        (TinyPrograms, {"held_out": 0}, 100),
    ],
)
def test_generated_tasks_hold_out_what_they_promise(kind, options, same):
    train, held_out = kind(**options), kind(split="eval", **options)
    counts = count_data(train, held_out, len(held_out))["eval"]
    assert (counts.overlap_equal_label, counts.overlap_other_label, counts.conflicting) == (same, 0, 0)


def test_a_mixture_is_counted_by_part_and_each_question_once(tmp_path):
    files = {name: write(tmp_path, name, rows) for name, rows in (("a", sums()), ("b", sums(8, 2)), ("c", sums(0, 3)))}
    tasks = {
        "many": {"name": "gsm8k", "source": files["a"], "eval_source": files["b"]},
        "few": {"name": "gsm8k", "source": files["b"], "eval_source": files["c"]},
    }
    train, held_out = Mixture(tasks), Mixture(tasks, split="eval")
    counts = count_data(train, held_out, len(held_out))
    assert [(name, c.questions, c.overlap_equal_label, c.duplicates) for name, c in counts.items()] == [
        ("train/many", 8, 0, 0),
        ("train/few", 2, 0, 0),
        ("eval/many", 2, 2, 0),
        ("eval/few", 3, 3, 0),
    ]
    assert overlap(counts) == "5 of 5 held-out questions are also training questions"
    assert train.question_key(train[0]) == train.parts["many"].question_key(train.parts["many"][0])


def test_a_curriculum_is_training_too(tmp_path):
    first, later = (GSM8K(source=write(tmp_path, f"{n}.jsonl", sums(n, 4))) for n in (0, 4))
    counts = count_data(first, later, 4, [(5, later)])
    assert list(counts) == ["train", "train from update 5", "eval"] and counts["eval"].overlap_equal_label == 4


def test_questions_without_labels_and_episodes():
    rows = [{"prompt": [{"role": "system", "content": s}, {"role": "user", "content": "Go"}]} for s in ("a", "b", "a")]
    counts = count_data(Prompts(rows), Prompts(rows[1:2], "eval"), 1)
    assert (counts["train"].duplicates, counts["train"].labels, counts["eval"].overlap_equal_label) == (1, 0, 1)
    episodes = [build_task({"name": "episodes"}, split, 0) for split in ("train", "eval")]
    assert count_data(*episodes, 8) == {}


def test_counts_are_kept_as_json_and_said_again(tmp_path):
    task = GSM8K(source=write(tmp_path, "a.jsonl", sums()))
    kept = json.loads(json.dumps({name: asdict(count) for name, count in count_data(task, task, 8).items()}))
    said = overlap({name: SplitCounts(**count) for name, count in kept.items()})
    assert said == "8 of 8 held-out questions are also training questions"


def test_other_tasks_say_which_labels_they_read(tmp_path):
    hotpot, math = (object.__new__(kind) for kind in (HotpotQA, Mathematics))
    assert [hotpot.reads_label(Example("1", "?", label)) for label in ("Emma", "?")] == [True, False]
    assert [math.reads_label(Example("1", "?", label)) for label in ("Emma", "x" * 10_001)] == [True, False]
    assert FANToM.labels_graded == 0, "grading would load the sentence encoder"


@dataclass(frozen=True)
class Many(Task):
    """Numbers, of which the grader reads the even ones."""

    size: int = 10
    readable: int = 2

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return Example(
            f"{index}", f"How much is the number of the row that has the number {index}, in words?", f"{index}"
        )

    def grade(self, example, text):
        return Grade(text, None if int(example.answer) % self.readable else text == example.answer, "")


def test_few_labels_of_a_task_of_ones_own_are_graded_and_said_so():
    counts = count_data(Many(10, readable=9))
    assert (counts["train"].graded, counts["train"].unreadable) == (4, 2)
    [fault] = faults(counts, "many", paid=True)
    assert str(fault).startswith("task many, train: 2 of 4 labels that were tried, of 10 in all, cannot be read")


@pytest.mark.slow
def test_many_questions_are_counted_soon():
    begun = time.process_time()
    counts = count_data(Many(10 * MOST))["train"]
    assert counts.questions == 200_000 and time.process_time() - begun < 6
