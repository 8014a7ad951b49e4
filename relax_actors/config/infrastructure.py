"""The sections [broker], [store] and [supervision]."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from broker.listeners import is_origin
from relax_actors.config.sections import NonNegativeInt, Positive, PositiveFloat, Section

_SERVER = re.compile(r"(nats|tls)://(.*@)?[^@/,\s]+(:\d+)?/?")
_DURATION = re.compile(r"always|(\d+(\.\d+)?(ns|us|ms|s|m|h))+")


class BrokerSection(Section):
    """[broker]: an embedded nats-server, or a server that is already running."""

    url: str | None = None
    """nats://[user:password@]host:port of a running server; several of one cluster, separated by commas. An embedded
    server is started if not set."""
    published: str | None = None
    """Address of the same server for commands such as `relax ledger` on a machine that does not know the host names in
    `url`, e.g. a port that a container publishes. Used with `credentials` only."""
    credentials: Path | None = None
    """NATS .creds file for `url`, or a folder written by `relax keys`, which gives each process its own user."""
    ca: Path | None = None
    """CA certificate of a server with TLS; `ca.pem` beside the credentials if not set."""
    port: Annotated[int, Field(ge=0, lt=65536)] = 0
    """Port of the embedded server; 0 takes a free port."""
    websocket: Annotated[int, Field(gt=0, lt=65536)] | None = None
    """Port on which the embedded server takes observers over WebSocket, on the loopback address; no WebSocket if not
    set."""
    origins: list[str] = Field(default_factory=list)
    """Pages that may use `websocket`, e.g. `"http://127.0.0.1:8000"`; only those of its own host and port if empty.
    Programs that are no browsers send no origin and are not limited."""
    max_bytes: Positive = 2 << 30
    """Size limit of the table's stream, in bytes."""
    log_bytes: Positive = 64 << 20
    """Size limit of the stream of events and metrics, in bytes."""
    sync_interval: str = "10s"
    """Interval at which the embedded server syncs its files to disk, as `sync_interval` of nats-server. A killed server
    loses nothing; a crash of the machine may lose this much."""
    replicas: Literal[1, 3, 5] = 1
    """Copies of each stream in a cluster of servers."""

    @field_validator("url")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        if value is not None and not all(_SERVER.fullmatch(server) for server in re.split(r",(?=\w+://)", value)):
            msg = "write nats://[user:password@]host:port, or tls://..., several separated by commas"
            raise ValueError(msg)
        return value

    @field_validator("origins")
    @classmethod
    def _origins(cls, value: list[str]) -> list[str]:
        if wrong := [origin for origin in value if not is_origin(origin)]:
            msg = f"{wrong[0]!r} is no origin of a page; write https://HOST or https://HOST:PORT"
            raise ValueError(msg)
        return value

    @model_validator(mode="after")
    def _websocket(self) -> Self:
        if self.websocket is not None and self.url is not None:
            msg = "websocket is of the embedded server; `relax keys --websocket PORT` configures a server at `url`"
            raise ValueError(msg)
        if self.origins and self.websocket is None:
            msg = "origins needs `websocket`, the port that pages of these origins connect to"
            raise ValueError(msg)
        return self

    @field_validator("sync_interval")
    @classmethod
    def _sync_interval(cls, value: str) -> str:
        if not _DURATION.fullmatch(value):
            msg = 'write a duration such as "10s", "500ms" or "2m", or "always"'
            raise ValueError(msg)
        return value


class StoreSection(Section):
    """[store]: where large arrays and weights are stored."""

    path: Path | None = None
    """Folder that all actors can read and write; `<run folder>/store` if not set. It must survive a restart."""
    patience: PositiveFloat = 300.0
    """Seconds to wait for space on a full disk before the run stops."""


START_LIMIT = 5
"""How many times `supervision.start_deadline` a start that makes progress may take."""


class SupervisionSection(Section):
    """[supervision]: restarts, timeouts and quarantine."""

    intensity: NonNegativeInt = 5
    """Restarts of one role's actors within `period` after which the run stops. External kills of a ready actor are not
    counted."""
    period: PositiveFloat = 60.0
    """Window of `intensity` in seconds, counted while the actors are ready."""
    backoff: PositiveFloat = 0.1
    """Seconds before the first restart; doubled at each further one."""
    backoff_max: PositiveFloat = 10.0
    """Maximum of the doubled `backoff`, in seconds."""
    max_failures: Positive = 3
    """Times that a row may fail or crash its actor before it is quarantined."""
    max_kills: Positive = 12
    """Times that an actor may be killed or stopped from outside while it handles a row, before the row is
    quarantined."""
    ack_wait: Annotated[float, Field(ge=1)] = 4.0
    """Seconds after which an unacknowledged row of a dead actor is redelivered, if its supervisor did not return it."""
    heartbeat: Annotated[float, Field(ge=1)] = 10.0
    """Seconds without a heartbeat after which an actor's process is killed, and without an answer after which an
    external engine is removed from the run."""
    start_deadline: PositiveFloat = 180.0
    """Seconds in which an actor, a node or the broker becomes ready, and an engine is imported before. A start that
    makes progress (log, memory or CPU time of its processes) may take five times as long."""
    patience: PositiveFloat = 600.0
    """Seconds that the run waits for a role that has no actor on any node, e.g. for `relax node`, before it ends."""
    shutdown: PositiveFloat = 5.0
    """Seconds that an actor has to stop in order. A surplus actor after `relax scale` has its role's deadline in
    addition."""

    @property
    def longest_start(self) -> float:
        """Seconds that a start may take, at most."""
        return START_LIMIT * self.start_deadline
