"""A frozen reward model that scores answers in an SGLang server of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from relax_actors.data.model_folder import stored_shapes
from relax_actors.data.score_folder import HEAD
from relax_actors.engines.protocols.samples import TrainSample
from relax_actors.engines.protocols.server import ServerSpec
from relax_actors.engines.sglang.frozen_server import FrozenServer
from relax_actors.engines.sglang.reward_check import SCORE_CLASSES
from relax_actors.engines.sglang.server import Server, ServerGoneError
from relax_actors.engines.sglang.weight_loaders import FileLoader, ModelFolder, StagedWeights, WeightLoader
from relax_actors.errors import ActorError, EngineError
from relax_actors.runtime import Context
from relax_actors.weights import files as weights

T = TypeVar("T")
BIAS = HEAD.replace("weight", "bias")
TOGETHER, MAX_LOSSES, POLL_SECONDS = 32, 5, 0.1


class SglangRewardModel:
    """Scores answers as `TorchRewardModel` does.

    Args:
        context: of the actor.
        spec: how servers are started.
        path: folder of the reward model.
        device: torch device, or "auto".

    Raises:
        ActorError: no server is ready in time.
    """

    def __init__(self, context: Context, spec: ServerSpec, path: Path, device: str) -> None:
        self._context = context
        # Batches of a deterministic run must not depend on when requests arrive.
        self._seconds = context.config.roles[context.role].deadline
        self._together = 1 if context.config.run.deterministic else TOGETHER
        self._own = FrozenServer(context, spec, path, device, scores=True)
        name, shapes = json.loads((path / "config.json").read_text())["architectures"][0], stored_shapes(path)
        self._loader: WeightLoader
        if SCORE_CLASSES[name] and BIAS not in shapes:  # the server's own would be random
            tensors = dict(weights.load(sorted(path.glob("*.safetensors"))))
            tensors[BIAS] = torch.zeros(shapes[HEAD][0])
            self._weights = StagedWeights(0, weights.fingerprint(tensors))
            self._loader = FileLoader(self._own.scratch / "weights")
            self._loader.stage(self._weights, tensors)
        else:
            self._loader = folder = ModelFolder(path.absolute())
            self._weights = folder.weights()
        self._server: Server | None = None
        self._ready()

    def score(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> list[NDArray[Any]]:
        """Compute the score of each answer at its last token, `[1, classes] float32`.

        Raises:
            EngineError: the server was lost several times in a row, or refuses an answer.
        """
        found: list[NDArray[Any]] = []
        for part in self._parts(samples):
            scores = self._classified([sample.token_ids.tolist() for sample in part])
            found += [np.array([own], np.float32) for own in scores]
            progress()
        return found

    def _parts(self, samples: Sequence[TrainSample]) -> Iterator[list[TrainSample]]:
        """Yield the answers of each request, by their number and their tokens."""
        most, part = self._context.config.trainer.max_tokens_per_microbatch, list[TrainSample]()
        for sample in samples:
            if part and (len(part) == self._together or sum(map(len, [*part, sample])) > most):
                yield part
                part = []
            part.append(sample)
        if part:
            yield part

    def _classified(self, sequences: list[list[int]]) -> list[list[float]]:
        for _ in range(MAX_LOSSES):
            server = self._ready()
            try:
                if self._together == 1:
                    server.is_idle()  # empties the cache, whose prefixes an earlier incarnation may have left
                return self._waited(partial(server.classify, sequences, self._seconds))
            except ServerGoneError:
                self._lose(server)
        msg = f"the server of the reward model was lost {MAX_LOSSES} times in a row with the same answers; see its log"
        raise EngineError(msg)

    def _ready(self) -> Server:
        """Return the server with the weights; start one if there is none."""
        context, end = self._context, time.monotonic() + self._context.config.supervision.longest_start
        while self._server is None:
            if time.monotonic() > end or context.stopping():
                msg = f"the server of the reward model is not ready in time; see logs/server.{context.role}.*.log"
                raise ActorError(msg)
            if (record := self._own.find()) is None:
                context.progress()
                time.sleep(POLL_SECONDS)
                continue
            server = Server(record)
            try:
                self._waited(partial(self._loader.load, server, self._weights))
                self._server = server
            except ServerGoneError:
                self._lose(server)
        return self._server

    def _waited(self, call: Callable[[], T]) -> T:
        """Return what a call returns in another thread, and report progress meanwhile."""
        with ThreadPoolExecutor(1, thread_name_prefix="scoring") as thread:
            pending = thread.submit(call)
            while not wait([pending], POLL_SECONDS).done:
                self._context.progress()
        return pending.result()

    def _lose(self, server: Server) -> None:
        """Kill a server that does not answer; the next one is started when it is needed."""
        self._server = None
        server.record.kill()
        server.close()

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.close()
        self._own.close()
