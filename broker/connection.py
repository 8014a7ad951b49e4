"""Connection to NATS, owned by one asyncio thread per process.

Other threads call into it with a deadline. The connection reconnects forever. A publish whose acknowledgement is
lost is repeated: cells are write-once and log messages carry an id, so repeating is safe.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import re
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import nats.errors
import structlog
from nats.js import JetStreamContext
from nats.js.errors import APIError, NoStreamResponseError, ServiceUnavailableError

from broker.address import Address
from broker.client import ASKS_FOR_NONE, Client, HeaderParser
from broker.credentials import read_claims
from broker.errors import BrokerError, BrokerUnreachableError
from broker.requests import ANSWER_TIMEOUT, Requests

T = TypeVar("T")
log = structlog.get_logger()

DEADLINE_SLACK = 10.0
"""Seconds after a deadline within which a loaded machine must report that it has passed."""
RETRY_SECONDS = 0.05
RECONNECT_SECONDS, MAX_RECONNECT_SECONDS = 0.1, 5.0
"""Pause between attempts to connect; it doubles with each attempt that the broker refuses."""
SIGN_IN_SECONDS = 600.0
"""How long requests wait for newer credentials while the broker refuses the present ones."""
_NOT_READY = 503
"""Code of an error of JetStream that starts, e.g. right after a restart."""
_NO_PEERS = 10005
"""Error code of a cluster that has not heard of enough servers yet, e.g. right after its start, or has no room."""
TRANSIENT = (
    nats.errors.TimeoutError,
    nats.errors.NoRespondersError,
    nats.errors.OutboundBufferLimitError,
    NoStreamResponseError,
    ServiceUnavailableError,
)
"""Errors of a request that may be repeated."""


_DENIED = re.compile(r'permissions violation for (?P<kind>publish|subscription) to "(?P<subject>[^"]+)"')


def _describe(error: BaseException) -> str:
    if isinstance(error, socket.gaierror):
        return "its host name is unknown on this machine"
    return f"{type(error).__name__}: {error}" if str(error) else "no answer"


def _is_refusal(text: str) -> bool:
    return any(word in text.lower() for word in ("authorization", "authentication expired"))


class Connection:
    """The process's connection to the broker.

    Args:
        address: address of the broker.
        name: client name in the server's list of connections.
        deadline: seconds to wait for the first connection.

    Raises:
        BrokerUnreachableError: the broker did not answer before the deadline.
        BrokerError: the broker refused the credentials.
    """

    def __init__(self, address: Address, name: str, deadline: float = 10.0) -> None:
        self.address = address
        self.loop: asyncio.AbstractEventLoop = asyncio.new_event_loop()
        self.on_reconnect: list[Callable[[], Awaitable[None]]] = []
        self.on_wait: Callable[[], None] = lambda: None
        """Called periodically while a request waits for the broker, so that a watchdog does not take it for a hang."""
        self._name = name
        self._options = address.connect_options()
        self._closing = False
        self._refused_at, self._refusal = float("-inf"), ""
        self._signing_in_since: float | None = None
        self._thread = threading.Thread(target=self._run_loop, name="broker-connection", daemon=True)
        self._thread.start()
        self.nc: Client
        self.js: JetStreamContext
        self.requests: Requests
        try:
            self.call(self._connect(deadline), deadline + DEADLINE_SLACK)
        except BaseException:
            self.close()
            raise

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.run_until_complete(self._cancel_rest())

    async def _cancel_rest(self) -> None:
        """Cancel requests that other threads submitted while the connection was being closed."""
        await asyncio.sleep(0)
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=0.5)

    async def _connect(self, deadline: float) -> None:
        last_error = ""

        async def on_error(error: Exception) -> None:
            nonlocal last_error
            # Errors after a refusal only report the closed socket; keep the refusal.
            last_error = last_error if _is_refusal(last_error) else _describe(error)
            if _is_refusal(str(error)):
                self._wait_longer()
            if "permissions violation" in str(error).lower():
                self._refused_at, self._refusal = time.monotonic(), str(error)
                log.error("broker_permission_denied", error=str(error))
            log.debug("broker_error", error=str(error))

        async def on_disconnect() -> None:
            if self._closing:
                return
            log.warning("broker_disconnected", url=self.address.url)

        async def on_reconnect() -> None:
            log.info("broker_reconnected", url=self.address.url)
            self._signing_in_since = None
            self.nc.options["reconnect_time_wait"] = RECONNECT_SECONDS
            for hook in list(self.on_reconnect):
                await hook()

        # nats-py retries the first connection forever, so the deadline is enforced here.
        self.nc = Client()
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
                **self._options,
            )
        )
        # Retrieve the exception in every case, or asyncio warns about it.
        connecting.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.wait({connecting}, timeout=deadline)
        try:
            if not connecting.done():
                # Do not wait for the cancellation: between two attempts nats-py may notice it late.
                connecting.cancel()
                raise TimeoutError  # noqa: TRY301 reported with the error of the last attempt
            connecting.result()
        except (OSError, nats.errors.Error, TimeoutError, ValueError) as error:
            raise self._connect_error(last_error or _describe(error), deadline) from error
        self.js = self.nc.jetstream(timeout=ANSWER_TIMEOUT)
        self.js._hdr_parser = HeaderParser()  # noqa: SLF001 nats-py has no public name for it
        self.requests = Requests(self.nc)

    def _wait_longer(self) -> None:
        """Double the pause before the next attempt to connect: the broker refused the credentials."""
        if self._signing_in_since is None:
            self._signing_in_since = time.monotonic()
        wait = 2 * self.nc.options["reconnect_time_wait"]
        self.nc.options["reconnect_time_wait"] = min(wait, MAX_RECONNECT_SECONDS)

    @property
    def refusal(self) -> str:
        """Why the broker refuses this process, and the remedy; empty if it does not."""
        since = self._signing_in_since
        if since is None or self.nc.is_connected:
            return ""
        return (
            f"broker {self.address.url} has refused the credentials {self.address.credentials} for "
            f"{time.monotonic() - since:.0f} s: they were revoked or have expired; copy the newer ones that `relax "
            "keys` wrote there"
        )

    def check_sign_in(self) -> None:
        """Raise BrokerError if the broker has refused the credentials for too long."""
        since = self._signing_in_since
        if since is not None and time.monotonic() - since > SIGN_IN_SECONDS and (text := self.refusal):
            msg = f"{text} and start this process again"
            raise BrokerError(msg)

    def _connect_error(self, text: str, deadline: float) -> BrokerError:
        url = self.address.url
        if _is_refusal(text):
            given = self.address.credentials or self.address.user or "none given"
            msg = f"broker {url} refuses these credentials ({given}; {text}); give credentials that this broker issued"
            return BrokerError(msg)
        if ASKS_FOR_NONE in text:
            own = self.address.credentials
            msg = f"broker {url} {ASKS_FOR_NONE} of {own}; give the address of the broker that issued them"
            return BrokerError(msg)
        msg = f"broker {url} does not answer within {deadline:g} s ({text}); start it, or give its right address"
        return BrokerUnreachableError(msg)

    def _permission_error(self, request: str) -> str:
        """Describe a request that the broker refused, with the permission that is missing."""
        credentials = self.address.credentials
        user = read_claims(Path(credentials)).name if credentials else self.address.user
        denied = _DENIED.search(self._refusal)
        missing = self._refusal
        if denied is not None:
            # nats-py reports subjects in lower case.
            at = request.lower().find(denied["subject"])
            subject = request[at : at + len(denied["subject"])] if at >= 0 else denied["subject"]
            missing = f"{'subscribe' if denied['kind'] == 'subscription' else 'publish'} to {subject}"
        return (
            f"broker {self.address.url} refuses to {request}: user {user!r} has no permission to {missing}. A role may "
            "write its column `writes` and what its `spec` lists; add it there, then run `relax keys` again, or "
            "`relax up` for an embedded broker"
        )

    @property
    def host(self) -> str:
        """Name or address of the connected server's host."""
        url = self.nc.connected_url
        return str((url.hostname if url is not None else None) or urlsplit(self.address.url).hostname or "")

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine in the connection's loop; raises BrokerUnreachableError if closed."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError as error:  # the loop is closed
            work.close()
            msg = f"the connection to broker {self.address.url} is closed"
            raise BrokerUnreachableError(msg) from error

    def call(self, work: Coroutine[Any, Any, T], deadline: float) -> T:
        """Run a coroutine in the connection's loop and wait for its result.

        May be called from any thread but the connection's own, which it would block.

        Raises:
            BrokerUnreachableError: the coroutine took longer than `deadline` seconds, or the connection is closed.
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
        except concurrent.futures.CancelledError as error:
            if not self._closing:
                raise
            msg = f"the connection to broker {self.address.url} was closed during a request"
            raise BrokerUnreachableError(msg) from error

    async def retry(self, attempt: Callable[[], Awaitable[T]], request: str, deadline: float | None = None) -> T:
        """Repeat a request until the broker answers it.

        Errors that the server returns are raised; that a cluster has no suitable peers, after the deadline. `attempt`
        must be safe to repeat, and `request` describes it in errors and in the warning every 10 s. Without `deadline`
        (seconds) it tries forever, e.g. while a broker is down.

        Raises:
            BrokerUnreachableError: no answer before the deadline.
            BrokerError: the credentials do not permit the request, or were refused for `SIGN_IN_SECONDS`.
        """
        start = time.monotonic()
        warned = 0.0
        while True:
            try:
                return await attempt()
            except (*TRANSIENT, APIError) as error:
                no_peers = isinstance(error, APIError) and error.err_code == _NO_PEERS
                if not isinstance(error, TRANSIENT) and error.code != _NOT_READY and not no_peers:
                    raise
                if self._refused_at > start:
                    raise BrokerError(self._permission_error(request)) from error
                self.check_sign_in()
                waited = time.monotonic() - start
                if deadline is not None and waited > deadline:
                    if no_peers:
                        raise
                    msg = f"broker {self.address.url} did not answer to {request} within {deadline:g} s"
                    raise BrokerUnreachableError(msg) from error
                if waited > warned + 10:
                    warned = waited
                    log.warning("waiting_for_broker", request=request, seconds=round(waited, 1))
            self.on_wait()
            await asyncio.sleep(RETRY_SECONDS)

    def close(self) -> None:
        """Flush, close the connection and end its thread."""
        if self.loop.is_closed():
            return
        self._closing = True
        # Cut off if nats-py passes the cancellation of its own tasks on.
        with suppress(BrokerError, nats.errors.Error):
            self.call(self._close(), 3)
        self._stop_loop()

    async def _close(self) -> None:
        try:
            if self.nc.is_connected:
                await asyncio.wait_for(self.nc.flush(1), 1)
            await asyncio.wait_for(self.nc.close(), 1)
        except (nats.errors.Error, TimeoutError, OSError, AssertionError) as error:  # the last if it never connected
            log.debug("broker_close_failed", error=str(error))
        finally:
            # A client that is still reconnecting leaves tasks behind.
            tasks = [t for t in asyncio.all_tasks(self.loop) if t is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=0.5)
            # nats-py closes the socket only when connected, so a client interrupted while signing in leaks it.
            transport: Any = self.nc._transport  # noqa: SLF001
            with suppress(AttributeError):  # no transport, or no connection
                transport.close()
            await asyncio.sleep(0)

    def _stop_loop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(3)
        if not self._thread.is_alive():
            self.loop.close()
