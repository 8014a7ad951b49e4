"""Role `rollout` of runs with [environment]: samples are episodes of several turns.

While one episode waits for its environment, others generate: turns join the running batch as they become ready.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from relax_actors.config import Config
from relax_actors.data.prompt_maker import room
from relax_actors.engines.protocols import GenerationRequest
from relax_actors.engines.protocols.guests import InFlight
from relax_actors.engines.protocols.inference import no_more_requests
from relax_actors.envs.loading import load_environment
from relax_actors.errors import RelaxError, RowError
from relax_actors.messages import Trajectory
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.roles.rollout import BatchKey, Pending, Rollout
from relax_actors.runtime import More, Results, Row
from relax_actors.training.conversation import conversation_of
from relax_actors.training.episode_input import Limits
from relax_actors.training.token_ledger import TokenLedger

if TYPE_CHECKING:  # `relax check` loads every role, and needs no NATS
    from relax_actors.training.episode_batch import EpisodeBatch
    from relax_actors.training.episode_group import EpisodeGroup, SeenPrompt
    from relax_actors.training.observation_media import ObservationMedia

WAIT_SECONDS = 0.05
"""Longest wait for an environment's answer before rows and guests are looked for again."""
CACHE_SHARE = 0.9
"""Share of an engine's key-value cache that conversations and requests of the gateway may fill together.

The rest is for what a server rounds up to whole pages.
"""


