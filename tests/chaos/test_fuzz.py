"""A run under malformed messages on all of its subjects; `make fuzz` sends a million."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.flooding import flooded
from tests.support.running import relax


@pytest.mark.slow
def test_malformed_messages_do_not_change_how_a_run_ends(tmp_path: Path) -> None:
    counts, wrong = flooded(tmp_path, "fuzzed", 5, 3000, steps=20, rate=1500.0)
    assert wrong == []
    sent = {kind for kind, answer in counts if answer == "stored"}
    assert {"batch", "weights", "checkpoint", "eval", "malformed subject", "event or metric", "KV state"} <= sent
    for kind in ("malformed_cell", "malformed_subject", "stray_cell", "row_quarantined"):
        assert counts["event", kind] > 0, kind
    assert counts["unreadable cell", "its row is quarantined"] > 0

    # The commands read the malformed cells.
    def output(*arguments: str) -> str:
        done = relax(*arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert json.loads(output("ledger", "fuzzed", "--json"))["violations"] == []
    rows = [json.loads(line) for line in output("quarantine", "list", "fuzzed", "--json").splitlines()]
    unreadable = [row["row"] for row in rows if row["error"].startswith("unreadable: ")]
    assert unreadable
    assert "unreadable" in output("quarantine", "show", "fuzzed", unreadable[0])
    assert output("quarantine", "list", "fuzzed")
    assert output("status", "fuzzed")
    assert "broker" in output("tree", "fuzzed")
