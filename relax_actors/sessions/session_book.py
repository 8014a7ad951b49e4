"""Sessions of a rollout actor: who works on which sample, and its end; pure."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from broker.subjects import RowId
from relax_actors.generation.sampling import Sampling
from relax_actors.messages import FinishReason, MediaSource
from relax_actors.messages.generate import SessionAnswer, SessionCall
from relax_actors.messages.session_log import SessionState, SessionStep, SessionTurn
from relax_actors.sessions.forest import Forest

_ID = re.compile(r"(group|eval)-(\d{1,18})-(\d{1,18})-(\d{1,9})-(\d{1,9})")


@dataclass(frozen=True, slots=True)
class Rules:
    """Limits of a session, in seconds where they are times.

    Attributes:
        seconds: time that an agent has for a sample.
        lease: time without a sign of life after which a sample is given to another agent.
        retries: times that a sample is given out again.
        max_turns: most answers in a sample.
        refills: whether a sample whose agent failed begins anew.
    """

    seconds: float
    lease: float
    retries: int
    max_turns: int
    refills: bool = False


@dataclass(slots=True, eq=False)
class Session:
    """One sample of a row, and the agent that works on it.

    Attributes:
        row: the row.
        sample: index of the sample.
        task: what its agent is to do.
        seed: seed of the row.
        attempt: times that it was given out again.
        forest: its turns.
        offered_at: time from which it waits for an agent; None while an agent has it.
        alive_until: end of the agent's lease.
        ends_at: end of the agent's time.
        state: how it ended; None if it did not.
        lease: seconds of the agent's lease.
        sampling: how the policy's answers are drawn; as [rollout] says if None.
        media: media of the row's prompt.
        environment_task: what the run's environment gets for the sample.
        steps: what the environment has answered in the present attempt.
        unrecorded: states that the log does not have yet, oldest first.
        answering: held while a request of the sample is answered.
        recording: held while its states are recorded.
        stepping: held while its environment takes a step.
    """

    row: RowId
    sample: int
    task: Mapping[str, Any]
    seed: int
    attempt: int = 0
    forest: Forest = field(default_factory=Forest)
    offered_at: float | None = 0.0
    alive_until: float = 0.0
    ends_at: float = 0.0
    state: SessionState | None = None
    lease: float = 30.0
    sampling: Sampling | None = None
    media: Sequence[MediaSource] = ()
    environment_task: Mapping[str, Any] = field(default_factory=dict)
    steps: list[SessionStep] = field(default_factory=list)
    unrecorded: list[SessionState] = field(default_factory=list)
    answering: asyncio.Lock = field(default_factory=asyncio.Lock)
    recording: asyncio.Lock = field(default_factory=asyncio.Lock)
    stepping: asyncio.Lock = field(default_factory=asyncio.Lock)

    def end(self, reason: FinishReason, result: SessionCall | None = None) -> None:
        """End the sample once; `result` has the rewards and metrics of its agent."""
        if self.state is None:
            turns = sorted(self.forest.exported())
            given = (None, {}, {}) if result is None else (result.reward, result.metrics, result.rewards)
            reward, metrics, rewards = given
            state = SessionState(
                self.sample, self.attempt, reason, reward, dict(metrics), turns=turns, rewards=dict(rewards)
            )
            self.enter_end(state)
            self.unrecorded.append(state)

    @property
    def greedy(self) -> bool:
        """Whether the policy answers greedily."""
        return self.sampling is not None and self.sampling.is_greedy(self.sample)

    @property
    def reward(self) -> float | None:
        """What the agent has reported, else the sum of its environment's rewards; None without both."""
        if self.state is None or self.state.reward is not None:
            return None if self.state is None else self.state.reward
        rewards = [step.seen.reward for step in self.steps if step.seen.reward is not None]
        return float(sum(rewards)) if rewards else None

    def has_reward(self, players: Sequence[str]) -> bool:
        """Whether the sample has a reward; with players, the agent has to reward them by name."""
        return self.state is not None and (bool(self.state.rewards) if players else self.reward is not None)

    @property
    def has_failed(self) -> bool:
        """Whether the sample has ended because its agents failed."""
        return self.state is not None and self.state.reason == FinishReason.ERROR

    def enter_end(self, state: SessionState) -> None:
        """Take over how the sample ended; the first end counts."""
        if self.state is None:
            self.state = state
            self.forest.keep(state.turns)

    def begin_again(self, state: SessionState) -> None:
        """Enter a new attempt."""
        self.attempt = state.attempt
        self.steps = []
        if state.forgets:
            self.forest.forget()
        else:
            self.forest.restart()

    def repeat(self, written: SessionTurn | SessionStep | SessionState) -> bool:
        """Replay recorded states; turns behind a lost turn are left out."""
        if isinstance(written, SessionTurn):
            follows = written.number == len(self.forest.turns) > written.turn.parent
            if follows:
                self.forest.add(written.turn, is_used=self.state is None)
        elif isinstance(written, SessionStep):
            follows = (written.attempt, written.number) == (self.attempt, len(self.steps))
            if follows:
                self.steps.append(written)
        elif follows := bool(written.reason):
            self.enter_end(written)
        elif follows := written.attempt > self.attempt:
            self.begin_again(written)
        return follows

    def shown(self, name: str, now: float) -> SessionAnswer:
        """Return the state of a session for its agent, without the ids of other agents."""
        is_open = self.state is None and self.id == name
        seconds = max(0.0, self.ends_at - now) if is_open else 0.0
        return SessionAnswer(session=name, task=dict(self.task), seconds=seconds, turns=self.forest.used)

    @property
    def id(self) -> str:
        """Id of the sample in its present attempt; an agent that lost the sample has another one."""
        return f"{self.row.kind}-{self.row.step}-{self.row.index}-{self.sample}-{self.attempt}"


