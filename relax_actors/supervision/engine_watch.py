"""Health of external engines: checked before they join, and watched as long as they are part of the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from relax_actors.config import Config
from relax_actors.engines.backends import inference_backend
from relax_actors.errors import ConfigError, EngineError
from relax_actors.messages.operations import OperationRequest
from relax_actors.operations.engines import normal_url, read_key
from relax_actors.operations.states import Operation

WATCH_SECONDS = 2.0
"""Seconds between two questions to an engine."""


class EngineWatch:
    """Asks external engines for their health."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due = float("-inf")
        # When each engine answered last.
        self._answered: dict[int, float] = {}

    def check(self, config: Config, request: OperationRequest, *, is_last_try: bool) -> bool:
        """Check whether an engine can join; return False if it does not answer yet.

        Raises:
            ConfigError: it is no engine for this run, or it does not answer at the last try.
        """
        if request.url in map(normal_url, config.rollout.sglang.urls):
            msg = f"{request.url} is in rollout.sglang.urls, so the run uses it already"
            raise ConfigError(msg)
        try:
            inference_backend(config).check_engine(config, request.url, read_key(config.store_path, request.key_file))
        except EngineError as error:
            if is_last_try:
                raise ConfigError(str(error)) from error
            return False
        return True

    def lost(self, config: Config, engines: Sequence[Operation]) -> Iterator[tuple[Operation, str]]:
        """Yield the engines that have not answered for `supervision.heartbeat` seconds, each with the reason."""
        now = self._clock()
        if now < self._due:
            return
        self._due = now + WATCH_SECONDS
        self._answered = {o.id: self._answered.get(o.id, now) for o in engines}
        for operation in engines:
            try:
                key = read_key(config.store_path, operation.request.key_file)
                why = inference_backend(config).engine_fault(operation.request.url, key)
            except ConfigError as error:
                why = str(error)
            if not why:
                self._answered[operation.id] = self._clock()
            elif self._clock() - self._answered[operation.id] > config.supervision.heartbeat:
                yield operation, why
