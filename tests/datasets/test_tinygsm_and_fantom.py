"""Tasks with labels from programs, tasks that grade by embeddings, and questions that are read together."""

import json
import logging
import tarfile
from types import SimpleNamespace

import pytest

from maporl.errors import ConfigError
from maporl.methods.fantom import MAX_CHARACTERS, SentenceEncoder, load_encoder
from maporl.sandbox.sandbox import Outcome, Sandbox
from maporl.tasks import ANLI, FANToM, TaskError, TinyGSM, build_task, tinygsm
from maporl.types import Example, Grade


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MAPORL_CACHE", str(tmp_path / "cache"))


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def program(result):
    return f"def simple_math_problem() -> float:\n    return {result}\n"


# -- TinyGSM -----------------------------------------------------------------------------------------------------------

PROGRAMS = ["6 * 7", "84 / 2", "-1", "3 - 4.0", "7 / 2", "1 / 0", "open('/etc/passwd')", "None", "True"]


def test_labels_are_what_the_programs_return(tmp_path, caplog):
    rows = [{"question": f"Q{n}?", "code": program(p)} for n, p in enumerate(PROGRAMS)]
    rows += [{"id": "m", "question": "M?", "meta": {"code": program("5")}}, {"question": "", "code": program("1")}]
    rows += [{"question": ["a list"], "code": program("1")}]
    rows += [{"question": "no code?"}, {"question": "held out?", "code": program("8")}]
    task = TinyGSM(source=write(tmp_path / "t.jsonl", rows), held_out=1, max_dropped=0.9)
    with caplog.at_level(logging.INFO):
        assert [(e.id, e.question, e.answer) for e in task] == [
            ("tinygsm-0", "Q0?", "42"), ("tinygsm-1", "Q1?", "42"), ("tinygsm-2", "Q2?", "-1"), ("tinygsm-3", "Q3?", "-1"),
            ("m", "M?", "5"),
        ]  # fmt: skip
    assert task.dropped == {
        "not_integer": 2, "no_question": 2, "error:ZeroDivisionError": 1, "error:PermissionError": 1, "no_value": 1, "source": 1,
    }  # fmt: skip
    assert task.remark() == (
        "tinygsm: train: 5 rows, 8 dropped (no_question 2, not_integer 2, error:ZeroDivisionError 1, "
        "error:PermissionError 1, no_value 1, source 1)"
    )
    assert "tinygsm: 2 of 13 rows dropped: not_integer" in caplog.text
    assert task.grade(task[2], "Answer: -1").correct and not task.grade(task[2], "Answer: 1").correct
    assert task.question(task[0]).startswith("Q0?\n\n")


@pytest.mark.parametrize(
    "lines, dropped",
    [
        (["import datetime", "def f(): return datetime.datetime.now().microsecond"], "not_repeatable"),
        (["import datetime", "def f():", "    g = datetime.date.today", "    return g().day"], "not_repeatable"),
        (["import random", "def f(): return random.SystemRandom().randint(1, 10**9)"], "not_repeatable"),
        (["from random import SystemRandom as R", "def f(): return R().randint(1, 10**9)"], "not_repeatable"),
        (["def f(): return id(f)"], "not_repeatable"),
        (["def f(): return hash((1, f)) % 1000"], "not_repeatable"),
        (["def f():", "    g = [id, 1]", "    return g[0](g)"], "not_repeatable"),
        (["import random", "random.seed()", "def f(): return random.randint(1, 10**9)"], "not_repeatable"),
        (["import random as r", "def f(): return r.Random().randint(1, 10**9)"], "not_repeatable"),
        (["from time import perf_counter as p", "def f(): return int(p())"], "not_repeatable"),
        (["import secrets, uuid, os", "def f(): return 1"], "not_repeatable"),
        (["import time", "def f(time=3): return time"], None),
        (["import datetime", "def f(): return datetime.date(2024, 3, 1).day"], None),
        (["import random", "def f(): return random.Random(5).randint(1, 10**9)"], None),
        (["import random", "def f(): return random.randint(1, 10**9)"], None),
        (["def f(id=3):", "    now, today = 4, 5", "    return id * now + today"], None),
    ],
)
def test_a_label_is_the_same_on_every_day_and_in_every_process(tmp_path, lines, dropped):
    code = "\n".join(lines)
    rows = [{"question": f"Q{n}?", "code": code if n else "def f(): return 1"} for n in range(3)]
    labels = []
    for name in ("one", "two"):  # a cache of its own each, so that the programs run twice
        task = TinyGSM(source=write(tmp_path / f"{name}.jsonl", rows), held_out=1, max_dropped=0.9)
        labels.append([example.answer for example in task])
        assert task.dropped == ({dropped: 1} if dropped else {})
        (tmp_path / "cache").rename(tmp_path / f"cache-{name}")
    assert labels[0] == labels[1] and len(labels[0]) == (1 if dropped else 2)


