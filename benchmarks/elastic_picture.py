"""Picture of `elastic.py`: rows per second over time, one panel a part, as SVG."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from elastic_parts import Part, rows_per_second

WIDTH, PANEL, LEFT, TOP, RIGHT = 860, 190, 50, 44, 14
"""Width of the picture, height of a panel, and the space around its curve, in pixels."""
BINS = 120
"""Points of a curve, at most; each spans at least a second."""


def draw(parts: Mapping[str, Part]) -> str:
    """Return the picture of all parts."""
    height = PANEL * len(parts)
    panels = "".join(_panel(name, part, n * PANEL) for n, (name, part) in enumerate(parts.items()))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12" role="img">\n'
        f"<title>Rows per second while rollouts come and go</title>\n"
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>\n{panels}</svg>\n'
    )


def _panel(name: str, part: Part, top: int) -> str:
    begin, end = part.marks[0][0], part.marks[-1][0]
    width = max(1.0, (end - begin) / BINS)
    # The last bin would be shorter than the others.
    times = [begin + n * width for n in range(int((end - begin) / width))]
    rates = [rows_per_second(part.run, at, at + width) for at in times]
    most = max([*rates, 1e-6])
    bottom, room = top + PANEL - 26, PANEL - TOP - 26
    scale = (WIDTH - LEFT - RIGHT) / max(end - begin, 1e-6)

    def x(at: float) -> float:
        return round(LEFT + (at - begin) * scale, 1)

    points = " ".join(
        f"{x(at + width / 2)},{bottom - rate / most * room:.1f}" for at, rate in zip(times, rates, strict=True)
    )
    lines = [_text(LEFT, top + 16, f"{name}: rows per second", weight="bold")]
    lines += [_text(LEFT - 6, top + TOP + 4, f"{most:.0f}", anchor="end"), _text(LEFT - 6, bottom, "0", anchor="end")]
    lines += [_text(WIDTH - RIGHT, bottom + 18, f"{end - begin:.0f} s", anchor="end")]
    for (at, label), (until, _) in zip(part.marks, part.marks[1:], strict=False):
        lines.append(f'<line x1="{x(at)}" y1="{top + TOP - 8}" x2="{x(at)}" y2="{bottom}" stroke="#bbb"/>')
        # Short phases have no room for their names beside each other.
        low = 10 if x(until) - x(at) < 8 * len(label) else 0
        lines.append(_text(x(at) + 3, top + TOP - 8 + low, label))
    lines.append(f'<line x1="{LEFT}" y1="{bottom}" x2="{WIDTH - RIGHT}" y2="{bottom}" stroke="#555"/>')
    lines.append(f'<polyline points="{points}" fill="none" stroke="#1f6feb" stroke-width="1.5"/>')
    return "\n".join(lines) + "\n"


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'
