"""Episodes that an actor plays: their turns, and the traffic with their environments.

Used from the role's thread. Every wait has a deadline: the client answers each operation, at the latest with an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from relax_actors.engines.protocols import Generation, GenerationRequest
from relax_actors.envs.client import EnvironmentClient
from relax_actors.envs.operations import Close, Operation
from relax_actors.errors import RelaxError, RowError
from relax_actors.generation.batch import Generates, Kind, Samples
from relax_actors.messages import EnvironmentAnswer, Fault, FinishReason
from relax_actors.runtime import Row
from relax_actors.runtime.context import Context
from relax_actors.runtime.seeds import derive_seed
from relax_actors.sessions.conversation import Conversation
from relax_actors.sessions.environment import EnvironmentFailedError, Playing, SessionEnvironment, play
from relax_actors.sessions.episode import Episode
from relax_actors.sessions.episode_group import EpisodeGroup
from relax_actors.sessions.episode_start import Limits, Start, starts_of, task_of
from relax_actors.sessions.session_log import LazyLog, read_logs

WAIT_SECONDS = 0.05
"""Longest wait for an environment's answer before rows and service requests are looked for again."""
LOOK_SECONDS = 1.0
"""Interval of looking for episodes that have taken too long."""


@dataclass(slots=True, eq=False)
class Live:
    """An episode that is being played.

    Attributes:
        episode: the episode.
        group: that of its row.
        environment: its environment.
        playing: its loop.
        asked: the turn that is being generated; None while it is not.
    """

    episode: Episode
    group: EpisodeGroup
    environment: SessionEnvironment
    playing: Playing
    asked: Future[Samples] | None = None


@dataclass(frozen=True, slots=True)
class Rules:
    """How the episodes of an actor are played.

    Attributes:
        conversation: renders observations.
        limits: limits of an episode.
        template: settings of the requests, with the number of samples of a row.
    """

    conversation: Conversation
    limits: Limits
    template: GenerationRequest


