"""Export of timelines to an OpenTelemetry collector: deterministic ids, and a real receiver of OTLP over HTTP."""

from __future__ import annotations

import gzip
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from broker.subjects import RowId
from relax_actors.errors import ConfigError
from relax_actors.messages import Batch, Weights
from relax_actors.monitoring.log_message import LogMessage
from relax_actors.monitoring.timeline import Span, Timeline
from tests.support.consoles import WrittenRun
from tests.support.http_servers import serving
from tests.support.log_messages import metric
from tests.support.running import wait_until
from tests.support.shown_rows import write_row

pytest.importorskip("opentelemetry.sdk", reason="needs the extra `otlp`")
from relax_actors.monitoring.sinks.otlp import OtlpSink, context, spans_of

STEP = Timeline(
    "demo",
    (
        Span("trajectory", 10.0, 12.0, "rollout.0", "group.3.1", 3),
        Span("reward", 12.0, 12.5, "reward.0", "group.3.1", 3),
        Span("train", 13.0, 14.0, "trainer.0", step=3, arguments={"reward": 0.5}),
    ),
    (),
)


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """A receiver, and the spans that it got as (service, span)."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    got: list[Any] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers["Content-Encoding"] == "gzip":
                body = gzip.decompress(body)
            request = ExportTraceServiceRequest.FromString(body)
            for part in request.resource_spans:
                service = {each.key: each.value.string_value for each in part.resource.attributes}["service.name"]
                got.extend((service, span) for scope in part.scope_spans for span in scope.spans)
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with serving(Receiver) as url:
        yield url, got


@pytest.fixture
def written(tmp_path: Path) -> Iterator[WrittenRun]:
    run = WrittenRun(tmp_path)
    yield run
    run.stop()


def step(number: int) -> LogMessage:
    return metric("trainer", kind="step", step=number, reward=0.5)


def test_steps_arrive_at_a_collector_with_their_times(collector: tuple[str, list[Any]]) -> None:
    url, got = collector
    asked: list[int] = []

    def read(number: int, message: LogMessage) -> Timeline:
        asked.append(number)
        assert message.numbers()["step"] == number
        return STEP

    sink = OtlpSink(url, "demo", read)
    for number in (2, 3):
        sink.take(step(number))
    sink.take(metric("rollout", rows=3))
    sink.close()
    assert asked == [2, 3]
    assert sink.left_out == 0
    by_name = {span.name: (service, span) for service, span in got[:4]}
    assert {name: service for name, (service, _) in by_name.items()} == {
        "row": "prompts",
        "trajectory": "rollout",
        "reward": "reward",
        "train": "trainer",
    }
    row, reward, train = (by_name[name][1] for name in ("row", "reward", "train"))
    assert (reward.start_time_unix_nano, reward.end_time_unix_nano) == (12_000_000_000, 12_500_000_000)
    assert reward.parent_span_id == row.span_id
    assert reward.trace_id == row.trace_id != train.trace_id
    assert row.links[0].trace_id == train.trace_id
    assert row.links[0].span_id == train.span_id


def test_every_exporter_computes_the_same_ids() -> None:
    first, again = ([span.context for span in spans_of("demo", STEP)] for _ in range(2))
    assert first == again
    assert len({each.span_id for each in first}) == len(first) == 4
    assert context("demo", "group.3.1", "group.3.1") != context("other", "group.3.1", "group.3.1")


def test_collector_that_is_away_or_a_step_that_is_gone_is_counted(collector: tuple[str, list[Any]]) -> None:
    def read(number: int, message: LogMessage) -> Timeline:
        if number == 0:
            raise ConfigError("nothing of step 0 is left")
        return STEP

    sink = OtlpSink(f"{collector[0]}/elsewhere", "demo", read)
    sink.take(step(0))
    sink.take(step(1))
    sink.close()
    assert sink.left_out == 2
    assert not any(thread.name == "otlp" for thread in threading.enumerate())


def always(number: int, message: LogMessage) -> Timeline:
    return STEP


@pytest.mark.parametrize("url", ["4318", "localhost:4318", "ftp://x"])
def test_addresses_that_are_none_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="give the collector's address"):
        OtlpSink(url, "demo", always)


def test_turns_of_a_sample_are_spans_below_its_session() -> None:
    turns = [
        Span(f"turn {turn}", 10.0 + turn, 11.0 + turn, f"sample.{sample}", "group.3.1", 3)
        for sample in range(2)
        for turn in range(2)
    ]
    found = spans_of("demo", Timeline("demo", (*STEP.spans, *turns), ()))
    sessions = [span for span in found if span.name == "session"]
    assert [(span.start_time, span.end_time) for span in sessions] == [(10_000_000_000, 12_000_000_000)] * 2
    for session in sessions:
        below = [
            span.name for span in found if span.parent is not None and span.parent.span_id == session.context.span_id
        ]
        assert below == ["turn 0", "turn 1"]
    assert len({span.context.span_id for span in found}) == len(found)


@pytest.mark.slow
def test_live_monitor_exports_steps_and_sessions_to_a_collector(
    written: WrittenRun, collector: tuple[str, list[Any]]
) -> None:
    url, got = collector
    command = [sys.executable, "-m", "relax_actors.cli.main", "monitor", str(written.folder.root), "--otlp", url]
    monitors = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)
    ]
    write_row(written, RowId(0, 0), ["yes", "no"], tool="search")

    def exported() -> bool:
        """Report the steps until both monitors, which see only what is published while they listen, have step 0."""
        for step in range(2):
            written.trainer.metric({"kind": "step", "step": step, "reward": 0.5})
        assert written.trainer.flush(20)
        return sum(span.name == "train" for _, span in got) >= 2

    written.table.put(written.subjects.numbered("batch", 0), Batch([0], 1, 1, 0.5, 0, 8, 1e9))
    written.table.put(written.subjects.numbered("weights", 1), Weights(1, "f1", [], 1))
    try:
        wait_until(exported, "step 0 of two monitors", 60)
        run = written.journal("run")
        run.event("finished", steps=100)
        assert run.flush(20)
        assert [monitor.wait(60) for monitor in monitors] == [0, 0]
    finally:
        for monitor in monitors:
            monitor.kill()
            monitor.communicate()
    ids: dict[str, set[tuple[bytes, bytes]]] = {}
    for _, span in got:
        ids.setdefault(f"{span.name} of {span.parent_span_id.hex()}", set()).add((span.trace_id, span.span_id))
    # Whatever exports a span gives it the same ids, and those follow from its names.
    assert all(len(each) == 1 for each in ids.values())
    row = context(written.name, "group.0.0", "group.0.0")
    ((trace, span),) = ids["row of "]
    assert (int.from_bytes(trace, "big"), int.from_bytes(span, "big")) == (row.trace_id, row.span_id)
    names = {span.name for _, span in got}
    assert {"row", "trajectory", "reward", "session", "turn 0", "turn 1", "train"} <= names
