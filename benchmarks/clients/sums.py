"""What the programs of this folder share: a tool, the shape of an answer, and the second question."""

from pydantic import BaseModel

AGAIN = "Are you sure?"


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


class Sum(BaseModel):
    """The sum of two numbers."""

    answer: int
