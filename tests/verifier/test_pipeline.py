"""The verifier's own pipeline: samples, balance, training. Tiny real models, numbers by hand."""

import json
import math
import os
import random
import time
from dataclasses import replace

import numpy as np
import processes
import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner

from maporl import Agent, Arithmetic, Team
from maporl.cli.main import app
from maporl.config.schema import TinySection
from maporl.errors import ConfigError
from maporl.storage.run_folder import RunExists
from maporl.tasks.base import Task
from maporl.types import Example, Grade
from maporl.validation.load import from_dict
from maporl.verifier import balance as balancing
from maporl.verifier import measures
from maporl.verifier.data import DataError, Sample, read_folder, read_samples
from maporl.verifier.encoding import answer_start, chat_of, encode
from maporl.verifier.filters import fault
from maporl.verifier.generate import Shard, generate_samples
from maporl.verifier.leak import balance_table, measure
from maporl.verifier.model import Verifier, VerifierError, chance_of
from maporl.verifier.options import BalanceOptions, GenerateOptions, TrainOptions
from maporl.verifier.sampling import Speaker, label
from maporl.verifier.section import VerifierSection
from maporl.verifier.source import load_verifier
from maporl.verifier.train import answer_loss, train_verifier
from trl_ext.chat.encoding import FALLBACK_TEMPLATE

ALPHABET = "0123456789+=*:;?-#.,()<>'\n ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
TINY = {"alphabet": ALPHABET, "hidden_size": 32, "layers": 1, "heads": 2, "context": 1024}
CONFIG = {
    "output_dir": "unused", "task": {"name": "toy_sum", "largest": 4}, "agents": {"ann": {"tiny": TINY}},
    "ppo": {"response_length": 3}, "training": {"use_cpu": True}, "evaluation": {"questions": 0},
}  # fmt: skip
TASK = Arithmetic(largest=4)
ONE = Shard(0, 1)


def config_file(tmp_path, **changes):
    file = tmp_path / "c.yaml"
    file.write_text(json.dumps({**CONFIG, **changes}))  # JSON is YAML
    return str(file)


def invoke(*words):
    return CliRunner().invoke(app, ["verifier", *map(str, words)])


def made(folder):
    return [json.loads(line) for file in sorted(folder.glob("samples-*.jsonl")) for line in file.open()]


# -- generate -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_generation_goes_on_and_ends_as_if_it_had_not_been_killed(tmp_path):
    config = config_file(tmp_path, task={"name": "toy_sum", "largest": 9})
    options = ["--per-question", "5", "--batch-size", "4", "-q"]  # 100 batches
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = processes.start(["-m", "maporl", "verifier", "generate", config, "--output", killed, *options])
    progress = killed / "progress-0.json"
    deadline = time.time() + 60
    while not (progress.exists() and json.loads(progress.read_text())["batches"] >= 5):
        assert process.poll() is None and time.time() < deadline
        time.sleep(0.01)
    process.kill()
    done = json.loads(progress.read_text())["batches"]
    assert 5 <= done < 100 and len(made(killed)) < 400
    with (killed / "samples-0.jsonl").open("a") as file:
        file.write('{"id": "half a li')
    for folder in (killed, whole):
        result = invoke("generate", config, "--output", folder, *options)
        assert result.exit_code == 0, result.output
    assert (killed / "samples-0.jsonl").read_bytes() == (whole / "samples-0.jsonl").read_bytes()
    assert [row["position"] for row in made(killed)] == list(range(400))
    assert json.loads((killed / "manifest.json").read_text()) == json.loads((whole / "manifest.json").read_text())
    again = invoke("generate", config, "--output", killed, *options[:-1])
    assert "complete" in again.output and len(made(killed)) == 400


@pytest.fixture
def ann(tiny):
    model, tokenizer = tiny(**TINY)
    return Team([Agent("ann", model, tokenizer)])


