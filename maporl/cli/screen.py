"""Rich's console for texts of strangers: the terminal shows their control characters, and obeys none of them."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from maporl.text import printable


class Screen(Console):
    """A console that makes the control characters of every text visible (:func:`maporl.text.printable`)."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Return the segments of ``renderable``. Colours are Rich's own, and not part of a segment's text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
