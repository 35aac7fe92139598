"""Task documents: texts of one's own that a proposer reads, and the questions that evaluations ask instead."""

import json
import random
import string

import pytest
from scripted_training import recipe_values

from maporl import Documents, Example, TaskError
from maporl.errors import ConfigError
from maporl.methods.documents import pieces
from maporl.tasks import build_task
from maporl.validation.load import from_dict
from maporl.validation.preflight import check_run

SUMS = {"name": "toy_sum", "largest": 3}


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "more").mkdir()
    (tmp_path / "one.txt").write_text("The first one. " * 10)
    (tmp_path / "two.md").write_text("Short.\n")
    (tmp_path / "more/three.txt").write_text("Third.")
    (tmp_path / "empty.txt").write_text(" \n")
    return tmp_path


def test_text_files_are_documents_and_long_ones_several(corpus):
    task = Documents(f"{corpus}/**/*.txt", SUMS, longest=100)
    assert [e.id for e in task] == ["document-1-0", "document-2-0", "document-2-1"], "sorted, without the empty one"
    assert [len(e.question) for e in task] == [6, 99, 49] and {e.answer for e in task} == {""}
    assert task.remark() == f"documents: 3 of at most 100 characters, from 2 texts of {corpus}/**/*.txt"
    assert [e.question for e in Documents(str(corpus / "two.md"), SUMS)] == ["Short."]
    assert len(Documents(f"{corpus}/**/*.txt", SUMS, longest=100, limit=2)) == 1, "of the texts, the first is empty"
    assert len(Documents(f"{corpus}/**/*.txt", SUMS, longest=100, limit=3)) == 3, "one of them is two documents"


def test_rows_are_documents(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"body": text}) for text in ("One.", "Two.")))
    assert [e.question for e in Documents(str(file), SUMS, column="body")] == ["One.", "Two."]
    with pytest.raises(TaskError, match=r"row 1 has no text in the column 'text', but \['body'\]; set task.column"):
        len(Documents(str(file), SUMS))
    file.write_text('{"text": "a"}\n{"text": null}\n{"text": 3}')
    with pytest.raises(TaskError, match="row 2: expected a text in the column 'text', got null; remove it"):
        len(Documents(str(file), SUMS))
    assert len(Documents(str(file), SUMS, limit=1)) == 1, "what follows is not read"


def test_a_pattern_may_name_files_of_rows_and_of_one_text(tmp_path):
    (tmp_path / "A.JSONL").write_text('{"text": "One."}\n{"text": "Two."}')
    (tmp_path / "b.csv").write_text("text,n\nThree.,1\n")
    (tmp_path / "c.TXT").write_text("Four.")
    (tmp_path / "d.md").mkdir()
    assert [e.question for e in Documents(f"{tmp_path}/*", SUMS)] == ["One.", "Two.", "Three.", "Four."]
    assert [e.question for e in Documents(f"{tmp_path}/*.JSONL", SUMS)] == ["One.", "Two."]
    assert [e.question for e in Documents(f"{tmp_path}/c.TXT", SUMS)] == ["Four."]
    (tmp_path / "[1].txt").write_text("Five.")
    assert [e.question for e in Documents(f"{tmp_path}/[1].txt", SUMS)] == ["Five."], "a file of this name is there"


