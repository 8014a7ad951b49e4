"""Streamed requests to a server: one for each group of samples, for those that are not finished."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from relax_actors.engines.protocols.server import ServerRecord
from relax_actors.engines.sglang.partial_sample import PartialSample
from relax_actors.engines.sglang.server import CONNECT_SECONDS, OK, UNLOAD_SECONDS, ServerGoneError, authorization
from relax_actors.errors import EngineError


class SampleLimit:
    """Limit from `most` on: it grows by `step`, the samples of a row, and is halved when samples are retracted."""

    def __init__(self, most: int, step: int = 1) -> None:
        self._most, self._step, self._without_retraction = most, step, 0
        self.limit = most
        """Samples that the server may generate at once; a request alone may have more."""

    def finished(self, samples: int, *, retracted: bool) -> None:
        """Adapt the limit to a finished request, some of whose samples the server may have retracted: its cache was
        full.
        """
        if retracted:
            self.limit, self._without_retraction = max(1, self.limit // 2), 0
            return
        self._without_retraction += samples
        if self._without_retraction >= self.limit:
            self.limit, self._without_retraction = min(self._most, self.limit + self._step), 0


DATA, END = "data: ", "[DONE]"


@dataclass(frozen=True, slots=True)
class Served:
    """Weights in use.

    Attributes:
        version: their version.
        named: versions by the names of weights on the server, which reports the name for every token.
        adapter: name of the adapter that requests are to use; None if versions are full sets.
    """

    version: int
    named: Mapping[str, int]
    adapter: str | None = None


ServedWeights = Callable[[], Served]
"""Returns the weights in use now."""


class RowStreams:
    """Requests to one server. Create and use it in the thread of the event loop.

    Args:
        record: address and key of the server.
        limit: limits the samples that are requested at once.
        keep_partial: whether samples keep their tokens when their request breaks off, and are aborted at a stop string.
            Log-probs then depend on time, by rounding. If not, the server has one request at a time.
        counts: counts the tokens of prompts, those that the server found in its cache, and retracted samples.
    """

    def __init__(
        self, record: ServerRecord, limit: SampleLimit, *, keep_partial: bool, counts: Counter[str] | None = None
    ) -> None:
        self.record, self._limit, self._keep_partial = record, limit, keep_partial
        self._counts: Counter[str] = Counter() if counts is None else counts
        # No read timeout: a single row may wait for long. The engine detects a stall over all rows.
        self._client = httpx.AsyncClient(
            base_url=record.url,
            headers=authorization(record),
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            verify=record.url.startswith("https:"),
            trust_env=not record.is_own,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )
        self._slot_free = asyncio.Condition()
        self._running = 0
        # Requests that run, by the adapter that they name.
        self._requests: Counter[str | None] = Counter()
        self.tokens = 0
        """Tokens received so far, over all rows."""

    async def generate(self, group: Sequence[PartialSample], weights: ServedWeights) -> None:
        """Generate the samples of a request until all have ended.

        Waits while the limit of samples is reached.

        Raises:
            ServerGoneError: the connection broke; the samples hold the tokens from which they can continue.
            EngineError: the server refuses the request.
        """
        async with self._slot_free:
            await self._slot_free.wait_for(lambda: self._has_room(len(group)))
            self._running += len(group)
        try:
            while unfinished := [sample for sample in group if sample.finish_reason is None]:
                await self._request(unfinished, weights)
        except BaseException:
            if not self._keep_partial:
                # All samples start again: log-probs depend by rounding on the samples of a request.
                for sample in group:
                    sample.request_broken(keep=False)
            raise
        finally:
            async with self._slot_free:
                self._running -= len(group)
                self._slot_free.notify_all()

    def _has_room(self, samples: int) -> bool:
        return not self._running or (self._keep_partial and self._running + samples <= self._limit.limit)

    async def _request(self, samples: list[PartialSample], weights: ServedWeights) -> None:
        """Send one request for samples.

        An abort on the server can end it while samples are unfinished. So ends a request whose adapter is not in use
        any more, and the next one continues its samples with the present adapter.
        """
        name = uuid.uuid4().hex
        # Servers abort all requests whose name begins with a given one: no name may be the beginning of another.
        running = {f"{i}-{name}": sample for i, sample in enumerate(samples)}
        served = weights()
        adapter = served.adapter
        body = _body(running, adapter)
        self._requests[adapter] += 1
        for sample in samples:
            sample.request_started()
        limit, retracted = self._limit.limit, False
        aborted: set[str] = set()
        try:
            async with self._client.stream("POST", "/generate", json=body) as answer:
                if answer.status_code != OK:
                    text = (await answer.aread()).decode(errors="replace")
                    msg = f"the server at {self.record.url} refuses a row ({answer.status_code}): {text[:1000]}"
                    raise EngineError(msg)
                async for line in answer.aiter_lines():
                    if not line.startswith(DATA) or line == DATA + END:
                        continue
                    served = weights() if adapter is None else served
                    retracted |= self._handle(json.loads(line[len(DATA) :]), running, served)
                    if self._keep_partial:
                        await self._abort_needless(running, aborted, is_stale=weights().adapter != adapter)
        except httpx.TransportError as error:
            msg = f"the server at {self.record.url} broke the connection of a row: {error or type(error).__name__}"
            raise ServerGoneError(msg) from error
        finally:
            self._requests[adapter] -= 1
            for sample in running.values():
                sample.request_broken(keep=self._keep_partial)
        if adapter not in (None, weights().adapter) and not self._requests[adapter]:
            await self._unload(adapter)
        if self._limit.limit == limit:
            self._limit.finished(len(samples), retracted=retracted)

    async def _abort_needless(self, running: Mapping[str, PartialSample], aborted: set[str], *, is_stale: bool) -> None:
        """Abort the requests of samples in which a stop string has ended, or which another adapter continues.

        Not in a deterministic run, whose batches must not depend on when an abort arrives.
        """
        for name, sample in list(running.items()):
            if name not in aborted and (sample.is_stopped or (is_stale and sample.can_continue)):
                aborted.add(name)
                await self._abort(name)

    async def _abort(self, name: str) -> None:
        """Abort the request of a sample; its last message comes sooner."""
        answer = await self._client.post("/abort_request", json={"rid": name})
        if answer.status_code != OK:
            why = f"({answer.status_code}): {answer.text[:1000]}"
            msg = f"the server at {self.record.url} refuses to abort a sample {why}"
            raise EngineError(msg)

    async def _unload(self, adapter: str | None) -> None:
        """Unload an adapter whose last request has ended; see `Server.unload_adapter`."""
        timeout = httpx.Timeout(UNLOAD_SECONDS, connect=CONNECT_SECONDS)
        try:
            await self._client.post("/unload_lora_adapter", json={"lora_name": adapter}, timeout=timeout)
        except httpx.ReadTimeout:
            return
        except httpx.TransportError as error:
            msg = f"the server at {self.record.url} broke a connection: {error or type(error).__name__}"
            raise ServerGoneError(msg) from error

    def _handle(self, chunk: dict[str, Any], running: dict[str, PartialSample], served: Served) -> bool:
        """Handle one message; return whether the server retracted the sample for lack of cache."""
        if "error" in chunk:
            msg = f"the server at {self.record.url} refuses a row: {chunk['error']}"
            raise EngineError(msg)
        meta = chunk["meta_info"]
        sample = running[meta["id"]]
        before = sample.received
        ended = sample.add_chunk(chunk, served.version, served.named)
        # Tokens after a stop string count, too: the server that generates them does not hang.
        self.tokens += max(0, sample.received - before)
        if ended:
            del running[meta["id"]]
            self._counts["prompt_tokens"] += int(meta.get("prompt_tokens") or 0)
            self._counts["cached_prompt_tokens"] += int(meta.get("cached_tokens") or 0)
        retracted = bool(meta.get("num_retractions")) and not sample.was_swapped
        self._counts["retracted_samples"] += ended and retracted
        return retracted

    @property
    def adapters(self) -> set[str]:
        """Names of the adapters that requests use now."""
        return {name for name, count in self._requests.items() if count and name is not None}

    async def close(self) -> None:
        """Close the connections; the server drops requests whose client is gone."""
        await self._client.aclose()


def _body(running: Mapping[str, PartialSample], adapter: str | None) -> dict[str, Any]:
    """Return the request for samples, by the names of their requests, with an adapter."""
    samples = list(running.values())
    has_media = any(sample.media is not None for sample in samples)
    return {
        "rid": list(running),
        "input_ids": [sample.prompt for sample in samples],
        # SGLang takes references of any kind of media here.
        "image_data": [[sample.media] for sample in samples] if has_media else None,
        "sampling_params": [sample.parameters() for sample in samples],
        "return_logprob": True,
        "return_routed_experts": samples[0].moe is not None,
        "lora_path": adapter,
        "stream": True,
    }


async def wait_for_first(tasks: Iterable[asyncio.Task[None]], seconds: float) -> set[asyncio.Task[None]]:
    """Return the tasks that are done, as soon as there is one, or after `seconds`."""
    return (await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED))[0]


async def cancel_all(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
