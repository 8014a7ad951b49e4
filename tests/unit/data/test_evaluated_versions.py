"""Versions that are evaluated."""

from __future__ import annotations

from typing import Any

import pytest

from relax_actors.algorithms.schedules import is_evaluated
from relax_actors.config import Config, validate


def run_config(**sections: Any) -> Config:
    body = {"model": {"path": "m"}, "data": {"kind": "jsonl"}}
    return validate(body | sections, "test")


@pytest.mark.parametrize(("every", "expected"), [(0, [0, 10]), (4, [0, 4, 8, 10]), (5, [0, 5, 10]), (99, [0, 10])])
def test_first_last_and_every_nth_version_are_evaluated(every: int, expected: list[int]) -> None:
    config = run_config(run={"steps": 10}, eval={"every": every, "data": {"kind": "jsonl"}})
    assert [version for version in range(11) if is_evaluated(config, version)] == expected


def test_no_version_is_evaluated_without_a_section() -> None:
    assert not any(is_evaluated(run_config(), version) for version in range(200))
