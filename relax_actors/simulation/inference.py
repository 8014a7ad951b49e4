"""Generation as time alone: samples of drawn lengths run at the pace that their devices' load allows."""

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
    GeneratesAll,
    Generation,
    GenerationRequest,
    More,
    Refresh,
    nothing_more,
)
from relax_actors.errors import ConfigError, StoreError
from relax_actors.messages import FinishReason
from relax_actors.simulation.devices import LOAD, TICK, Devices
from relax_actors.simulation.times import Floats, draw, generator_of
from relax_actors.weights.protocol import Step


class DigestCopy:
    """Weights as bytes; see `WeightsCopy`."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.fingerprint = ""
        self.tensors: dict[str, bytes] = {}

    def take(self, way: Sequence[Step]) -> None:
        """Read the last version of a way, and verify it; see `WeightsCopy`."""
        self.version, self.fingerprint, self.tensors = None, "", {}
        last = way[-1]
        try:
            data = b"".join(shard.read_bytes() for shard in last.shards)
        except OSError as error:
            msg = f"weights {last.version} cannot be read: {error}"
            raise StoreError(msg) from error
        if (found := xxhash.xxh3_128_hexdigest(data)) != last.fingerprint:
            msg = f"weights {last.version} have fingerprint {found}, published was {last.fingerprint}; not loaded"
            raise StoreError(msg)
        self.version, self.fingerprint, self.tensors = last.version, last.fingerprint, {"digest": data}


class SimulatedInference(GeneratesAll):
    """One rollout actor's share of the rollout devices.

    Args:
        devices: the run's.
        n: the actor's number.
        context_length: tokens that prompt and completion may have together.
        rows: generated at once, at most.
    """

    def __init__(self, devices: Devices, n: int, context_length: int, rows: int = 1) -> None:
        self._devices, self._n, self._most = devices, n, rows
        self._context_length = context_length
        self._version: int | None = None
        self._staged: int | None = None
        generation = devices.simulate.generation
        if generation.row is None and generation.token_seconds is None:
            msg = "simulate.generation.token_seconds is not set, and no [simulate.calibration] to fit it"
            raise ConfigError(msg)
        # What an earlier life of this actor had running is gone.
        devices.running[n] = 0

    @property
    def version(self) -> int | None:
        """Version of the weights that are loaded."""
        return self._version

    @property
    def context_length(self) -> int:
        """Tokens that prompt and completion may have together."""
        return self._context_length

    def empty_copy(self) -> DigestCopy:
        """A copy of bytes; see the protocol."""
        return DigestCopy()

    def stage(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Take the time of `simulate.phases.load`; see the protocol."""
        del tensors
        self._devices.spend_phase(LOAD, version, lambda: None)
        self._staged = version

    def swap(self) -> int:
        """Serve what was staged; see the protocol."""
        if self._staged is None:
            msg = "no weights are staged; nothing can be swapped"
            raise StoreError(msg)
        self._version, self._staged = self._staged, None
        return self._version

    def load(self, version: int, fingerprint: str, shards: Sequence[Path]) -> None:
        """Swap to a set of weights at once; see the protocol."""
        self._version = None
        copy = self.empty_copy()
        copy.take([Step(version, fingerprint, shards)])
        self.stage(version, copy.tensors)
        self.swap()

    def close(self) -> None:
        """Nothing outlives the process."""
        self._devices.running[self._n] = 0

    def stream(
        self,
        requests: Sequence[GenerationRequest],
        progress: Callable[[], None],
        refresh: Refresh | None = None,
        more: More = nothing_more,
    ) -> Iterator[Done]:
        """Take the time that all samples need together, those of rows that come meanwhile too; see the protocol.

        To go on with newer weights takes none: what was read before is not read again.
        """
        if self._version is None:
            msg = "no verified weights are loaded; nothing can be generated"
            raise StoreError(msg)
        shared = self._devices.simulate.placement == "colocated"
        numbers = count()

        def begun(requests: Sequence[GenerationRequest], tokens: float) -> dict[int, _Row]:
            return {next(numbers): _Row(one, self._lengths(one), tokens, self._version) for one in requests}

        running = begun(requests, 0.0)
        with self._devices.generating(progress):
            try:
                tokens, now = 0.0, time.monotonic()
                while running:
                    pace = self._wait(running.values(), tokens)
                    before, now = now, time.monotonic()
                    tokens += (now - before) / pace
                    progress()
                    ended = [i for i, row in running.items() if row.last <= tokens]
                    if ended:
                        yield [(i, _samples(running.pop(i))) for i in ended]
                    if refresh is not None and refresh():
                        for row in running.values():
                            row.began.append((tokens - row.start, self._version))
                    # Whoever has a turn on shared devices gives it back when these rows are through.
                    if running and not shared:
                        running |= begun(more(self._most - len(running)), tokens)
            finally:
                self._devices.running[self._n] = 0

    def _lengths(self, request: GenerationRequest) -> Floats:
        """Tokens of each sample, by the row's seed; the row's seconds if those are what is simulated."""
        section, source = self._devices.simulate.generation, generator_of(request.seed)
        if section.row is not None:
            return draw(section.row, source)
        return draw(section.tokens, source, request.samples)

    def _wait(self, rows: Collection[_Row], tokens: float) -> float:
        """Wait until a sample ends, or for a tick; gives the seconds that a token takes meanwhile.

        Args:
            rows: that run.
            tokens: how far samples are that began at 0.
        """
        simulate, running = self._devices.simulate, self._devices.running
        section, devices = simulate.generation, simulate.devices_of("rollout")
        alone = 1.0 if section.row is not None else section.token_seconds or 0.0
        load = 0.0 if section.row is not None else section.load
        left = np.concatenate([row.start + row.lengths for row in rows]) - tokens
        left = left[left > 0]
        running[self._n] = len(left)
        pace = alone * (1 + load * int(running.sum()) / devices) * simulate.time_scale
        if len(left):
            time.sleep(min(TICK, float(left.min()) * pace + 1e-5))
        return pace


class _Row:
    """A request that runs: its samples' `lengths`, since which token, and which version wrote from where on."""

    def __init__(self, request: GenerationRequest, lengths: Floats, start: float, version: int | None) -> None:
        self.request, self.lengths, self.start = request, lengths, start
        self.last = start + float(lengths.max())
        self.began = [(0.0, version)]


def _samples(row: _Row) -> list[Generation]:
    """A token of each version that wrote the sample, 0 or 1 by the row's seed; at most the first and the last."""
    request = row.request
    choices = generator_of(request.seed + 1).integers(0, 2, request.samples)
    samples = []
    for token, length in zip(choices, np.broadcast_to(row.lengths, request.samples), strict=True):
        wrote = [version for at, version in row.began if at < length]
        versions = np.array([wrote[0], *wrote[-1:]] if len(wrote) > 1 else wrote, np.int32)
        samples.append(
            Generation(
                tokens=np.full(len(versions), token, np.int32),
                logprobs=np.full(len(versions), np.log(0.5), np.float32),
                versions=versions,
                finish_reason=FinishReason.STOP,
            )
        )
    return samples
