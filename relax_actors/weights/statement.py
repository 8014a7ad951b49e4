"""Signed statement about the files of a model: format, digests and signature; without torch.

The statement is an in-toto Statement with a predicate of SLSA Provenance 1.0, in an envelope of DSSE 1.0. Its signature
is that of the trainer's user of the broker; the claims beside it, signed by the account of the run, name the key.

Sources:
    in-toto Attestation Framework, Statement v1 (https://in-toto.io/Statement/v1).
    SLSA Provenance 1.0 (https://slsa.dev/provenance/v1).
    DSSE 1.0, pre-authentication encoding (https://github.com/secure-systems-lab/dsse).
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash

STATEMENT, STEPS = "provenance.json", "provenance-steps.jsonl"
"""Files beside a model: the signed statement, and the rows and weights of each step."""
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE, PREDICATE_TYPE = "https://in-toto.io/Statement/v1", "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:relax-actors:training:1"
MAX_HEADER_BYTES = 32 << 20
_CHUNK = 16 << 20


def pre_authentication_encoding(payload: bytes) -> bytes:
    """Return the signed bytes: `DSSEv1 <length of type> <type> <length of payload> <payload>`."""
    return b" ".join(
        [b"DSSEv1", str(len(PAYLOAD_TYPE)).encode(), PAYLOAD_TYPE.encode(), str(len(payload)).encode(), payload]
    )


def envelope(payload: bytes, signatures: list[dict[str, str]]) -> str:
    """Return the envelope of a payload as JSON."""
    body = {"payloadType": PAYLOAD_TYPE, "payload": base64.b64encode(payload).decode(), "signatures": signatures}
    return json.dumps(body, indent=1)


def files_of(folder: Path) -> Iterator[Path]:
    """Yield the files of a statement: regular files of a folder but itself, no links."""
    own = (path for path in sorted(folder.rglob("*")) if path != folder / STATEMENT)
    yield from (path for path in own if path.is_file() and not path.is_symlink())


def others_of(folder: Path) -> Iterator[Path]:
    """Yield what a folder holds besides regular files and folders: links, sockets, devices."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            yield path


def sha256_of(path: Path, progress: Callable[[], None] = lambda: None) -> str:
    """Return the SHA-256 of a file; calls `progress` every 16 MiB."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_CHUNK):
            digest.update(data)
            progress()
    return digest.hexdigest()


def tensors_of(path: Path, progress: Callable[[], None] = lambda: None) -> dict[str, str]:
    """Return the xxh3-64 digest of each tensor of a safetensors file; empty for others."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER_BYTES:
                return {}
            header: dict[str, Any] = json.loads(file.read(length))
            digests = {}
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                begin, end = entry["data_offsets"]
                file.seek(8 + length + begin)
                digests[name] = _digest_of(file, end - begin)
                progress()
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}
    return digests


def _digest_of(file: Any, length: int) -> str:
    digest = xxhash.xxh3_64()
    while length > 0 and (data := file.read(min(length, _CHUNK))):
        digest.update(data)
        length -= len(data)
    return digest.hexdigest()
