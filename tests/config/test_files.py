"""Texts of the user's, as editors and spreadsheets save them: with a byte-order mark, in UTF-16, and with other ends of
lines. Labels in all kinds of files are the texts that stand there, or refused."""

import datetime
import json
from decimal import Decimal
from pathlib import Path

import pytest

from maporl.config.parse import read_values
from maporl.config.safe_yaml import read_yaml_file
from maporl.datasets.search import read_corpus
from maporl.errors import UserError
from maporl.tasks import ANLI, GSM8K, MBPP, FANToM, HotpotQA, HumanEval, Mathematics, TaskError
from maporl.tasks.base import read_examples, read_rows
from maporl.team.loading import read_chat_template
from maporl.types import Example
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
    assert read_rows(str(file("a.csv", TABLE)), "train") == ROWS
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


def labels(folder, values, name):
    """The labels that a task reads from a file of the kind ``name`` with ``values``, which are written there as they
    are, but for parquet files."""
    place = folder / name
    if name == "a.parquet":
        import pyarrow as pa
        import pyarrow.parquet

        pyarrow.parquet.write_table(pa.table({"question": ["?"] * len(values), "answer": values}), place)
    elif name.endswith("csv"):
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(("question,answer\n" + "".join(f"?,{value}\n" for value in values)).encode())
        place = place.parent if name == "folder/train.csv" else place  # as the library datasets reads one of the hub
    else:
        rows = [f'{{"question": "?", "answer": {value}}}' for value in values]
        place.write_text("\n".join(rows) if name == "a.jsonl" else f"[{', '.join(rows)}]")
    return [example.answer for example in Mathematics(source=str(place))]


TEXTS = ["12:30", "2026-01-02 10:00", "0011", "true", "12345678901234567", "123456789012345678901", "1.50", "NA", "1/2"]


@pytest.mark.parametrize("name", ["a.csv", "folder/train.csv", "a.jsonl", "a.json", "a.parquet"])
def test_a_label_is_the_text_of_its_file(tmp_path, monkeypatch, name):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    assert labels(tmp_path, [json.dumps(text) for text in TEXTS] if "json" in name else TEXTS, name) == TEXTS


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_number_of_a_json_file_is_the_text_that_stands_there(tmp_path, name):
    numbers = ["18", "1.50", "-0.0", "1e17", "12345678901234567.25", "123456789012345678901"]
    assert labels(tmp_path, numbers, name) == numbers
    assert labels(tmp_path, ["[1.50, 2]", '["a", 3]'], name) == ["1.50, 2", "a, 3"], "several answers of one question"


@pytest.mark.parametrize(("values", "texts"), [
    ([18, 2**62], ["18", "4611686018427387904"]),
    ([2.5, 18.0, 999_999_999_999_999.0], ["2.5", "18.0", "999999999999999.0"]),
    ([Decimal("1.50")], ["1.50"]),
    ([["1.5", "2"]], ["1.5, 2"]),
])  # fmt: skip
def test_a_typed_label_has_one_text(tmp_path, values, texts):
    assert labels(tmp_path, values, "a.parquet") == texts


@pytest.mark.parametrize(("name", "value", "shown"), [
    ("a.parquet", 1e17, r"1e\+17 of the type float"),
    ("a.parquet", 0.1 + 0.2, "0.30000000000000004 of the type float"),
    ("a.parquet", float("inf"), "inf of the type float"),
    ("a.parquet", True, "True of the type bool"),
    ("a.parquet", b"5", "b'5' of the type bytes"),
    ("a.parquet", datetime.time(12, 30), r"datetime.time\(12, 30\) of the type time"),
    ("a.parquet", {"a": 5}, "{'a': 5} of the type dict"),
    ("a.parquet", [[5]], r"\[5\] of the type list"),
    ("a.jsonl", "true", "True of the type bool"),
    ("a.jsonl", '{"a": 5}', "{'a': 5} of the type dict"),
    ("a.json", "NaN", "nan of the type float"),
])  # fmt: skip
def test_a_label_without_one_text_is_refused(tmp_path, name, value, shown):
    message = (
        f"{name}: row 1 has {shown} in the column 'answer'; expected a text, or a number of at most 15 digits; write a "
        "text there, in quotes, or name another column"
    )
    with pytest.raises(TaskError, match=message):
        labels(tmp_path, [value], name)


def test_what_a_task_of_ones_own_takes_from_a_row_becomes_text_too(tmp_path):
    saved(tmp_path, "a.jsonl", '{"q": 1.50, "a": 18}\n', "utf-8")
    convert = lambda row, number: Example(str(number), row["q"], row["a"])  # noqa: E731
    assert read_examples(str(tmp_path / "a.jsonl"), "train", convert) == [Example("0", "1.50", "18")]
    with pytest.raises(TaskError, match=r"a\.jsonl: row 1 has \[18\] of the type list in the column 'answer'"):
        read_examples(str(tmp_path / "a.jsonl"), "train", lambda row, number: Example("0", "?", [row["a"]]))


