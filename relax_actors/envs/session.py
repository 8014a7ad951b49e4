"""A session in its own process: makes the environment, and answers through a socket.

Invariant: nothing that the environment does ends another session. Its exceptions become answers; a hang or a crash ends
this process alone.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from broker.codec import MAX_CELL_BYTES, decode_fields, encode, open_envelope
from relax_actors.envs.environment import Environment
from relax_actors.envs.frames import frame, open_socket, read_frame
from relax_actors.envs.loading import make_environment
from relax_actors.envs.observation import EnvironmentFaultError, answer_of, checked_state
from relax_actors.errors import CodecError
from relax_actors.messages import Act, EnvironmentAnswer, Fault, Open
from relax_actors.messages.environment import OPENED

AUTHOR = "environment"
MAX_DETAIL = 2000
READY, CLOSE, REUSABLE = b"ready", b"", b"reusable"
"""First frame of a process; frame that closes its session, and the answer if it can have another one."""
_OWN = Path(__file__).parent


@dataclass(frozen=True)
class Template:
    """What the sessions of an actor have in common.

    Attributes:
        cls: class of the environment.
        values: values of its options.
        max_observation_bytes: largest observation.
        players: names of the players.
        is_reusable: whether a process may have one session after another.
    """

    cls: type[Environment]
    values: dict[str, Any]
    max_observation_bytes: int
    players: tuple[str, ...] = ()
    is_reusable: bool = True


class Session:
    """Session of one environment."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._environment: Environment | None = None
        self._name = ""

    async def open(self, request: Open) -> EnvironmentAnswer:
        """Create the environment, then restore its state or replay its actions."""
        self._name = request.session
        self._environment = environment = make_environment(self._template.cls, self._template.values)
        rng = np.random.default_rng(request.seed)
        answer = self._answer(await _run(environment.reset, request.task, rng), OPENED)
        turn = len(request.actions) + OPENED
        if request.actions and request.state is not None:
            await _run(environment.restore, request.state)
            return EnvironmentAnswer(self._name, turn, state=request.state)
        for turn, action in enumerate(request.actions):
            answer = self._answer(await _run(environment.step, action), turn)
            if turn < len(request.digests) and answer.digest != request.digests[turn]:
                msg = f"turn {turn} of the replay gave another answer than recorded: {str(answer.messages)[:200]}"
                return EnvironmentAnswer(self._name, turn, error=Fault.REPLAY, detail=msg)
        return await self._with_state(answer)

    async def act(self, request: Act) -> EnvironmentAnswer:
        """Take a turn."""
        assert self._environment is not None  # noqa: S101 the host opens every session first
        return await self._with_state(self._answer(await _run(self._environment.step, request.action), request.turn))

    async def close(self) -> None:
        """Close the environment."""
        if self._environment is not None:
            await _run(self._environment.close)

    def _answer(self, result: Any, turn: int) -> EnvironmentAnswer:
        template = self._template
        return answer_of(result, self._name, turn, template.max_observation_bytes, template.players)

    async def _with_state(self, answer: EnvironmentAnswer) -> EnvironmentAnswer:
        environment = self._environment
        if answer.done or answer.truncated or environment is None or type(environment).state is Environment.state:
            return answer
        return replace(answer, state=checked_state(await _run(environment.state)))


async def _run(method: Callable[..., Any], *arguments: Any) -> Any:
    result = method(*arguments)
    return await result if inspect.isawaitable(result) else result


async def serve(template: Template, sock: socket.socket) -> None:
    """Answer the requests that arrive on a socket, until it is closed or an operation fails."""
    reader, writer = await open_socket(sock)
    session = Session(template)
    writer.write(frame(READY))
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            data = await read_frame(reader, MAX_CELL_BYTES)
            if data == CLOSE:
                await session.close()
                if not template.is_reusable or _has_children():
                    return
                session = Session(template)
                writer.write(frame(REUSABLE))
                continue
            envelope = open_envelope(data)
            if envelope.type == Open.__name__:
                opening = decode_fields(envelope, Open)
                answer = await guarded(session.open, opening, len(opening.actions) + OPENED)
            else:
                action = decode_fields(envelope, Act)
                answer = await guarded(session.act, action, action.turn)
            writer.write(frame(_encoded(answer)))
            await writer.drain()
            if answer.error:
                break
    with suppress(Exception):
        await session.close()
    writer.close()


def _has_children() -> bool:
    """Whether this process has child processes, which a further session must not inherit."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _encoded(answer: EnvironmentAnswer) -> bytes:
    try:
        return encode(answer, AUTHOR)
    except CodecError as error:
        fault = EnvironmentAnswer(answer.session, answer.turn, error=Fault.ENVIRONMENT, detail=f"its answer: {error}")
        return encode(fault, AUTHOR)


async def guarded(work: Callable[[Any], Any], request: Open | Act, turn: int) -> EnvironmentAnswer:
    """Run an operation; an exception of the environment becomes an answer with an error."""
    try:
        answer: EnvironmentAnswer = await work(request)
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 of the environment
        return EnvironmentAnswer(request.session, turn, error=Fault.ENVIRONMENT, detail=describe(error)[:MAX_DETAIL])
    return answer


def describe(error: BaseException) -> str:
    """Describe an environment's exception by type, text and line."""
    if isinstance(error, EnvironmentFaultError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    last = next((frame for frame in reversed(frames) if Path(frame.filename).parent != _OWN), None)
    where = f" ({last.filename}, line {last.lineno})" if last else ""
    text = f"{type(error).__name__}: {error}{where}"
    return text.encode(errors="replace").decode()