class TurnRollout(Rollout):
    """Generates the episodes of rows with the environments of the role `environment`.

    An episode's turns are written to the table (`training/turn_log.py`). An actor that takes over a row repeats the
    recorded turns without generating them, brings the environments to the same place, and continues.
    """

    spec: ClassVar[RoleSpec] = replace(Rollout.spec, turns=True)
    has_barrier: ClassVar[bool] = False
    """Whether a turn waits for the environments of all episodes, as it does in a deterministic run."""

    def setup(self) -> None:
        """Build the engine, and connect to the environments."""
        from relax_actors.envs.client import EnvironmentClient  # noqa: PLC0415 as above

        super().setup()
        config = self.context.config
        chats = self._tokenizer.has_chat_template if config.data.chat is None else config.data.chat
        self._observed: ObservationMedia | None = None
        if self._media is not None:
            from relax_actors.training.observation_media import ObservationMedia  # noqa: PLC0415 as above

            self._observed = ObservationMedia(config, self.context.table.store, self.progress)
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
        self._barrier = self.has_barrier or config.run.deterministic
        self._batch: EpisodeBatch | None = None
        self._counts: Counter[str] = Counter()
        self._waited_seconds = 0.0
        # Rows that cannot be generated, with their errors.
        self._bad: list[tuple[Row, RelaxError]] = []

    def _generate(self, key: BatchKey, pending: Pending, more: More) -> Iterator[Results]:
        """Generate the episodes of the pending rows of a batch key, and of matching rows that arrive later."""
        from relax_actors.training.episode_batch import EpisodeBatch  # noqa: PLC0415 as above

        first, (version, greedy) = pending.pop(key), key
        if gone := self._use_weights(version, first):
            yield gone
            return
        config, bad = self.context.config, self._bad
        samples = 1 if greedy else config.rollout.group_size
        # Batches of a deterministic run do not depend on what an actor has generated before.
        room = (None, None) if self._barrier else (config.rollout.max_running_tokens, self._cache_tokens())
        running, refresh = InFlight(), self._refresh_of(version)
        ledger, pace = TokenLedger(*room, lambda: running.guest_tokens), self._guests.pace()
        batch = self._batch = EpisodeBatch(
            self.context, self._client, self._conversation, self._limits, ledger, barrier=self._barrier
        )
        batch.counts = self._counts
        bad += batch.add(first, samples, self._see)
        template = self._request(first[0], greedy=greedy)

        def invites() -> bool:
            """Whether guests may join: as long as they keep no row and no weights from their turn."""
            return bool(batch.groups) and not self._drains(key, pending)

        def ready() -> list[GenerationRequest]:
            batch.take_answers(0.0)
            free = self.row_limit() - len(batch.groups)
            bad.extend(batch.add(self._joining(key, pending, lambda: more(free), bad), samples, self._see))
            ledger.withdraw_guest()
            guests = self._guests.invite(running, ledger.begin_guest) if invites() else []
            return guests + running.add(batch.requests(template))

        def join(limit: int) -> list[GenerationRequest]:
            del limit
            guests = self._guests.invitable(running, ledger.guest_fits) if invites() else 0
            if pace.step(batch.ready + guests, len(running)):
                return ready()
            batch.take_answers(0.0)
            return []

        more_turns = no_more_requests if self._barrier else join
        try:
            yield self._finished(batch)
            while batch.groups:
                if refresh is not None:
                    refresh()
                if requests := ready():
                    yield from self._turns(requests, running, refresh, more_turns)
                else:
                    self._wait(batch)
                yield self._finished(batch)
        finally:
            running.dismiss()
            batch.close()
            self._batch = None

    def _see(self, row: Row) -> SeenPrompt | None:
        """Return the prompt of a row with its media; None for a model that reads text only."""
        if self._media is None or self._observed is None:
            return None
        from relax_actors.training.episode_group import SeenPrompt  # noqa: PLC0415 as above
        from relax_actors.training.episode_media import EpisodeMedia  # noqa: PLC0415

        prepare = EpisodeMedia(self.context.config, self._observed, self._media, row.id)
        return SeenPrompt(row.media.tokens, self._media_of.pop(row.id), prepare)

    def _turns(
        self, requests: Sequence[GenerationRequest], running: InFlight, refresh: Any, more_turns: Any
    ) -> Iterator[Results]:
        """Generate turns until none is running and none is ready."""
        batch = self._batch
        assert batch is not None  # noqa: S101 set by the caller
        cpu_start = time.thread_time()
        for done in self._engine.stream(requests, self.progress, refresh, more_turns):
            self._model_seconds += time.thread_time() - cpu_start
            if done:
                batch.generated([(live, samples[0]) for live, samples in running.take(done)])
                if not self._barrier:
                    batch.write_turns()
            yield self._finished(batch)
            cpu_start = time.thread_time()
        batch.write_turns()
        running.dismiss()

    def _cache_tokens(self) -> int | None:
        """Return the tokens of the engine's key-value cache that conversations and guests may fill together."""
        tokens = self._engine.cache_tokens
        return None if tokens is None else int(CACHE_SHARE * tokens)

    def _wait(self, batch: EpisodeBatch) -> None:
        start = time.monotonic()
        batch.take_answers(WAIT_SECONDS)
        self._waited_seconds += time.monotonic() - start
        self.progress()

    def _finished(self, batch: EpisodeBatch) -> list[tuple[Row, Any]]:
        found: list[tuple[Row, Any]] = list(self._bad)
        self._bad.clear()
        for group, result in batch.finished(self._stager.served):
            checked = self._checked(group, result) if isinstance(result, Trajectory) else result
            found.append((group.row, checked))
        return found

    def _checked(self, group: EpisodeGroup, trajectory: Trajectory) -> Trajectory | RelaxError:
        row = group.row
        self._generated_tokens += int((trajectory.versions >= 0).sum())
        self._report(trajectory.samples, time.monotonic() - group.started)  # type: ignore[arg-type]
        if not row.is_eval and (why := self._validator.of_trajectory(trajectory, row.id.step)):
            return RowError(f"the episodes of {row.id}: {why}")
        return trajectory

    def metrics(self) -> dict[str, float]:
        """Return also the turns generated and repeated, and the time without anything to generate."""
        return {**super().metrics(), **self._counts, "environment_wait_seconds": round(self._waited_seconds, 3)}

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
