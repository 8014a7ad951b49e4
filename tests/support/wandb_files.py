"""Figures in the file of an offline run of Weights & Biases, which has no public reader."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path


def scalars_of(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the logged values of `step/...` and `eval/...` by name, each with its step."""
    from wandb.proto import wandb_internal_pb2

    found: dict[str, list[tuple[int, float]]] = {}
    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]  # made when the module is imported
        record.ParseFromString(data)
        items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        for name, value in items.items():
            if name.startswith(("step/", "eval/")):
                found.setdefault(name, []).append((int(json.loads(items["step"])), float(json.loads(value))))
    return found


def _records(data: bytes) -> Iterator[bytes]:
    """Split a file into its records: LevelDB's log format after a header of 7 bytes."""
    whole, at = b"", 7
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:  # no header fits into the rest of the block
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield whole
            whole = b""
