"""Fixtures of several integration tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from relax_actors.config import Config
from relax_actors.engines.ranks.group import TrainerGroup
from tests.support.service_ends import ends
from tests.support.session_ends import goes_on, left, make_sessions

__all__ = ["ends", "goes_on", "group_of", "left", "make_sessions"]


@pytest.fixture
def group_of() -> Iterator[Callable[[Config], TrainerGroup]]:
    """Trainers of several ranks, which end with the test."""
    groups: list[TrainerGroup] = []

    def make(config: Config) -> TrainerGroup:
        groups.append(TrainerGroup(config))
        return groups[-1]

    yield make
    for group in groups:
        group.close()