def row_of(session: str) -> RowId | None:
    """Return the row of a session's id; None if it is no such id."""
    parts = _parsed(session)
    return None if parts is None else parts[0]


def _parsed(session: str) -> tuple[RowId, int, int] | None:
    """Return row, sample and attempt of a session's id; None if it is no such id."""
    if (parts := _ID.fullmatch(session)) is None:
        return None
    return RowId(int(parts[2]), int(parts[3]), parts[1]), int(parts[4]), int(parts[5])


class SessionBook:
    """Sessions of one actor."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._rows: dict[RowId, list[Session]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    def open(self, row: RowId, sessions: Iterable[Session], now: float, *, resumed: bool) -> None:
        """Offer the samples of a row to agents.

        If another actor held the row before (`resumed`), its agents have the time of a lease to go on.
        """
        held = list(sessions)
        for session in held:
            session.offered_at = now + self._rules.lease if resumed else now
        self._rows[row] = held

    def take(self, lease: float, now: float) -> Session | None:
        """Give a waiting sample to an agent, the oldest row's first; None if none waits."""
        for sessions in self._rows.values():
            for session in sessions:
                if session.state is None and session.offered_at is not None and session.offered_at <= now:
                    session.lease = lease
                    self._hold(session, now)
                    return session
        return None

    def _hold(self, session: Session, now: float) -> None:
        session.offered_at = None
        session.alive_until, session.ends_at = now + session.lease, now + self._rules.seconds

    def find(self, name: str, now: float) -> Session | str:
        """Return a session and renew its lease; or "elsewhere" or "ended"."""
        if (parsed := _parsed(name)) is None:
            return "ended"
        row, sample, attempt = parsed
        if (sessions := self._rows.get(row)) is None:
            return "elsewhere"
        session = next((session for session in sessions if session.sample == sample), None)
        if session is None or session.attempt != attempt:
            return "ended"
        if session.state is None:
            if session.offered_at is not None:
                self._hold(session, now)  # its agent found this actor, which took the row over
            session.alive_until = now + session.lease
        return session

    def fail(self, session: Session, now: float, *, is_lost: bool = False) -> None:
        """Give a sample whose agent failed or was lost to another one, or end it."""
        if session.attempt >= self._rules.retries:
            session.end(FinishReason.ERROR)
            return
        forgets = self._rules.refills and not is_lost
        state = SessionState(session.sample, session.attempt + 1, forgets=forgets)
        session.begin_again(state)
        session.unrecorded.append(state)
        session.offered_at = now

    def expire(self, now: float) -> None:
        """End samples whose time is over, and offer the samples of lost agents again."""
        for sessions in self._rows.values():
            for session in sessions:
                if session.state is not None or session.offered_at is not None:
                    continue
                if now > session.ends_at:
                    session.end(FinishReason.TIMEOUT)
                elif now > session.alive_until:
                    self.fail(session, now, is_lost=True)

    def unrecorded(self) -> list[Session]:
        """Return the sessions with states that the log does not have yet."""
        return [session for sessions in self._rows.values() for session in sessions if session.unrecorded]

    def holds(self, session: Session) -> bool:
        """Whether a session is still the current one of its sample and delivery."""
        return any(session is one for one in self._rows.get(session.row, ()))

    def is_over(self, row: RowId) -> bool:
        """Whether all samples of a row have ended, and the log says so."""
        return all(session.state is not None and not session.unrecorded for session in self._rows.get(row, ()))

    def sessions(self, row: RowId) -> list[Session]:
        """Return the samples of a row that is held."""
        return self._rows[row]

    def close(self, row: RowId) -> list[Session]:
        """Forget a row; return its samples."""
        return self._rows.pop(row, [])

    def counts(self) -> dict[str, int]:
        """Return how many samples wait for an agent, have one, and have ended."""
        counts = {"waiting": 0, "running": 0, "ended": 0}
        for sessions in self._rows.values():
            for session in sessions:
                ended, waits = session.state is not None, session.offered_at is not None
                counts["ended" if ended else "waiting" if waits else "running"] += 1
        return counts
