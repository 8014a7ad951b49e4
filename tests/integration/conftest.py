"""Fixtures of several integration tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from relax_actors.config import Config
from relax_actors.engines.ranks.group import TrainerGroup
from tests.support.service_ends import ends
from tests.support.session_ends import goes_on, left, make_sessions
from tests.support.sglang_servers import kept

__all__ = ["ends", "goes_on", "group_of", "kept", "left", "make_sessions"]


@pytest.fixture
def group_of() -> Iterator[Callable[..., TrainerGroup]]:
    """Trainers of several ranks, which end with the test; `lost` is called for each rank that dies."""
    groups: list[TrainerGroup] = []

    def make(config: Config, lost: Callable[[int, int], None] = lambda *_: None) -> TrainerGroup:
        groups.append(TrainerGroup(config, lost))
        return groups[-1]

    yield make
    for group in groups:
        group.close()