def test_pieces_are_those_of_cutting_again_and_again():
    """The same as to cut what is left and to strip it, which copies a long text once for each piece."""

    def slowly(text, longest):
        parts, left = [], text.strip()
        while len(left) > longest:
            cut = left.rfind("\n\n", longest // 2, longest + 1)
            cut = left.rfind(" ", longest // 2, longest + 1) if cut < 0 else cut
            cut = longest if cut < 0 else cut
            parts.append(left[:cut].strip())
            left = left[cut:].strip()
        return [*parts, left] if left else parts

    rng = random.Random(0)
    for _ in range(500):
        text = "".join(rng.choices("ab \n", (6, 6, 3, 3), k=rng.randint(0, 80)))
        longest = rng.randint(1, 20)
        assert pieces(text, longest) == slowly(text, longest), (text, longest)
    assert len(pieces("word " * 400_000, 100)) == 20_000


def test_evaluations_ask_the_questions_of_the_other_task(corpus):
    task = Documents(f"{corpus}/*.txt", SUMS, split="eval", seed=5)
    asked = build_task(SUMS, "eval", 5)
    assert list(task) == list(asked) and task.solution(task[0]) == asked.solution(asked[0])
    made = Example("made", "1+1", "2")
    assert [grade.correct for grade in task.grade_many([made] * 2, ["Answer: 2", "Answer: 3"])] == [True, False]
    assert task.grade(made, "Answer: 2").correct and task.question(made) == asked.question(made)
    hops = Documents(f"{corpus}/*.txt", {"name": "tiny_hops"}, split="eval")
    assert hops.show_meta(Example("", "", "", {"paragraphs": 1, "start": 2})) == {"paragraphs": 1}
    assert (task.answer_form, task.prompt(made)) == (asked.answer_form, asked.prompt(made))
    assert task.columns(made) == {"answer": "2"}


@pytest.mark.parametrize(
    "options, words",
    [
        ({"longest": 9}, "longest: expected a whole number of at least 100, got 9"),
        ({"limit": 0}, "limit: expected a whole number of at least 1, got 0"),
        ({"questions": {"name": "episodes"}}, "questions: expected a task with labels"),
        ({"questions": {"name": "mixture", "tasks": {"a": SUMS, "b": SUMS}}}, "questions: expected a task with labels"),
    ],
)
def test_options_are_checked(options, words):
    with pytest.raises(ValueError, match=words):
        Documents(**{"source": "x.txt", "questions": SUMS} | options)


PDF, ZIP = b"%PDF-1.7\n%\xe2\xe3", b"PK\x03\x04\x14\0\x06"
BINARY = "expected a text, got a binary file that begins with b'.*; give a"


@pytest.mark.parametrize(
    ("source", "content", "message"),
    [
        ("*.txt", None, "no file has such a name; give a text file, a pattern"),
        ("none.txt", b"\n", r"none\.txt: it holds no text"),
        ("bad.txt", b"\xff\xfea\xd8", r"bad\.txt: cannot be read: .*; save it as UTF-8"),
        ("latin.txt", "für".encode("latin-1"), r"latin\.txt: cannot be read: .*; save it as UTF-8"),
        ("paper.pdf", PDF, BINARY),
        ("paper.txt", PDF, BINARY),
        ("paper.jsonl", ZIP, BINARY),
        ("pap*", b"%PDF-1.4 plain", BINARY),
        ("notes.rst", b"A text.", r"notes\.rst: line 1: cannot be read as JSON: .*; a file that is one text ends in \.txt"),
        ("notes.txt", b"A text.", r"notes\.txt: no such file; did you mean 'notes\.rst'"),
        ("corpus", "folder", r"corpus: expected a file, got a folder; give a file in it, or a pattern"),
        ("corpus.txt", "folder", r"corpus\.txt: expected a file, got a folder"),
        ("corpus.jsonl", "folder", r"corpus\.jsonl: expected a file, got a folder"),
    ],
)  # fmt: skip
def test_a_source_that_is_no_text_is_named(source, content, message, tmp_path):
    name = {"pap*": "paper.txt", "notes.txt": "notes.rst"}.get(source, source)
    if content == "folder":
        (tmp_path / name).mkdir()
    elif content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TaskError, match=message):
        len(Documents(f"{tmp_path}/{source}", SUMS))


def test_spice_reads_documents_of_ones_own(corpus):
    values = recipe_values("spice", corpus / "run", protocol={"propose": "{document}?<q><a>"})
    values["agent_defaults"]["tiny"]["alphabet"] = string.printable[:95]
    values["task"] = {"name": "documents", "source": f"{corpus}/**/*.txt", "longest": 100, "questions": SUMS}
    lines = check_run(from_dict(values, "test"))
    assert any("documents: 3 of at most 100 characters" in line for line in lines)
    values["task"]["source"] = str(corpus / "four.txt")
    with pytest.raises((TaskError, ConfigError), match=r"four\.txt: no such file"):
        check_run(from_dict(values, "test"))