def test_the_only_function_of_a_program_may_have_another_name(tmp_path):
    other = "def profit():\n    return 3\n"
    codes = {
        "one": other,
        "two": other + program("4"),
        "none": "x = 5",
        "neither": other + other.replace("profit", "loss"),
    }
    rows = [{"question": name, "code": code} for name, code in codes.items()]
    task = TinyGSM(source=write(tmp_path / "t.jsonl", [*rows, rows[0]]), held_out=1)
    assert [(e.question, e.answer) for e in task] == [("one", "3"), ("two", "4")]
    assert task.dropped == {"no_value": 2}


def test_evaluation_rows_follow_the_training_rows_and_share_no_question(tmp_path):
    rows = [{"question": f"Q{n}?", "code": program(n)} for n in range(8)] + [{"question": "Q1?", "code": program(1)}]
    source = write(tmp_path / "t.jsonl", rows)

    def questions(**options):
        return [e.question for e in TinyGSM(source=source, **options)]

    assert questions(limit=4, held_out=2) == ["Q0?", "Q1?", "Q2?", "Q3?"]
    assert questions(limit=4, held_out=2, split="eval") == ["Q4?", "Q5?"]
    assert questions(held_out=3) == ["Q0?", "Q1?", "Q2?", "Q3?", "Q4?", "Q5?"]
    held_out = TinyGSM(source=source, held_out=3, split="eval")
    assert ([e.question for e in held_out], held_out.dropped) == (["Q6?", "Q7?"], {"also_in_training": 1})
    other = write(tmp_path / "o.jsonl", [{"question": "O?", "code": program(3)}])
    assert questions(eval_source=other, split="eval") == ["O?"]
    assert len(questions(eval_source=other)) == 9
    with pytest.raises(TaskError, match=r"held_out=9 leaves none of 9 rows; lower it"):
        questions(held_out=9)


def test_too_many_dropped_rows_are_an_error_that_names_the_reasons(tmp_path):
    rows = [{"question": f"Q{n}?", "code": program(p)} for n, p in enumerate(["1", "2.5", "1/0", "2"])]
    source = write(tmp_path / "t.jsonl", rows)
    with pytest.raises(TaskError, match=r"2 of 3 rows were dropped \(not_integer 1, error:ZeroDivisionError 1\)"):
        len(TinyGSM(source=source, held_out=1))
    assert len(TinyGSM(source=source, held_out=1, max_dropped=0.7)) == 1


@pytest.mark.parametrize(("slow", "killed", "message"), [
    (100, 0, "100 of the first 100 programs did not end within the sandbox's time; expected at most 50 of 999"),
    (30, 70, r"30 of the first 100 programs did not .* time, and 70 crashed; expected at most 50"),
])  # fmt: skip
def test_data_whose_programs_do_not_end_cost_minutes_and_not_a_night(tmp_path, monkeypatch, slow, killed, message):
    outcomes = iter([Outcome(None, "cpu")] * slow + [Outcome(None, "killed")] * killed)
    monkeypatch.setattr(Sandbox, "execute", lambda self, code, call: next(outcomes))
    with pytest.raises(TaskError, match=message):
        len(TinyGSM(source=thousand_rows(tmp_path), held_out=1, max_dropped=0.99))
    assert next(outcomes, None) is None


