"""What a run stands on: the broker, the store and the supervisors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from relax_actors.config.sections import Positive, PositiveFloat, Section


class BrokerSection(Section):
    """[broker]: an embedded nats-server, or one that runs already."""

    url: str | None = None
    """nats://[user:password@]host:port of a running server, or of several of a cluster with commas between them; one
    is started if not set."""
    credentials: Path | None = None
    """A NATS .creds file for `url`, or a folder that `relax keys` wrote: every process then signs in as what it is."""
    ca: Path | None = None
    """Certificate of the authority of a server with TLS; `ca.pem` beside the credentials if not set."""
    port: Annotated[int, Field(ge=0, lt=65536)] = 0
    """Port of the embedded server; 0 takes a free one."""
    max_bytes: Positive = 2 << 30
    """Bound of the table's stream."""
    log_bytes: Positive = 64 << 20
    """Bound of the events' and metrics' stream."""
    sync_interval: str = "10s"
    replicas: Literal[1, 3, 5] = 1


class StoreSection(Section):
    """[store]: where large arrays and weights lie."""

    path: Path | None = None
    """A folder that all actors see; `<run folder>/store` if not set. What it holds must outlive a restart."""
    patience: PositiveFloat = 300.0
    """Seconds that a full disk is waited for, before the run stops."""


class SupervisionSection(Section):
    """[supervision]"""

    intensity: Annotated[int, Field(ge=0)] = 5
    """Failures of one role's actors within `period` before the run gives up. Kills from outside of an actor that was
    ready do not count."""
    period: PositiveFloat = 60.0
    """Seconds, counted while the actors are ready."""
    backoff: PositiveFloat = 0.1
    """Seconds before the first restart; doubled at each further one."""
    backoff_max: PositiveFloat = 10.0
    max_failures: Positive = 3
    """Times that a row may fail or kill its actor before it is quarantined."""
    max_kills: Positive = 12
    """Times that a row may be in hand when its actor is killed or stopped from outside before it is quarantined."""
    ack_wait: Annotated[float, Field(ge=1)] = 4.0
    """Seconds after which a row in the hands of a dead actor goes to another, if its supervisor did not see to it."""
    heartbeat: Annotated[float, Field(ge=1)] = 10.0
    """Seconds without a sign of life after which an actor's process is killed."""
    start_deadline: PositiveFloat = 180.0
    """Seconds that an actor may take until it is ready, and that the import of what it needs may take before."""
    shutdown: PositiveFloat = 5.0
    """Seconds an actor has to end in order; one too many after `relax scale` has its role's deadline besides."""
