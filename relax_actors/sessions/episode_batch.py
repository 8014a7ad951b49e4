"""Episodes that an actor generates: their turns, and the traffic with their environments.

Used from the role's thread. Every wait has a deadline: the client answers each operation, at the latest with an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from relax_actors.config import Config
from relax_actors.config.environment import EnvironmentSection
from relax_actors.engines.protocols import Generation, GenerationRequest
from relax_actors.envs.client import EnvironmentClient
from relax_actors.envs.operations import Close
from relax_actors.errors import EpisodesFailedError, RelaxError, RowError
from relax_actors.generation.batch import Generates, Kind, Samples
from relax_actors.messages import Act, EnvironmentAnswer, Fault, FinishReason, Open, Trajectory
from relax_actors.runtime import Drop, Row
from relax_actors.runtime.context import Context
from relax_actors.runtime.seeds import derive_seed
from relax_actors.sessions.conversation import Conversation
from relax_actors.sessions.episode import Episode, State
from relax_actors.sessions.episode_group import EpisodeGroup, Live, SeenPrompt, starts_of, task_of
from relax_actors.sessions.episode_input import Limits
from relax_actors.sessions.forest import experts_of
from relax_actors.sessions.session_log import LazyLog, read_logs

MAX_LOSSES = 20
"""Times that a session may be lost in one turn before its sample fails."""
WAIT_SECONDS = 0.05
"""Longest wait for an environment's answer before rows and guests are looked for again."""
LOOK_SECONDS = 1.0
"""Interval of looking for episodes that have taken too long."""


