"""Reward for bounding boxes by their overlap."""

from __future__ import annotations

import re
from itertools import product

from relax_actors.errors import RowError
from relax_actors.messages import Prompt
from relax_actors.rewards._text import compares, final_part, required_answer

Box = tuple[float, float, float, float]
_MAX_BOXES = 256  # a completion with more of them is no answer
_N = r" ?([+-]?\d{1,9}(?:\.\d{1,9})?) ?"
_OPEN, _CLOSE = r"[\[(]", r"[\])]"
_KEY = r""" ?["']?{}["']? ?[:=]"""
_BOX = re.compile(
    rf"{_OPEN}{_N},{_N},{_N},{_N}{_CLOSE}"  # [x1, y1, x2, y2]
    rf"|{_OPEN}{_N},{_N}{_CLOSE},? ?{_OPEN}{_N},{_N}{_CLOSE}"  # (x1, y1), (x2, y2)
    rf"|{_KEY.format('x1')}{_N},{_KEY.format('y1')}{_N},{_KEY.format('x2')}{_N},{_KEY.format('y2')}{_N}"
)
_ALONE = re.compile(rf"{_N}[, ]{_N}[, ]{_N}[, ]{_N}")  # x1 y1 x2 y2
# White space is collapsed before matching: adjacent optional runs of it would make hostile text take quadratic time.


@compares
def iou(completion: str, prompt: Prompt) -> float:
    r"""Return the IoU of the completion's boxes and the answer's, 0 to 1.

    A box is `x1, y1, x2, y2` in the unit of the answer, with x1 < x2 and y1 < y2. It is written `[x1, y1, x2, y2]`,
    `(x1,y1),(x2,y2)` or `{"x1": ...}`, with anything around it (`{"bbox_2d": [...]}`, `<|box_start|>`), or as four
    numbers alone. Of the last `<answer>` tag, the last `\boxed{}` or the whole completion it takes the last box if
    the answer is one box. If the answer has several, it takes all boxes, matches each to at most one of the answer,
    best overlap first, and divides the sum by the larger of the two numbers of boxes.

    Raises:
        RowError: the answer contains no box, or a box without area.
    """
    answer = required_answer(prompt, "iou")
    expected = boxes(answer)
    if not expected or not all(map(_area, expected)):
        msg = (
            f"reward iou finds no box with an area in the answer {answer!r:.80}; "
            "write [x1, y1, x2, y2] with x1 < x2 and y1 < y2, or a list of such boxes"
        )
        raise RowError(msg)
    given = boxes(final_part(completion))
    if len(expected) == 1:
        given = given[-1:]
    if not given or len(given) > max(_MAX_BOXES, len(expected)):
        return 0.0
    return _matched(given, expected) / max(len(given), len(expected))


def boxes(text: str) -> list[Box]:
    """All boxes of a text, in order."""
    text = " ".join(text.split())
    alone = _ALONE.fullmatch(text)
    matches = [alone] if alone else _BOX.finditer(text)
    return [_box([float(number) for number in match.groups() if number is not None]) for match in matches]


def _box(numbers: list[float]) -> Box:
    left, top, right, bottom = numbers
    return left, top, right, bottom


def _matched(given: list[Box], expected: list[Box]) -> float:
    """Sum of the overlaps of a one-to-one matching, best first."""
    overlaps = {(i, j): _overlap(given[i], expected[j]) for i, j in product(range(len(given)), range(len(expected)))}
    free = {i for i, _ in overlaps}, {j for _, j in overlaps}
    total = 0.0
    for (i, j), overlap in sorted(overlaps.items(), key=lambda item: -item[1]):
        if i in free[0] and j in free[1]:
            free[0].remove(i)
            free[1].remove(j)
            total += overlap
    return total


def _overlap(one: Box, other: Box) -> float:
    common = _area(
        (max(one[0], other[0]), max(one[1], other[1]), min(one[2], other[2]), min(one[3], other[3])),
    )
    areas = _area(one), _area(other)
    return common / (sum(areas) - common) if all(areas) else 0.0


def _area(box: Box) -> float:
    left, top, right, bottom = box
    return max(right - left, 0.0) * max(bottom - top, 0.0)
