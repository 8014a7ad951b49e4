"""Base class of environments: what a model acts in, turn by turn.

    class GuessNumber(Environment):
        limit: int = 15  # option `limit` of [environment.options]

        def reset(self, task, rng):
            self.secret = rng.integers(self.limit + 1)
            return "?"

        def step(self, action):
            guess = int(action) if action.isdigit() else -1
            if guess == self.secret:
                return Step(done=True, reward=1.0)
            return Step("<" if self.secret < guess else ">")

Invariant: what an environment answers must follow from the task, the random generator and the actions alone. After a
crash the same actions are taken again, and the answers are compared with the recorded ones.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import numpy as np

from relax_actors.registry.options import build

Observation: TypeAlias = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""What the model sees: a text, a chat message, a list of chat messages, or the parts of one message's content."""


@dataclass(frozen=True)
class Step:
    """Answer of an environment to an action.

    Attributes:
        observation: what the model sees next; ignored if the episode has ended.
        reward: reward of the turn; None if there is none. The reward of an episode is the sum of its turns' rewards. In
            an episode with players it is that of the player that has acted; a dict rewards players by name.
        done: whether the episode has ended.
        metrics: finite numbers to record with the sample.
        truncated: whether the episode has ended by a limit of the environment, without a result.
        player: player that reads the observation and acts next, one of `environment.players`; empty for the same one.
    """

    observation: Observation = ""
    reward: float | Mapping[str, float] | None = None
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    truncated: bool = False
    player: str = ""


Result: TypeAlias = Step | Observation
"""What `reset` and `step` return: an observation alone means `Step(observation)`."""


class Environment:
    """One episode of a model with its surroundings.

    Each episode has an instance and, while it is open, a process of its own, in which the methods run one at a time.
    They may be coroutines. Annotated class attributes of a subclass are its options, set from [environment.options]
    before `reset` and checked by pydantic. Attributes whose names begin with an underscore, and `ClassVar`s, are no
    options.

    An exception of any method ends the sample with reason `error`; it does not end the row or the rollout.

    Attributes:
        shares_process: whether the process of an episode that was closed in order may host the next one. Set it to
            False if episodes change more than their instance, e.g. the attributes of modules.
    """

    shares_process: ClassVar[bool] = True

    def reset(self, task: Mapping[str, Any], rng: np.random.Generator) -> Result | Awaitable[Result]:
        """Begin the episode of a task and return the first observation, which may be empty.

        All random choices come from `rng`, which depends on the row and the sample alone. The task has `prompt` (text),
        `answer` (text) and `metadata`.
        """
        raise NotImplementedError

    def step(self, action: str) -> Result | Awaitable[Result]:
        """Answer an action: the text that the model wrote in a turn."""
        raise NotImplementedError

    def close(self) -> Awaitable[None] | None:
        """Release resources at the end of the episode. Not called after a kill or a timeout."""

    def state(self) -> bytes | Awaitable[bytes | None] | None:
        """Return the state for `restore`; None to replay the actions instead.

        Called after every turn; at most 1 MiB.
        """
        return None

    def restore(self, state: bytes) -> Awaitable[None] | None:
        """Continue from a state, in place of the replay; called after `reset`."""
        raise NotImplementedError

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Check before the run that the environment works here with its options.

        Raises:
            ConfigError: it cannot, e.g. because a package or a program is missing.
        """

    @classmethod
    def clean_up(cls, options: Mapping[str, Any]) -> None:
        """Remove what killed sessions have left outside of their processes, e.g. containers.

        Called in the process that starts an actor's sessions, before the first and after the last one.
        """

    @classmethod
    def tool_schemas(cls, options: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return JSON schemas of functions for the model's chat template; none by default."""
        del options
        return []

    @classmethod
    def build(cls, given: dict[str, Any], where: str = "environment.options") -> Environment:
        """Create an instance with options; raises ConfigError for bad ones."""
        return build(cls, Environment, given, where, "reset")
