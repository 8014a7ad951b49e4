"""Policy that says given texts, for tests of the gateway's protocols; and a gateway that serves it over a socket."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.protocols import StopStrings
from relax_actors.messages.generate import GenerateAnswer, GenerateCall, GeneratePiece, SessionAnswer, SessionCall
from relax_actors.serving.answers import Answers, Limits
from relax_actors.serving.app import Access, Gateway
from relax_actors.serving.listening import listen
from relax_actors.serving.policy import OnPiece, Policy
from relax_actors.serving.server import HttpServer
from tests.support.chat_folder import make_chat_folder

TOKEN = "gateway-token-of-tests"  # noqa: S105
SECRET = "secret-of-tests"  # noqa: S105
HOLD = "%"
TEMPLATE = (
    "{% if fails %}{{ raise_exception('no such conversation') }}{% endif %}"
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    'Call: <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ScriptedPolicy:
    """Answers each call with the text that `says` returns for the prompt's text, token by token where it is streamed.

    "INDEX" in the text becomes the number of the answer among those of its call. An answer stops before its character
    `HOLD`, until `resume` is set.
    """

    def __init__(self, tokenizer: Tokenizer, says: Callable[[str], str]) -> None:
        self._tokenizer, self._says = tokenizer, says
        self.calls: list[GenerateCall] = []
        self.cancelled: list[str] = []
        self.delivered_calls: list[tuple[str, str]] = []
        self.resume = threading.Event()
        self.changed: Callable[[int], int] = lambda token: token
        """Applied to the tokens of the answer but not to those of its pieces, as if it were begun anew."""
        self.session_calls: list[SessionCall] = []

    async def generate(self, call: GenerateCall, on_piece: OnPiece | None = None) -> GenerateAnswer:
        self.calls.append(call)
        try:
            return await self._generate(call, on_piece)
        except asyncio.CancelledError:
            self.cancelled.append(call.call)
            raise

    async def delivered(self, session: str, call: str) -> None:
        self.delivered_calls.append((session, call))

    async def _generate(self, call: GenerateCall, on_piece: OnPiece | None) -> GenerateAnswer:
        prompt = call.tokens
        if call.messages or call.text:
            text = call.text or self._tokenizer.chat(call.messages, tools=call.tools or None)
            prompt = self._tokenizer.encode(text, special=False)
        answers = [await self._choice(call, prompt, index, on_piece) for index in range(call.n)]
        return replace(answers[0], others=[one.first for one in answers[1:]])

    async def _choice(
        self, call: GenerateCall, prompt: np.ndarray, index: int, on_piece: OnPiece | None
    ) -> GenerateAnswer:
        said = self._says(self._tokenizer.spell(prompt)).replace("INDEX", str(index))
        tokens = self._tokenizer.encode(f"{said}<|im_end|>", special=False)
        if strings := [*call.stop, *call.ends]:
            end = StopStrings(strings, self._tokenizer.token_bytes).find(tokens.tolist())
            tokens = tokens[:end]
        if call.max_tokens and len(tokens) > call.max_tokens:
            tokens, reason = tokens[: call.max_tokens], "length"
        else:
            reason = "stop"
        count = len(tokens)
        for place, token in enumerate(tokens.tolist()):
            while self._tokenizer.decode([token]) == HOLD and not self.resume.is_set():  # noqa: ASYNC110 set in another thread
                await asyncio.sleep(0.005)
            if on_piece is not None:
                assert call.stream
                piece = GeneratePiece(place, prompt, tokens[place : place + 1], np.full(1, -0.25, np.float32), index)
                on_piece(piece)
                await asyncio.sleep(0)
        tokens = np.array([self.changed(token) for token in tokens.tolist()], np.int32)
        return GenerateAnswer(
            prompt=prompt,
            tokens=tokens,
            logprobs=np.full(count, -0.25, np.float32),
            versions=np.full(count, 7, np.int32),
            finish_reason=reason,
            fingerprint="f" * 32,
        )

    async def session(self, call: SessionCall) -> SessionAnswer:
        self.session_calls.append(call)
        return SessionAnswer(session=call.session or "group-0-0-0", task={"prompt": "sort"}, seconds=60.0)


@contextmanager
def serve(
    folder: Path, says: Callable[[str], str], limits: Limits | None = None, template: str = TEMPLATE
) -> Iterator[tuple[str, ScriptedPolicy]]:
    """Serve a scripted policy; yields the server's address and the policy."""
    tokenizer = Tokenizer(make_chat_folder(folder, template, ["<|im_end|>"]))
    policy = ScriptedPolicy(tokenizer, says)
    with serve_policy(policy, tokenizer, limits) as url:
        yield url, policy


@contextmanager
def serve_policy(policy: Policy, tokenizer: Tokenizer, limits: Limits | None = None) -> Iterator[str]:
    """Serve a policy; yields the server's address."""
    limits = limits or Limits(max_body_bytes=1 << 20, max_concurrent=64, request_seconds=30.0)
    answers = Answers(policy, tokenizer, "tiny", 4096, limits)
    gateway = Gateway(answers, Access((TOKEN,), SECRET), limits)
    server = HttpServer(gateway.app(), listen("127.0.0.1", 0))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(10)
    try:
        yield server.url
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(answers.close), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()
