"""`/api/curves`: figures over optimizer steps, thinned out to what a chart can show."""

from __future__ import annotations

from dataclasses import dataclass

from relax_actors.console.figures import Curve
from relax_actors.console.query import Query

POINTS, MAX_POINTS = 600, 20_000


@dataclass(frozen=True, slots=True)
class Curves:
    """Figures of a run.

    Attributes:
        run: name of the run.
        sequence: sequence of the log up to which figures are counted; the stream goes on after it.
        last: newest step; None before the first.
        names: names of all figures.
        curves: the figures asked for.
    """

    run: str
    sequence: int
    last: int | None
    names: list[str]
    curves: dict[str, Curve]


async def answer(query: Query) -> Curves:
    """Return the figures in parameter `names`, separated by commas, from step `first` to `last`."""
    picture = await query.run.refresh()
    figures = picture.figures
    points = query.number("points", POINTS, least=1, most=MAX_POINTS) or POINTS
    first, last = query.number("first", 0) or 0, query.number("last")
    names = [name for name in query.text("names").split(",") if name]
    curves = {name: figures.curve(name, points, first, last) for name in names}
    return Curves(query.run.name, picture.log_sequence, figures.last, figures.names(), curves)
