"""Task documents: texts of one's own that a proposer reads, and the questions that evaluations ask instead."""

import json
import string

import pytest
from scripted_training import recipe_values

from maporl import Documents, Example, TaskError
from maporl.errors import ConfigError
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
    assert len(Documents(f"{corpus}/**/*.txt", SUMS, longest=100, limit=2)) == 1, "the first of them is empty"


def test_rows_are_documents(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"body": text}) for text in ("One.", "Two.")))
    assert [e.question for e in Documents(str(file), SUMS, column="body")] == ["One.", "Two."]
    with pytest.raises(TaskError, match=r"row 1 has no text in the column 'text', but \['body'\]; set task.column"):
        len(Documents(str(file), SUMS))


def test_evaluations_ask_the_questions_of_the_other_task(corpus):
    task = Documents(f"{corpus}/*.txt", SUMS, split="eval", seed=5)
    asked = build_task(SUMS, "eval", 5)
    assert list(task) == list(asked) and task.solution(task[0]) == asked.solution(asked[0])
    made = Example("made", "1+1", "2")
    assert [grade.correct for grade in task.grade_many([made] * 2, ["Answer: 2", "Answer: 3"])] == [True, False]
    assert task.grade(made, "Answer: 2").correct and task.question(made) == asked.question(made)
    assert (task.answer_form, task.prompt(made), task.columns(made)) == (
        asked.answer_form,
        asked.prompt(made),
        {"answer": "2"},
    )


@pytest.mark.parametrize(
    "options, words",
    [
        ({"longest": 9}, "longest: expected at least 100 characters, got 9"),
        ({"limit": 0}, "limit: expected at least 1 document, got 0"),
        ({"questions": {"name": "episodes"}}, "questions: 'episodes' cannot grade an answer"),
        ({"questions": {"name": "mixture", "tasks": {"a": SUMS, "b": SUMS}}}, "questions: 'mixture' cannot grade"),
    ],
)
def test_options_are_checked(options, words):
    with pytest.raises(ValueError, match=words):
        Documents(**{"source": "x.txt", "questions": SUMS} | options)


def test_a_source_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(TaskError, match="no such file; give a text file, a pattern"):
        len(Documents(f"{tmp_path}/*.txt", SUMS))
    (tmp_path / "none.txt").write_text("\n")
    with pytest.raises(TaskError, match=r"none\.txt: it holds no text"):
        len(Documents(f"{tmp_path}/none.txt", SUMS))
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfea\xd8")
    with pytest.raises(TaskError, match=r"bad\.txt: cannot be read"):
        len(Documents(f"{tmp_path}/bad.txt", SUMS))


def test_spice_reads_documents_of_ones_own(corpus):
    values = recipe_values("spice", corpus / "run", protocol={"propose": "{document}?"})
    values["agent_defaults"]["tiny"]["alphabet"] = string.printable[:95]
    values["task"] = {"name": "documents", "source": f"{corpus}/**/*.txt", "longest": 100, "questions": SUMS}
    lines = check_run(from_dict(values, "test"))
    assert any("documents: 3 of at most 100 characters" in line for line in lines)
    values["task"]["source"] = str(corpus / "four.txt")
    with pytest.raises((TaskError, ConfigError), match=r"four\.txt: no such file"):
        check_run(from_dict(values, "test"))
