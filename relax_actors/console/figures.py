"""Figures of a run over its optimizer steps, held as arrays and thinned out for a chart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from relax_actors.monitoring.log_message import LogMessage

MAX_NAMES = 256
"""Figures that are kept by name; further ones are left out."""
FIRST_SIZE = 256
MAX_WAITING = 1024
"""Messages whose figures wait to be written into the arrays."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One figure over steps, thinned out.

    Attributes:
        steps: first step of each point.
        mean: mean of the values that a point stands for.
        low: least of these values.
        high: largest of these values.
    """

    steps: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


class Figures:
    """Values of each figure by step. A replayed step replaces its earlier values, except times (`*_seconds`).

    Values of steps beyond the last one of the run are ignored, since any role can write to the log.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._values: dict[str, np.ndarray[Any, np.dtype[np.float64]]] = {}
        # Messages whose figures are not in the arrays yet, by the names that they have. None of them is of a step that
        # had another message of its kind: a replayed step settles all messages before it.
        self._new: dict[tuple[str, ...], list[tuple[int, tuple[float, ...]]]] = {}
        self._waiting = 0
        self._furthest: dict[str, int] = {}
        self.last: int | None = None
        """Newest step with a figure; None before the first."""

    def take(self, message: LogMessage) -> None:
        """Record the figures of a message; others and false claims are ignored."""
        if message.claim or (figures := message.figures()) is None:
            return
        step, names, values = figures
        if not 0 <= step <= self._steps:
            return
        if message.kind == "step":
            self.last = max(step, self.last or 0)
        if not values:
            return
        if step <= self._furthest.get(message.kind, -1) or self._waiting >= MAX_WAITING or len(self._new) >= MAX_NAMES:
            self._settle()
        self._furthest[message.kind] = max(step, self._furthest.get(message.kind, -1))
        self._new.setdefault(names, []).append((step, values))
        self._waiting += 1

    def _settle(self) -> None:
        """Write new figures into the arrays: those of many messages at once, since single numbers take NumPy longer."""
        for names, messages in self._new.items():
            steps = np.array([step for step, _ in messages])
            table = np.array([values for _, values in messages], np.float64)
            for name, values in zip(names, table.T, strict=True):
                if name not in self._values and len(self._values) >= MAX_NAMES:
                    continue
                array = self._array(name, int(steps.max()))
                # A replay takes what is in the table, so the time that it takes is not that of the step.
                new = np.isnan(array[steps]) if name.endswith("_seconds") else slice(None)
                array[steps[new]] = values[new]
        self._new, self._waiting = {}, 0

    def _array(self, name: str, step: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        array = self._values.get(name)
        if array is None or step >= len(array):
            size = max(FIRST_SIZE, 2 * (step + 1))
            grown = np.full(min(size, self._steps + 1), np.nan)
            if array is not None:
                grown[: len(array)] = array
            self._values[name] = array = grown
        return array

    def names(self) -> list[str]:
        """Return the names of all figures, in the order of their first values."""
        self._settle()
        return list(self._values)

    def latest(self) -> dict[str, float]:
        """Return the newest value of each figure."""
        self._settle()
        newest = {}
        for name, array in self._values.items():
            known = np.flatnonzero(~np.isnan(array))
            if len(known):
                newest[name] = float(array[known[-1]])
        return newest

    def curve(self, name: str, points: int, first: int = 0, last: int | None = None) -> Curve:
        """Return a figure as at most `points` points over the steps from `first` to `last`.

        Equal numbers of values are taken together, so a curve of 10,000 steps keeps its peaks in `low` and `high`.
        """
        self._settle()
        array = self._values.get(name)
        if array is None:
            return Curve([], [], [], [])
        part = array[first : None if last is None else last + 1]
        known = np.flatnonzero(~np.isnan(part))
        values = part[known]
        size = max(1, -(-len(values) // max(1, points)))
        starts = np.arange(0, len(values), size)
        if not len(starts):
            return Curve([], [], [], [])
        counts = np.diff(np.append(starts, len(values)))
        means = np.add.reduceat(values, starts) / counts
        lows, highs = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
        return Curve((known[starts] + first).tolist(), means.tolist(), lows.tolist(), highs.tolist())
