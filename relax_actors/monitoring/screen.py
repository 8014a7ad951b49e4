"""Terminal output of the commands, which shows text of other processes."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from relax_actors.printable import printable_lines


class Screen(Console):
    """Console without control characters but rich's, and without markup in strings.

    Whatever is printed, every piece of text passes `printable_lines`. Values that stand in one line or one cell of a
    table pass `printable` before, which also escapes their newlines.
    """

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render an object to segments of text, and make their text printable."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable_lines(text), style, control)

    def show(self, text: str, style: str = "") -> None:
        """Print text without wrapping it; newlines in it are kept."""
        self.print(Text(text, style), soft_wrap=True)