def test_shards_cover_every_question_once_and_the_last_one_completes_the_manifest(ann, tmp_path):
    config, options = from_dict(CONFIG), GenerateOptions(per_question=3, batch_size=5, limit=7)
    for rank in (2, 0):
        manifest = generate_samples(config, TASK, ann, tmp_path / "s", options, Shard(rank, 3), quiet=True)
        assert not manifest["complete"]
    with pytest.raises(DataError, match="not all questions are sampled yet"):
        read_folder(tmp_path / "s")
    manifest = generate_samples(config, TASK, ann, tmp_path / "s", options, Shard(1, 3), quiet=True)
    rows = made(tmp_path / "s")
    assert manifest["complete"] and manifest["right"] + manifest["wrong"] == 21 == len(rows)
    assert sorted(row["position"] for row in rows) == list(range(21))
    assert [len((tmp_path / "s" / f"samples-{r}.jsonl").read_text().splitlines()) for r in range(3)] == [9, 6, 6]
    for row in rows:
        example = TASK[row["position"] // 3]
        assert (row["id"], row["policy"]) == (example.id, "ann") and 1.3 <= row["temperature"] <= 1.5
        assert row["correct"] == TASK.grade(example, row["answer"]).correct
    assert len({row["temperature"] for row in rows}) == 6  # one for each batch: 5 + 4, 5 + 1, 5 + 1 positions
    assert (manifest["models"], manifest["seed"], manifest["questions"]) == ({"ann": "tiny"}, 0, 7)


def test_a_folder_of_other_work_or_with_a_damaged_file_is_refused(ann, tmp_path):
    config, options = from_dict(CONFIG), GenerateOptions(per_question=2, limit=2)

    def run(folder, config=config, options=options, shard=ONE):
        return generate_samples(config, TASK, ann, tmp_path / folder, options, shard, quiet=True)

    run("s")
    with pytest.raises(DataError, match="begun with another config_sha256"):
        run("s", config=from_dict({**CONFIG, "updates": 7}))
    with pytest.raises(DataError, match="begun with another options"):
        run("s", options=GenerateOptions(per_question=3, limit=2))
    with pytest.raises(DataError, match=r"begun with another processes \(was 1, is 2\)"):
        run("s", shard=Shard(1, 2))
    os.truncate(tmp_path / "s" / "samples-0.jsonl", 5)
    with pytest.raises(DataError, match=r"has 5 bytes, but progress-0.json says"):
        run("s")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(RunExists, match=r"nothing was overwritten"):
        run("other")


class Judged(Arithmetic):
    """A task whose grader cannot grade some answers."""

    def grade(self, example, text):
        return Grade(None, None, "ungradable")


def test_what_cannot_be_labelled_is_dropped_and_counted(ann, tmp_path):
    task, options = Judged(largest=4), GenerateOptions(per_question=2, limit=2)
    manifest = generate_samples(from_dict(CONFIG), task, ann, tmp_path / "s", options, ONE, quiet=True)
    assert manifest["dropped"] == {"ungradable": 4} and made(tmp_path / "s") == []


def test_a_judge_labels_by_yes_and_no_and_unreadable_judgements_have_no_label(ann, monkeypatch):
    judge = Speaker(from_dict(CONFIG), ann, "ann", "--judge")
    asked = []

    def generate(texts, temperature, batch_size):
        asked.extend([*texts, temperature])
        return ["Looks fine.\nAnswer: yes", "Answer: no", "yes or no"]

    monkeypatch.setattr(judge, "generate", generate)
    examples = [TASK[0], TASK[1], TASK[2]]
    found = label(Judged(largest=4), examples, ["{x}", "b", "c"], judge, 8)
    assert found == [(True, "judge"), (False, "judge"), (None, "unreadable_judgement")]
    assert asked[-1] == 0.0 and "{x}" in asked[0] and TASK[0].answer in asked[0] and "Is this answer right?" in asked[0]


def test_agents_who_answer_must_be_models_and_prompts_must_fit(ann, tmp_path):
    config = config_file(tmp_path)
    for option in ("--agent", "--judge"):
        result = invoke("generate", config, "--output", tmp_path / "s", option, "anna")
        assert result.exit_code == 2 and f"{option} anna: unknown 'anna'; did you mean 'ann'?" in result.output
    long = from_dict({**CONFIG, "ppo": {"response_length": 1024}})
    with pytest.raises(ConfigError, match=r"agent 'ann': the prompt has .* tokens"):
        generate_samples(long, TASK, ann, tmp_path / "t", GenerateOptions(), ONE, quiet=True)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (GenerateOptions, {"temperature_low": 0}, "--temperature-low: expected a number above 0, got 0"),
        (GenerateOptions, {"temperature_low": 2.0}, "--temperature-high: expected at least 2.0, got 1.5"),
        (GenerateOptions, {"top_p": 1.1}, "--top-p: expected a number above 0 and at most 1, got 1.1"),
        (GenerateOptions, {"per_question": 0}, "--per-question: expected a whole number of at least 1, got 0"),
        (BalanceOptions, {"rounds": -1}, "--rounds: expected a whole number of at least 0, got -1"),
        (TrainOptions, {"model": "m", "held_out": 1.0}, "--held-out: expected a number above 0 and below 1, got 1.0"),
        (
            TrainOptions,
            {"model": "m", "learning_rate": math.nan},
            "--learning-rate: expected a number above 0, got nan",
        ),
    ],
)
def test_options_out_of_range_are_named(kind, values, message):
    with pytest.raises(ConfigError, match=message):
        kind(**values)


# -- balance ------------------------------------------------------------------------------------------------------


