"""A run's measurements as Prometheus reads them: a page of text, made when it is asked for."""

from __future__ import annotations

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from relax_actors.errors import ConfigError
from relax_actors.monitoring.sinks import Heard

MOST_SERIES = 20_000
_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9_]")
Series = tuple[str, tuple[tuple[str, str], ...]]


class Prometheus:
    """Serves `/metrics`.

        relax_step_<name>{run}              of the last optimizer step
        relax_actor_<name>{run,role,n}      of an actor, about once a second
        relax_events_total{run,role,kind}   events heard

    Args:
        at: `port` or `host:port`; 127.0.0.1 if no host is given.

    Raises:
        ConfigError: the port cannot be had.
    """

    def __init__(self, at: str) -> None:
        host, _, port = at.rpartition(":")
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
            msg = f"--prometheus {at}: {error}; give a free port, or host:port"
            raise ConfigError(msg) from error
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    def take(self, heard: Heard) -> None:
        """Keep the last value of each series."""
        if heard.is_event:
            labels = (("run", heard.run), ("role", heard.role), ("kind", heard.kind))
            self._set(("relax_events_total", labels), 1.0, add=True)
            return
        if heard.kind not in ("", "step"):
            return
        step = heard.kind == "step"
        actor = () if step else (("role", heard.role), ("n", heard.n))
        labels_of = (("run", heard.run), *actor)
        for name, value in heard.numbers().items():
            self._set((f"relax_{'step' if step else 'actor'}_{_NOT_A_NAME.sub('_', name)[:64]}", labels_of), value)

    def _set(self, series: Series, value: float, *, add: bool = False) -> None:
        with self._lock:
            if series in self._values or len(self._values) < MOST_SERIES:
                self._values[series] = value + (self._values.get(series, 0.0) if add else 0.0)

    def page(self) -> str:
        """All series as text."""
        with self._lock:
            known = sorted(self._values.items())
        lines: list[str] = []
        last = ""
        for (name, labels), value in known:
            if name != last:
                lines.append(f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}")
                last = name
            shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
            lines.append(f"{name}{{{shown}}} {value!r}")
        return "\n".join(lines) + "\n"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
