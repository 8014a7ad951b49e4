"""Segments with the features of one medium, shared by all rows with the same file.

A segment is named by a hash of the file's hash, the part of it that is used, the settings, the model's preprocessing
and its version. So the same name has the same bits in every process, and a lost segment can be written again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from broker.fields import TensorRef
from broker.segment import checksum
from broker.shared_files import SharedFiles
from broker.store import Store
from relax_actors.errors import StoreError
from relax_actors.media import Features

_ALIGN = 64
_DTYPES = {"uint8": "U8", "float32": "F32"}
_MAX_HEADER = 1 << 20


class MediaSegments:
    """The segments of a store."""

    def __init__(self, store: Store) -> None:
        self._store, self._shared = store, SharedFiles(store)

    def get(
        self, key: str, folder: str, make: Callable[[], Sequence[Features]]
    ) -> tuple[list[Features], list[TensorRef]]:
        """Return the features of a segment, mapped, and their references in the folder of a step.

        `make` computes the features, unless the segment exists and is whole.

        Raises:
            StoreError: the segment cannot be read although it was just written.
            StoreFullError: no space is left.
        """
        name = f"{key}.safetensors"
        for _ in range(2):
            uri = self._shared.link(name, folder, lambda: _parts(make()))
            try:
                return self._read(uri)
            except StoreError as error:
                problem = error
                self._shared.discard(name, uri)
        raise problem

    def _read(self, uri: str) -> tuple[list[Features], list[TensorRef]]:
        header, start = _header(self._store.path(uri), uri)
        try:
            entries = [
                (facts, header[str(number)])
                for number, facts in enumerate(json.loads(header["__metadata__"]["features"]))
            ]
            references = [_entry(uri, start, *entry) for entry in entries]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            msg = f"the header of segment {uri} is damaged: {type(error).__name__} {error}"
            raise StoreError(msg) from error
        read = self._store.reader()
        features = [Features(array=read(reference), **facts) for reference, facts in references]
        return features, [reference for reference, _ in references]


def _entry(uri: str, start: int, facts: dict[str, Any], entry: dict[str, Any]) -> tuple[TensorRef, dict[str, Any]]:
    """Return the reference to an array of a segment, and the other fields of its `Features`."""
    digest, dtype, (begin, end) = facts.pop("xxh3_128"), facts.pop("dtype"), entry["data_offsets"]
    reference = TensorRef(uri, start + begin, end - begin, dtype, tuple(entry["shape"]), digest)
    facts |= {"grid": np.array(facts["grid"], np.int32), "timestamps": tuple(facts["timestamps"])}
    return reference, facts


def _parts(features: Sequence[Features]) -> list[Any]:
    """Return the content of a segment as buffers."""
    header: dict[str, Any] = {}
    facts, size = list[dict[str, Any]](), 0
    parts: list[Any] = []
    for number, one in enumerate(features):
        data = np.ascontiguousarray(one.array)
        kind, end = str(data.dtype), size + data.nbytes
        header[str(number)] = {"dtype": _DTYPES[kind], "shape": list(data.shape), "data_offsets": [size, end]}
        raw, pad = data.reshape(-1).view(np.uint8), -data.nbytes % _ALIGN
        if pad:  # the format does not allow gaps between tensors
            header[f"pad{number}"] = {"dtype": "U8", "shape": [pad], "data_offsets": [end, end + pad]}
        parts += [raw.data, bytes(pad)] if pad else [raw.data]
        size = end + pad
        plain = asdict(replace(one, array=np.empty(0)))
        del plain["array"]
        facts.append(plain | {"grid": one.grid.tolist(), "dtype": kind, "xxh3_128": checksum(raw)})
    text = json.dumps({"__metadata__": {"features": json.dumps(facts)}, **header}).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)
    return [len(text).to_bytes(8, "little") + text, *parts]


def _header(path: Path, uri: str) -> tuple[dict[str, Any], int]:
    """Return the header of a segment, and where its data begins."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, _MAX_HEADER)))
    except (OSError, ValueError, RecursionError) as error:
        msg = f"segment {uri} is missing or has no header: {error}"
        raise StoreError(msg) from error
    return header, 8 + size
