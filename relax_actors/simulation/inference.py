"""Simulated inference engine: samples of random length on devices of limited speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from relax_actors.engines.protocols.inference import (
    Done,
    GenerateMixin,
    Generation,
    GenerationRequest,
    MoreRequests,
    Refresh,
    no_more_requests,
)
from relax_actors.errors import ConfigError, StoreError
from relax_actors.messages import FinishReason
from relax_actors.simulation.devices import LOAD, TICK_SECONDS, Devices
from relax_actors.simulation.durations import Floats, draw, random_generator
from relax_actors.weights.protocols import WeightUpdate


class DigestCopy:
    """Weights of a simulated trainer, as bytes; implements `WeightCopy`."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.fingerprint = ""
        self.tensors: dict[str, bytes] = {}

    def apply(self, updates: Sequence[WeightUpdate]) -> None:
        """Read and verify the last of `updates`; see `WeightCopy`."""
        self.version, self.fingerprint, self.tensors = None, "", {}
        last = updates[-1]
        try:
            data = b"".join(shard.read_bytes() for shard in last.shards)
        except OSError as error:
            msg = f"weights {last.version} cannot be read: {error}"
            raise StoreError(msg) from error
        if (fingerprint := xxhash.xxh3_128_hexdigest(data)) != last.fingerprint:
            msg = f"weights {last.version} have fingerprint {fingerprint}, published was {last.fingerprint}; not loaded"
            raise StoreError(msg)
        self.version, self.fingerprint, self.tensors = last.version, last.fingerprint, {"digest": data}


