"""The streams of a run, made by whoever comes first, and what they tell those who join it."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from broker.connection import Connection
from broker.leases import RunState
from broker.streams import ensure_bucket, ensure_streams, log_spec, table_spec
from broker.subjects import Subjects
from relax_actors.config import Config
from relax_actors.errors import BrokerError

LOG_AGE = 7 * 86400.0
RUN_KEY, MARK = "run", "mark"
PRIVATE = ("url", "credentials", "ca")


@dataclass(frozen=True, slots=True)
class Published:
    """A run as others may join it: its settings without those of the broker, and whether it is over.

    `scaled` are the numbers of actors that `relax scale` asked for, by node name and role; `mark` is what the run's
    store is known by, see `mark_of`.
    """

    config: dict[str, Any]
    import_path: str
    finished: bool = False
    scaled: dict[str, dict[str, int]] = field(default_factory=dict)
    mark: str = ""


async def ensure_run_streams(connection: Connection, config: Config) -> RunState:
    """Make the run's table, log and bucket, or bring them up to date."""
    subjects, broker = Subjects(config.run.name), config.broker
    specs = [
        table_spec(subjects, broker.max_bytes, broker.replicas),
        log_spec(subjects, broker.log_bytes, LOG_AGE, broker.replicas),
    ]
    await ensure_streams(connection, specs)
    return RunState(connection, await ensure_bucket(connection, subjects, broker.replicas))


async def publish_run(state: RunState, config: Config, import_path: str, *, finished: bool = False) -> None:
    """Let others know the run; what nodes were asked for by `relax scale` goes on."""
    body = config.model_dump(mode="json")
    body["broker"] = {name: value for name, value in body["broker"].items() if name not in PRIVATE}
    mark = mark_of(config.store_path)

    def publish(known: Any) -> dict[str, Any]:
        before = _published(known)
        return asdict(Published(body, import_path, finished, before.scaled if before is not None else {}, mark))

    await state.update(RUN_KEY, publish)


def mark_of(store: Path, *, make: bool = True) -> str:
    """What tells a run's store from a folder that only has its path: the content of a file in it; empty if it has none.

    Args:
        store: the folder.
        make: whether to give it one.
    """
    path = store / MARK
    with suppress(FileNotFoundError):
        if mark := path.read_text():
            return mark
    if not make:
        return ""
    store.mkdir(parents=True, exist_ok=True)
    mark = secrets.token_hex(8)
    unfinished = path.with_name(f".{MARK}.{mark}.tmp")
    unfinished.write_text(mark)
    try:
        os.link(unfinished, path)
    except FileExistsError:
        pass
    except OSError:  # no hard links on this file system
        with suppress(FileExistsError), path.open("x") as file:
            file.write(mark)
    finally:
        unfinished.unlink()
    return path.read_text()


async def publish_scale(state: RunState, node: str, numbers: dict[str, int]) -> None:
    """Let a node know how many actors of some roles it is to have.

    Raises:
        BrokerError: nobody has published the run.
    """

    def scale(body: Any) -> dict[str, Any]:
        found = _published(body)
        if found is None:
            msg = "the run is not published to nodes; `relax up` it first"
            raise BrokerError(msg)
        scaled = {**found.scaled, node: {**found.scaled.get(node, {}), **numbers}}
        return asdict(replace(found, scaled=scaled))

    # The run may end meanwhile, which must not be forgotten.
    await state.update(RUN_KEY, scale)


async def published_run(state: RunState) -> Published | None:
    """The run as it was published last; None if it was not, or by nobody of ours."""
    return _published(await state.get(RUN_KEY))


def _published(body: Any) -> Published | None:
    try:
        scaled = {name: {role: int(n) for role, n in numbers.items()} for name, numbers in body["scaled"].items()}
        return Published(
            dict(body["config"]), str(body["import_path"]), bool(body["finished"]), scaled, str(body.get("mark", ""))
        )
    except (TypeError, KeyError, ValueError, AttributeError):
        return None
