"""Texts of the user's, as editors and spreadsheets save them: with a byte-order mark, in UTF-16, and with other ends of
lines."""

import json
from pathlib import Path

import pytest

from maporl.config.parse import read_values
from maporl.config.safe_yaml import read_yaml_file
from maporl.environments.search import read_corpus
from maporl.errors import UserError
from maporl.tasks.base import read_rows
from maporl.team.loading import read_chat_template
from reward_server.options import read_token

ROWS = [{"question": "Größe von 漢?", "answer": "4"}, {"question": "b", "answer": "5"}]
LINES = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
LISTED = json.dumps(ROWS, ensure_ascii=False)
TABLE = "question,answer\nGröße von 漢?,4\nb,5\n"
PASSAGES = '{"title": "漢", "text": "a"}\n{"text": "b"}\n'
ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32"]


def saved(folder, name, text, encoding):
    file = folder / name
    mark = "\ufeff" if encoding == "utf-16-be" else ""  # Python's other encodings with marks write theirs
    file.write_bytes((mark + text).encode(encoding))
    return file


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_mark_at_the_beginning_is_no_part_of_the_text(tmp_path, encoding, ends):
    def file(name, text):
        return saved(tmp_path, name, text.replace("\n", ends), encoding)

    assert read_rows(str(file("a.jsonl", LINES)), "train") == ROWS
    assert read_rows(str(file("a.json", LISTED)), "train") == ROWS
    assert read_rows(str(file("b.json", LINES)), "train") == ROWS
    assert read_rows(str(file("a.csv", TABLE)), "train") == [{**row, "answer": int(row["answer"])} for row in ROWS]
    assert [(p.title, p.text) for p in read_corpus(str(file("c.jsonl", PASSAGES)))] == [("漢", "a"), ("", "b")]
    assert read_values(file("a.yaml", "output_dir: runs/漢\n"))["output_dir"] == "runs/漢"
    assert read_chat_template(str(file("a.jinja", "{{ messages }}\nend")), "x") == "{{ messages }}\nend"
    assert read_token(file("token", "secret-漢\n")) == "secret-漢"


def test_joined_files_have_marks_in_the_middle(tmp_path):
    first, second = (json.dumps(row, ensure_ascii=False).encode("utf-8-sig") for row in ROWS)
    file = tmp_path / "joined.jsonl"
    file.write_bytes(first + b"\n" + second + b"\n\xef\xbb\xbf\n")
    assert read_rows(str(file), "train") == ROWS
    file.write_bytes('{"text": "a"}'.encode("utf-8-sig") + b"\n" + '{"text": "b"}'.encode("utf-8-sig"))
    assert [p.text for p in read_corpus(str(file))] == ["a", "b"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "c.jsonl", "a.yaml", "a.jinja", "token"])
@pytest.mark.parametrize("content", [b"\xff\xfea", b"\xfe\xff\xd8\x00\x00", b"\xff\xfe\x00\x00abc", b"\xe9\xff"])
def test_a_text_that_is_not_what_its_mark_says_is_one_line(tmp_path, monkeypatch, name, content):
    monkeypatch.chdir(tmp_path)
    file = Path(name)
    file.write_bytes(content)
    readers = {"c.jsonl": read_corpus, "a.yaml": read_values, "token": lambda place: read_token(file)}
    read = readers.get(name, lambda place: read_rows(place, "train"))
    if name == "a.jinja":
        read = lambda place: read_chat_template(place, "agents.ann.chat_template")  # noqa: E731
    if name == "a.csv" and content == b"\xe9\xff":
        return  # pyarrow takes other bytes than UTF-8 for a name, and the task does not find its columns
    with pytest.raises(UserError) as caught:
        read(str(file))
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_is_read_as_it_is_whatever_became_of_what_was_read_before(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("a: {b: [1]}")
    read_yaml_file(file)["a"]["b"].append(2)
    assert read_yaml_file(file) == {"a": {"b": [1]}}
    file.write_text("a: 2")
    assert read_yaml_file(file) == {"a": 2}