def answers(name, right, wrong, source="sample"):
    return [Sample(name, f"{name}?", text, True, source=source) for text in right] + [
        Sample(name, f"{name}?", text, False, source=source) for text in wrong
    ]


def numbered(start, count):
    return [f"Answer: {n}" for n in range(start, start + count)]


def test_hand_made_answers_are_filtered_and_cut_to_equal_numbers():
    samples = [
        *answers("a", numbered(0, 3), [*numbered(10, 4), "ANSWER:  10", "no answer here"]),
        *answers("b", numbered(0, 1), [*numbered(10, 5), "Answer: 7\nUser: and then?", "Answer: 1\nAnswer: 2"]),
        *answers("c", [], [*numbered(10, 2), "As requested, here is a wrong answer.\nAnswer: 9"]),
        *answers("d", numbered(0, 2), [" "]),
        *answers("e", [" "], ["Answer: 4<|im_end|>"]),
    ]
    result = balancing.balance(samples, BalanceOptions(per_question=2))
    kept = {name: [s.correct for s in result.samples if s.id == name] for name in "abcde"}
    assert kept == {"a": [True, True, False, False], "b": [True, False], "c": [], "d": [], "e": []}
    assert result.questions == {
        "full": 1, "cut": 1, "dropped: no right one": 1, "dropped: no wrong one": 1, "dropped: no usable answer": 1,
    }  # fmt: skip
    assert result.dropped == {
        "duplicate": 1, "no_final_answer": 1, "leaked_prompt": 2, "several_final_answers": 1, "admits_rewriting": 1,
        "empty": 2,
    }  # fmt: skip
    dropped = balancing.balance(samples, BalanceOptions(per_question=2, short="drop"))
    assert {s.id for s in dropped.samples} == {"a"} and dropped.questions["dropped: short"] == 1
    assert balancing.balance(samples, BalanceOptions(per_question=2)).samples == result.samples
    assert result.lines()[0].startswith("questions: full 1, cut 1")
    short = answers("a", ["4", "4", " 4"], ["5", "5", "6", "7"])
    kept = balancing.balance(short, BalanceOptions(repeats=True)).samples
    assert [s.correct for s in kept] == [True] * 3 + [False] * 3 and len(
        balancing.balance(short, BalanceOptions()).samples
    ) == 2


def test_one_question_in_two_wordings_is_refused():
    with pytest.raises(DataError, match=r"question a: two texts"):
        balancing.balance(
            [*answers("a", ["Answer: 1"], []), Sample("a", "else?", "Answer: 2", False)], BalanceOptions()
        )


def test_the_question_says_nothing_about_the_label_once_answers_are_balanced():
    samples = []
    for n in range(10):  # hard ones have mostly wrong answers, and their wording shows it
        hard = n % 2 == 0
        name = f"{'hard' if hard else 'easy'} {n}"
        samples += answers(name, numbered(0, 1 if hard else 4), numbered(10, 4 if hard else 1))
    before = measure(samples)
    assert (before.questions, before.right, before.wrong, before.both) == (10, 25, 25, 10)
    assert before.skew == pytest.approx(0.3) and before.words == pytest.approx(0.8)
    assert before.majority == pytest.approx(0.8)
    after = measure(balancing.balance(samples, BalanceOptions(per_question=4)).samples)
    assert (after.right, after.wrong, after.skew, after.words, after.majority) == (10, 10, 0.0, 0.5, 0.5)
    assert balance_table(before, after).row_count == 9 == balance_table(before, None).row_count


def test_the_table_says_how_many_different_errors_a_verifier_will_know():
    samples = [
        *answers("a", ["Answer: 1"], ["Answer: 2", "answer:  2", "Answer: 3", "Answer: 3"]),
        *answers("b", ["Answer: 1"], ["Answer: 4"]),
        *answers("c", ["Answer: 1"], []),
    ]
    assert measure(samples).errors == 1.5  # 2 of a, 1 of b; c has none
    assert measure(answers("c", ["Answer: 1"], [])).errors == 0.0


