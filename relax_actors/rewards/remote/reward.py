"""Reward `remote`: a service scores the samples of a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relax_actors.config.sections import Positive, PositiveFloat
from relax_actors.messages import Prompt
from relax_actors.rewards.remote.endpoint import Endpoint
from relax_actors.rewards.score import Score


class Remote:
    """Reward that a service gives over HTTP, for all samples of a row in one call.

    It gets JSON `{"completions": [...], "prompt": ..., "answer": ..., "metadata": {...}}` by POST, and answers
    `{"rewards": [...]}` with a number, or `{"reward": ..., "components": {...}, "tokens": [...]}`, for each completion.

    A service that does not answer gives no reward: the call is tried again until its deadline, then the actor ends with
    the reason, and its rows wait for the next one. After five failed tries in a row, one call at a time tries the
    service until it answers again. A row whose answers cannot be used is tried again, and quarantined after
    `supervision.max_failures`.

    Args:
        url: address of the service.
        key_variable: environment variable with a key, sent as bearer token; list it in `reward.secrets`.
        seconds: for a call with all its tries.
        concurrent: calls at once.
    """

    deadline = None
    may_hang = True
    not_in_sandbox = "a sandbox has no network"

    def __init__(
        self, *, url: str, key_variable: str = "", seconds: PositiveFloat = 60.0, concurrent: Positive = 16
    ) -> None:
        self._endpoint = Endpoint(url, "reward.options.remote.url", key_variable, seconds, concurrent)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._endpoint.aclose()

    async def __call__(self, completions: list[str], prompt: Prompt) -> list[float | Score]:
        """Return the rewards of the samples of a row.

        Raises:
            ConfigError: wrong address or key.
            RowError: the service refuses the row.
            ActorError: it gave no answer in time.
            EndpointError: none of its answers could be used.
        """
        body = {
            "completions": completions,
            "prompt": prompt.text,
            "answer": prompt.answer,
            "metadata": prompt.metadata,
        }
        return await self._endpoint.post(body, lambda answer: _scores(answer, len(completions)))


def _scores(answer: Any, expected: int) -> list[float | Score]:
    """Return the rewards in an answer; raises ValueError if it has none for some sample."""
    rewards = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(rewards, list) or len(rewards) != expected:
        msg = f"the answer is {answer!r:.200}, not {{'rewards': [...]}} with {expected} rewards"
        raise ValueError(msg)
    return [_score(reward) for reward in rewards]


def _score(reward: Any) -> float | Score:
    if isinstance(reward, Mapping) and reward.keys() <= {"reward", "components", "tokens"}:
        number, components = reward.get("reward"), reward.get("components", {})
        if isinstance(components, Mapping) and (_is_number(number) or (number is None and components)):
            return Score(number, components, reward.get("tokens"))
    if _is_number(reward):
        return float(reward)
    msg = f"a reward is {reward!r:.200}, not a number or an object with reward, components or tokens"
    raise ValueError(msg)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
