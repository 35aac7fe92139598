"""A task of the user's own that breaks its contract is refused in one line, before a model loads."""

import uuid

import pytest

from maporl.config.imports import import_modules
from maporl.errors import ConfigError
from maporl.tasks import build_task
from maporl.validation.load import from_dict
from maporl.validation.preflight import check_run

TASK = """
from dataclasses import dataclass
from maporl import Example, Grade, Task


@dataclass(frozen=True)
class Own(Task):
    split: str = "train"

    def __len__(self):
        return 16

    def __getitem__(self, i):
        return Example(f"{i}", f"{i:04b}", "yn"[i % 2])

    def grade(self, example, text):
        return Grade(text, text == example.answer, "compared")
"""
ITEM, GRADE = "    def __getitem__(self, i):", "    def grade(self, example, text):"


def checked(tmp_path, body="", alphabet="01yn"):
    """Return what ``check`` says of the task with ``body`` at the end of its class."""
    name = f"own_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(TASK + body)
    values = {
        "task": {"name": f"{name}:Own"},
        "agents": {"ann": {}, "bob": {}},
        "agent_defaults": {"tiny": {"alphabet": alphabet, "hidden_size": 32, "layers": 1, "heads": 2}},
        "protocol": {"name": "debate", "turns": 1},
        "output_dir": str(tmp_path / "run"),
        "pythonpath": [str(tmp_path)],
        "ppo": {"response_length": 2},
        "evaluation": {"questions": 4},
        "training": {"use_cpu": True},
    }
    return "\n".join(check_run(from_dict(values)))


@pytest.mark.parametrize(("body", "message"), [
    (f"{ITEM}\n        return {{'id': '1'}}", "returned a value of type dict; expected maporl\\.Example\\(id, question, answer\\)"),
    (f"{ITEM}\n        return None", "returned None; expected maporl.Example"),
    (f"{ITEM}\n        return Example(str(i), [], 'y')", "whose question is a value of type list"),
    (f"{ITEM}\n        return Example(i, '01', 'y')", "whose id is a value of type int"),
    (f"{ITEM}\n        return Example(str(i), '01', 1)", "whose answer is a value of type int"),
    (f"{ITEM}\n        return Example('x', '01', 'y')", "examples 0 and 1 have the same id 'x'"),
    (f"{ITEM}\n        return Example(str(i), '01'[7], 'y')", r"example 0: .*own_\w+\.py, line 19: IndexError"),
    ("    def question(self, example):\n        return 3", "question returned a value of type int"),
    ("    def question(self, example):\n        return 1 / 0", r"line 19: ZeroDivisionError"),
    ("    def solution(self, example):\n        return 1 / 0", r"line 19: ZeroDivisionError"),
    (f"{GRADE}\n        return text == example.answer", "grade returned a value of type bool; expected maporl.Grade"),
    (f"{GRADE}\n        return Grade(text, 'yes', '')", "a Grade whose correct is a value of type str"),
    (f"{GRADE}\n        from maporl.errors import ConfigError; raise ConfigError('no such text')", "^no such text$"),
    (f"{GRADE}\n        return Grade(text[99], True, '')", r"grade: .*own_\w+\.py, line 19: IndexError"),
])  # fmt: skip
def test_a_task_that_breaks_its_contract_is_refused_in_one_line(tmp_path, body, message):
    with pytest.raises(ConfigError, match=message) as refused:
        checked(tmp_path, body)
    assert "\n" not in str(refused.value)


def test_an_alphabet_without_the_characters_of_right_answers_has_a_warning(tmp_path):
    assert "right answers have characters that it lacks, 'ny'" in checked(tmp_path, alphabet="01")


@pytest.mark.parametrize("body", [
    f"{GRADE}\n        return Grade(text, False, 'never')",
    "    def solution(self, example):\n        return 'the answer'",
])  # fmt: skip
def test_a_task_that_calls_its_right_answer_wrong_has_a_warning(tmp_path, body):
    assert "grades its own right answer" in checked(tmp_path, body)


def test_a_class_that_the_module_only_imports_is_not_offered(tmp_path):
    name = f"own_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(TASK)
    import_modules({"task.name": f"{name}:Onw"}, [str(tmp_path)], "configuration")
    with pytest.raises(ConfigError, match=r"known: Own$"):
        build_task({"name": f"{name}:Onw"}, "train", 0)
