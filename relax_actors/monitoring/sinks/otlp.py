"""Sink that exports each step's timeline to OpenTelemetry, by OTLP over HTTP.

A row is a trace with a span for each of its columns, for each sample of several turns (`session`) and its turns, and
links to the trace of the step that trained it. The ids follow from run, step and index alone, so that every exporter
of a run computes the same ones, and a collector that gets a span twice has it once.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import structlog

from relax_actors.errors import ConfigError, MissingPackageError
from relax_actors.monitoring.log_message import LogMessage
from relax_actors.monitoring.timeline import Span, Timeline

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext

log = structlog.get_logger()
MAX_WAITING = 1000
"""Steps that wait for their export; further ones are left out and counted."""
EXPORT_SECONDS = 10
SAMPLE = "sample"
"""Begins the names of the lanes of turns: `sample.<number>`."""
ReadStep = Callable[[int, LogMessage], Timeline]


class OtlpSink:
    """Exports steps in a thread of its own, so that the view never waits for a collector.

    The path of the collector's address, such as `http://127.0.0.1:4318/v1/traces`, may be left out. `read_step` returns
    the timeline of a step by its metric.

    Raises:
        ConfigError: the URL is none, or the extra `otlp` is not installed.
    """

    def __init__(self, url: str, run: str, read_step: ReadStep) -> None:
        self._exporter = _exporter(url)
        self._run, self._read_step = run, read_step
        self._steps: queue.Queue[LogMessage | None] = queue.Queue(MAX_WAITING)
        # The weights of the newest step may not be stored yet.
        self._newest: LogMessage | None = None
        self.left_out = 0
        """Steps that were not exported."""
        self._thread = threading.Thread(target=self._work, name="otlp", daemon=True)
        self._thread.start()

    def take(self, message: LogMessage) -> None:
        """Export the step before the reported one, whose cells are all stored."""
        if message.is_event or message.kind != "step" or message.numbers().get("step", -1.0) < 0:
            return
        before, self._newest = self._newest, message
        if before is not None:
            try:
                self._steps.put_nowait(before)
            except queue.Full:
                self.left_out += 1

    def _work(self) -> None:
        while (message := self._steps.get()) is not None:
            step = int(message.numbers()["step"])
            try:
                timeline = self._read_step(step, message)
                result = self._exporter.export(spans_of(self._run, timeline))
            except Exception as error:  # noqa: BLE001 a collector must not end the view
                log.warning("step_not_exported", step=step, error=f"{type(error).__name__}: {error}"[:300])
                self.left_out += 1
            else:
                self.left_out += result.name != "SUCCESS"

    def close(self) -> None:
        """Export what waits, for at most `EXPORT_SECONDS`."""
        for last in (self._newest, None):
            with suppress(queue.Full):
                self._steps.put(last, timeout=1.0)
        self._thread.join(EXPORT_SECONDS)
        self._exporter.shutdown()


def _exporter(url: str) -> Any:
    if find_spec("opentelemetry.exporter") is None or find_spec("opentelemetry.sdk") is None:
        msg = "--otlp needs packages: pip install 'relax-actors[otlp]'"
        raise MissingPackageError(msg)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        msg = f"--otlp {url}: give the collector's address, such as http://127.0.0.1:4318"
        raise ConfigError(msg)
    return OTLPSpanExporter(
        endpoint=url if parts.path.strip("/") else f"{url.rstrip('/')}/v1/traces", timeout=EXPORT_SECONDS
    )


def spans_of(run: str, timeline: Timeline) -> list[ReadableSpan]:
    """Return the spans of a timeline, or a part of one, as OpenTelemetry has them."""
    rows: defaultdict[str, list[Span]] = defaultdict(list)
    exported = []
    for span in timeline.spans:
        if span.row:
            rows[span.row].append(span)
        else:
            place = f"step/{span.step}"
            exported.append(_span(run, span, place, f"{place}/{span.actor}/{span.name}", None, []))
    for row, spans in rows.items():
        exported += _row(run, row, spans)
    return exported


def _row(run: str, row: str, spans: list[Span]) -> Iterator[ReadableSpan]:
    """Yield spans of a row, of its columns below it, and of turns below samples."""
    from opentelemetry.trace import Link

    begin, end = min(span.begin for span in spans), max(span.end for span in spans)
    whole = Span("row", begin, end, "prompts.0", row, spans[0].step)
    of_step = context(run, f"step/{whole.step}", f"step/{whole.step}/trainer.0/train")
    yield _span(run, whole, row, row, None, [Link(of_step)])
    sessions: defaultdict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.role == SAMPLE:
            sessions[span.actor].append(span)
        else:
            yield _span(run, span, row, f"{row}/{span.name}", context(run, row, row), [])
    for sample, turns in sessions.items():
        place = f"{row}/{sample}"
        session = Span("session", turns[0].begin, turns[-1].end, sample, row, whole.step)
        yield _span(run, session, row, place, context(run, row, row), [])
        for turn in turns:
            yield _span(run, turn, row, f"{place}/{turn.name}", context(run, row, place), [])


def _span(run: str, span: Span, trace: str, name: str, parent: SpanContext | None, links: list[Any]) -> ReadableSpan:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

    facts = {"relax.run": run, "relax.actor": span.actor, **span.arguments}
    if span.row:
        facts["relax.row"] = span.row
    if span.step is not None:
        facts["relax.step"] = span.step
    return ReadableSpan(
        name=span.name,
        context=context(run, trace, name),
        parent=parent,
        resource=Resource({"service.name": span.role, "service.namespace": run}),
        attributes=facts,
        links=links,
        start_time=round(span.begin * 1e9),
        end_time=round(span.end * 1e9),
    )


def context(run: str, trace: str, name: str) -> SpanContext:
    """Return a span's ids, which follow from run, trace and span alone."""
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(
        _number(f"{run}/{trace}", 16), _number(f"{run}/{name}", 8), is_remote=False, trace_flags=TraceFlags(1)
    )


def _number(text: str, size: int) -> int:
    """Return a number of `size` bytes that follows from a text, and is not 0."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest(), "big") or 1
