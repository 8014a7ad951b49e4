"""What the HTTP application asks its surroundings for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from relax_actors.messages.generate import GenerateAnswer, GenerateCall, GeneratePiece, SessionAnswer, SessionCall

OnPiece: TypeAlias = Callable[[GeneratePiece], None]


class Policy(Protocol):
    """The live policy of a run and its sessions. All methods run in the event loop's thread."""

    async def generate(self, call: GenerateCall, on_piece: OnPiece | None = None) -> GenerateAnswer:
        """Return the answer to a call, or a refusal, within `call.seconds`; may be cancelled.

        `on_piece` gets pieces of the answer while it is generated, if the call wants them.
        """

    async def delivered(self, session: str, call: str) -> None:
        """Note that the client has the answer to a call of a session."""

    async def session(self, call: SessionCall) -> SessionAnswer:
        """Take, keep, show or end a session."""
