"""The extensions in examples/ do what their pages say."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import numpy as np

from relax_actors.monitoring.sinks import LogMessage

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_ranked_advantages_depend_on_the_order_of_rewards_only() -> None:
    ranked = runpy.run_path(str(EXAMPLES / "custom_estimator" / "ranked.py"))["ranked"]
    found = ranked(np.array([0.1, 9.0, 0.2], np.float32), normalise="std")
    assert found.tolist() == [-1.0, 1.0, 0.0]
    assert ranked(np.ones(4, np.float32), normalise="std").tolist() == [0.0] * 4


def test_csv_sink_writes_a_line_for_each_step(tmp_path: Path) -> None:
    target = tmp_path / "steps.csv"
    sink = runpy.run_path(str(EXAMPLES / "csv_sink" / "csv_sink.py"))["CsvSink"](str(target), "demo")
    for body in ({"kind": "step", "step": 3, "reward": 0.5, "loss": 0.25}, {"role": "trainer", "n": 0}):
        message = LogMessage.parse("relax.demo.metric.trainer.0", json.dumps(body).encode())
        assert message is not None
        sink.take(message)
    sink.close()
    assert target.read_text().split() == ["demo,3,0.5,0.25"]