class EpisodeBatch:
    """Episodes of the rows that an actor generates together; see `relax_actors.generation.work.Work`.

    Args:
        context: context of the actor.
        client: sessions of the actor.
        conversation: renders observations.
        limits: limits of an episode.
        samples: samples of each row, greedy ones included.
        greedy: how many of them, the last ones, are greedy.
        policy: generates turns.
        template: settings of the requests.
        see: returns the prompt of a row with its media; None for a model that reads text only.
        check: checks the trajectory of a row that is over.
        barrier: whether to wait for all environments before each turn.
        most: rows that are generated at once.

    Attributes:
        groups: rows that are not over.
        counts: turns generated, turns taken from turn cells instead, sessions opened and lost, failures of
            environments, and seconds without anything to generate. Batches of one actor share it: the number of a
            session is part of its name, so that no answer to an earlier session is taken for one to a later session of
            the same sample.
    """

    asks_as_guests = False

    def __init__(
        self,
        context: Context,
        client: EnvironmentClient,
        conversation: Conversation,
        limits: Limits,
        *,
        samples: int,
        greedy: int,
        policy: Generates,
        template: GenerationRequest,
        see: Callable[[Row], SeenPrompt | None],
        check: Callable[[EpisodeGroup, Trajectory], Trajectory | RelaxError],
        fingerprints: Mapping[int, str],
        barrier: bool,
        most: int,
        counts: dict[str, float],
    ) -> None:
        config: Config = context.config
        assert config.environment is not None  # noqa: S101 the role is chosen by this section
        self._context, self._client, self._conversation = context, client, conversation
        self._section: EnvironmentSection = config.environment
        self._settings, self._limits, self._barrier = config.rollout, limits, barrier
        self._samples, self._greedy = samples, greedy
        self._policy, self._template, self._see, self._check = policy, template, see, check
        self._fingerprints, self._most = fingerprints, most
        self.groups: list[EpisodeGroup] = []
        self._sessions: dict[str, Live] = {}
        self._ready: list[Live] = []
        self._done: list[tuple[Live, Generation]] = []
        self._error: BaseException | None = None
        self._has_new_turns = False
        self._looked = 0.0
        self.counts = counts

    def __len__(self) -> int:
        """Return the number of rows that are not over."""
        return len(self.groups)

    def room(self, limit: int) -> int:
        """Return how many rows may begin: turns need no room of their own."""
        del limit
        return self._most - len(self.groups)

    def open(self, rows: Sequence[Row]) -> list[tuple[Row, RelaxError]]:
        """Begin with rows, or continue where the last actor that had them wrote turns down."""
        bad: list[tuple[Row, RelaxError]] = []
        if not rows:
            return bad
        table = self._context.table
        logs = table.call(read_logs(table, [row.id for row in rows]))
        for row in rows:
            cells, length = logs[row.id]
            seen = self._see(row)
            try:
                starts = starts_of(row.prompt, self._samples, self._conversation, self._section, seen)
                first = self._samples - self._greedy
                starts = [replace(start, greedy=start.sample >= first) for start in starts]
            except RowError as error:
                bad.append((row, error))
                continue
            group = EpisodeGroup(row, LazyLog(table, row.id, length), time.monotonic())
            prepare = None if seen is None else seen.prepare
            group.members = [Live(Episode(start, self._limits, self._conversation, prepare), group) for start in starts]
            repeated = group.repeat(cells)
            if repeated:
                self.counts["turns_repeated"] += repeated
                self._context.journal.event("row_resumed", row=str(row.id), turns=repeated)
            self.groups.append(group)
            self._open([live for live in group.members if live.episode.state is not State.ENDED])
        return bad

    def exchange(self) -> None:
        """Write turns down, take the answers of environments, and ask for the turns that are ready."""
        self._write_turns()
        self._take_answers(0.0)
        self._ask()

    def wait(self) -> None:
        """Wait a short time for an environment."""
        start = time.monotonic()
        self._take_answers(WAIT_SECONDS)
        self.counts["environment_wait_seconds"] += time.monotonic() - start

    def _open(self, members: Sequence[Live]) -> None:
        """Open the sessions of episodes, and bring them to their last action."""
        operations = []
        for live in members:
            self._sessions.pop(live.session, None)
            self.counts["sessions_opened"] += 1
            row, sample = live.group.row, live.episode.start.sample
            live.session = f"{row.id}.{sample}@{self._context.author}.{self.counts['sessions_opened']:.0f}"
            self._sessions[live.session] = live
            actions, seen = live.episode.actions, live.episode.observations
            opening = Open(live.session, task_of(row.prompt), derive_seed(row.prompt.seed, "environment", sample))
            live.restoring = bool(actions) and seen[-1].state is not None
            if live.restoring:
                opening = replace(opening, state=seen[-1].state, actions=actions[:-1])
            elif actions:
                opening = replace(opening, actions=list(actions), digests=[answer.digest for answer in seen[1:]])
            operations.append(opening)
        self._client.submit(operations)

    def _take_answers(self, timeout: float) -> None:
        """Take the answers of environments that have arrived; waits at most `timeout` seconds for the first one."""
        for answer in self._client.take(timeout):
            live = self._sessions.get(answer.session)
            if live is None or live.episode.state not in (State.OPENING, State.WAITING):
                continue
            if answer.error:
                self._fail(live, answer)
            elif live.restoring:
                live.restoring = False
                self._act([live])
            else:
                self._observe(live, answer)
        self._end_late()

    def _observe(self, live: Live, answer: EnvironmentAnswer) -> None:
        episode, live.losses = live.episode, 0
        try:
            episode.observe(answer)
        except RowError as error:
            self._fail(live, replace(answer, error=Fault.ENVIRONMENT, detail=f"its observation: {error}"))
            return
        if episode.state is State.READY:
            self._ready.append(live)
        else:
            self._ended(live)

    def _fail(self, live: Live, answer: EnvironmentAnswer) -> None:
        """Open a lost session again; begin a failed episode again or end it."""
        live.failure = f"{answer.error}: {answer.detail}"
        if answer.error in (Fault.LOST, Fault.BUSY) and live.losses < MAX_LOSSES:
            live.losses += 1
            self.counts["sessions_lost"] += 1
            self._open([live])
            return
        self.counts["environment_errors"] += 1
        again = answer.error == Fault.REPLAY or self._section.on_error == "refill"
        row, sample = live.group.row, live.episode.start.sample
        self._context.journal.event("environment_failed", row=str(row.id), sample=sample, error=live.failure[:500])
        if again and live.episode.attempt < self._section.max_refills:
            live.episode.restart()
            self._open([live])
        else:
            live.episode.end(FinishReason.ERROR)
            self._ended(live)

    def _end_late(self) -> None:
        """End episodes that take longer than environment.episode_seconds."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        for group in self.groups:
            if group.seconds(now) < self._section.episode_seconds:
                continue
            for live in group.members:
                if live.episode.state is State.GENERATING and not (live.asked and live.asked.cancel()):
                    continue  # its turn is being generated
                if live.episode.state is not State.ENDED:
                    live.episode.end(FinishReason.TIMEOUT)
                    self._ended(live)
        self._ready = [live for live in self._ready if live.episode.state is State.READY]

    def _ended(self, live: Live) -> None:
        self._policy.release(live)
        if live.episode.reason is not FinishReason.ERROR:
            live.group.log.add(live.episode.last_state())
        if self._sessions.pop(live.session, None) is not None:
            self._client.submit([Close(live.session)])

    def _act(self, members: Sequence[Live]) -> None:
        self._client.submit([Act(m.session, m.episode.turns - 1, m.episode.actions[-1]) for m in members])

    def _ask(self) -> None:
        """Ask for the turns that are ready.

        With a barrier, a turn of all samples forms one batch, whatever its environments take: a deterministic run
        computes the same bits again.
        """
        if self._barrier and any(self._waits(live) for live in self._sessions.values()):
            return
        if self._barrier:
            self._ready.sort(key=lambda live: (live.group.row.id, live.episode.start.sample))
        ready, self._ready = self._ready, []
        for live in ready:
            episode = live.episode
            most = episode.max_tokens
            request = replace(
                self._template,
                tokens=episode.tokens,
                seed=episode.seed,
                samples=1,
                greedy_samples=int(episode.start.greedy),
                max_tokens=most,
                min_tokens=min(self._template.min_tokens, most),
                session="" if self._barrier else f"{live.session}{episode.player}",
                media=episode.media,
            )
            episode.begin()
            live.asked = self._policy.generate(request, Kind.TURN, conversation=live, tokens=episode.held + most)
            live.asked.add_done_callback(partial(self._take, live))

    def _take(self, live: Live, samples: Future[Samples]) -> None:
        if samples.cancelled():
            return
        if (error := samples.exception()) is None:
            self._done.append((live, samples.result()[0]))
        else:
            self._error = error

    @staticmethod
    def _waits(live: Live) -> bool:
        return live.episode.state in (State.OPENING, State.WAITING)

    def _generated(self) -> None:
        """Take generated turns, and give them to their environments."""
        done, self._done = self._done, []
        acting = []
        self._has_new_turns = self._has_new_turns or bool(done)
        for live, found in done:
            self.counts["turns"] += 1
            episode, experts = live.episode, experts_of(found, live.episode.before)
            turn = episode.generated(found.tokens, found.logprobs, found.versions, found.finish_reason, experts)
            live.group.log.add(turn)
            if episode.state is State.ENDED:
                self._ended(live)
            else:
                self._policy.hold(live, episode.held)
                acting.append(live)
        self._act(acting)

    def _write_turns(self) -> None:
        """Write the turns of rows whose work is worth more than rollout.turn_log_after."""
        if not self._has_new_turns:
            return
        self._has_new_turns = False
        now = time.monotonic()
        for group in self.groups:
            if now - group.started >= self._settings.turn_log_after:
                group.log.flush(group.seconds(now))

    def results(self) -> list[tuple[Row, Any]]:
        """Take the turns that were generated; return the rows that are over, with their results."""
        if self._error is not None:
            raise self._error
        self._generated()
        if not self._barrier:
            self._write_turns()
        return [
            (group.row, self._check(group, result) if isinstance(result, Trajectory) else result)
            for group, result in self._finished()
        ]

    def _finished(self) -> list[tuple[EpisodeGroup, Trajectory | Drop | RelaxError]]:
        over = [group for group in self.groups if group.is_over]
        if not over:
            return []
        self.groups = [group for group in self.groups if not group.is_over]
        found: list[tuple[EpisodeGroup, Trajectory | Drop | RelaxError]] = []
        for group in over:
            try:
                found.append((group, group.result(self._section, self._fingerprints)))
            except EpisodesFailedError as error:
                found.append((group, error))
            except ValueError as error:
                found.append((group, RowError(f"the episodes of {group.row.id}: {error}")))
        return found

    def close(self) -> None:
        """Close the sessions of rows that are given up."""
        self._client.submit([Close(name) for name in self._sessions])
        for live in self._sessions.values():
            self._policy.release(live)
        self._sessions.clear()
