"""Downloads of media from hostile servers: bounded in time, and bad addresses are errors of their row."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from broker.store import Store
from relax_actors.config.media import MediaSection, UrlSection
from relax_actors.data.download import Downloads
from relax_actors.errors import DownloadError, RowError
from relax_actors.messages import MediaSource
from tests.support.http_servers import serving

DIGEST = "0" * 32


class SlowBody(BaseHTTPRequestHandler):
    """Sends a byte now and then, for longer than any deadline."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.trickle()

    def trickle(self) -> None:
        """Send bytes until the client goes."""
        end, pause = time.monotonic() + 10, threading.Event()
        while time.monotonic() < end:
            try:
                self.wfile.write(b"x")
                self.wfile.flush()
            except OSError:
                return
            pause.wait(0.02)

    def log_message(self, *arguments: object) -> None:
        pass


class SlowHeaders(SlowBody):
    """Sends a header whose value never ends."""

    def do_GET(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
        self.trickle()


def fetch(folder: Path, url: str) -> None:
    urls = UrlSection(allow=True, private=True, timeout=0.5)
    source = MediaSource("image", f"group/3/media.{DIGEST}.raw", DIGEST, stored=True, url=url, origin="row 1")
    Downloads(MediaSection(urls=urls), Store(folder), lambda: None).fetch(source)


@pytest.mark.parametrize("handler", [SlowBody, SlowHeaders])
def test_a_server_that_sends_a_byte_now_and_then_does_not_outlast_the_timeout(
    tmp_path: Path, handler: type[SlowBody]
) -> None:
    began = time.monotonic()
    with (
        serving(handler) as url,
        pytest.raises(DownloadError, match=r"took longer than media\.urls\.timeout = 0\.5 s$"),
    ):
        fetch(tmp_path, f"{url}/a.png")
    assert time.monotonic() - began < 8


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:99999/a.png", "http://" + "a" * 70])
def test_an_address_that_cannot_be_asked_is_an_error_of_its_row(tmp_path: Path, url: str) -> None:
    with pytest.raises(RowError, match=r"no address .*correct the URL"):
        fetch(tmp_path, url)
