"""Reward for an interval of time by its overlap."""

from __future__ import annotations

import re

from relax_actors.errors import RowError
from relax_actors.messages import Prompt
from relax_actors.rewards._text import compares, final_part, required_answer

Interval = tuple[float, float]
_CLOCK = r"(?<![\d.:])(?:\d{1,3}:){0,2}\d{1,6}(?:\.\d{1,6})?(?![\d.]*\d|:)"
_TIME = rf"<? ?({_CLOCK}) ?(?:s|sec|secs|seconds?)? ?>?"
_TO = " ?(?:-|\N{EN DASH}|\N{EM DASH}|,|to|and|until) ?"
_KEYS = r"""["']?start["']? ?[:=] ?["']?{0}["']? ?, ?["']?end["']? ?[:=] ?["']?{0}"""
_INTERVAL = re.compile(rf"{_TIME}{_TO}{_TIME}|{_KEYS.format(_TIME)}", re.IGNORECASE)


@compares
def temporal_iou(completion: str, prompt: Prompt) -> float:
    r"""Return the IoU of the completion's last interval and the answer's, 0 to 1.

    An interval is two times in seconds or as `minutes:seconds`, the earlier one first: `[1.5, 4]`, `1.5 - 4.0`,
    `from 1.5s to 4 seconds`, `00:05-01:10`, `<1.5 seconds> to <4 seconds>`, `{"start": 1.5, "end": 4}`. It is taken
    from the last `<answer>` tag, the last `\boxed{}` or the whole completion.

    Raises:
        RowError: the answer contains no interval, or one without length.
    """
    answer = required_answer(prompt, "temporal_iou")
    expected = last_interval(answer)
    if expected is None or expected[0] >= expected[1]:
        msg = (
            f"reward temporal_iou finds no interval in the answer {answer!r:.80}; "
            "write [start, end] in seconds with start < end"
        )
        raise RowError(msg)
    given = last_interval(final_part(completion))
    if given is None or given[0] >= given[1]:
        return 0.0
    common = max(min(given[1], expected[1]) - max(given[0], expected[0]), 0.0)
    return common / (given[1] - given[0] + expected[1] - expected[0] - common)


def last_interval(text: str) -> Interval | None:
    """The last interval of a text, in seconds; None if it has none."""
    matches = [match.groups() for match in _INTERVAL.finditer(" ".join(text.split()))]  # linear time for hostile text
    if not matches:
        return None
    start, end = (_seconds(time) for time in matches[-1] if time is not None)
    return start, end


def _seconds(time: str) -> float:
    seconds = 0.0
    for part in time.split(":"):
        seconds = 60 * seconds + float(part)
    return seconds