@pytest.mark.parametrize(("task", "row", "column"), [
    (GSM8K, {"question": ["?"], "answer": "5"}, "question"),
    (GSM8K, {"question": "?", "answer": ["5"]}, "answer"),
    (Mathematics, {"question": {"a": "?"}, "answer": "5"}, "question"),
    (ANLI, {"question": ["?"], "answer": "neutral"}, "question"),
    (ANLI, {"premise": ["a"], "hypothesis": "b", "label": 1}, "premise"),
    (HotpotQA, {"question": "?", "answer": ["a", "b"], "paragraphs": ["a"]}, "answer"),
    (MBPP, {"text": ["?"], "code": "def f(x): return x", "test_list": ["assert f(1)", "assert f(2)"]}, "text"),
    (HumanEval, {"prompt": ["?"], "entry_point": "f", "test": "def check(c): assert c(1)"}, "prompt"),
    (FANToM, {"document": "d", "question": "?", "correct_answer": ["a"], "wrong_answer": "b"}, "correct_answer"),
    (FANToM, {"document": "d", "question": "?", "correct_answer": "a", "wrong_answer": ["b"]}, "wrong_answer"),
])  # fmt: skip
def test_no_task_makes_a_text_of_a_list_or_an_object(tmp_path, task, row, column):
    saved(tmp_path, "a.jsonl", "\n".join([json.dumps(row)] * 70), "utf-8")  # HumanEval holds 64 rows out
    with pytest.raises(TaskError, match=rf"a\.jsonl: row 1 has .* of the type \w+ in the column '{column}'; expected"):
        list(task(source=str(tmp_path / "a.jsonl")))


def test_the_columns_of_olympiadbench_are_read_from_csv_files_too(tmp_path):
    text = "question,answer,is_multiple_answer,error,meta\n?,5,False,,web\n?,5,True,0.01,web\n"
    saved(tmp_path, "a.csv", text, "utf-8")
    metas = [example.meta for example in Mathematics(source=str(tmp_path / "a.csv"))]
    assert metas == [{}, {"is_multiple_answer": "True", "error": "0.01"}]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_quoted_text_of_a_csv_file_is_kept_as_it_is(tmp_path, encoding):
    long = "a,\r\nb\n" * 200_000 + '""é""'
    file = saved(tmp_path, "a.csv", f'question,answer\r\n\r\n"{long}",\r\n" b ",NA\r\n', encoding)
    question = long.replace('""', '"')
    assert read_rows(str(file), "train") == [{"question": question, "answer": ""}, {"question": " b ", "answer": "NA"}]


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.csv", b"question,answer\n\xe9,5\n", "a.csv: cannot be read: .*; save it as UTF-8"),
    ("a.csv", b"question,answer\n1,234,5\n", "a.csv: line 2: .* expected 2 columns, as in the first line, got 3; "),
    ("a.csv", b"question,answer\nb\n", "a.csv: line 2: .* expected 2 columns, as in the first line, got 1; "),
    ("a.csv", b'question,answer\n"b,5\n', "a.csv: line 2: .* unexpected end of data; texts with quotes, commas"),
    ("a.csv", b"question,answer,answer\nb,4,5\n", "a.csv: .*the name 'answer' stands there twice; rename one"),
    ("a.csv", b"question,answer\nb,\n", r"a\.csv: row 1 \(0\) has no answer; remove or fill it"),
    ("a.csv", b"question,answer\n", "a.csv: it holds no rows"),
    ("a.jsonl", b'{"answer": 4, "answer": 5}', "a.jsonl: line 1: .*the name 'answer' stands there twice"),
    ("a.json", b'[{"question": "b", "answer": " "}]', r"a.json: row 1 \(0\) has no answer"),
    ("a.json", b'["b"]', "a.json: row 1: expected an object with a field for each column, got str"),
])  # fmt: skip
def test_a_file_whose_texts_are_in_doubt_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TaskError, match=message) as caught:
        len(Mathematics(source=str(tmp_path / name)))
    assert "\n" not in str(caught.value)


def test_two_columns_of_one_name_in_a_parquet_file_are_refused(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.Table.from_arrays([pa.array(["4"])] * 2, ["answer"] * 2), tmp_path / "a.parquet")
    with pytest.raises(TaskError, match=r"a\.parquet: .*the name 'answer' stands there twice; rename one"):
        read_rows(str(tmp_path / "a.parquet"), "train")
