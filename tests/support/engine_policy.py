"""Policy of random weights that really generates, for tests of the gateway."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.protocols import GenerationRequest, StopStrings
from relax_actors.engines.torch.model import build, tensors_of
from relax_actors.engines.transformers.engine import TransformersEngine
from relax_actors.messages.generate import GenerateAnswer, GenerateCall, GeneratePiece, SessionAnswer, SessionCall
from relax_actors.serving.policy import OnPiece
from tests.support.models import QWEN3, publish


def make_engine(folder: Path, *, kept_bytes: int | None = None) -> TransformersEngine:
    """Give a tokenizer's folder a tiny model, and load it with random weights."""
    # Models have more rows than their tokenizer has tokens.
    size = Tokenizer(folder).size + 7
    fields = QWEN3 | {"vocab_size": size, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(fields))
    engine = TransformersEngine(folder, kept_bytes=kept_bytes)
    fingerprint, files = publish(tensors_of(build(folder, seed=3)), folder / "published.safetensors")
    engine.load(1, fingerprint, files)
    return engine


class EnginePolicy:
    """Generates the calls of a gateway one by one, with an engine.

    Args:
        engine: with weights.
        tokenizer: of its model.
    """

    def __init__(self, engine: TransformersEngine, tokenizer: Tokenizer) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._turn = threading.Lock()

    async def generate(self, call: GenerateCall, on_piece: OnPiece | None = None) -> GenerateAnswer:
        watch = None if on_piece is None else _Pieces(asyncio.get_running_loop(), call.tokens, on_piece)
        return await asyncio.to_thread(self._generate, call, watch)

    def _generate(self, call: GenerateCall, watch: _Pieces | None) -> GenerateAnswer:
        request = GenerationRequest(
            call.tokens,
            call.seed,
            samples=1,
            temperature=call.temperature or 1.0,
            top_p=call.top_p or 1.0,
            max_tokens=call.max_tokens or 2000,
            stop_ids=self._tokenizer.stop_ids,
            stop_strings=StopStrings(call.stop, self._tokenizer.token_bytes) if call.stop else None,
            watch=watch,
            grammar=call.grammar,
        )
        with self._turn:
            ((sample,),) = self._engine.generate([request], lambda: None)
        reason = str(sample.finish_reason)
        return GenerateAnswer(
            sample.tokens, sample.logprobs, sample.versions, reason, "f" * 32, call.call, prompt=call.tokens
        )

    async def delivered(self, session: str, call: str) -> None:
        del session, call

    async def session(self, call: SessionCall) -> SessionAnswer:
        return SessionAnswer(session=call.session)


class _Pieces:
    """Passes tokens on to an event loop; implements `Watch`."""

    is_cancelled, wants_tokens = False, True

    def __init__(self, loop: asyncio.AbstractEventLoop, prompt: NDArray[Any], on_piece: OnPiece) -> None:
        self._loop, self._prompt, self._on_piece = loop, prompt, on_piece

    def on_tokens(self, start: int, tokens: NDArray[Any], logprobs: NDArray[Any]) -> None:
        self._loop.call_soon_threadsafe(self._on_piece, GeneratePiece(start, self._prompt, tokens, logprobs))
