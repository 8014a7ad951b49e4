"""Client of the gateway's session routes, for programs that run agents. Needs httpx alone."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

TIMEOUT = 30.0
STEP_SECONDS = 900.0
"""Time for a step of the run's environment, which has deadlines of its own."""
PAUSE_SECONDS = 0.3
GIVE_UP_SECONDS = 120.0
"""Time for which a gateway that does not answer is asked again."""


@dataclass(frozen=True, slots=True)
class AgentTask:
    """What an agent is to do, and where it finds the policy.

    Attributes:
        session: id of its session.
        base_url: for OpenAI's SDK.
        anthropic_base_url: for Anthropic's SDK.
        api_key: token of the session, for both.
        task: `prompt` (text), `messages`, `metadata`, whether the row is `held_out`, and `answer` with
            agent.shows_answer.
        seconds: time until the session ends by itself.
    """

    session: str
    base_url: str
    anthropic_base_url: str
    api_key: str
    task: dict[str, Any]
    seconds: float


@dataclass(frozen=True, slots=True)
class AgentResult:
    """Result of an agent; `metrics` become metrics of the sample, `rewards` name players."""

    reward: float | None = None
    metrics: dict[str, float] | None = None
    rewards: dict[str, float] | None = None


class SessionGoneError(Exception):
    """The session is over, or another agent has its sample."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the run's environment answered.

    Attributes:
        messages: observation as chat messages, which the policy reads as they are.
        reward: reward of the action; None if there is none.
        done: whether the episode has ended.
        truncated: whether it ended without a result.
        metrics: measurements.
    """

    messages: list[dict[str, Any]]
    reward: float | None
    done: bool
    truncated: bool
    metrics: dict[str, float]

    @property
    def is_over(self) -> bool:
        """Whether no further action may follow."""
        return self.done or self.truncated


class EnvironmentFailedError(Exception):
    """The run's environment raised, hung or died in the session of an agent."""


class TaskEnvironment:
    """The run's [environment] in the session of an agent; its rewards are the sample's."""

    def __init__(self, task: AgentTask) -> None:
        self._task, self._turn = task, -1
        self._client = SessionClient(task.anthropic_base_url.rpartition("/sessions/")[0], task.api_key)

    async def reset(self) -> Seen:
        """Begin an episode; an agent has one in a session."""
        self._turn = -1
        return await self._step("")

    async def step(self, action: str) -> Seen:
        """Pass a text to the environment.

        Raises:
            SessionGoneError: the session is over.
            EnvironmentFailedError: the environment failed.
        """
        return await self._step(action)

    async def _step(self, action: str) -> Seen:
        seen = await self._client.step(self._task, self._turn, action)
        self._turn += 1
        return seen

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()


class SessionClient:
    """Takes samples, keeps and ends them. A gateway that is restarted is asked again."""

    def __init__(self, url: str, token: str) -> None:
        self._url, self._token = url.rstrip("/"), token
        import httpx  # noqa: PLC0415 `relax check` loads every role, and httpx imports a console

        self._lost = httpx.TransportError
        self._http = httpx.AsyncClient(timeout=TIMEOUT, trust_env=False)

    async def take(self, lease: float) -> AgentTask | None:
        """Take a sample, or None; after `lease` seconds without a sign of life it is taken again."""
        answer = await self._post("/sessions", self._token, {"lease_seconds": lease})
        if answer is None:
            return None
        url = f"{self._url}/sessions/{answer['id']}"
        return AgentTask(answer["id"], f"{url}/v1", url, answer["token"], answer["task"], answer["seconds"])

    async def keep(self, task: AgentTask) -> None:
        """Renew the lease of a session; raises SessionGoneError if it is over."""
        await self._post(f"/sessions/{task.session}/keep", task.api_key, {})

    async def step(self, task: AgentTask, turn: int, action: str) -> Seen:
        """Reset the run's environment with turn -1, or pass action `turn`; idempotent.

        Raises:
            SessionGoneError: the session is over.
            EnvironmentFailedError: the environment failed.
        """
        body = {"turn": turn, "action": action}
        answer = await self._post(f"/sessions/{task.session}/environment", task.api_key, body, STEP_SECONDS)
        assert answer is not None  # noqa: S101 a body
        return Seen(**{name: answer[name] for name in ("messages", "reward", "done", "truncated", "metrics")})

    async def end(self, task: AgentTask, result: AgentResult, error: str = "") -> None:
        """End a session with the result of its agent, or with its error; idempotent.

        Raises:
            SessionGoneError: it is over.
            ValueError: the run has no such players, or takes rewards of players alone.
        """
        numbers = {"reward": result.reward, "rewards": result.rewards or {}, "metrics": result.metrics or {}}
        body = {**numbers, "error": error[:4000]}
        await self._post(f"/sessions/{task.session}/end", task.api_key, body)

    async def _post(
        self, path: str, token: str, body: dict[str, Any], seconds: float = TIMEOUT
    ) -> dict[str, Any] | None:
        end = time.monotonic() + GIVE_UP_SECONDS + seconds
        while True:
            try:
                answer = await self._http.post(
                    f"{self._url}{path}", json=body, headers={"Authorization": f"Bearer {token}"}, timeout=seconds
                )
                if answer.status_code < 500 and answer.status_code != 429:  # noqa: PLR2004
                    break
            except self._lost:
                if time.monotonic() > end:
                    raise
            else:
                if time.monotonic() > end:
                    break
            await asyncio.sleep(PAUSE_SECONDS)
        if answer.status_code in (403, 404, 410, 503):
            raise SessionGoneError(answer.text[:500])
        if answer.status_code == 422:  # noqa: PLR2004
            raise EnvironmentFailedError(answer.text[:500])
        if answer.status_code == 400:  # noqa: PLR2004 bad request
            raise ValueError(answer.text[:500])
        answer.raise_for_status()
        return dict(answer.json()) if answer.content else None

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()
