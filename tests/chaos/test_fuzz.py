"""A living run under malformed messages on all its subjects; a million of them by `make fuzz`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_actors.cli import inspect, quarantine
from tests.support.flooding import flooded


def test_a_run_ends_as_if_malformed_messages_had_never_come(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, wrong = flooded(tmp_path, "fuzzed", 5, 3000, steps=20, rate=1500.0)
    assert wrong == []
    sent = {kind for kind, answer in counts if answer == "stored"}
    assert {"batch", "weights", "checkpoint", "eval", "malformed subject", "event or metric", "KV state"} <= sent
    for kind in ("malformed_cell", "malformed_subject", "stray_cell", "row_quarantined"):
        assert counts["event", kind] > 0, kind
    assert counts["unreadable cell", "its row is quarantined"] > 0

    # The command line reads what the flood left.
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert inspect.ledger("fuzzed", as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["violations"] == []
    quarantine.list_rows("fuzzed", as_json=True)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    unreadable = [row["row"] for row in rows if row["error"].startswith("unreadable: ")]
    assert unreadable
    quarantine.show_row("fuzzed", unreadable[0])
    assert "unreadable" in capsys.readouterr().out
    quarantine.list_rows("fuzzed", as_json=False)
    inspect.status("fuzzed", as_json=False)
    inspect.tree("fuzzed")
    assert "trainer" in capsys.readouterr().out
