"""The streams of a run, made by whoever comes first."""

from __future__ import annotations

from broker.bridge import Bridge
from broker.streams import ensure_streams, log_spec, table_spec
from broker.subjects import Subjects
from relax_actors.config import Config

LOG_AGE = 7 * 86400.0


async def ensure_run_streams(bridge: Bridge, config: Config) -> None:
    """Make the run's table and log, or bring them up to date."""
    subjects, broker = Subjects(config.run.name), config.broker
    specs = [
        table_spec(subjects, broker.max_bytes, broker.replicas),
        log_spec(subjects, broker.log_bytes, LOG_AGE, broker.replicas),
    ]
    await ensure_streams(bridge, specs)
