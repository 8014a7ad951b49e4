"""Calls of an HTTP service: retries until a deadline, a pause while it is down."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from relax_actors.errors import ActorError, ConfigError, RowError

T = TypeVar("T")
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before the second try of a call; each further pause is twice as long, up to the longest one."""
FAILURES_UNTIL_PAUSE = 5
"""Failed tries in a row, of all calls, after which only one call at a time tries the service."""
TRIES, SHORTEST_TRY = 3, 1.0
"""A try may take a third of the deadline of a call, and at least one second."""
LARGEST_ANSWER = 8 << 20
_JSON = {"Content-Type": "application/json"}
_TRY_AGAIN = frozenset({408, 409, 425, 429, *range(500, 600)})
_OF_THE_CONFIGURATION = frozenset({301, 302, 307, 308, 401, 403, 404, 405})


class EndpointError(Exception):
    """The service gave no usable answer for a row."""


class Endpoint:
    """One HTTP service, called by POST with JSON.

    Args:
        url: its address.
        setting: key of the configuration with the address, for errors.
        key_variable: environment variable with a key that is sent as bearer token; empty for none. List it in
            `reward.secrets`.
        deadline: seconds for a call with all its tries, from the time at which it is one of the `concurrent` ones.
        concurrent: calls at once.
    """

    def __init__(self, url: str, setting: str, key_variable: str, deadline: float, concurrent: int) -> None:
        if not _is_url(url):
            msg = f"{setting} = {url!r} is not a valid URL; write http:// or https:// and a host, without a password"
            raise ConfigError(msg)
        headers = {}
        if key_variable:
            if not (key := os.environ.get(key_variable)):
                msg = (
                    f"{setting}: the environment variable {key_variable} is not set for the reward; set it, and list "
                    f'it in reward.secrets = ["{key_variable}"]'
                )
                raise ConfigError(msg)
            headers["Authorization"] = f"Bearer {key}"
        self._url, self._setting, self._deadline = url, setting, deadline
        self._client = httpx.AsyncClient(headers=headers, timeout=deadline, follow_redirects=False, trust_env=False)
        self._places = asyncio.Semaphore(concurrent)
        self._failures = 0
        self._probe = asyncio.Lock()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def post(self, body: Mapping[str, Any], read: Callable[[Any], T]) -> T:
        """Send JSON and return what `read` makes of the JSON of the answer.

        An answer from which `read` raises ValueError is a failed try.

        Raises:
            ConfigError: the service refuses every call: wrong address, or wrong key.
            RowError: it refuses this call, or `body` is no JSON.
            ActorError: it has not answered within the deadline.
            EndpointError: it has answered, but none of its answers could be used.
        """
        try:
            data = json.dumps(body, allow_nan=False).encode(errors="replace")
        except (ValueError, TypeError) as error:
            msg = f"{self._setting}: the row cannot be sent as JSON: {error}"
            raise RowError(msg) from error
        why, answered, pause = "", False, FIRST_PAUSE
        async with self._places:
            end = time.monotonic() + self._deadline
            while (left := end - time.monotonic()) > 0:
                limit = min(left, max(SHORTEST_TRY, self._deadline / TRIES))
                try:
                    async with asyncio.timeout(limit):
                        answer = await self._tried_alone_while_down(data, read)
                except TimeoutError:
                    why = why or f"no answer within {limit:.3g} seconds"
                except (httpx.HTTPError, EndpointError) as error:
                    why, answered = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__, False
                except ValueError as error:
                    why, answered = str(error), True
                else:
                    self._failures = 0
                    return answer
                self._failures += 1
                await asyncio.sleep(max(0.0, min(pause, end - time.monotonic())))
                pause = min(2 * pause, LONGEST_PAUSE)
        msg = f"{self._setting}: {self._url} gave no usable answer within {self._deadline:g} seconds ({why})"
        raise (EndpointError if answered else ActorError)(msg)

    async def _tried_alone_while_down(self, data: bytes, read: Callable[[Any], T]) -> T:
        if self._failures < FAILURES_UNTIL_PAUSE:
            return await self._tried(data, read)
        async with self._probe:
            return await self._tried(data, read)

    async def _tried(self, body: bytes, read: Callable[[Any], T]) -> T:
        async with self._client.stream("POST", self._url, content=body, headers=_JSON) as answer:
            data = bytearray()
            async for chunk in answer.aiter_bytes():
                data += chunk
                if len(data) > LARGEST_ANSWER:
                    msg = f"{self._setting}: {self._url} answered with more than {LARGEST_ANSWER >> 20} MiB"
                    raise RowError(msg)
        if answer.is_success:
            return read(json.loads(data))
        said = f"{self._url} answered {answer.status_code}: {bytes(data[:300]).decode(errors='replace')}"
        if answer.status_code in _OF_THE_CONFIGURATION:
            msg = f"{self._setting}: {said}; correct the address or the key"
            raise ConfigError(msg)
        if answer.status_code not in _TRY_AGAIN:
            msg = f"{self._setting}: {said}"
            raise RowError(msg)
        raise EndpointError(said)


def _is_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.username is None and parts.port != 0
    except ValueError:  # such as a port above 65535
        return False
