"""One asyncio thread a process owns the connection to NATS; everyone else calls it with a deadline.

The connection reconnects for ever. A publish whose acknowledgement is lost is published again: cells are
write-once and log messages carry an id, so that repeating is safe.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.errors import APIError, NoStreamResponseError, ServiceUnavailableError

from broker.credentials import claims_of
from broker.errors import BrokerError, BrokerUnreachableError
from broker.files import write_private

T = TypeVar("T")
log = structlog.get_logger()

ACK_TIMEOUT = 2.0
SLACK = 10.0
"""Seconds beyond its deadline that a loaded machine may take to say that one has passed."""
CREDENTIALS = "nats.creds"
_NOT_READY = 503
_TRANSIENT = (
    nats.errors.TimeoutError,
    nats.errors.NoRespondersError,
    nats.errors.OutboundBufferLimitError,
    NoStreamResponseError,
    ServiceUnavailableError,
)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a broker listens and how to sign in; the URLs of a cluster's servers have commas between them."""

    url: str
    user: str | None = None
    password: str | None = None
    credentials: str | None = None
    """Path of a NATS `.creds` file, or of a folder with one folder a user; see `of`."""
    ca: str | None = None
    """Path of the authority's certificate, if the server has TLS; `ca.pem` beside the credentials if not given."""

    def __repr__(self) -> str:
        return f"Address({self.url})"

    def of(self, user: str) -> Address:
        """This broker as a user signs in: out of a folder of credentials his own, `<user>/nats.creds`.

        Raises:
            BrokerError: the folder holds none of his.
        """
        if self.credentials is None or not Path(self.credentials).is_dir():
            return self
        folder = Path(self.credentials)
        for path in (folder / user / CREDENTIALS, folder / CREDENTIALS):
            if path.is_file():
                return replace(self, credentials=str(path))
        msg = f"{folder} holds no credentials of {user}: no {user}/{CREDENTIALS}; make them by `relax keys`"
        raise BrokerError(msg)

    def options(self) -> dict[str, Any]:
        """How nats-py is to sign in.

        Raises:
            BrokerError: the credentials or certificates are none.
        """
        options: dict[str, Any] = {"reconnect_time_wait": 0.1}
        if self.user:
            options |= {"user": self.user, "password": self.password}
        if self.credentials:
            options["user_credentials"] = self.credentials
            if prefix := claims_of(Path(self.credentials)).inbox:
                options["inbox_prefix"] = prefix.encode()
        if context := self.tls():
            options["tls"] = context
        return options

    def tls(self) -> ssl.SSLContext | None:
        """How to check the server's certificate, with the user's own one beside the credentials; None without TLS.

        Raises:
            BrokerError: the files are no certificates.
        """
        beside = Path(self.credentials).parent if self.credentials else None
        ca = Path(self.ca) if self.ca else beside / "ca.pem" if beside else None
        if ca is None or not (self.ca or ca.is_file()):
            return ssl.create_default_context() if self.url.startswith("tls://") else None
        try:
            context = ssl.create_default_context(cafile=ca)
            if beside is not None and (beside / "cert.pem").is_file():
                context.load_cert_chain(beside / "cert.pem", beside / "key.pem")
        except (OSError, ssl.SSLError) as error:
            msg = f"the certificates beside {ca} cannot be used: {error}; make them anew by `relax keys --tls`"
            raise BrokerError(msg) from error
        return context

    def save(self, path: Path) -> None:
        """Write it readable for this user only, whole or not at all: whoever is killed here is started again."""
        write_private(path, json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Address:
        """Read what `save` wrote.

        Raises:
            BrokerError: no such file, or it holds something else.
        """
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            msg = f"no broker address in {path}: {error}; is the run up?"
            raise BrokerError(msg) from error


class _Client(Client):
    """A client whose connection outlives any message: subjects and headers need not be UTF-8 to be published.

    With TLS asked for it speaks to no server that does without.
    """

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:  # noqa: FBT001, FBT002 as there
        if initial_connection and "tls" in self.options and not info.get("tls_required"):
            msg = "nats: the server does without TLS, which these credentials ask for"
            raise nats.errors.Error(msg)
        await super()._process_info(info, initial_connection)

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Msg:
        plain = subject.decode(errors="backslashreplace").encode()
        return super()._build_message(sid, plain, reply, data, headers)  # type: ignore[no-any-return]

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        try:
            return await super()._process_headers(headers)
        except ValueError:
            return None


def _is_refusal(text: str) -> bool:
    return any(word in text.lower() for word in ("authorization", "authentication expired"))


class Bridge:
    """The process's connection.

    Args:
        address: the broker.
        name: shown in the server's list of connections.
        deadline: seconds for the first connection.

    Raises:
        BrokerUnreachableError: no connection before the deadline.
    """

    def __init__(self, address: Address, name: str, deadline: float = 10.0) -> None:
        self.address = address
        self.loop = asyncio.new_event_loop()
        self.on_reconnect: list[Callable[[], Awaitable[None]]] = []
        self.waiting: Callable[[], None] = lambda: None
        """Called now and then while the broker is waited for: who waits for it does not hang."""
        self._name = name
        self._closing = False
        self._refused_at, self._refusal = float("-inf"), ""
        self._thread = threading.Thread(target=self._run_loop, name="bridge", daemon=True)
        self._thread.start()
        self.nc: Client
        self.js: JetStreamContext
        try:
            self.call(self._connect(deadline), deadline + SLACK)
        except BaseException:
            with suppress(BrokerError, nats.errors.Error):
                self.call(self._close(), 3)
            self._stop_loop()
            raise

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    async def _connect(self, deadline: float) -> None:
        last = ""

        async def on_error(error: Exception) -> None:
            nonlocal last
            # What comes after a refusal is only the end of the connection.
            last = last if _is_refusal(last) else f"{type(error).__name__}: {error}"
            if "permissions violation" in str(error).lower():
                self._refused_at, self._refusal = time.monotonic(), str(error)
                log.error("broker_refuses", error=str(error))
            log.debug("broker_error", error=str(error))

        async def on_disconnect() -> None:
            if self._closing:
                return
            log.warning("broker_disconnected", url=self.address.url)

        async def on_reconnect() -> None:
            log.info("broker_reconnected", url=self.address.url)
            for hook in list(self.on_reconnect):
                await hook()

        # nats-py tries for ever by itself: the deadline is ours.
        self.nc = _Client()
        connecting = asyncio.ensure_future(
            self.nc.connect(
                self.address.url.split(","),
                name=self._name,
                connect_timeout=2,
                allow_reconnect=True,
                max_reconnect_attempts=-1,
                error_cb=on_error,
                disconnected_cb=on_disconnect,
                reconnected_cb=on_reconnect,
                **self.address.options(),
            )
        )
        # However it ends, somebody has looked.
        connecting.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.wait({connecting}, timeout=deadline)
        try:
            if not connecting.done():
                # Not waited for: it may take its time, between two attempts, to notice.
                connecting.cancel()
                raise TimeoutError  # noqa: TRY301 told with what the last attempt met
            connecting.result()
        except (OSError, nats.errors.Error, TimeoutError, ValueError) as error:
            text = last or f"{type(error).__name__}: {error}"
            if _is_refusal(text):
                msg = f"broker {self.address.url} refuses these credentials ({text}); mend broker.url or .credentials"
                raise BrokerError(msg) from error
            msg = (
                f"broker {self.address.url} does not answer within {deadline:g} s ({text}); "
                "start it, or set broker.url and its credentials"
            )
            raise BrokerUnreachableError(msg) from error
        self.js = self.nc.jetstream(timeout=ACK_TIMEOUT)

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine in the bridge's thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call(self, work: Coroutine[Any, Any, T], deadline: float) -> T:
        """Run a coroutine in the bridge's thread and wait for it; never from that thread itself.

        Raises:
            BrokerUnreachableError: it took longer than `deadline` seconds.
        """
        future = self.submit(work)
        try:
            return future.result(deadline)
        except concurrent.futures.TimeoutError as error:
            if future.done():
                raise
            future.cancel()
            msg = f"no answer from broker {self.address.url} within {deadline:g} s"
            raise BrokerUnreachableError(msg) from error

    async def persist(self, attempt: Callable[[], Awaitable[T]], what: str, deadline: float | None = None) -> T:
        """Repeat a request to the broker until it is answered; the answer may be an error of the server's.

        Args:
            attempt: makes the request; must be safe to repeat.
            what: names the request in the warning after 10 s and in the error.
            deadline: seconds until giving up; None waits for ever, as when a broker is away.

        Raises:
            BrokerUnreachableError: no answer before the deadline.
            BrokerError: these credentials do not allow it.
        """
        start = time.monotonic()
        warned = 0.0
        while True:
            try:
                return await attempt()
            except (*_TRANSIENT, APIError) as error:
                # 503: JetStream is there but not ready yet, as just after a restart.
                if isinstance(error, APIError) and error.code != _NOT_READY:
                    raise
                if self._refused_at > start:
                    msg = f"broker {self.address.url} refuses to {what}: {self._refusal}; see `relax keys`"
                    raise BrokerError(msg) from error
                waited = time.monotonic() - start
                if deadline is not None and waited > deadline:
                    msg = f"broker {self.address.url} did not answer to {what} within {deadline:g} s"
                    raise BrokerUnreachableError(msg) from error
                if waited > warned + 10:
                    warned = waited
                    log.warning("waiting_for_broker", request=what, seconds=round(waited, 1))
            self.waiting()
            await asyncio.sleep(0.05)

    def close(self) -> None:
        """Flush, close the connection and end the thread."""
        if self.loop.is_closed():
            return
        self._closing = True
        try:
            self.call(self._close(), 3)
        except (BrokerError, nats.errors.Error):
            log.debug("broker_close_failed")
        self._stop_loop()

    async def _close(self) -> None:
        try:
            if self.nc.is_connected:
                await asyncio.wait_for(self.nc.flush(1), 1)
            await asyncio.wait_for(self.nc.close(), 1)
        except (nats.errors.Error, TimeoutError, OSError) as error:
            log.debug("broker_close_failed", error=str(error))
        finally:
            # A client that is still trying to reconnect leaves tasks behind.
            tasks = [t for t in asyncio.all_tasks(self.loop) if t is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=0.5)
            # One that was about to sign in has left its socket open: nats-py closes it only where it is connected.
            transport: Any = self.nc._transport  # noqa: SLF001
            with suppress(AttributeError):  # no transport, or no connection
                transport.close()
            await asyncio.sleep(0)

    def _stop_loop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(3)
        if not self._thread.is_alive():
            self.loop.close()