class Scripted(Task):
    """Three questions. The grader does not accept the second one's own solution."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return Example("abc"[index], f"{'abc'[index]}?", "1")

    def grade(self, example, text):
        return Grade(None, None if "none" in text else "Answer: 1" in text, "cannot be read")

    def solution(self, example):
        return "Answer: 5" if example.id == "b" else "It is one.\nAnswer: 1"


class ScriptedSpeaker:
    """Gives the ``replies`` in order, and remembers the requests."""

    def __init__(self, replies):
        self.replies, self.requests = iter(replies), []

    class policy:
        name = "voice"

    def generate(self, texts, temperature, batch_size, top_p, seed):
        self.requests += texts
        return [next(self.replies) for _ in texts]


def top_up(samples, replies, **options):
    options = BalanceOptions(per_round=1, batch_size=2, **options)
    speaker = ScriptedSpeaker(replies)
    source = balancing.TopUp(from_dict(CONFIG), Scripted(), options, speaker, None, quiet=True)
    return balancing.balance(samples, options, source), speaker


def test_short_sides_are_topped_up_by_references_and_hints_within_the_rounds():
    samples = [*answers("a", [], ["Answer: 2"]), *answers("b", ["so:\nAnswer: 1"], [])]
    replies = ["Answer: 3", "Hm.\nAnswer: 1", "Answer: 7", "none", "Answer: 8", "Answer: 9"]
    result, speaker = top_up(samples, replies, per_question=2, rounds=2)
    got = {(s.id, s.correct, s.source, s.answer) for s in result.samples if s.id == "a"}
    assert got == {
        ("a", True, "reference", "It is one.\nAnswer: 1"), ("a", True, "hint", "Hm.\nAnswer: 1"),
        ("a", False, "sample", "Answer: 2"), ("a", False, "hint", "Answer: 3"),
    }  # fmt: skip
    assert [(s.correct, s.source) for s in result.samples if s.id == "b"] == [(True, "sample"), (False, "hint")]
    assert result.questions == {"full": 1, "cut": 1} and len(speaker.requests) == 6
    assert result.dropped == {"reference: not_right": 1, "hint: cannot be read": 1, "hint: side_full": 1}


def test_hints_show_a_right_answer_and_grow_stronger_where_wrong_ones_are_missing():
    options = BalanceOptions(per_question=5)
    source = balancing.TopUp(from_dict(CONFIG), Scripted(), options, None)
    pool = balancing.Pool("a", "a?")
    assert source.prompt(pool, True) == "a?"
    strong = source.prompt(pool, False)
    assert "The right final answer is 1." in strong and "Answer: <final answer>" in strong
    pool.add(Sample("a", "a?", "{so}\nAnswer: 1", True), options)
    assert "{so}\nAnswer: 1" in source.prompt(pool, True)
    pool.add(Sample("a", "a?", "Answer: 2", False), options)
    assert "with one mistake in its reasoning" in source.prompt(pool, False)
    pool.add(Sample("a", "a?", "Answer: 3", False), options)
    assert "one small slip" in source.prompt(pool, False)
    with pytest.raises(DataError, match=r"question z: not in the configuration's task"):
        source.prompt(balancing.Pool("z", "z?"), True)
    with pytest.raises(DataError, match=r"question a: worded otherwise by the configuration's task"):
        source.prompt(balancing.Pool("a", "A?"), True)


def test_balance_on_the_command_line_with_a_model_that_is_given_hints(tmp_path):
    config, folder = config_file(tmp_path), tmp_path / "s"
    folder.mkdir()
    rows = [Sample(e.id, e.question, "99", False) for e in (TASK[i] for i in range(4))]
    (folder / "samples-0.jsonl").write_text("".join(row.line() for row in rows))
    output = tmp_path / "b.jsonl"
    override = "agents.ann.tiny.heads=4"  # beside the file, as the page has it
    command = ["balance", folder, config, override, "--output", output, "--per-question", 1, "--rounds", 1]
    result = invoke(*command)
    assert result.exit_code == 0, result.output
    assert [s.correct for s in read_samples([output])] == [True, False] * 4
    assert "reference: 4 right, 0 wrong" in result.output and "questions: full 4" in result.output
    again = invoke(*command)
    assert again.exit_code == 1 and "nothing was overwritten" in again.output
    hinted = invoke("balance", folder, config, "--output", tmp_path / "h.jsonl", "--per-question", 2, "--rounds", 1)
    assert hinted.exit_code == 0 and "answers not used: hint" in hinted.output
    bare = invoke("balance", folder, "--output", tmp_path / "n.jsonl")
    assert bare.exit_code == 1 and "no question has a right and a wrong answer" in bare.output
    lost = invoke("balance", folder, "--output", tmp_path / "n.jsonl", "--agent", "ann")
    assert lost.exit_code == 2 and "--agent, --judge and --set speak of a CONFIG" in lost.output
    empty = invoke("balance", tmp_path / "none", "--output", tmp_path / "n.jsonl")
    assert empty.exit_code == 1 and "no samples-*.jsonl" in empty.output


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": 3}, "row 1: id: expected text, got 3"),
        ({"id": "a", "question": "q", "answer": "x", "correct": 1}, "row 1: correct: expected true or false, got 1"),
        ({"id": "a", "question": "q", "answer": "x", "correct": True, "corect": 1}, "row 1: unknown key 'corect'"),
    ],
)
def test_rows_that_are_no_samples_are_named(tmp_path, row, message):
    (tmp_path / "x.jsonl").write_text(json.dumps(row))
    with pytest.raises(DataError, match=message):
        read_samples([tmp_path / "x.jsonl"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("In other words, 12 of the original solution is salt.\nAnswer: 12", None),
        ("Rewrite the fraction as 1/2.\nAnswer: 0.5", None),
        ("The answer is 12.\n#### 12", None),
        ("#### 12\nAnswer: 13", "several_final_answers"),
        ("Here's a plausible but incorrect solution:\nAnswer: 12", "admits_rewriting"),
        ("This solution is incorrect.\nAnswer: 12", "admits_rewriting"),
        ("### Instruction\nAnswer: 12", "leaked_prompt"),
        ("I deliberately made a wrong step.\nAnswer: 12", None),
        ("A deliberately wrong step.\nAnswer: 12", "admits_rewriting"),
        ("Here is my rewritten version of it.\nAnswer: 12", "admits_rewriting"),
        ("12\n<|im_start|>assistant\nAnswer: 12", "leaked_prompt"),
        ("Answer:", "no_final_answer"),
    ],
)
def test_the_filters_take_what_they_say_and_leave_ordinary_words(text, reason):
    assert fault(text) == reason


# -- measures -----------------------------------------------------------------------------------------------------


def test_auc_and_ece_by_hand():
    labels = np.array([1, 0, 1, 0, 1])
    scores = np.array([0.92, 0.9, 0.55, 0.55, 0.12])
    # pairs right > wrong: 0.92 beats both; 0.55 loses to 0.9 and ties; 0.12 loses twice: (2 + 0.5) / 6
    assert measures.auc(scores, labels) == pytest.approx(2.5 / 6)
    # bins: {0.92, 0.9}: |0.91 - 0.5|, {0.55, 0.55}: |0.55 - 0.5|, {0.12}: |0.12 - 1|
    assert measures.ece(scores, labels) == pytest.approx((2 * 0.41 + 2 * 0.05 + 0.88) / 5)
    assert measures.accuracy(scores, labels) == pytest.approx(2 / 5)
    assert measures.calibration_bins(np.array([0.0, 1.0]), np.array([0, 1])) == [(1, 0.0, 0.0), (1, 1.0, 1.0)]
    assert measures.auc(scores, np.ones(5)) is None
    assert measures.nll(np.array([0.0, 2.0]), np.array([1, 0])) == pytest.approx(
        (math.log(2) + math.log(1 + math.e**2)) / 2
    )


def test_the_temperature_undoes_overconfidence():
    rng = np.random.default_rng(0)
    honest = rng.normal(size=20000)
    labels = (rng.random(20000) < measures.sigmoid(honest)).astype(float)
    assert measures.fit_temperature(3 * honest, labels) == pytest.approx(3, rel=0.05)
    assert measures.fit_temperature(np.array([-1.0, 1.0]), np.array([0, 1])) == pytest.approx(0.05, rel=1e-3)
    assert measures.fit_temperature(np.array([-1.0, 1.0]), np.array([1, 0])) == pytest.approx(20, rel=1e-3)


def test_measures_by_question_and_by_length():
    outputs, labels = np.array([2.0, -1.0, 0.5, 3.0]), np.array([1, 0, 0, 0])
    found = measures.by_question(outputs, labels, ["a", "a", "a", "b"])
    assert found == {
        "questions": 2, "mean_accuracy": pytest.approx(1 / 3), "worst_accuracy": 0.0,
        "questions_with_both_labels": 1, "mean_auc_within": 1.0,
    }  # fmt: skip
    quarters = measures.by_length(outputs, labels, np.array([5, 6, 7, 8]))
    assert [(q["tokens"], q["answers"], q["accuracy"]) for q in quarters] == [
        ([5, 5], 1, 1.0), ([6, 6], 1, 1.0), ([7, 7], 1, 0.0), ([8, 8], 1, 0.0),
    ]  # fmt: skip


# -- train --------------------------------------------------------------------------------------------------------


@pytest.fixture
def base(tiny, tmp_path):
    """A folder with a tiny causal language model."""
    model, tokenizer = tiny(**TINY)
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def separable(tmp_path, questions=40, name="toy.jsonl", both=True):
    """Right answers are written in small digits, wrong ones in large ones, of various lengths."""
    rng = random.Random(0)
    rows = []
    for n in range(questions):
        for correct in (True, False) if both else (True,):
            for _ in range(3):
                text = "".join(rng.choice("01234" if correct else "56789") for _ in range(rng.randrange(3, 12)))
                rows.append(Sample(str(n), f"{n}?", text, correct))
    file = tmp_path / name
    file.write_text("".join(row.line() for row in rows))
    return file


@pytest.mark.parametrize("loss", ["every", pytest.param("last", marks=pytest.mark.slow)])
def test_a_verifier_learns_what_can_be_told_apart_and_serves_what_was_measured(base, tmp_path, loss, monkeypatch):
    file, folder = separable(tmp_path), tmp_path / "v"
    arguments = ["--model", base, "--loss", loss, "--learning-rate", 2e-2, "--epochs", 4, "--held-out", 0.25]
    result = invoke("train", file, "--output", folder, *arguments, "--use-cpu")
    assert result.exit_code == 0, result.output
    record = json.loads((folder / "verifier.json").read_text())
    assert record["metrics"]["held_out"]["auc"] > 0.9 and record["metrics"]["by_question"]["mean_auc_within"] > 0.9
    assert record["rows"] == {"trained_on": 180, "held_out": 60, "dropped_too_long": 0}
    assert record["metrics"]["other_half_after_temperature"]["answers"] == 30
    assert {p.name for p in folder.iterdir()} >= {"README.md", "model.safetensors", "tokenizer.json"}
    assert sum(answers for answers, _, _ in record["metrics"]["held_out"]["bins"]) == 60
    auc = record["metrics"]["held_out"]["auc"]
    assert f"it scores the right one higher in {auc:.0%} of all pairs; a coin does so in 50%" in result.output
    assert record["loss"] == loss and "AUC" in result.output and "base_model" in (folder / "README.md").read_text()
    verifier = Verifier.load(str(folder))
    assert verifier.temperature == record["temperature"] != 1.0
    chats = [sample.chat() for sample in read_samples([file])]
    model, rows = verifier.model, [encode(verifier.tokenizer, chat) for chat in chats]
    alone = [
        torch.sigmoid(model(input_ids=torch.tensor([ids])).logits[0, 0] / record["temperature"]).item() for ids in rows
    ]
    assert verifier.score(chats) == pytest.approx(alone, abs=1e-5)
    example = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(example, names := {"question": "7?", "answer": "01"})
    assert names["verifier"].temperature == verifier.temperature, "the card's example runs"
    refused = invoke("train", file, "--output", folder, *arguments)
    assert refused.exit_code == 1 and "nothing was overwritten" in refused.output


@pytest.mark.slow
def test_the_saved_verifier_scores_what_the_trained_adapter_scored(base, tmp_path, monkeypatch):
    from maporl.verifier import train as training

    kept = {}
    plain = training.get_peft_model

    def remember(*args):
        kept["peft"] = plain(*args)
        kept["merge"] = kept["peft"].merge_and_unload
        monkeypatch.setattr(kept["peft"], "merge_and_unload", merge, raising=False)
        return kept["peft"]

    def merge():
        rows = [encode(AutoTokenizer.from_pretrained(base), s.chat()) for s in read_samples([file])]
        inner = training.base_of(kept["peft"]).eval()
        kept["outputs"] = [training.last_outputs(inner, [ids]).item() for ids in rows]
        return kept["merge"]()

    file = separable(tmp_path, questions=6)
    monkeypatch.setattr(training, "get_peft_model", remember)
    options = TrainOptions(str(base), learning_rate=1e-2, use_cpu=True, save_anyway=True)
    train_verifier(file, tmp_path / "v", options, quiet=True)
    verifier = Verifier.load(str(tmp_path / "v"))
    expected = measures.sigmoid(np.array(kept["outputs"]) / verifier.temperature)
    assert verifier.score([s.chat() for s in read_samples([file])]) == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.slow
def test_a_verifier_that_is_not_better_than_chance_says_so_wherever_it_goes(base, tmp_path, caplog):
    """Its labels are thrown by a coin, so that there is nothing to learn. The one with real labels says nothing."""
    lines = [json.loads(line) for line in separable(tmp_path, questions=30).read_text().splitlines()]
    rng = random.Random(0)
    file = tmp_path / "coin.jsonl"
    file.write_text("".join(json.dumps({**line, "correct": rng.random() < 0.5}) + "\n" for line in lines))
    options = TrainOptions(str(base), learning_rate=1e-2, held_out=0.5, use_cpu=True)
    with pytest.raises(
        VerifierError, match=r"coin: not saved, because .* not better than chance.* --save-anyway saves"
    ):
        train_verifier(file, tmp_path / "coin", options, quiet=True)
    assert not (tmp_path / "coin").exists()
    record = train_verifier(file, tmp_path / "coin", replace(options, save_anyway=True), quiet=True)
    said = "the verifier is not better than chance: its AUC on"
    assert f"{tmp_path / 'coin'}: {said}" in caplog.text and "--epochs" in caplog.text
    assert f"**Warning**: {said}" in (tmp_path / "coin/README.md").read_text()
    assert record["metrics"]["held_out"]["auc"] <= record["metrics"]["auc_reached_by_chance"] < 0.7
    caplog.clear()
    load_verifier(VerifierSection(model=str(tmp_path / "coin")))
    assert f"reward.verifier.model {tmp_path / 'coin'}: {said}" in caplog.text
    caplog.clear()
    train_verifier(separable(tmp_path, questions=30), tmp_path / "v", options, quiet=True)
    load_verifier(VerifierSection(model=str(tmp_path / "v")))
    assert "chance" not in caplog.text and "Warning" not in (tmp_path / "v/README.md").read_text()


@pytest.mark.parametrize(
    ("right", "wrong", "reached"),
    [(100, 100, 0.5673), (10, 10, 0.7176), (1, 1, 1.3225), (50, 200, 0.5752), (5, 0, None), (0, 5, None)],
)
def test_what_chance_reaches_is_that_of_coins(right, wrong, reached):
    labels = np.array([1] * right + [0] * wrong)
    found = measures.reached_by_chance(labels)
    assert found is None if reached is None else found == pytest.approx(reached, abs=1e-4)
    if min(right, wrong) >= 10:
        rng = np.random.default_rng(0)
        above = np.mean([measures.auc(rng.random(len(labels)), labels) > found for _ in range(2000)])
        assert 0.035 < above < 0.065
    record = {"metrics": {"held_out": {"auc": 0.58, "answers": right + wrong}, "auc_reached_by_chance": found}}
    assert (chance_of(record) is None) == (reached is not None and reached < 0.58)
    assert chance_of({"metrics": {"held_out": {"auc": 0.5}}}) is None, "made by an earlier version"


def test_the_loss_on_every_answer_token_and_on_the_last_written_out():
    outputs = torch.tensor([[9.0, 1.0, -2.0, 7.0], [9.0, 9.0, 9.0, 0.5]])
    starts, ends, labels = torch.tensor([1, 3]), torch.tensor([3, 4]), torch.tensor([1.0, 0.0])

    def right(z):
        return math.log(1 + math.exp(-z))

    every = (right(1.0) + right(-2.0) + right(-0.5)) / 3
    assert answer_loss(outputs, starts, ends, labels, "every").item() == pytest.approx(every, abs=1e-6)
    last = (right(-2.0) + right(-0.5)) / 2
    assert answer_loss(outputs, starts, ends, labels, "last").item() == pytest.approx(last, abs=1e-6)


def test_answer_tokens_begin_after_the_opening_and_end_with_the_chat(tiny):
    _, tokenizer = tiny(**TINY)
    tokenizer.chat_template = FALLBACK_TEMPLATE
    chat = chat_of("1+1=", "2")
    ids, start = encode(tokenizer, chat), answer_start(tokenizer, chat)
    assert tokenizer.decode(ids[start:]).startswith(" 2<eos>") and tokenizer.decode(ids[:start]).endswith("Assistant:")


def test_data_that_no_verifier_can_be_made_of_is_an_error_before_training(base, tmp_path):
    options = TrainOptions(str(base), use_cpu=True)

    def run(file, options=options):
        return train_verifier(file, tmp_path / "v", options, quiet=True)

    with pytest.raises(DataError, match=r"all .* rows to train on have the label True"):
        run(separable(tmp_path, name="one.jsonl", both=False))
    with pytest.raises(DataError, match=r"1 questions are left, .* at least 2 are needed"):
        run(separable(tmp_path, questions=1, name="single.jsonl"))
    with pytest.raises(DataError, match=r"0 questions are left"):
        run(separable(tmp_path), TrainOptions(str(base), longest=4))
    few = separable(tmp_path, questions=3, name="few.jsonl")
    few.write_text(
        "".join(line + "\n" for line in few.read_text().splitlines() if '"id": "1"' not in line or "true" in line)
    )
    with pytest.raises(DataError, match=r"few.jsonl: the 3 held-out answers are all right or all wrong, .*--held-out"):
        run(few, replace(options, seed=1))
    with pytest.raises(ConfigError, match="--model, --tiny, CONFIG: expected one of them"):
        run(separable(tmp_path), TrainOptions())
    with pytest.raises(ConfigError, match="--model, --tiny: expected one of the two, got both"):
        TrainOptions("model", tiny=TinySection())
    with pytest.raises(VerifierError, match=r"--model '/none' could not be loaded"):
        run(separable(tmp_path), TrainOptions("/none"))
    with pytest.raises(VerifierError, match=r"training diverged"):
        run(separable(tmp_path), TrainOptions(str(base), learning_rate=1e30, use_cpu=True))
    with pytest.raises(
        ConfigError,
        match=r"--chat-template: 'fallbck' cannot be read; give fallback or a template",
    ):
        run(separable(tmp_path), TrainOptions(str(base), chat_template="fallbck"))
    with pytest.raises(DataError, match=r"none\.jsonl: no such file"):
        run(tmp_path / "none.jsonl")
    (base / "chat_template.jinja").unlink()
    with pytest.raises(VerifierError, match=r"no chat template; .* --chat-template sets one here"):
        run(separable(tmp_path))
    assert not (tmp_path / "v").exists() or not any((tmp_path / "v").iterdir())


def test_bfloat16_long_rows_and_two_questions(base, tmp_path):
    file = separable(tmp_path, questions=2)
    longest = 11  # one digit, '?', and an answer with its end
    options = TrainOptions(str(base), use_cpu=True, bf16=True, longest=longest, chat_template=None, save_anyway=True)
    record = train_verifier(file, tmp_path / "v", options, quiet=True)
    long = sum(len(s.question) + len(s.answer) + 1 > longest for s in read_samples([file]))
    assert record["rows"]["dropped_too_long"] == long > 0 and record["temperature"] == 1.0
    assert "other_half_after_temperature" not in record["metrics"]
    verifier = Verifier.load(str(tmp_path / "v"))
    assert verifier.model.dtype == torch.bfloat16 and verifier.model.config.pad_token_id == 0


def test_a_tiny_verifier_is_built_by_its_options(tmp_path):
    file, tiny = separable(tmp_path), json.dumps(TINY)
    learn = ["--learning-rate", 1e-2, "--epochs", 4, "--held-out", 0.25, "--use-cpu"]
    done = invoke("train", file, "--output", tmp_path / "v", "--tiny", tiny, *learn)
    assert done.exit_code == 0, done.output
    verifier = Verifier.load(str(tmp_path / "v"))
    assert verifier.model.config.hidden_size == 32 and verifier.record["metrics"]["held_out"]["auc"] > 0.9
    refused = invoke("train", file, "--output", tmp_path / "w", "--tiny", "{hiden_size: 8}")
    assert refused.exit_code == 2 and "unknown key 'hiden_size'" in refused.output


@pytest.mark.slow
def test_a_verifier_begins_with_an_agents_model(base, tmp_path):
    file, config = separable(tmp_path), tmp_path / "team.yaml"
    agents = {
        "ann": {"tiny": TINY},
        "bob": {"model": str(base), "chat_template": "fallback"},
        "eve": {"engine": "human"},
    }
    config.write_text(json.dumps({**CONFIG, "agents": agents}))
    learn = ["--learning-rate", 1e-2, "--epochs", 1, "--held-out", 0.25, "--use-cpu", "--save-anyway"]

    def train(name, *options):
        done = invoke("train", file, config, "--output", tmp_path / name, *learn, *options)
        return done if done.exit_code else Verifier.load(str(tmp_path / name))

    first, bob = train("first"), train("bob", "--agent", "bob")
    assert first.record["base_model"] == "a tiny random model" and first.record["options"]["tiny"]["layers"] == 1
    assert bob.record["base_model"] == str(base) and "User: " in bob.tokenizer.chat_template
    wider = train("wider", "--set", "agents.ann.tiny.hidden_size=64")
    assert (first.model.config.hidden_size, wider.model.config.hidden_size) == (32, 64)
    for options, message in (
        (["--agent", "eve"], "--agent eve: no model speaks for this agent"),
        (["--agent", "bobb"], "--agent bobb: unknown 'bobb'; did you mean 'bob'?"),
        (["--tiny", json.dumps(TINY)], "--model, --tiny: CONFIG says which model"),
        (["--tokenizer", base], "--tokenizer: a tiny model has a tokenizer of its own"),
    ):
        refused = train("none", *options)
        assert refused.exit_code == 2 and message in refused.output, refused.output
    refused = invoke("train", file, "--output", tmp_path / "none", "--model", base, "--agent", "bob")
    assert refused.exit_code == 2 and "--agent and --set speak of a CONFIG" in refused.output


def test_what_is_missing_is_told_with_what_to_do(tmp_path):
    samples = [Sample(str(n), f"{n}?", str(i), correct) for n in range(30) for i, correct in enumerate((True, False))]
    few = balancing.too_few(samples)
    assert few.startswith("60 answers to 30 questions are few: of these maporl verifier train holds out about 6 ")
    assert "--held-out 0.3" in few and balancing.too_few(samples * 8) is None
    (tmp_path / "samples").mkdir()
    for correct, said in ((False, "no answer is right"), (True, "no answer is wrong")):
        lines = "".join(replace(sample, correct=correct).line() for sample in samples)
        (tmp_path / "samples/samples-0.jsonl").write_text(lines)
        refused = invoke("balance", tmp_path / "samples", "--output", tmp_path / "b.jsonl")
        assert refused.exit_code == 1 and said in refused.output, refused.output
        assert ("maporl sft CONFIG" if not correct else "--temperature-high 3") in refused.output
    assert not (tmp_path / "b.jsonl").exists()
