"""Role `rollout` of runs with [environment]: samples are episodes of several turns.

While one episode waits for its environment, others generate: turns join the running batch as they become ready.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from relax_actors.config import Config
from relax_actors.data.prompt_maker import room
from relax_actors.envs.loading import load_environment
from relax_actors.errors import EpisodesFailedError, RelaxError, RowError
from relax_actors.generation.sampling import Sampling
from relax_actors.messages import Trajectory
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.roles.rollout import Rollout
from relax_actors.runtime import Drop, Row
from relax_actors.sessions.conversation import conversation_of
from relax_actors.sessions.episode_start import Limits, Start

if TYPE_CHECKING:  # `relax check` loads every role, and needs no NATS
    from relax_actors.sessions.episode_batch import EpisodeBatch
    from relax_actors.sessions.episode_group import EpisodeGroup
    from relax_actors.sessions.observation_media import ObservationMedia


class TurnRollout(Rollout):
    """Generates the episodes of rows with the environments of the role `environment`.

    An episode's turns are written to the table (`sessions/session_log.py`). An actor that takes over a row repeats the
    recorded turns without generating them, brings the environments to the same place, and continues.
    """

    spec: ClassVar[RoleSpec] = replace(Rollout.spec, turns=True)

    def setup(self) -> None:
        """Build the engine, and connect to the environments."""
        from relax_actors.envs.client import EnvironmentClient  # noqa: PLC0415 as above

        super().setup()
        config = self.context.config
        chats = self._tokenizer.has_chat_template if config.data.chat is None else config.data.chat
        self._observed: ObservationMedia | None = None
        if self._media is not None:
            from relax_actors.sessions.observation_media import ObservationMedia  # noqa: PLC0415 as above

            self._observed = ObservationMedia(self.context, self._media, self.progress)
        family = None if self._observed is None else self._observed.family
        tools = _tools(config) if chats else ()
        section = config.environment
        assert section is not None  # noqa: S101 the role is chosen by this section
        self._conversation = conversation_of(
            self._tokenizer, chat=chats, tools=tools, family=family, branches=section.on_rewrite == "branch"
        )
        self._client = EnvironmentClient(self.context)
        most = min(self._engine.context_length, room(config))
        self._limits = Limits(section.max_turns, config.rollout.max_tokens, most, section.token_budget)
        self._counts: defaultdict[str, float] = defaultdict(float)

    def has_barrier(self) -> bool:
        """Return whether a turn waits for all environments, as in a deterministic run."""
        return self.context.config.run.deterministic

    def make_work(self, sampling: Sampling) -> EpisodeBatch:
        """Return the episodes of rows."""
        from relax_actors.sessions.episode_batch import EpisodeBatch, Rules  # noqa: PLC0415 as above

        return EpisodeBatch(
            self.context,
            self._client,
            Rules(self._conversation, self._limits, self._template(sampling)),
            self._policy,
            start=self._start,
            result=self._result,
            counts=self._counts,
        )

    def _start(self, row: Row) -> Start:
        """Return the prompt of a row as an episode begins with it."""
        prompt = row.prompt
        start = Start(row.id, 0, prompt.seed, prompt.tokens, prompt.messages)
        if self._media is None or self._observed is None:
            return start
        media = self._media_of.pop(row.id)
        return replace(start, tokens=row.media.tokens, media=media, sources=prompt.media, prepare=self._observed)

    def _result(self, group: EpisodeGroup) -> Trajectory | Drop | RelaxError:
        """Return the result of a row that is over."""
        row, section = group.row, self.context.config.environment
        assert section is not None  # noqa: S101 the role is chosen by this section
        try:
            trajectory = group.result(section, self._stager.served)
        except EpisodesFailedError as error:
            return error
        except ValueError as error:
            return RowError(f"the episodes of {row.id}: {error}")
        if isinstance(trajectory, Drop):
            return trajectory
        self._generated_tokens += int((trajectory.versions >= 0).sum())
        self._report(trajectory.samples, time.monotonic() - group.started)  # type: ignore[arg-type]
        if not row.is_eval and (why := self._validator.of_trajectory(trajectory, row.id.step)):
            return RowError(f"the episodes of {row.id}: {why}")
        return trajectory

    def metrics(self) -> dict[str, float]:
        """Return also the turns generated and repeated, and the time without anything to generate."""
        return {**super().metrics(), **{name: round(count, 3) for name, count in self._counts.items()}}

    def close(self) -> None:
        """Close the sessions, the stager and the engine."""
        self._client.close()
        super().close()


def _tools(config: Config) -> list[dict[str, Any]]:
    """Return the schemas of the tools that the environment offers to the model."""
    if config.environment is None:
        return []
    cls, options = load_environment(config.environment, hosted=False)
    return cls.tool_schemas(options)