class EpisodeBatch:
    """Episodes of the rows that an actor generates together; a `generation.rows.Work`.

    With a barrier, as in a deterministic run, a turn of all samples forms one batch, whatever time their environments
    take, so that the run computes the same bits again.

    Args:
        context: context of the actor, whose run has the section [environment].
        client: talks to the actors that host environments.
        rules: how episodes are played.
        policy: generates turns.
        start: returns the prompt of a row.
        result: returns the result of a row that is over.
        counts: turns generated, turns taken from the logs of rows instead, environments opened, lost and failed, and
            seconds without anything to generate. Batches of one actor share it; see `SessionEnvironment`.

    Attributes:
        groups: rows that are not over.
    """

    uses_service = False

    def __init__(
        self,
        context: Context,
        client: EnvironmentClient,
        rules: Rules,
        policy: Generates,
        *,
        start: Callable[[Row], Start],
        result: Callable[[EpisodeGroup], Any],
        counts: MutableMapping[str, float],
    ) -> None:
        assert context.config.environment is not None  # noqa: S101 the role is chosen by this section
        self._context, self._client, self._rules = context, client, rules
        self._section, self._settings = context.config.environment, context.config.rollout
        self._barrier = context.config.run.deterministic
        self._policy, self._start, self._result = policy, start, result
        self.groups: list[EpisodeGroup] = []
        self._playing: dict[Episode, Live] = {}
        self._operations: list[Operation] = []
        # Episodes that wait for their environments, by the names of these; that wait for `_ask`; that have a turn.
        self._waiting: dict[str, Live] = {}
        self._ready: list[tuple[Live, GenerationRequest]] = []
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
        return self._settings.max_concurrent_prompts - len(self.groups)

    def open(self, rows: Sequence[Row]) -> list[tuple[Row, RelaxError]]:
        """Begin with rows, or continue where the last actor that had them wrote turns down."""
        bad: list[tuple[Row, RelaxError]] = []
        table, rules = self._context.table, self._rules
        logs = table.call(read_logs(table, [row.id for row in rows])) if rows else {}
        for row in rows:
            cells, length = logs[row.id]
            try:
                starts = starts_of(self._start(row), rules.template, rules.conversation, self._section)
            except RowError as error:
                bad.append((row, error))
                continue
            group = EpisodeGroup(row, LazyLog(table, row.id, length), time.monotonic())
            group.members = [Episode(start, rules.limits, rules.conversation) for start in starts]
            if repeated := group.restore(cells):
                self.counts["turns_repeated"] += repeated
                self._context.journal.event("row_resumed", row=str(row.id), turns=repeated)
            self.groups.append(group)
            for episode in group.members:
                if episode.state is None:
                    self._begin(episode, group)
        self._submit()
        return bad

    def _begin(self, episode: Episode, group: EpisodeGroup) -> None:
        prompt, sample = group.row.prompt, episode.start.sample
        seed, author = derive_seed(prompt.seed, "environment", sample), self._context.author
        environment = SessionEnvironment(
            f"{group.row.id}.{sample}", task_of(prompt), seed, author, self._leave, self.counts
        )
        playing = play(episode, environment, self._rules.template, group.log, partial(self._fail, group))
        live = Live(episode, group, environment, playing)
        self._playing[episode] = live
        self._advance(live, None)

    def _advance(self, live: Live, outcome: EnvironmentAnswer | Generation | None) -> None:
        """Play on, up to the next operation of the environment, the next turn, or the end."""
        try:
            wanted = live.playing.send(outcome)
        except StopIteration:
            self._forget(live)
            return
        if isinstance(wanted, GenerationRequest):
            self._ready.append((live, wanted))
        else:
            self._waiting[wanted.session] = live
            self._operations.append(wanted)

    def _forget(self, live: Live) -> None:
        self._policy.release(live)
        del self._playing[live.episode]

    def _leave(self, name: str) -> None:
        self._waiting.pop(name, None)
        self._operations.append(Close(name))

    def _submit(self) -> None:
        """Submit operations, so that those of many sessions share a message."""
        operations, self._operations = self._operations, []
        self._client.submit(operations)

    def _fail(self, group: EpisodeGroup, episode: Episode, error: EnvironmentFailedError) -> None:
        """Begin an episode again whose environment failed, or end it."""
        episode.failure = str(error)
        self.counts["environment_errors"] += 1
        row, sample = str(group.row.id), episode.start.sample
        self._context.journal.event("environment_failed", row=row, sample=sample, error=episode.failure[:500])
        again = error.fault == Fault.REPLAY or self._section.on_error == "refill"
        if again and episode.attempt < self._section.max_refills:
            episode.restart()
        else:
            episode.end(FinishReason.ERROR)

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

    def _take_answers(self, timeout: float) -> None:
        """Take the answers of environments; wait at most `timeout` seconds for the first one."""
        for answer in self._client.take(timeout):
            if (live := self._waiting.pop(answer.session, None)) is not None:
                self._advance(live, answer)
        self._end_late()
        self._submit()

    def _end_late(self) -> None:
        """End episodes that take longer than environment.episode_seconds."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        for live in list(self._playing.values()):
            is_late = live.group.seconds(now) >= self._section.episode_seconds
            if is_late and (live.asked is None or live.asked.cancel()):  # else its turn is being generated
                live.episode.end(FinishReason.TIMEOUT)
                live.playing.close()
                self._forget(live)
        self._ready = [(live, request) for live, request in self._ready if live.episode in self._playing]

    def _ask(self) -> None:
        """Request the turns that are ready; with a barrier, once no environment is awaited."""
        if self._barrier and self._waiting:
            return
        if self._barrier:
            self._ready.sort(key=lambda ready: (ready[0].group.row.id, ready[0].episode.start.sample))
        ready, self._ready = self._ready, []
        for live, request in ready:
            tokens = live.episode.held + request.max_tokens
            session = "" if self._barrier else f"{live.environment.name}{live.episode.player}"
            live.asked = self._policy.generate(
                replace(request, session=session), Kind.TURN, conversation=live, tokens=tokens
            )
            live.asked.add_done_callback(partial(self._take, live))

    def _take(self, live: Live, samples: Future[Samples]) -> None:
        if samples.cancelled():
            return
        if (error := samples.exception()) is None:
            self._done.append((live, samples.result()[0]))
        else:
            self._error = error

    def _take_turns(self) -> None:
        """Take generated turns, and give them to their environments."""
        done, self._done = self._done, []
        self._has_new_turns = self._has_new_turns or bool(done)
        for live, generation in done:
            self.counts["turns"] += 1
            live.asked = None
            self._advance(live, generation)
            if live.episode.state is None:
                self._policy.hold(live, live.episode.held)
        self._submit()

    def _write_turns(self) -> None:
        """Write the turns of rows worth more than rollout.turn_log_after; all when stopping."""
        stopping = self._context.stopping()
        if not (self._has_new_turns or stopping):
            return
        self._has_new_turns = False
        now = time.monotonic()
        for group in self.groups:
            if stopping or now - group.started >= self._settings.turn_log_after:
                group.log.flush(group.seconds(now))

    def results(self) -> list[tuple[Row, Any]]:
        """Take the turns that were generated; return the rows that are over, with their results."""
        if self._error is not None:
            raise self._error
        self._take_turns()
        if not self._barrier:
            self._write_turns()
        over = [group for group in self.groups if group.is_over]
        if over:
            self.groups = [group for group in self.groups if not group.is_over]
        return [(group.row, self._result(group)) for group in over]

    def close(self) -> None:
        """Close the environments of rows that are given up."""
        for live in list(self._playing.values()):
            live.playing.close()
            self._forget(live)
        self._submit()
