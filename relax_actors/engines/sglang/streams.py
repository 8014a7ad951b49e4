"""Rows in flight: one streamed request a row, for all of its samples that have not ended."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import httpx

from relax_actors.engines.sglang.concurrency import Concurrency
from relax_actors.engines.sglang.record import ServerRecord
from relax_actors.engines.sglang.samples import Sample
from relax_actors.engines.sglang.server import CONNECT_SECONDS, OK, ServerGoneError, authorization
from relax_actors.errors import EngineError

DATA, END = "data: ", "[DONE]"
Dated = Callable[[], tuple[int, Mapping[str, int]]]
"""Gives the version in use, and all versions by name."""


class Streams:
    """Requests to one server. Make and use it in the loop's thread.

    Args:
        record: the server.
        concurrency: how many rows it may have at once.
        keeps_partial: whether samples whose request breaks off keep what they have.
    """

    def __init__(self, record: ServerRecord, concurrency: Concurrency, *, keeps_partial: bool) -> None:
        self.record, self._concurrency, self._keeps_partial = record, concurrency, keeps_partial
        # Silence is judged over all rows: one may wait for long.
        self._client = httpx.AsyncClient(
            base_url=record.url,
            headers=authorization(record),
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            verify=record.url.startswith("https:"),
            trust_env=not record.is_own,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )
        self._free = asyncio.Condition()
        self._busy = 0
        self.tokens = 0
        """Tokens told so far."""

    async def finish(self, group: list[Sample], dated: Dated) -> None:
        """Have the samples of a row finished, when it is its turn.

        Raises:
            ServerGoneError: the server is gone; the samples are left as they can go on.
            EngineError: it refuses.
        """
        async with self._free:
            await self._free.wait_for(lambda: self._busy < self._concurrency.limit)
            self._busy += 1
        try:
            while missing := [sample for sample in group if sample.finish_reason is None]:
                await self._ask(missing, dated)
        finally:
            async with self._free:
                self._busy -= 1
                self._free.notify_all()

    async def _ask(self, samples: list[Sample], dated: Dated) -> None:
        """One request for samples; some may still be unfinished when somebody ended it."""
        name = uuid.uuid4().hex
        running = {f"{name}-{i}": sample for i, sample in enumerate(samples)}
        body = {
            "rid": list(running),
            "input_ids": [sample.prompt for sample in samples],
            "sampling_params": [sample.parameters() for sample in samples],
            "return_logprob": True,
            "return_routed_experts": samples[0].moe is not None,
            "stream": True,
        }
        for sample in samples:
            sample.begin()
        began, put_back = self._concurrency.limit, False
        try:
            async with self._client.stream("POST", "/generate", json=body) as answer:
                if answer.status_code != OK:
                    text = (await answer.aread()).decode(errors="replace")
                    msg = f"the server at {self.record.url} refuses a row ({answer.status_code}): {text[:1000]}"
                    raise EngineError(msg)
                async for line in answer.aiter_lines():
                    if not line.startswith(DATA) or line == DATA + END:
                        continue
                    put_back |= self._take(json.loads(line[len(DATA) :]), running, dated)
        except httpx.TransportError as error:
            msg = f"the server at {self.record.url} breaks off a row: {error or type(error).__name__}"
            raise ServerGoneError(msg) from error
        finally:
            for sample in running.values():
                sample.cut_off(keep=self._keeps_partial)
        if self._concurrency.limit == began:
            self._concurrency.finished(put_back=put_back)

    def _take(self, chunk: dict[str, Any], running: dict[str, Sample], dated: Dated) -> bool:
        """Take in one message; gives whether a sample had to wait for room."""
        if "error" in chunk:
            msg = f"the server at {self.record.url} refuses a row: {chunk['error']}"
            raise EngineError(msg)
        meta = chunk["meta_info"]
        sample = running[meta["id"]]
        before = len(sample)
        ended = sample.take(chunk, *dated())
        self.tokens += max(0, len(sample) - before)
        if ended:
            del running[meta["id"]]
        return bool(meta.get("num_retractions")) and not sample.was_swapped

    async def close(self) -> None:
        """Close the connections; the server drops requests that nobody waits for."""
        await self._client.aclose()


async def first_of(tasks: Iterable[asyncio.Task[None]], seconds: float) -> set[asyncio.Task[None]]:
    """Those that are through after some seconds, or as soon as there is one."""
    return (await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED))[0]


async def cancelled(tasks: Iterable[asyncio.Task[None]]) -> None:
    """End tasks, and wait until they have."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
