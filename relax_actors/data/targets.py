"""What the scores of a reward model are compared with, from the fields of a row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np

from relax_actors.data.example import Example
from relax_actors.errors import RowError
from relax_actors.messages.trajectory import LABEL

MARGIN, STEPS, LABELS = "margin", "steps", "labels"


class Targets:
    """Reads labels (of `classes`) and margins; `separator` ends a step."""

    def __init__(self, classes: int, separator: str) -> None:
        self._classes, self._separator = max(2, classes), separator

    def margin(self, fields: Mapping[str, Any]) -> float:
        """Return the margin of a pair, 0 without one; raises RowError if it is no finite number."""
        margin = fields.get(MARGIN, 0.0)
        if margin is None:
            return 0.0
        if isinstance(margin, bool) or not isinstance(margin, Real) or not math.isfinite(margin):
            msg = (
                f"its field 'margin' is {margin!r:.60}; write a finite number, the least difference of the scores, or "
                "leave it out"
            )
            raise RowError(msg)
        return float(margin)

    def label(self, fields: Mapping[str, Any]) -> float:
        """Return a labelled answer's class; raises RowError for a missing or unknown label."""
        return self._class_of(fields.get(LABEL), "its field 'label'")

    def steps(self, answer: str, fields: Mapping[str, Any]) -> tuple[list[str], list[float]]:
        """Return the steps of an answer, without separators, and the class of each.

        They are the field `steps`, a list of texts, or what the separators of the answer end; the last one may lack it.

        Raises:
            RowError: the row has no steps, no separator, or not as many labels as steps.
        """
        labels = fields.get(LABELS)
        if not isinstance(labels, list) or not labels:
            msg = f"its field 'labels' is {labels!r:.60}; write a list with the label of each step"
            raise RowError(msg)
        steps = self._listed(fields[STEPS]) if STEPS in fields else self._cut(answer)
        if len(steps) != len(labels):
            msg = f"it has {len(steps)} steps and {len(labels)} labels; write one label for each step"
            raise RowError(msg)
        return steps, [self._class_of(label, f"label {i} of its steps") for i, label in enumerate(labels, 1)]

    def _listed(self, steps: object) -> list[str]:
        if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
            msg = f"its field 'steps' is {steps!r:.60}; write a list of texts"
            raise RowError(msg)
        if inside := next((step for step in steps if self._separator in step), None):
            msg = f"the step {inside!r:.60} has a separator {self._separator!r} inside; split it, with a label for each"
            raise RowError(msg)
        return list(steps)

    def _cut(self, answer: str) -> list[str]:
        if self._separator not in answer:
            msg = (
                f"its answer {answer!r:.60} has no separator {self._separator!r}, where the score of a step is read; "
                "end each step with it, write the steps as a list `steps`, or set examples.step_separator"
            )
            raise RowError(msg)
        return steps_of(answer, self._separator)

    def _class_of(self, label: object, what: str) -> float:
        number = int(label) if isinstance(label, bool | int) else -1
        if not 0 <= number < self._classes:
            known = "true or false" if self._classes == 2 else f"a class from 0 to {self._classes - 1}"  # noqa: PLR2004
            msg = f"{what} is {label!r:.60}; write {known}, or raise algorithm.scores.classes"
            raise RowError(msg)
        return float(number)


def steps_of(answer: str, separator: str) -> list[str]:
    """Return the steps of an answer, without separators; the last one may lack it."""
    return answer.removesuffix(separator).split(separator)


def is_good(fields: Mapping[str, Any]) -> bool:
    """Return whether a labelled answer is good; raises RowError if the row does not say it."""
    label = fields.get(LABEL)
    if not isinstance(label, bool):
        msg = f"its field 'label' is {label!r:.60}; write true for a good answer, and false for a bad one"
        raise RowError(msg)
    return label


def at_end(example: Example, target: float) -> Example:
    """Return an example with its score at the answer's last token, compared with `target`."""
    targets = np.full(len(example.ids), np.nan, np.float32)
    targets[np.flatnonzero(example.trained)[-1]] = target
    return replace(example, targets=targets)
