"""Observations of a run: read from a real broker, saved to a file, and read back the same."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax_actors.errors import ConfigError
from relax_actors.messages import Weights
from relax_actors.monitoring.diagnosis import diagnose
from relax_actors.monitoring.diagnosis.log_reader import load_observed, observe, save_observed
from tests.support.consoles import WrittenRun

SETTINGS = {"run": {"name": "seen", "folder": "/srv/secret"}, "broker": {"token": "hunter2"}, "trainer": {}}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[WrittenRun]:
    run = WrittenRun(tmp_path)
    yield run
    run.stop()


def test_saved_observations_read_back_the_same_without_secrets(run: WrittenRun, tmp_path: Path) -> None:
    trainer = run.journal("trainer")
    for step in range(8):
        trainer.metric({"kind": "step", "step": step, "reward": 0.0, "staleness": 0})
        run.table.put(run.subjects.numbered("weights", step), Weights(step, f"{step:032x}", [], 1))
    reward, node = run.journal("reward"), run.journal("node")
    reward.event("crashed", error="ValueError: no number")
    node.metric({"kind": "supervision", "restarts": {"reward.0": 2}, "disk_free_mib": 77})
    assert all(journal.flush(10) for journal in (trainer, reward, node))
    seen = observe(run.table, SETTINGS)
    assert [seen.steps[step]["reward"] for step in range(8)] == [0.0] * 8
    assert seen.fingerprints[3] == f"{3:032x}"
    assert [(event.sender, event.kind, event.text) for event in seen.events][-1:] == [
        ("reward.0", "crashed", "ValueError: no number")
    ]
    assert seen.restarts == {"reward.0": 2}
    assert seen.actors["node.0"][0].figures["disk_free_mib"] == 77
    assert [finding.rule for finding in diagnose(seen)] == ["flat_reward"]
    path = tmp_path / "seen.jsonl.gz"
    assert save_observed(run.table, SETTINGS, path) >= 10
    again = load_observed(path)
    assert (again.steps, again.fingerprints) == (seen.steps, seen.fingerprints)
    assert [(event.sender, event.text) for event in again.events] == [(e.sender, e.text) for e in seen.events]
    text = gzip.decompress(path.read_bytes()).decode()
    assert "hunter2" not in text
    assert "/srv" not in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as recorded observations"),
        (gzip.compress(b"{}\n{}\n"), "cannot be read as recorded observations"),
        (gzip.compress(b'{"format": "x", "run": "a", "settings": {}}\n{"fingerprints": {}}\n'), "has the format 'x'"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "other.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_observed(path)
    with pytest.raises(ConfigError, match="No such file"):
        load_observed(tmp_path / "absent.jsonl.gz")
