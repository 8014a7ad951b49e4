"""Sink that serves the measurements of a run to Prometheus."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import groupby

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric

from relax_actors.monitoring.log_message import LogMessage
from relax_actors.monitoring.sinks.metrics_server import MetricsServer

MAX_SERIES, MAX_ROLES = 4000, 64
"""Series of a role, and roles; further ones are counted and left out, so that memory is bounded and no role crowds out
another."""
_INVALID = re.compile(r"[^a-zA-Z0-9_]")
Labels = tuple[tuple[str, str], ...]
Series = tuple[str, Labels]


class Prometheus:
    """Sink with an HTTP server of its own, which serves `/metrics`.

        relax_step_<name>{run}                   measurements of the last optimizer step
        relax_critic_<name>{run}                 measurements of the last step of the critic
        relax_actor_<name>{run,role,n}           state of an actor, about once a second
        relax_events_total{run,role,kind}        events received
        relax_ignored_values_total{run,role}     values left out because the role has too many series

    Args:
        target: `port` or `host:port`; 127.0.0.1 if no host is given. Other addresses than those of the loopback
            interface are refused unless marked: `public:host:port`.
        run: name of the run; not used.

    Raises:
        ConfigError: the address is invalid or in use, or public and not marked as such.
    """

    def __init__(self, target: str, run: str) -> None:  # noqa: ARG002 the signature of every sink
        self._values: dict[Series, float] = {}
        self._series: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._server = MetricsServer(target, self.page)

    @property
    def port(self) -> int:
        """Port that the server listens on."""
        return int(self._server.server_address[1])

    def take(self, message: LogMessage) -> None:
        """Store the last value of each series, and count events."""
        run, role = ("run", message.run), ("role", message.role)
        labels: Labels
        if message.is_event:
            self._set(message, "relax_events_total", (run, role, ("kind", message.kind)), 1.0, add=True)
            return
        if message.kind in ("step", "critic"):
            prefix, labels = f"relax_{message.kind}", (run,)
        elif not message.kind:
            prefix, labels = "relax_actor", (run, role, ("n", message.n))
        else:
            return
        for name, value in message.numbers().items():
            self._set(message, f"{prefix}_{_INVALID.sub('_', name)}", labels, value)

    def _set(self, message: LogMessage, name: str, labels: Labels, value: float, *, add: bool = False) -> None:
        with self._lock:
            series, role = (name, labels), message.role
            if role not in self._series and len(self._series) >= MAX_ROLES:
                return
            if series not in self._values and self._series[role] >= MAX_SERIES:
                series, value, add = ("relax_ignored_values_total", (("run", message.run), ("role", role))), 1.0, True
            elif series not in self._values:
                self._series[role] += 1
            self._values[series] = value + (self._values.get(series, 0.0) if add else 0.0)

    def collect(self) -> Iterator[Metric]:
        """Yield all series; implements `prometheus_client.registry.Collector`."""
        with self._lock:
            known = sorted(self._values.items())
        for name, series in groupby(known, lambda item: item[0][0]):
            metric = Metric(name.removesuffix("_total"), "", "counter" if name.endswith("_total") else "gauge")
            for (_, labels), value in series:
                metric.add_sample(name, dict(labels), value)
            yield metric

    def page(self) -> bytes:
        """Return all series in the text format of Prometheus."""
        return generate_latest(self)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