def test_programs_that_take_long_cost_minutes_too(tmp_path, monkeypatch):
    monkeypatch.setattr(Sandbox, "execute", lambda self, code, call: Outcome(1, "ok"))
    clock = iter(range(0, 100_000, 40))
    monkeypatch.setattr(tinygsm, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with pytest.raises(TaskError, match=r"the first 200 of 999 programs took 80 seconds; expected at most 0\.05 each"):
        len(TinyGSM(source=thousand_rows(tmp_path), held_out=1))


def thousand_rows(folder):
    return write(folder / "t.jsonl", [{"question": f"Q{n}?", "code": program(n)} for n in range(1000)])


def test_an_integer_longer_than_any_label_drops_its_row_and_nothing_else(tmp_path):
    rows = [
        {"question": f"Q{n}?", "code": program(p)}
        for n, p in enumerate(["10 ** 3000", "2 ** 60 + 1", "-(10 ** 400)", "4"])
    ]
    task = TinyGSM(source=write(tmp_path / "t.jsonl", rows), held_out=1, max_dropped=0.9)
    assert [(e.question, e.answer) for e in task] == [("Q1?", str(2**60 + 1))]
    assert task.dropped == {"not_integer": 2}


def test_every_program_may_have_a_function_of_its_own_name(monkeypatch):
    monkeypatch.setattr(Sandbox, "run_many", lambda self, codes, call: [Outcome(int(call[1:]), "ok")] * len(codes))
    rows = [(n, {"question": f"Q{n}?", "code": f"def f{n}(): return {n}"}) for n in range(20_000)]
    examples, _ = tinygsm.label_rows(rows, set())
    assert [e.answer for e in examples] == [str(n) for n in range(20_000)]


def test_building_a_task_reads_and_runs_nothing(monkeypatch):
    monkeypatch.setattr(tinygsm, "read_rows", lambda *a: pytest.fail("read"))
    build_task({"name": "tinygsm"}, "train", 0)
    with pytest.raises(ConfigError, match="max_dropped: expected less than 1, got 1"):
        build_task({"name": "tinygsm", "max_dropped": 1}, "train", 0)


def test_no_more_rows_of_a_hub_data_set_are_read_than_asked_for(monkeypatch):
    asked = []
    rows = [{"question": f"Q{n}?", "code": program(n)} for n in range(5)]
    monkeypatch.setattr(tinygsm, "read_rows", lambda source, split: asked.append((source, split)) or rows)
    assert len(TinyGSM(limit=3, held_out=2)) == 3
    assert asked == [("TinyGSM/TinyGSM", "train[:5]")]


def test_every_stored_answer_of_a_file_is_what_the_code_returns(data):
    path = data / "tinygsm/train.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    with Sandbox() as sandbox:
        for row in rows:
            outcome = sandbox.run(row["meta"]["code"], tinygsm.labelling_function(row["meta"]["code"]))
            assert outcome.ok and outcome.value == pytest.approx(float(row["answer"]), rel=1e-9, abs=6e-7), row["id"]
    stored = {row["id"]: row["answer"] for row in rows}
    held_out = len(rows) // 6
    tasks = [TinyGSM(source=str(path), held_out=held_out, split=split) for split in ("train", "eval")]
    labels = {e.id: e.answer for task in tasks for e in task}
    assert labels == {name: stored[name] for name in labels}
    fractions = sum(not float(row["answer"]).is_integer() for row in rows)
    assert len(labels) == len(rows) - fractions and fractions >= 3
    assert sum(task.dropped["not_integer"] for task in tasks) == fractions
    assert not {e.question for e in tasks[0]} & {e.question for e in tasks[1]}


# -- FANToM ------------------------------------------------------------------------------------------------------------


def fantom_rows(count=20):
    return [
        {
            "question": f"What does Ann believe, {n}?", "document": f"Ann: hello {n // 2}.", "conversation": n // 2,
            "correct_answer": f"that Bob left at {n}", "wrong_answer": f"that Bob stayed {n}",
        }
        for n in range(count)
    ]  # fmt: skip


@pytest.fixture
def encoder_folder(tmp_path):
    """A random BERT of two layers that reads single characters."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    alphabet = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,?"
    vocabulary = {token: n for n, token in enumerate(["[PAD]", "[UNK]", *alphabet])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]", model_max_length=64
    ).save_pretrained(tmp_path / "encoder")
    torch.manual_seed(0)
    shape = BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64,
    )  # fmt: skip
    BertModel(shape).save_pretrained(tmp_path / "encoder")
    return str(tmp_path / "encoder")


def test_the_nearer_reference_decides_and_the_encoder_is_loaded_once(tmp_path, encoder_folder, monkeypatch):
    loads = []
    init = SentenceEncoder.__init__
    monkeypatch.setattr(SentenceEncoder, "__init__", lambda self, name: loads.append(name) or init(self, name))
    load_encoder.cache_clear()
    task = FANToM(source=write(tmp_path / "f.jsonl", fantom_rows()), encoder=encoder_folder)
    example = task[0]
    wrong = example.meta["wrong_answer"]
    assert task.grade(example, example.answer) == Grade(example.answer, True, "nearer the correct reference")
    assert task.grade(example, wrong) == Grade(wrong, False, "not nearer the correct than the wrong reference")
    assert task.grade(example, " \n") == Grade(None, False, "the answer is empty")
    examples = [e for e in task for _ in range(3)]
    texts = [text for e in task for text in (e.answer, "", f" {e.meta['wrong_answer']} ")]
    assert [g.correct for g in task.grade_many(examples, texts)] == [True, False, False] * len(task)
    assert [g.answer for g in task.grade_many([example], [""])] == [None]
    assert loads == [encoder_folder]


def test_a_tokenizer_reads_the_beginning_of_a_hostile_text_only(encoder_folder):
    encoder = SentenceEncoder(encoder_folder)
    tokenize, read = encoder.tokenizer, []
    encoder.tokenizer = lambda texts, **options: read.extend(texts) or tokenize(texts, **options)
    vectors = encoder.embed(["a\ud800b", "a?b", "a" * 10**6, "a" * MAX_CHARACTERS])
    assert vectors[0].equal(vectors[1]) and vectors[2].equal(vectors[3])
    assert [len(text) for text in read] == [3, 3, MAX_CHARACTERS, MAX_CHARACTERS]


def test_an_embedding_does_not_depend_on_its_batch_and_has_length_one(encoder_folder):
    encoder = SentenceEncoder(encoder_folder)
    texts = ["Bob left.", "Ann believes that Bob stayed with Cy, who had come late.", "x" * 500]
    together = encoder.embed(texts, batch=3)
    assert (together - encoder.embed(texts, batch=1)).abs().max() < 1e-5
    assert together.norm(dim=-1).tolist() == pytest.approx([1.0] * 3)
    assert encoder.references([texts[1], texts[0], texts[1]]).equal(encoder.references([texts[1], texts[0], texts[1]]))


def test_the_document_is_in_the_question_whatever_it_says(tmp_path):
    rows = fantom_rows()
    rows[0]["document"] = rows[1]["document"] = "Ann: {question}"
    tasks = [FANToM(source=write(tmp_path / "f.jsonl", rows), split=split) for split in ("train", "eval")]
    shown = {example.question: task.question(example) for task in tasks for example in task}
    assert shown["What does Ann believe, 0?"] == (
        "Ann: {question}\n\nQuestion: What does Ann believe, 0?\n\nAnswer in one sentence."
    )


def test_conversations_are_not_split(tmp_path):
    source = write(tmp_path / "f.jsonl", fantom_rows(40))

    def conversations(**options):
        return {e.meta["conversation"] for e in FANToM(source=source, **options)}

    train, held_out = conversations(), conversations(split="eval")
    assert (len(train), len(held_out), train & held_out) == (18, 2, set())
    assert any(conversations(split="eval", seed=seed) != held_out for seed in range(1, 5))
    bare = [{k: v for k, v in row.items() if k != "conversation"} for row in fantom_rows(40)]
    by_document = FANToM(source=write(tmp_path / "b.jsonl", bare), split="eval")
    assert (len(by_document), len({e.meta["document"] for e in by_document})) == (4, 2)
    assert len(FANToM(source=source, eval_source=source)) == 40


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"document": ""}, r"row 1 \(fantom-0\) has no document; remove the row or fill it in"),
        ({"wrong_answer": " "}, "has no wrong_answer"),
        ({"correct_answer": None}, "has no answer"),
        ({"wrong_answer": "that Bob left at 0"}, "correct_answer and wrong_answer are equal; remove the row"),
    ],
)
def test_rows_that_cannot_be_graded_are_named(tmp_path, change, message):
    rows = fantom_rows(4)
    rows[0] |= change
    with pytest.raises(TaskError, match=message):
        len(FANToM(source=write(tmp_path / "f.jsonl", rows)))
    with pytest.raises(TaskError, match="holds one conversation"):
        len(FANToM(source=write(tmp_path / "f.jsonl", fantom_rows(2))))


def published_set(name, beliefs):
    """A set of questions as the published archive has it; the parts that are not read are left short."""
    question = {"question": "What did Bob miss?", "correct_answer": "The cat.", "wrong_answer": "The dog."}
    return {
        "set_id": name, "part_id": name.rsplit("-", 1)[0], "conv_id": name.split("-")[0], "topic": "pets",
        "full_context": f"Ann: hello.\nBob: bye.\nAnn: my cat {name}.", "short_context": f"\nAnn: my cat {name}.\n",
        "missed_info": "The cat.", "joining_speaker": "Bob", "factQA": question,
        "beliefQAs": [
            question | {"question": f"What does {who} believe?", "correct_answer": f"{who} does not know",
                        "wrong_answer": f"{who} knows", "question_type": "tom:belief:inaccessible",
                        "tom_type": "first-order", "missed_info_accessibility": "inaccessible"}
            for who in beliefs
        ],
        "answerabilityQA_list": question | {"correct_answer": ["Ann"], "wrong_answer": ["Bob"]},
        "answerabilityQAs_binary": [], "infoAccessibilityQA_list": question, "infoAccessibilityQAs_binary": [],
    }  # fmt: skip


def archive(folder, content, name="fantom_v1.json"):
    """Write ``fantom.tar.gz`` with a resource fork beside the file, as tar makes it on a Mac."""
    (folder / "fantom_v1.json").write_text(content)
    with tarfile.open(folder / "fantom.tar.gz", "w:gz") as tar:
        tar.add(folder / "fantom_v1.json", arcname=f"./._{name}")
        tar.add(folder / "fantom_v1.json", arcname=f"./{name}")
    return str(folder / "fantom.tar.gz")


def test_the_published_archive_is_read_as_it_is(tmp_path):
    sets = [published_set(f"{c}-{p}-0", ["Ann", "Bob"]) for c in range(10) for p in range(2)]
    source = archive(tmp_path, json.dumps(sets))
    whole = FANToM(source=source, eval_source=source)
    assert len(whole) == 40
    assert whole[1] == Example(
        "0-0-0:belief-1", "What does Bob believe?", "Bob does not know",
        {"document": "Ann: my cat 0-0-0.", "wrong_answer": "Bob knows", "conversation": "0"},
    )  # fmt: skip
    assert list(whole) == list(FANToM(source=str(tmp_path / "fantom_v1.json"), eval_source=source))
    train, held_out = ({e.meta["conversation"] for e in FANToM(source=source, split=s)} for s in ("train", "eval"))
    assert (len(train), len(held_out), train & held_out) == (9, 1, set())
    assert not (tmp_path / "fantom").exists()


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ("[]", "fantom_v1.json", "holds no rows"),
        ("not json", "fantom_v1.json", "expected the published archive.*JSONDecodeError"),
        ('[{"set_id": "0-0-0"}]', "fantom_v1.json", "expected the published archive.*KeyError: 'beliefQAs'"),
        ("[3]", "fantom_v1.json", "expected the published archive.*TypeError"),
        ("[]", "other.json", "KeyError: 'fantom_v1.json'"),
    ],
)
def test_an_archive_that_is_not_the_published_one_is_named(tmp_path, content, name, message):
    with pytest.raises(TaskError, match=message):
        len(FANToM(source=archive(tmp_path, content, name)))
    (tmp_path / "fantom.tar.gz").write_text("no archive")
    with pytest.raises(TaskError, match=r"expected the published archive.*ReadError"):
        len(FANToM(source=str(tmp_path / "fantom.tar.gz")))
    with pytest.raises(TaskError, match=r"none\.tar\.gz: cannot be read"):
        len(FANToM(source=str(tmp_path / "none.tar.gz")))


# -- ANLI --------------------------------------------------------------------------------------------------------------


def test_rounds_are_read_together(tmp_path):
    for number in (1, 2, 3):
        rows = [{"id": f"r{number}-{n}", "question": "P and H", "answer": "neutral"} for n in range(3)]
        write(tmp_path / f"r{number}.jsonl", rows)
    each = str(tmp_path / "r{round}.jsonl")

    def ids(source=each, **options):
        return [e.id for e in build_task({"name": "anli", "source": source, **options}, "train", 0)]

    assert ids(round=2) == ["r2-0", "r2-1", "r2-2"]
    assert ids(round=[3, 1], limit=1) == ["r3-0", "r1-0"]
    assert ids(round="all", limit=2) == ["r1-0", "r1-1", "r2-0", "r2-1", "r3-0", "r3-1"]
    assert ids(str(tmp_path / "r1.jsonl"), round="all") == ["r1-0", "r1-1", "r1-2"]
    held_out = ANLI(source=each, eval_source=each, round="all", split="eval")
    assert len(held_out) == 9
    for wrong in (4, [], [1, 1], [0], "some"):
        with pytest.raises(ConfigError, match="round"):
            ids(round=wrong)


def test_rounds_of_the_hub_are_its_splits(monkeypatch):
    from maporl.tasks import base

    asked = []
    row = {"uid": "u", "premise": "P.", "hypothesis": "H.", "label": 0}
    monkeypatch.setattr(base, "read_rows", lambda source, split: asked.append((source, split)) or [row])
    assert len(ANLI(round=(1, 3))) == 2 and len(ANLI(split="eval")) == 1
    assert asked == [("facebook/anli", "train_r1"), ("facebook/anli", "train_r3"), ("facebook/anli", "test_r3")]


def test_the_rounds_parse_and_every_gold_label_is_right(data):
    source = str(data / "anli_r{round}/dev_dev.jsonl")
    sizes = {n: (data / f"anli_r{n}/dev_dev.jsonl").read_text().count("\n") for n in (1, 2, 3)}
    assert {number: len(ANLI(source=source, round=number)) for number in (1, 2, 3)} == sizes
    task = ANLI(source=source, round="all")
    assert len({e.id for e in task}) == len(task) == sum(sizes.values())
    assert {e.answer for e in task} == {"entailment", "neutral", "contradiction"}
    assert all(task.grade(e, f"Because.\nAnswer: {e.answer}").correct for e in task)
