"""Observations of a run: read from its log and table, and kept in a file."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from nats.aio.msg import Msg

from broker.errors import CodecError
from broker.ordered_consumer import OrderedConsumer
from broker.table import CALL_DEADLINE, Table
from relax_actors.config.masking import masked
from relax_actors.errors import ConfigError
from relax_actors.messages import Weights
from relax_actors.monitoring.diagnosis.observations import Observations
from relax_actors.monitoring.log_message import LogMessage

FIRST, LAST = 5_000, 30_000
"""Messages at the beginning and at the end of the log that are read."""
FORMAT = "relax observations 1"


def observe(table: Table, settings: dict[str, Any]) -> Observations:
    """Read what was seen of a run, live or finished; `settings` has its defaults, too."""
    seen = Observations(table.subjects.run, settings)
    table.connection.call(_follow(table, seen), CALL_DEADLINE)
    prefix = table.subjects.numbered("weights", "*")
    for _, cell in table.snapshot([prefix]):
        with suppress(CodecError):
            weights = table.read(cell.data, Weights, subject=cell.subject)
            seen.publish(weights.version, weights.fingerprint)
    return seen


async def _follow(table: Table, seen: Observations) -> None:
    async for message in log_messages(table):
        if (parsed := LogMessage.parse(message.subject, message.data)) is not None:
            seen.take(parsed, message.metadata.timestamp.timestamp())


async def log_messages(table: Table) -> AsyncIterator[Msg]:
    """Yield the first and last messages of a run's log, in order."""
    stream = table.subjects.log_stream
    state = (await table.connection.js.stream_info(stream)).state
    middle = max(state.first_seq + FIRST, state.last_seq - LAST)
    for begin, end in ((1, state.first_seq + FIRST), (middle, state.last_seq + 1)):
        if begin > state.last_seq:
            continue
        follower = OrderedConsumer(table.connection, stream, table.subjects.log_subjects(), start=begin)
        try:
            async for messages in follower.batches(tick=0.5):
                inside = [m for m in messages if m.metadata.sequence is not None and m.metadata.sequence.stream < end]
                for message in inside:
                    yield message
                if len(inside) < len(messages) or (not messages and follower.drained):
                    break
                if messages and messages[-1].metadata.num_pending == 0:
                    break
        finally:
            await follower.close()


def save_observed(table: Table, settings: dict[str, Any], path: Path) -> int:
    """Write what rules read of a run to a file, without secrets; return its messages.

    The file is gzip of JSON lines: the format, run and settings, the fingerprints of the weight versions, then the
    messages of the log as `[stored, subject, body]`.
    """
    lines: list[Any] = [{"format": FORMAT, "run": table.subjects.run, "settings": _without_folders(masked(settings))}]
    seen = observe(table, settings)
    lines.append({"fingerprints": {str(version): each for version, each in sorted(seen.fingerprints.items())}})

    async def read() -> list[Any]:
        entries = []
        async for message in log_messages(table):
            with suppress(ValueError, RecursionError):
                body = masked(json.loads(message.data))
                entries.append([round(message.metadata.timestamp.timestamp(), 6), message.subject, body])
        return entries

    lines += table.connection.call(read(), CALL_DEADLINE)
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data, mtime=0))
    return len(lines) - 2


def _without_folders(settings: Any) -> Any:
    """Return settings whose absolute paths are cut to their last name."""
    if isinstance(settings, dict):
        return {name: _without_folders(value) for name, value in settings.items()}
    if isinstance(settings, list):
        return [_without_folders(value) for value in settings]
    return Path(settings).name if isinstance(settings, str) and settings.startswith("/") else settings


def load_observed(path: Path) -> Observations:
    """Read a file of `save_observed`; raises ConfigError."""
    try:
        first, second, *rest = (json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines())
        seen = Observations(str(first["run"]), dict(first["settings"]))
        for version, fingerprint in second["fingerprints"].items():
            seen.publish(int(version), str(fingerprint))
        for stored, subject, body in rest:
            if (message := LogMessage.parse(subject, json.dumps(body).encode())) is not None:
                seen.take(message, float(stored))
        known = first["format"] == FORMAT
    except (OSError, EOFError, ValueError, TypeError, KeyError, AttributeError) as error:
        msg = f"{path} cannot be read as recorded observations: {error}; write it with `relax doctor RUN --save FILE`"
        raise ConfigError(msg) from error
    if not known:
        msg = f"{path} has the format {first['format']!r:.100}, and this version reads {FORMAT!r}"
        raise ConfigError(msg)
    return seen
