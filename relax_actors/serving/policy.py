"""What the HTTP application asks its surroundings for."""

from __future__ import annotations

from typing import Protocol

from relax_actors.messages.generate import GenerateAnswer, GenerateCall, SessionAnswer, SessionCall


class Policy(Protocol):
    """The live policy of a run, and the sessions of its agents. All methods run in the event loop's thread."""

    async def generate(self, call: GenerateCall) -> GenerateAnswer:
        """Return the answer to a call, or why there is none, within `call.seconds`."""

    async def session(self, call: SessionCall) -> SessionAnswer:
        """Take, keep, show or end a session."""
