"""Traces as rows of Parquet, free data as JSON; needs the extra `parquet`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from relax_actors.messages.media import MediaSource
from relax_actors.messages.samples import TokenSequence
from relax_actors.traces import fields
from relax_actors.traces.exact_json import dumps, loads
from relax_actors.traces.head import Head, head_of
from relax_actors.traces.model import Trace, TraceError

MARK = "finish_reason"
COLUMNS = frozenset({"sequences", "prompt_tokens", MARK})
"""Columns that tell a file of traces from other Parquet files."""
HEAD = ("run", "row", "prompt_tokens", "reward", "greedy")
"""Columns of the head of a trace."""
_SAME = ("run", "row", "sample", "step", "text", MARK, "reward", "prompt", "answer", "greedy", "author")
_JSON = ("metadata", "prompt_messages", "messages", "tools")
_NAMED = ("components", "metrics", "token_values")


def schema() -> Any:
    """Return the schema of a file, a `pyarrow.Schema`. One row is one trace."""
    import pyarrow as pa  # noqa: PLC0415 an extra

    ints, floats = pa.list_(pa.int32()), pa.list_(pa.float32())
    sequence = pa.struct(
        [
            ("token_ids", ints),
            ("loss_mask", pa.list_(pa.bool_())),
            ("logprobs", floats),
            ("versions", ints),
            ("spans", pa.list_(ints)),
            ("player", pa.string()),
        ]
    )

    def named(value: Any) -> Any:
        return pa.list_(pa.struct([("name", pa.string()), ("value", value)]))

    texts = [(name, pa.string()) for name in ("text", MARK, "prompt", "answer", "author", *_JSON, "media")]
    return pa.schema(
        [
            ("run", pa.string()),
            ("row", pa.string()),
            ("sample", pa.int32()),
            ("step", pa.int64()),
            ("prompt_tokens", ints),
            ("sequences", pa.list_(sequence)),
            ("reward", pa.float32()),
            ("greedy", pa.bool_()),
            ("components", named(pa.float32())),
            ("metrics", named(pa.float64())),
            ("token_values", named(floats)),
            ("turn_rewards", floats),
            ("fingerprints", pa.list_(pa.struct([("version", pa.int32()), ("fingerprint", pa.string())]))),
            *texts,
        ]
    )


def record_of(trace: Trace) -> dict[str, Any]:
    """Return a trace as a row of `schema()`; raises TraceError."""
    values = {name: [{"name": key, "value": _plain(v)} for key, v in getattr(trace, name).items()] for name in _NAMED}
    free = {name: dumps(getattr(trace, name), f"{trace.name}, {name}") for name in _JSON}
    return {
        **{name: getattr(trace, name) for name in _SAME},
        **values,
        **free,
        "prompt_tokens": trace.prompt_tokens.tolist(),
        "sequences": [_sequence_record(each) for each in trace.sequences],
        "turn_rewards": None if trace.turn_rewards is None else trace.turn_rewards.tolist(),
        "fingerprints": [{"version": version, "fingerprint": text} for version, text in trace.fingerprints.items()],
        "media": dumps([asdict(medium) for medium in trace.media], f"{trace.name}, media"),
    }


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _sequence_record(sequence: TokenSequence) -> dict[str, Any]:
    arrays = {name: getattr(sequence, name).tolist() for name in ("token_ids", "loss_mask", "logprobs", "versions")}
    spans = None if sequence.spans is None else sequence.spans.tolist()
    return {**arrays, "spans": spans, "player": sequence.player}


def trace_of(record: Mapping[str, Any], origin: str) -> Trace:
    """Return the trace of a row; raises TraceError if the row is malformed, or lacks a column."""
    try:
        rewards = record["turn_rewards"]
        return Trace(
            **{name: record[name] for name in _SAME},
            **{name: loads(record[name]) for name in _JSON},
            prompt_tokens=fields.token_ids(record, "prompt_tokens", origin),
            sequences=tuple(
                _sequence(own, f"{origin}, sequence {number}") for number, own in enumerate(record["sequences"])
            ),
            components={own["name"]: own["value"] for own in record["components"]},
            metrics={own["name"]: own["value"] for own in record["metrics"]},
            token_values={own["name"]: np.array(own["value"], np.float32) for own in record["token_values"]},
            turn_rewards=None if rewards is None else np.array(rewards, np.float32),
            media=tuple(MediaSource(**medium) for medium in loads(record["media"])),
            fingerprints={own["version"]: own["fingerprint"] for own in record["fingerprints"]},
            origin=origin,
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        what = f"no column {error.args[0]!r}" if isinstance(error, KeyError) else str(error)
        msg = f"{origin}: it is no exact trace ({what}); write the file by `relax traces export`"
        raise TraceError(msg) from error


def head(record: Mapping[str, Any]) -> Head:
    """Return the head of a row, which has the columns `HEAD` at least."""
    return head_of(record, record.get("prompt_tokens"))


def _sequence(record: Mapping[str, Any], where: str) -> TokenSequence:
    for name in ("token_ids", "loss_mask", "logprobs", "versions"):
        if record[name] is None or None in record[name]:
            msg = f"{where}: {name} has no value for a token; a trace needs one for each"
            raise TraceError(msg)
    return TokenSequence(
        fields.token_ids(record, "token_ids", where),
        np.array(record["loss_mask"], np.bool_),
        np.array(record["logprobs"], np.float32),
        np.array(record["versions"], np.int32),
        None if record["spans"] is None else np.array(record["spans"], np.int32).reshape(-1, 2),
        player=record["player"] or "",
    )
