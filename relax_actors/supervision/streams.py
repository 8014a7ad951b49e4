"""The streams of a run, made by whoever comes first, and what they tell those who join it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from broker.bridge import Bridge
from broker.lease import RunState
from broker.streams import ensure_bucket, ensure_streams, log_spec, table_spec
from broker.subjects import Subjects
from relax_actors.config import Config

LOG_AGE = 7 * 86400.0
RUN_KEY = "run"
PRIVATE = ("url", "credentials", "ca")


@dataclass(frozen=True, slots=True)
class Published:
    """A run as others may join it: its settings without those of the broker, and whether it is over."""

    config: dict[str, Any]
    import_path: str
    finished: bool = False


async def ensure_run_streams(bridge: Bridge, config: Config) -> RunState:
    """Make the run's table, log and bucket, or bring them up to date."""
    subjects, broker = Subjects(config.run.name), config.broker
    specs = [
        table_spec(subjects, broker.max_bytes, broker.replicas),
        log_spec(subjects, broker.log_bytes, LOG_AGE, broker.replicas),
    ]
    await ensure_streams(bridge, specs)
    return RunState(bridge, await ensure_bucket(bridge, subjects, broker.replicas))


async def publish_run(state: RunState, config: Config, import_path: str, *, finished: bool = False) -> None:
    """Let others know the run."""
    body = config.model_dump(mode="json")
    body["broker"] = {name: value for name, value in body["broker"].items() if name not in PRIVATE}
    await state.put(RUN_KEY, {"config": body, "import_path": import_path, "finished": finished})


async def published_run(state: RunState) -> Published | None:
    """The run as it was published last; None if it was not, or by nobody of ours."""
    body = await state.fetch(RUN_KEY)
    try:
        return Published(dict(body["config"]), str(body["import_path"]), bool(body["finished"]))
    except (TypeError, KeyError, ValueError):
        return None
