"""Episode of a sample with an environment: a state machine without input and output.

    OPENING -> READY -> GENERATING -> WAITING -> READY -> ... -> ENDED

In an episode with players, the model plays each of them. A player has a history of its own (`PlayerHistory`) and sees
the observations that the environment gives to it.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from relax_actors.data.media_fields import plain_messages
from relax_actors.engines.protocols.media import PromptMedia
from relax_actors.errors import RowError, StoreError, TooLongError
from relax_actors.messages import EnvironmentAnswer, FinishReason, Sample, SessionState, SessionTurn
from relax_actors.messages.samples import PLAYER_REWARD
from relax_actors.runtime.seeds import derive_seed
from relax_actors.sessions.conversation import Conversation
from relax_actors.sessions.episode_input import Limits, Media, Reading, Start
from relax_actors.sessions.forest import Forest
from relax_actors.sessions.player_history import NO_TOKENS, PlayerHistory

Array = NDArray[Any]


class State(Enum):
    """What an episode waits for."""

    OPENING = auto()
    READY = auto()
    GENERATING = auto()
    WAITING = auto()
    ENDED = auto()


class Episode:
    """One sample of a row. The methods must be called in the states that they name.

    Args:
        start: what it begins with.
        limits: its limits.
        conversation: renders messages.
        prepare: prepares media; None for a model that reads text only.

    Attributes:
        state: what it waits for.
        reason: why it ended; None before.
        attempt: how often the sample has begun again.
        forest: its turns.
        actions: what the model wrote, a text for each turn.
        observations: what the environment answered to its reset and to each action.
    """

    def __init__(self, start: Start, limits: Limits, conversation: Conversation, prepare: Media | None = None) -> None:
        self.start, self._limits, self._conversation, self._prepare = start, limits, conversation, prepare
        self.attempt = -1
        self.restart()

    def restart(self) -> None:
        """Begin again, under the next attempt; in any state."""
        self.attempt += 1
        self.state = State.OPENING
        self.reason: FinishReason | None = None
        self.actions: list[str] = []
        self.observations: list[EnvironmentAnswer] = []
        self.forest = Forest()
        self._histories = {
            name: PlayerHistory(name, self.start, self._conversation, self.forest, self._prepare)
            for name in self.start.players or ("",)
        }
        self._acting = next(iter(self._histories.values()))
        # Rewards of players that have not acted yet.
        self._owed = dict.fromkeys(self._histories, 0.0)
        self._rewards: list[float] = []
        self._budget_left = self._limits.token_budget
        self._digest = xxhash.xxh3_128(f"{self.start.sample}.{self.attempt}".encode())
        # Of the turn that is being generated: digest before its observation, and what it reads.
        self._before, self._reading = self._digest.hexdigest(), Reading(NO_TOKENS, branches=False)

    @property
    def turns(self) -> int:
        """Number of turns that were generated."""
        return len(self.actions)

    @property
    def tokens(self) -> Array:
        """Tokens that the model reads next, `[len] int32`."""
        return self._acting.tokens

    @property
    def media(self) -> PromptMedia | None:
        """Media of what the model reads next; None for a model that reads text only."""
        return self._acting.media

    @property
    def player(self) -> str:
        """Player whose turn it is; empty without players."""
        return self._acting.name

    @property
    def held(self) -> int:
        """Number of tokens that the conversations of all players hold in the cache of an engine."""
        histories = self._histories.values()
        return sum(history.length for history in histories if history.turns or history is self._acting)

    @property
    def branches(self) -> int:
        """Sequences that began because the template rewrote the conversation."""
        return sum(history.branches for history in self._histories.values())

    @property
    def max_tokens(self) -> int:
        """Largest number of tokens of the next turn."""
        return min(self._limits.max_tokens, self._free)

    @property
    def seed(self) -> int:
        """Seed of the next turn, from the row's seed, the sample, the turn and the attempt alone."""
        again = (self.attempt,) if self.attempt else ()
        return derive_seed(self.start.seed, "turn", self.start.sample, self.turns, *again)

    @property
    def _free(self) -> int:
        room = self._limits.room - self._acting.length
        return room if self._budget_left is None else min(room, self._budget_left)

    def observe(self, observed: EnvironmentAnswer, recorded: Reading | None = None) -> None:
        """Take the answer to the reset or to the last action; OPENING or WAITING becomes READY or ENDED.

        Args:
            observed: the answer.
            recorded: what the model read, in place of rendering the messages.

        Raises:
            RowError: the messages cannot be rendered, their media cannot be read, or a player is unknown.
        """
        self._expect(State.OPENING, State.WAITING)
        self._before = self._digest.hexdigest()
        self.observations.append(observed.without_bytes())
        self._reading = Reading(NO_TOKENS, branches=False)
        self._take_rewards(observed)
        if observed.done or observed.truncated:
            self.end(FinishReason.ENV_DONE if observed.done else FinishReason.MAX_TURNS)
        elif self.turns >= self._limits.max_turns:
            self.end(FinishReason.MAX_TURNS)
        else:
            self._read(observed, recorded)

    def _read(self, observed: EnvironmentAnswer, recorded: Reading | None) -> None:
        self._acting = acting = self._history(observed.player or self.player)
        if recorded is not None:
            messages, self._reading = plain_messages(observed.messages), recorded
        else:
            where = f"the observation before turn {self.turns} of sample {self.start.sample}"
            try:
                messages, self._reading = acting.render(observed.messages, where)
            except TooLongError:  # like one that is tokenized and leaves no room for an answer
                self.end(FinishReason.TOKEN_BUDGET)
                return
        cost = acting.read(messages, self._reading)
        if self._budget_left is not None:
            self._budget_left -= cost
        self.state = State.READY
        if self._free < 1:
            acting.drop_context(branches=self._reading.branches)
            self.end(FinishReason.TOKEN_BUDGET)

    def _history(self, player: str) -> PlayerHistory:
        if player not in self._histories:
            msg = f"the environment names the player {player!r}; environment.players are {', '.join(self._histories)}"
            raise RowError(msg)
        return self._histories[player]

    def _take_rewards(self, observed: EnvironmentAnswer) -> None:
        """Add rewards to the last turn of the player that has acted, and of those that are named."""
        if self._rewards and observed.reward is not None:
            self._rewards[-1] += observed.reward
        for player, reward in observed.rewards.items():
            if turns := self._history(player).turns:
                self._rewards[turns[-1]] += reward
            else:
                self._owed[player] += reward

    def begin(self) -> None:
        """Begin to generate a turn: READY becomes GENERATING."""
        self._expect(State.READY)
        self.state = State.GENERATING

    def generated(
        self, tokens: Array, logprobs: Array, versions: Array, reason: str, experts: Array | None = None
    ) -> SessionTurn:
        """Take a generated turn; GENERATING becomes WAITING or ENDED.

        Args:
            tokens: `[len] int32`.
            logprobs: `[len] float32`.
            versions: `[len] int32`.
            reason: why it ended.
            experts: see `Turn.experts`.

        Returns:
            The turn as it is written down. In state WAITING the environment must be given the last of `actions`.
        """
        self._expect(State.GENERATING)
        cut = reason != FinishReason.STOP
        short = self.max_tokens < self._limits.max_tokens
        turn = self._acting.next_turn((tokens, logprobs, versions), str(reason), experts)
        written = SessionTurn(self.start.sample, self.turns, turn, self.attempt, self._before, self.observations[-1])
        self._acting.write(self.forest.add(turn))
        self.actions.append(self._conversation.text(tokens))
        if self._budget_left is not None:
            self._budget_left -= len(tokens)
        self._rewards.append(self._owed[self.player])
        self._owed[self.player] = 0.0
        self._digest.update(self.observations[-1].digest.encode())
        self._digest.update(np.ascontiguousarray(tokens, np.int32).tobytes() + b"|")
        self.state = State.WAITING
        if cut and short:
            self.end(FinishReason.TOKEN_BUDGET)
        elif cut and self._conversation.needs_stop:
            self.end(FinishReason.LENGTH)
        return written

    @property
    def before(self) -> int:
        """Number of tokens up to the end of the turn that the next one continues; see `experts_of`."""
        return self._acting.before

    def end(self, reason: FinishReason) -> None:
        """End the episode, in any state."""
        self.state, self.reason = State.ENDED, reason

    def last_state(self) -> SessionState:
        """Return what is written down of the end of an episode, in state ENDED."""
        self._expect(State.ENDED)
        seen = self.observations[-1] if len(self.observations) > self.turns else None
        before = self._digest.hexdigest()
        return SessionState(
            self.start.sample, self.attempt, str(self.reason), number=self.turns, before=before, seen=seen
        )

    def repeat(self, written: SessionTurn) -> bool:
        """Take a turn that was written down; False if it does not follow what the episode has so far."""
        if written.attempt > self.attempt and written.number == 0:
            self.attempt = written.attempt - 1
            self.restart()
        seen, turn = written.seen, written.turn
        waits = self.state in (State.OPENING, State.WAITING)
        if not waits or seen is None or not self._follows(written, seen):
            return False
        player = seen.player or self.player
        if turn.player not in ("", player):
            return False
        try:
            reading = self._history(player).recorded(turn)
        except StoreError:  # lost media: the turn is generated again
            return False
        self.observe(seen, reading)
        if self.state is not State.READY:
            return False
        self.begin()
        self.generated(turn.tokens, turn.logprobs, turn.versions, turn.finish_reason, turn.experts)
        return True

    def repeat_end(self, written: SessionState) -> bool:
        """Take an end that was written down; False if it does not follow what the episode has so far."""
        ends = self.state in (State.OPENING, State.WAITING, State.ENDED) and bool(written.reason)
        if not ends or not self._follows(written, written.seen):
            return False
        if self.state is not State.ENDED and written.seen is not None:
            if self.state is State.WAITING:
                self._take_rewards(written.seen)
            self.observations.append(written.seen)
        self.end(FinishReason(written.reason))
        return True

    def _follows(self, written: SessionTurn | SessionState, seen: EnvironmentAnswer | None) -> bool:
        known = seen is None or self._histories.keys() >= {seen.player or self.player, *seen.rewards}
        place = (written.attempt, written.number, written.before)
        return known and place == (self.attempt, self.turns, self._digest.hexdigest())

    @property
    def rewards(self) -> dict[str, float]:
        """Reward of each player, the sum of those of its turns; without players, under the empty name."""
        found = {}
        for name, history in self._histories.items():
            turns = [self._rewards[turn] for turn in history.turns]
            found[name] = float(np.sum([*turns, self._owed[name]], dtype=np.float64))
        return found

    def sample(self, *, trained: bool = True, everyone: bool = False) -> Sample:
        """Return the sample, in state ENDED.

        Args:
            trained: whether it is trained; otherwise its loss mask is empty.
            everyone: whether the loss mask covers the turns of all players, as in held-out rows.
        """
        histories = [history for history in self._histories.values() if history.turns]
        histories = histories or list(self._histories.values())[:1]
        rewards, counted = self.rewards, self.start.trained if self.start.players else ("",)
        joint = "\n" if self._conversation.needs_stop else ""
        metrics = {f"environment/{name}": value for seen in self.observations for name, value in seen.metrics.items()}
        metrics |= {f"{PLAYER_REWARD}{name}": rewards[name] for name in self.start.players}
        metrics |= {
            "environment_reward": float(sum(rewards[name] for name in counted)),
            "turns": float(self.turns),
            "branches": float(self.branches),
            "attempts": float(self.attempt + 1),
        }
        shown = {one.name for one in histories} if everyone else set(counted)
        sequences = self.forest.sequences(players=list(self._histories)) or [histories[0].prompt()]
        return Sample(
            tuple(s if trained and s.player in shown else s.masked() for s in sequences),
            joint.join(self.actions),
            self.reason or FinishReason.ERROR,
            metrics,
            np.array([self._rewards[turn] for history in histories for turn in history.turns], np.float32),
            self._said(),
        )

    def _said(self) -> list[dict[str, Any]]:
        """Return the whole conversation, the last answer included, with hashes in place of the bytes of media."""
        said = [dict(message) for message in self.start.messages]
        player = next(iter(self._histories))
        for i, seen in enumerate(self.observations):
            player = seen.player or player
            by = {"player": player} if player else {}
            said += [{**message, **by} for message in seen.messages]
            if i < self.turns:
                said.append({"role": "assistant", "content": self.actions[i], **by})
        return said

    def _expect(self, *states: State) -> None:
        if self.state not in states:
            msg = f"sample {self.start.sample} is {self.state.name}, not {' or '.join(state.name for state in states)}"
            raise AssertionError(msg)