class SimulatedInference(GenerateMixin):
    """Takes the time of one rollout actor's generation; implements `InferenceEngine`.

    The lengths of samples are drawn: stop tokens and stop strings have no effect.

    Args:
        devices: of the run.
        n: number of the actor.
        context_length: largest number of tokens of prompt and completion together.
        rows: largest number of rows generated at once.
    """

    def __init__(self, devices: Devices, n: int, context_length: int, rows: int = 1) -> None:
        self._devices, self._n, self._max_rows = devices, n, rows
        self._context_length = context_length
        self._version: int | None = None
        self._staged: int | None = None
        generation = devices.simulate.generation
        if generation.row is None and generation.token_seconds is None:
            msg = "simulate.generation.token_seconds is not set; set it, or add [simulate.calibration]"
            raise ConfigError(msg)
        # Samples of an earlier incarnation no longer run.
        devices.running[n] = 0

    @property
    def version(self) -> int | None:
        """Version of the weights in use; None before the first."""
        return self._version

    @property
    def context_length(self) -> int:
        """Largest number of tokens of prompt and completion together."""
        return self._context_length

    def empty_copy(self) -> DigestCopy:
        """Return an empty copy; see `WeightConsumer`."""
        return DigestCopy()

    def stage(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Take the time of `simulate.phases.load`; see `WeightConsumer`."""
        del tensors
        self._devices.elapse_phase(LOAD, version, lambda: None)
        self._staged = version

    def swap(self) -> int:
        """Switch to the staged version; see `WeightConsumer`."""
        if self._staged is None:
            msg = "no weights are staged; nothing can be swapped"
            raise StoreError(msg)
        self._version, self._staged = self._staged, None
        return self._version

    def load(self, version: int, fingerprint: str, shards: Sequence[Path]) -> None:
        """Verify, stage and swap to weights; see `WeightConsumer`."""
        self._version = None
        copy = self.empty_copy()
        copy.apply([WeightUpdate(version, fingerprint, shards)])
        self.stage(version, copy.tensors)
        self.swap()

    def close(self) -> None:
        """Remove this actor's samples from the load of the devices."""
        self._devices.running[self._n] = 0

    def stream(
        self,
        requests: Sequence[GenerationRequest],
        progress: Callable[[], None],
        refresh: Refresh | None = None,
        more: MoreRequests = no_more_requests,
    ) -> Iterator[Done]:
        """Take the time of all samples, including those of rows that join; see `InferenceEngine`.

        In-flight updates take no time: the cost of a new prefill is not simulated.
        """
        if self._version is None:
            msg = "no verified weights are loaded; nothing can be generated"
            raise StoreError(msg)
        colocated = self._devices.simulate.placement == "colocated"
        numbers = count()

        def start(requests: Sequence[GenerationRequest], tokens: float) -> dict[int, _Row]:
            return {next(numbers): _Row(one, self._lengths(one), tokens, self._version) for one in requests}

        running = start(requests, 0.0)
        with self._devices.generating(progress):
            try:
                tokens, now = 0.0, time.monotonic()
                while running:
                    token_seconds = self._wait(running.values(), tokens)
                    before, now = now, time.monotonic()
                    tokens += (now - before) / token_seconds
                    progress()
                    for row in running.values():
                        row.end_if_cancelled(tokens)
                    ended = [i for i, row in running.items() if row.last <= tokens]
                    yield [(i, _samples(running.pop(i))) for i in ended]
                    if refresh is not None and refresh():
                        for row in running.values():
                            row.versions.append((tokens - row.start, self._version))
                    # Rows that join would keep the trainer from its turn on colocated devices.
                    if running and not colocated:
                        running |= start(more(self._max_rows - len(running)), tokens)
            finally:
                self._devices.running[self._n] = 0

    def _lengths(self, request: GenerationRequest) -> Floats:
        """Draw the tokens of each sample, `[samples]`, or the seconds of the row, `[1]`."""
        section, generator = self._devices.simulate.generation, random_generator(request.seed)
        if section.row is not None:
            return draw(section.row, generator)
        return draw(section.tokens, generator, request.samples)

    def _wait(self, rows: Collection[_Row], tokens: float) -> float:
        """Wait until a sample ends, at most one tick; return the real seconds per token."""
        simulate, running = self._devices.simulate, self._devices.running
        section, devices = simulate.generation, simulate.devices_of("rollout")
        alone = 1.0 if section.row is not None else section.token_seconds or 0.0
        load = 0.0 if section.row is not None else section.load
        remaining = np.concatenate([row.start + row.lengths for row in rows]) - tokens
        remaining = remaining[remaining > 0]
        running[self._n] = len(remaining)
        token_seconds = alone * (1 + load * int(running.sum()) / devices) * simulate.time_scale
        if len(remaining):
            time.sleep(min(TICK_SECONDS, float(remaining.min()) * token_seconds + 1e-5))
        return token_seconds


class _Row:
    """A running request.

    `lengths` of its samples; its `start` and its `last` token, counted in tokens of the stream; and `versions`: the
    token from which each weight version generated.
    """

    def __init__(self, request: GenerationRequest, lengths: Floats, start: float, version: int | None) -> None:
        self.request, self.lengths, self.start = request, lengths, start
        self.last = start + float(lengths.max())
        self.versions = [(0.0, version)]

    def end_if_cancelled(self, tokens: float) -> None:
        """End the row at this token of the stream if nobody waits for it."""
        if self.request.watch is not None and self.request.watch.is_cancelled:
            self.last = min(self.last, tokens)


def _samples(row: _Row) -> list[Generation]:
    """Return samples with one token per weight version: the first, and the last if another.

    The token is 0 or 1, drawn from the row's seed.
    """
    request = row.request
    choices = random_generator(request.seed + 1).integers(0, 2, request.samples)
    samples = []
    for token, length in zip(choices, np.broadcast_to(row.lengths, request.samples), strict=True):
        used = [version for start, version in row.versions if start < length] or [row.versions[0][1]]
        versions = np.array([used[0], *used[-1:]] if len(used) > 1 else used, np.int32)
        samples.append(
            Generation(
                tokens=np.full(len(versions), token, np.int32),
                logprobs=np.full(len(versions), np.log(0.5), np.float32),
                versions=versions,
                finish_reason=FinishReason.STOP,
            )
        )
    return samples
