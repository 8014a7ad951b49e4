"""Suite of monitor sinks: what a run measures arrives, and nothing that anybody may publish breaks a sink."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_actors.monitoring.sinks import LogMessage, Sink, open_sink
from tests.support.fuzzing import Fuzzer

RUN = "watched"
Scalars = dict[str, list[tuple[int, float]]]
"""Values by name, each with its step; sinks that keep the last value only have step -1."""


def message(subject: str, **body: Any) -> LogMessage:
    """A message of the run's log, as a monitor reads it."""
    read = LogMessage.parse(f"relax.{RUN}.{subject}", json.dumps(body).encode())
    assert read is not None
    return read


def step(n: int, **values: Any) -> LogMessage:
    """The measurements of an optimizer step."""
    return message("metric.trainer.0", kind="step", step=n, time=1e9 + n, **values)


class MonitorSinkConformance:
    """Laws of every sink; subclasses give its target and read back what it has written."""

    implements: str
    """Name in the registry."""

    needs: str | None = None
    """The package that may be missing."""
    keeps_history = True
    names: dict[str, str]
    """How the sink calls `step/reward`, `step/loss` and `eval/reward`; sinks may leave some out."""

    def target(self, folder: Path) -> str:
        """What follows `--sink`."""
        raise NotImplementedError

    def written(self, sink: Any, folder: Path) -> Scalars:
        """Close the sink, and read what it has written."""
        raise NotImplementedError

    @pytest.fixture
    def sink(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sink:
        if self.needs is not None:
            pytest.importorskip(self.needs, reason=f"pip install 'relax-actors[{self.needs}]'")
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("WANDB_DIR", str(tmp_path))
        return open_sink(self.target(tmp_path), RUN)

    def test_steps_and_evaluations_are_written_under_their_names(self, sink: Sink, tmp_path: Path) -> None:
        for n in range(5):
            sink.take(step(n, reward=0.25 * n, loss=0.5))
        sink.take(message("event.evaluator.0.evaluated", kind="evaluated", version=3, reward=0.75))
        found = self.written(sink, tmp_path)
        rewards = [(n, 0.25 * n) for n in range(5)]
        losses = [(n, 0.5) for n in range(5)]
        wanted = {"step/reward": rewards, "step/loss": losses, "eval/reward": [(3, 0.75)]}
        for name, ours in self.names.items():
            values = wanted[name] if self.keeps_history else [(-1, wanted[name][-1][1])]
            assert found[ours] == values

    def test_messages_of_no_interest_are_ignored(self, sink: Sink, tmp_path: Path) -> None:
        sink.take(message("event.reward.0.ready", kind="ready", seconds=1.5))
        sink.take(message("metric.trainer.0", kind="generated", seconds=1.5))
        sink.take(message("event.evaluator.0.evaluated", kind="evaluated", version=3))
        found = self.written(sink, tmp_path)
        assert not any("seconds" in name or "eval" in name for name in found)

    def test_values_that_are_not_finite_numbers_are_left_out(self, sink: Sink, tmp_path: Path) -> None:
        huge = 10**400
        sink.take(step(3, reward=1.0, huge=huge, text="x", nothing=None, many=[1], infinite=float("inf")))
        sink.take(message("metric.trainer.0", kind="step", step=1e30, reward=2.0))
        sink.take(message("metric.trainer.0", kind="step", step=huge, reward=2.0))
        found = self.written(sink, tmp_path)
        assert not [name for name in found if name.endswith(("huge", "text", "nothing", "many", "infinite"))]
        assert found[self.names["step/reward"]][0][1] in ((1.0, 2.0) if not self.keeps_history else (1.0,))

    def test_no_message_that_a_client_can_publish_breaks_a_sink(self, sink: Sink, tmp_path: Path) -> None:
        fuzzer, taken = Fuzzer(RUN, 7), 0
        for _ in range(3000):
            published = fuzzer.message()
            read = LogMessage.parse(published.subject, published.data)
            if read is not None:
                sink.take(read)
                taken += 1
        assert taken > 20
        sink.take(step(77, reward=0.5))
        assert (77 if self.keeps_history else -1, 0.5) in self.written(sink, tmp_path)[self.names["step/reward"]]
