"""Rules of `relax doctor` over figures: silent on a healthy run, whatever roles it has."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from broker.subjects import Subjects
from broker.table import Fill
from relax_actors.config import Config, load_config
from relax_actors.messages import Batch
from relax_actors.monitoring import health
from relax_actors.registry.catalog import ROLES
from relax_actors.roles import built_in_spec
from relax_actors.roles.registry import complete_spec
from relax_actors.runtime import check_role
from relax_actors.supervision.streams import consumers_of
from relax_actors.training.ledger import Ledger
from tests.support.running import TINY

BUILT_IN = sorted(ROLES.built_in)
WITHOUT_ROWS = {"agent", "autoscaler", "environment", "gateway", "trainer_rank"}


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(TINY, [])


def child(phase: str = "ready", age: float = 3600.0, restarts: int = 0) -> dict[str, Any]:
    return {"phase": phase, "since": time.time() - age, "restarts": restarts, "pid": 1}


def leases(*roles: str, **children: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Leases of a run on one node, whose actors are ready."""
    since = time.time() - 3600
    actors = {f"{role}.0": child() for role in roles} | children
    state = {"pid": 1, "incarnation": 1, "since": since, "rows": [], "waits_for": "its first row"}
    supervisors: dict[str, dict[str, Any]] = {
        "root.0": {"since": since, "children": {"broker": child(), "node": child()}}
    }
    supervisors["node.0"] = {"since": since, "children": actors}
    return {**supervisors, **dict.fromkeys(actors, state)}


@pytest.mark.parametrize("role", BUILT_IN)
def test_consumers_of_a_healthy_role_are_not_missing(config: Config, role: str) -> None:
    cls = check_role(ROLES.load(role, "role"), role)
    names = [str(consumer.durable_name) for consumer in consumers_of(config, role, cls())]
    assert (names == []) == (role in WITHOUT_ROWS)
    assert list(health.missing_consumers("table", {role: names}, names)) == []
    missing = list(health.missing_consumers("table", {role: names}, ()))
    assert [name in finding.text for name, finding in zip(names, missing, strict=True)] == [True] * len(names)
    assert complete_spec(cls) == built_in_spec(role)


def test_rules_are_silent_on_a_healthy_run_with_every_role(config: Config) -> None:
    now, found = time.time(), leases(*BUILT_IN, **{"server.0": child()})
    ledger = Ledger(4, 8, 1)
    for step in range(4):
        ledger.batches[step] = Batch([0], 0, 1, 0.5, 0, 1, now - 10 + step)
    silent = [
        *health.supervision(config, found),
        *health.forged({}),
        *health.progress(config, ledger, found, now),
        *health.table(Fill(100, 10_000, size=1 << 20, max_size=1 << 30), ""),
        *health.quarantine("tiny", [], ledger),
        *health.disks([]),
    ]
    assert silent == []


@pytest.mark.parametrize(
    ("phase", "age", "restarts", "kinds"),
    [
        ("starting", 30, 0, []),
        ("starting", 100, 0, ["note"]),
        ("starting", 800, 0, ["note"]),
        ("starting", 1000, 0, ["problem"]),
        ("backing_off", 1, 1, ["problem"]),
    ],
)
def test_long_start_is_a_note_and_one_beyond_the_limit_a_problem(
    config: Config, phase: str, age: float, restarts: int, kinds: list[str]
) -> None:
    found = list(health.supervision(config, leases(*BUILT_IN, **{"server.0": child(phase, age, restarts)})))
    assert ["problem" if finding.is_problem else "note" for finding in found] == kinds
    assert all("server.0 has been " in finding.text and "restart" in finding.text for finding in found)


def test_subjects_and_paths_of_findings_are_those_of_the_run(tmp_path: Path) -> None:
    stream = Subjects("tiny").table_stream
    (finding,) = health.missing_consumers(stream, {"reward": ["reward"]}, ())
    assert stream in finding.text
    assert "start it again" in finding.text
    assert list(health.disks([tmp_path / "absent"])) == []
