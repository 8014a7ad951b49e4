"""Sink that serves the measurements of a run to Prometheus."""

from __future__ import annotations

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from relax_actors.errors import ConfigError
from relax_actors.monitoring.sinks.base import LogMessage

MAX_SERIES = 20_000
"""Further series are ignored: any client of the broker can publish new names, and memory is bounded."""
_INVALID = re.compile(r"[^a-zA-Z0-9_]")
Labels = tuple[tuple[str, str], ...]
Series = tuple[str, Labels]


class Prometheus:
    """Sink with an HTTP server of its own, which serves `/metrics`.

        relax_step_<name>{run}              measurements of the last optimizer step
        relax_critic_<name>{run}            measurements of the last step of the critic
        relax_actor_<name>{run,role,n}      state of an actor, about once a second
        relax_events_total{run,role,kind}   events received

    Args:
        target: `port` or `host:port`; 127.0.0.1 if no host is given.
        run: name of the run; not used.

    Raises:
        ConfigError: the port is invalid or in use.
    """

    def __init__(self, target: str, run: str) -> None:  # noqa: ARG002 the signature of every sink
        host, _, port = target.rpartition(":")
        self._values: dict[Series, float] = {}
        self._lock = threading.Lock()
        page = self.page

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = self.path.split("?")[0] == "/metrics"
                body = page().encode() if found else b"see /metrics\n"
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 the library's name
                pass

        try:
            self._server = ThreadingHTTPServer((host or "127.0.0.1", int(port)), Handler)
        except (OSError, ValueError, OverflowError) as error:
            msg = f"--sink prometheus={target}: {error}; give a free port, or host:port"
            raise ConfigError(msg) from error
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()

    @property
    def port(self) -> int:
        """Port that the server listens on."""
        return int(self._server.server_address[1])

    def take(self, message: LogMessage) -> None:
        """Store the last value of each series, and count events."""
        labels: Labels
        if message.is_event:
            labels = (("run", message.run), ("role", message.role), ("kind", message.kind))
            self._set(("relax_events_total", labels), 1.0, add=True)
            return
        if message.kind in ("step", "critic"):
            prefix, labels = f"relax_{message.kind}", (("run", message.run),)
        elif not message.kind:
            prefix, labels = "relax_actor", (("run", message.run), ("role", message.role), ("n", message.n))
        else:
            return
        for name, value in message.numbers().items():
            self._set((f"{prefix}_{_INVALID.sub('_', name)[:64]}", labels), value)

    def _set(self, series: Series, value: float, *, add: bool = False) -> None:
        with self._lock:
            if series in self._values or len(self._values) < MAX_SERIES:
                self._values[series] = value + (self._values.get(series, 0.0) if add else 0.0)

    def page(self) -> str:
        """Return all series in the text format of Prometheus."""
        with self._lock:
            known = sorted(self._values.items())
        lines: list[str] = []
        last = ""
        for (name, labels), value in known:
            if name != last:
                lines.append(f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}")
                last = name
            shown = ",".join(f'{key}="{_escape(text)}"' for key, text in labels)
            lines.append(f"{name}{{{shown}}} {value!r}")
        return "\n".join(lines) + "\n"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
