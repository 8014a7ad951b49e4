"""Origin of the exported model: rows, versions, code and data, signed beside it."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from broker.credentials import Signature
from relax_actors.config import Config
from relax_actors.config.masking import masked
from relax_actors.config.sources import SourceSection
from relax_actors.data.files import data_files, files_at
from relax_actors.data.source import SourceSettings
from relax_actors.errors import CodecError, ConfigError
from relax_actors.messages import Batch, Weights
from relax_actors.runtime import Context
from relax_actors.runtime.code_version import LIBRARIES, git_commit, package_version, source_version
from relax_actors.weights.statement import (
    BUILD_TYPE,
    PREDICATE_TYPE,
    STATEMENT,
    STATEMENT_TYPE,
    STEPS,
    envelope,
    files_of,
    pre_authentication_encoding,
    sha256_of,
    tensors_of,
)

PACKAGES = ("relax-actors", *LIBRARIES, "numpy", "safetensors", "tokenizers", "nats-py")
PAGE = 500
"""Steps that are read at once."""


def write_provenance(context: Context, folder: Path) -> None:
    """Write the statement about a model folder, and the list of its steps, into the folder.

    The folder has all its other files, and the trainer's table all steps. The statement is signed with the credentials
    of the process; a run on a broker without credentials signs nothing.
    """
    first, last = _write_steps(context, folder / STEPS)
    payload = json.dumps(_statement(context, folder, first, last), sort_keys=True).encode()
    credentials = context.table.connection.address.credentials
    signatures = []
    if credentials is not None and Path(credentials).is_file():
        signed = Signature.of(pre_authentication_encoding(payload), Path(credentials))
        signatures.append({"keyid": "nats-user", "sig": signed.signature, "claims": signed.claims})
    (folder / STATEMENT).write_text(envelope(payload, signatures))


def _write_steps(context: Context, path: Path) -> tuple[Batch | None, Batch | None]:
    """Write one line for each step; return the batches of the first and the last."""
    table, first, last = context.table, None, None
    steps = context.config.run.steps
    with path.open("w") as file:
        for begin in range(0, steps, PAGE):
            numbers = range(begin, min(steps, begin + PAGE))
            batches = table.get_all([table.subjects.numbered("batch", number) for number in numbers])
            weights = table.get_all([table.subjects.numbered("weights", number + 1) for number in numbers])
            context.progress()
            for number, batch_cell, weights_cell in zip(numbers, batches, weights, strict=True):
                try:
                    if batch_cell is None:
                        continue
                    batch = table.read(batch_cell.data, Batch, subject=batch_cell.subject)
                    made = None
                    if weights_cell is not None:
                        made = table.read(weights_cell.data, Weights, subject=weights_cell.subject).fingerprint
                except CodecError:
                    continue
                first, last = first or batch, batch
                line = {"step": number, "rows": batch.rows, "digests": batch.digests, "weights": made}
                line |= {"incarnation": batch.incarnation, "unix_time": batch.unix_time, "tokens": batch.tokens}
                file.write(json.dumps(line) + "\n")
    return first, last


def _statement(context: Context, folder: Path, first: Batch | None, last: Batch | None) -> dict[str, Any]:
    config, progress = context.config, context.progress
    files = list(files_of(folder))
    subjects = [
        {"name": str(path.relative_to(folder)), "digest": {"sha256": sha256_of(path, progress)}} for path in files
    ]
    tensors = {
        str(path.relative_to(folder)): tensors_of(path, progress) for path in files if path.suffix == ".safetensors"
    }
    versions = {number: _fingerprint(context, number) for number in (0, config.run.steps)}
    return {
        "_type": STATEMENT_TYPE,
        "subject": subjects,
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"settings": masked(config.model_dump(mode="json"))},
                "internalParameters": {"python": platform.python_version(), "machine": platform.machine()},
                "resolvedDependencies": list(dependencies_of(config, progress)),
            },
            "runDetails": {
                "builder": {"id": f"relax-actors {package_version('relax-actors')}"},
                "metadata": {
                    "invocationId": config.run.name,
                    "startedUnixTime": None if first is None else first.unix_time,
                    "finishedUnixTime": None if last is None else last.unix_time,
                },
                "byproducts": [
                    {"name": "weights", "content": {"first": versions[0], "last": versions[config.run.steps]}},
                    {"name": "tensors", "content": tensors},
                ],
            },
        },
    }


def _fingerprint(context: Context, version: int) -> str | None:
    cell = context.table.fetch(context.table.subjects.numbered("weights", version), Weights)
    return None if cell is None else cell.fingerprint


def dependencies_of(config: Config, progress: Callable[[], None]) -> Iterator[dict[str, Any]]:
    """Yield code, packages, start models and data, with digests of their files.

    `progress` is called every 16 MiB.
    """
    code: dict[str, Any] = {"name": "code", "digest": {"xxh3_64": source_version()}}
    if commit := git_commit():
        code["digest"]["gitCommit"] = commit.removesuffix("+")
        code["annotations"] = {"changedFiles": commit.endswith("+")}
    yield code
    for name in PACKAGES:
        yield {"name": "package", "uri": f"pkg:pypi/{name}@{package_version(name)}"}
    folders = {
        "model": config.model.path,
        "critic": None if config.critic is None else config.critic.path,
        "adapter": None if config.lora is None else config.lora.path,
    }
    for name, path in folders.items():
        if path is not None:
            yield from _files(name, path, progress)
    sources: list[SourceSection] = [config.data, *config.data.mixture.values()]
    for source in sources:
        if source.path is not None:
            yield from _files("data", source.path, progress, source.split)
        if source.function:
            uri = f"python:{source.function}"
            yield {"name": "data", "uri": uri, **_module_digest(source.function, progress)}


def _files(name: str, path: Path, progress: Callable[[], None], split: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the files at a path or pattern; a reason stands in place of what cannot be read.

    `progress` is called every 16 MiB; of a folder of data only the files of `split` count.
    """
    unread = {"name": name, "uri": str(path)}
    try:
        files = files_at(path) if split is None else data_files(SourceSettings(path=path, split=split), name, ("",))
    except (OSError, ConfigError) as error:
        yield unread | {"annotations": {"notHashed": str(error)}}
        return
    if not files:
        yield unread | {"annotations": {"notHashed": f"{path} has no files"}}
    for file in files:
        entry = {"name": name, "uri": file.absolute().as_uri()}
        try:
            yield entry | {"digest": {"sha256": sha256_of(file, progress)}}
        except OSError as error:
            yield entry | {"annotations": {"notHashed": str(error)}}


def _module_digest(path: str, progress: Callable[[], None]) -> dict[str, Any]:
    try:
        spec = find_spec(path.partition(":")[0] if ":" in path else path.rpartition(".")[0])
        origin = None if spec is None else spec.origin
        return {} if origin is None else {"digest": {"sha256": sha256_of(Path(origin), progress)}}
    except (ImportError, ValueError, OSError, AttributeError):
        return {}
