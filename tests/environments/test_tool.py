"""The contract of a tool: what functions it takes, what it tells models, and what it refuses."""

import pytest

from maporl.environments.base import Tool, as_result
from maporl.errors import ConfigError
from maporl.types import Result


def add(a: int, b: int = 3) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


class TestOfAFunction:
    def test_schema_and_line(self):
        tool = Tool.of(add)
        assert tool.schema() == {
            "type": "function",
            "function": {
                "name": "add",
                "description": "Add two numbers.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "a": {"type": "integer", "description": "the first"},
                        "b": {"type": "integer", "description": "the second"},
                    },
                    "required": ["a"],
                },
                "return": {"type": "integer"},
            },
        }
        assert tool.line() == "add(a: integer, b: integer): Add two numbers."
        assert tool.run(a=2) == 5

    def test_a_method_leaves_out_self(self):
        class Shop:
            def look(self) -> str:
                """Look around."""
                return "three apples"

        tool = Tool.of(Shop().look)
        assert tool.parameters == {"type": "object", "properties": {}}
        assert tool.run() == "three apples"

    @pytest.mark.parametrize(("source", "message"), [
        ("def f(a: int): pass", "tool f: it has no docstring"),
        ("def f(a):\n    '''Do.\n\n    Args:\n        a: x\n    '''", "Argument a is missing a type hint"),
        ("def f(a: int):\n    '''Do.'''", "the docstring has no description for the argument 'a'"),
        ("def f(*a: int):\n    '''Do.'''", r"tool f: \*a: int: agents give arguments by name"),
        ("def f(a: 'Nowhere'):\n    '''Do.\n\n    Args:\n        a: x\n    '''", "annotations cannot be read"),
    ])  # fmt: skip
    def test_what_is_refused(self, source, message):
        names: dict = {}
        exec(source, names)
        with pytest.raises(ConfigError, match=message):
            Tool.of(names["f"])

    def test_a_name_that_no_model_can_write(self):
        with pytest.raises(ConfigError, match="tool 'my tool': its name must have only letters"):
            Tool("my tool", "x", {"type": "object"}, add)


def test_results_of_any_kind():
    assert as_result(None).text == "done"
    assert as_result(5).text == "5"
    assert as_result(b"\xff a").text == "\ufffd a"
    assert as_result(Result("x", reward=1.0)).reward == 1.0
