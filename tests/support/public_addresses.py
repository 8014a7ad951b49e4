"""Program for a network namespace of its own: serves files at a public address and downloads from it.

    unshare -rn python -m tests.support.public_addresses TARGET...

The server at `PUBLIC` redirects to each TARGET. Writes what each download gave, or its error, one a line.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from relax_actors.config.media import UrlSection
from relax_actors.data.download import download
from relax_actors.errors import RowError

PUBLIC, PORT = "9.9.9.9", 8000
_SIOCSIFADDR, _SIOCSIFFLAGS, _UP = 0x8916, 0x8914, 1


def take_address(name: str, address: str) -> None:
    """Give the loopback interface an address, and switch it on."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        where = struct.pack("16sH2s4s8x", name.encode(), socket.AF_INET, b"\0\0", socket.inet_aton(address))
        fcntl.ioctl(control, _SIOCSIFADDR, where)
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", name.encode(), _UP))


class Redirecting(BaseHTTPRequestHandler):
    """Redirects /<n> to the n-th target, and answers everything else with a secret."""

    def do_GET(self) -> None:
        number = self.path[1:]
        self.send_response(302 if number.isdigit() else 200)
        if number.isdigit():
            self.send_header("Location", sys.argv[int(number)])
        self.end_headers()
        self.wfile.write(b"secret")

    def log_message(self, *arguments: object) -> None:
        pass


def main() -> None:
    """Serve and download."""
    for name, address in (("lo", "127.0.0.1"), ("lo:1", PUBLIC)):
        take_address(name, address)
    server = ThreadingHTTPServer(("0.0.0.0", PORT), Redirecting)  # noqa: S104 in a namespace of its own
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    for number in range(1, len(sys.argv)):
        try:
            found = download(f"http://{PUBLIC}:{PORT}/{number}", UrlSection(allow=True, timeout=10.0)).decode()
        except RowError as error:
            found = str(error)
        sys.stdout.write(f"{found}\n")


if __name__ == "__main__":
    main()
