"""Routes by which an agent takes a sample to work on, keeps it, and ends it with its result."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from relax_actors.config.players import MAX_PLAYERS
from relax_actors.messages.generate import Refusal, SessionAnswer, SessionCall
from relax_actors.serving.answers import Limits
from relax_actors.serving.ask import Lenient, validated
from relax_actors.serving.errors import refused
from relax_actors.serving.policy import Policy
from relax_actors.serving.requests import read_object
from relax_actors.serving.tokens import session_token
from relax_actors.sessions.agent_environment import client_message

Number = Annotated[float, Field(ge=-1e30, le=1e30)]
"""Number that is finite in float32."""


class TakeBody(Lenient):
    """Body of `POST /sessions`."""

    lease_seconds: float | None = Field(None, gt=0)


class EndBody(Lenient):
    """Body of `POST /sessions/<id>/end`."""

    reward: Number | None = None
    rewards: dict[str, Number] = Field(default_factory=dict, max_length=MAX_PLAYERS)
    error: str = Field("", max_length=4096)
    metrics: dict[Annotated[str, Field(max_length=128)], Number] = Field(default_factory=dict, max_length=64)


class StepBody(Lenient):
    """Body of `POST /sessions/<id>/environment`: without an action, or with turn -1, a reset."""

    turn: int = Field(-1, ge=-1, lt=1 << 31)
    action: str = ""


class SessionRoutes:
    """The routes."""

    def __init__(self, policy: Policy, secret: str, limits: Limits) -> None:
        self._policy, self._secret, self._limits = policy, secret, limits

    async def take(self, request: Request, _: str) -> Response:
        """Give out a sample that no agent works on; status 204 if there is none now."""
        body = validated(TakeBody, await read_object(request, self._limits.max_body_bytes))
        lease = min(body.lease_seconds or self._limits.max_lease_seconds, self._limits.max_lease_seconds)
        answer = await self._policy.session(SessionCall("take", lease=lease))
        if not answer.refusal and not answer.session:
            return Response(status_code=204)
        return JSONResponse(self._state(request, answer))

    async def keep(self, request: Request, session: str) -> Response:
        """Keep a session whose agent does something else than ask the policy."""
        await read_object(request, self._limits.max_body_bytes)
        return JSONResponse(self._state(request, await self._policy.session(SessionCall("keep", session))))

    async def show(self, request: Request, session: str) -> Response:
        """Show a session, its task included."""
        return JSONResponse(self._state(request, await self._policy.session(SessionCall("show", session))))

    async def environment(self, request: Request, session: str) -> Response:
        """Reset or step the run's environment for a session; a repeated turn has the same answer."""
        body = validated(StepBody, await read_object(request, self._limits.max_body_bytes))
        answer = await self._policy.session(SessionCall("environment", session, turn=body.turn, action=body.action))
        if answer.refusal or answer.seen is None:
            raise refused(answer.refusal or Refusal.FAILED, answer.detail)
        seen = answer.seen
        return JSONResponse(
            {
                "turn": body.turn,
                "messages": [client_message(message) for message in seen.messages],
                "reward": seen.reward,
                "done": seen.done,
                "truncated": seen.truncated,
                "metrics": seen.metrics,
            }
        )

    async def end(self, request: Request, session: str) -> Response:
        """End a session with the agent's result.

        Repeating it changes nothing: it gets the same answer, or status 410 when the whole row has ended.
        """
        body = validated(EndBody, await read_object(request, self._limits.max_body_bytes))
        call = SessionCall(
            "end", session, reward=body.reward, rewards=body.rewards, error=body.error, metrics=body.metrics
        )
        return JSONResponse(self._state(request, await self._policy.session(call)))

    def _state(self, request: Request, answer: SessionAnswer) -> dict[str, Any]:
        if answer.refusal:
            raise refused(answer.refusal, answer.detail)
        base = f"{request.url.scheme}://{request.url.netloc}/sessions/{answer.session}"
        return {
            "id": answer.session,
            "token": session_token(self._secret, answer.session),
            "base_url": f"{base}/v1",
            "task": answer.task,
            "seconds": answer.seconds,
            "turns": answer.turns,
        }
