"""Formats of traces by name: how a record becomes a trace, and a trace a record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from relax_actors.traces import atif, openenv, parquet, verifiers
from relax_actors.traces.head import Head
from relax_actors.traces.model import Trace, TraceError


@dataclass(frozen=True, slots=True)
class Format:
    """A format of traces.

    Attributes:
        record_of: makes the record of a trace: a JSON object, or a row of Parquet.
        trace_of: makes the trace of a record, with its place for errors.
        head: finds the row of a record.
    """

    record_of: Callable[[Trace], dict[str, Any]]
    trace_of: Callable[[Mapping[str, Any], str], Trace]
    head: Callable[[Mapping[str, Any]], Head]


FORMATS = {
    "atif": Format(atif.record_of, atif.trace_of, atif.head),
    "verifiers": Format(verifiers.record_of, verifiers.trace_of, verifiers.head),
    "openenv": Format(openenv.record_of, openenv.trace_of, openenv.head),
    "parquet": Format(parquet.record_of, parquet.trace_of, parquet.head),
}
PARQUET = "parquet"


def format_of(record: Mapping[str, Any], origin: str) -> str:
    """Return a record's format; raises TraceError if unknown."""
    if record.keys() >= parquet.COLUMNS:
        return PARQUET
    if "schema_version" in record:
        version = record["schema_version"]
        if isinstance(version, str) and version.startswith(atif.PREFIX):
            return "atif"
        if type(version) is int and version == openenv.VERSION:
            return "openenv"
        msg = (
            f"{origin}: schema_version is {version!r:.40}; of ATIF, versions {atif.PREFIX}0 to {atif.VERSION} are "
            f"read, and of OpenEnv's TrainingTrace version {openenv.VERSION}"
        )
        raise TraceError(msg)
    if "nodes" in record:
        if record.get("version") == verifiers.VERSION:
            return "verifiers"
        msg = f"{origin}: version is {record.get('version')!r:.40}; traces of verifiers are read in version 1"
        raise TraceError(msg)
    msg = (
        f"{origin}: no trace that is known; it needs schema_version (ATIF, OpenEnv), version and nodes "
        "(verifiers), or the columns of `relax traces export --format parquet`"
    )
    raise TraceError(msg)


def trace_of(record: object, origin: str) -> Trace:
    """Return the trace of a record of any format; raises TraceError if it is no exact trace."""
    if not isinstance(record, dict):
        msg = f"{origin}: {record!r:.60} is no trace; write one JSON object a trace"
        raise TraceError(msg)
    name = format_of(record, origin)
    try:
        return FORMATS[name].trace_of(record, origin)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else f"{type(error).__name__}: {error}"
        msg = f"{origin}: it is malformed ({what:.200}); write the fields of the format {name} with their types"
        raise TraceError(msg) from error
