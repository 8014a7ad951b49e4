"""Episode of a sample with an environment: a state machine without input and output.

    OPENING -> READY -> GENERATING -> WAITING -> READY -> ... -> ENDED

Invariant: the tokens of a sequence only grow. The tokens of a turn are what the model read and sampled, never decoded
and encoded again; where the chat template would write the conversation in another way, a new sequence begins.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from relax_actors.data.media_fields import plain_messages
from relax_actors.errors import StoreError
from relax_actors.messages import EnvironmentAnswer, FinishReason, Sample, Turn
from relax_actors.runtime.seeds import derive_seed
from relax_actors.training.conversation import Conversation
from relax_actors.training.episode_input import Limits, Media, Reading, Start
from relax_actors.training.growing_sequence import GrowingSequence

Array = NDArray[Any]
_NO_TOKENS, _NO_LOGPROBS = np.zeros(0, np.int32), np.zeros(0, np.float32)


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
        media: prepares media; None for a model that reads text only.

    Attributes:
        state: what it waits for.
        reason: why it ended; None before.
        attempt: how often the sample has begun again.
        actions: what the model wrote, a text for each turn.
        observations: what the environment answered to its reset and to each action.
        branches: sequences that began because the template rewrote the conversation.
        media: media of what the model reads next; None for a model that reads text only.
    """

    def __init__(self, start: Start, limits: Limits, conversation: Conversation, media: Media | None = None) -> None:
        self.start, self._limits, self._conversation, self._prepare = start, limits, conversation, media
        self.attempt = -1
        self.restart()

    def restart(self) -> None:
        """Begin again, under the next attempt; in any state."""
        self.attempt += 1
        self.state = State.OPENING
        self.reason: FinishReason | None = None
        self.actions: list[str] = []
        self.observations: list[EnvironmentAnswer] = []
        self.branches = 0
        self._messages = [dict(message) for message in self.start.messages]
        self._sources = list(self.start.sources)
        self._sequences = [self._first()] if len(self.start.tokens) else []
        self.media = self.start.media
        self._rewards: list[float] = []
        self._budget_left = self._limits.token_budget
        self._digest = xxhash.xxh3_128(f"{self.start.sample}.{self.attempt}".encode())
        # Of the turn that is being generated: digest before its observation, and what it reads.
        self._before, self._reading = self._digest.hexdigest(), Reading(_NO_TOKENS, branches=False)

    def _first(self) -> GrowingSequence:
        """Return the sequence of the prompt."""
        return GrowingSequence.of(self.start.tokens, self.start.observed)

    @property
    def turns(self) -> int:
        """Number of turns that were generated."""
        return len(self.actions)

    @property
    def tokens(self) -> Array:
        """Tokens that the model reads next, `[len] int32`."""
        return self._sequences[-1].ids

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
        room = self._limits.room - (self._sequences[-1].length if self._sequences else 0)
        return room if self._budget_left is None else min(room, self._budget_left)

    def observe(self, observed: EnvironmentAnswer, recorded: Reading | None = None) -> None:
        """Take the answer to the reset or to the last action; OPENING or WAITING becomes READY or ENDED.

        Args:
            observed: the answer.
            recorded: what the model read, in place of rendering the messages.

        Raises:
            RowError: the messages cannot be rendered, or their media cannot be read.
        """
        self._expect(State.OPENING, State.WAITING)
        self._before = self._digest.hexdigest()
        self.observations.append(observed.without_bytes())
        self._reading = Reading(_NO_TOKENS, branches=False)
        if self._rewards and observed.reward is not None:
            self._rewards[-1] = observed.reward
        if observed.done or observed.truncated:
            self.end(FinishReason.ENV_DONE if observed.done else FinishReason.MAX_TURNS)
        elif self.turns >= self._limits.max_turns:
            self.end(FinishReason.MAX_TURNS)
        else:
            self._read(observed, recorded)

    def _read(self, observed: EnvironmentAnswer, recorded: Reading | None) -> None:
        messages = observed.messages
        if recorded is None:
            messages, self._reading = self._rendered(messages)
        else:
            messages, self._reading = plain_messages(messages), recorded
        reading = self._reading
        if self.turns and messages:
            self._messages += [{"role": "assistant", "content": self.actions[-1]}]
        self._messages += messages
        self._sources = [*([] if reading.branches else self._sources), *reading.sources]
        self.media = reading.media
        cost = len(reading.tokens)
        if reading.branches and self.turns:
            self.branches += 1
            cost = max(0, cost - self._sequences[-1].length)
        elif reading.branches:
            self._sequences.clear()  # the first observation is part of the prompt
        if reading.branches or not self._sequences:
            self._sequences.append(GrowingSequence.of(reading.tokens, reading.observed))
        else:
            self._sequences[-1].read(reading.tokens, reading.observed)
        if self._budget_left is not None and self.turns:
            self._budget_left -= cost
        self.state = State.READY
        if self._free < 1:
            self._drop_context()
            self.end(FinishReason.TOKEN_BUDGET)

    def _drop_context(self) -> None:
        """Remove the observation that leaves no room for an answer, so that the trainer need not read it."""
        if not self.turns:
            self._sequences = [self._first()]
            return
        if self._reading.branches:
            self._sequences.pop()
            self.branches -= 1
            return
        self._sequences[-1].drop_last()

    def _rendered(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], Reading]:
        """Return messages without their media, and what the model reads."""
        if self._prepare is None:
            return messages, Reading(*self._render(messages))
        where = f"the observation before turn {self.turns} of sample {self.start.sample}"
        messages, sources = self._prepare.admit(messages, where)
        tokens, branches = self._render(messages)
        if branches:
            sources = [*self._sources, *sources]
        begins = branches or not self._sequences
        length, before = (0, self._prepare.none) if begins else (self._sequences[-1].length, self.media)
        if not begins and not len(tokens):
            return messages, Reading(tokens, branches, before)
        found = self._prepare.read(length, before or self._prepare.none, tokens, sources, where)
        return messages, Reading(found.tokens, branches, found.media, found.observed, sources)

    def _render(self, messages: list[dict[str, Any]]) -> tuple[Array, bool]:
        """Return the tokens of an observation, and whether they are those of a new sequence."""
        if not self._sequences:
            return self._conversation.prompt([*self._messages, *messages]), False
        if not self.turns:
            if not messages:
                return _NO_TOKENS, False
            if self._messages:
                return self._conversation.prompt([*self._messages, *messages]), True
            return self._conversation.extend((), "", messages).token_ids, False
        answer = self.actions[-1]
        found = self._conversation.extend(self._messages, answer, messages)
        if found.is_faithful:
            return found.token_ids, False
        whole = [*self._messages, {"role": "assistant", "content": answer}, *messages]
        return self._conversation.prompt(whole), True

    def begin(self) -> None:
        """Begin to generate a turn: READY becomes GENERATING."""
        self._expect(State.READY)
        self.state = State.GENERATING

    def generated(self, tokens: Array, logprobs: Array, versions: Array, reason: str) -> Turn:
        """Take a generated turn; GENERATING becomes WAITING or ENDED.

        Returns:
            The turn as it is written down. In state WAITING the environment must be given the last of `actions`.
        """
        self._expect(State.GENERATING)
        cut = reason != FinishReason.STOP
        short = self.max_tokens < self._limits.max_tokens
        turn = self._turn(tokens, logprobs, versions, reason)
        self._sequences[-1].write(tokens, logprobs, versions)
        if self._budget_left is not None:
            self._budget_left -= len(tokens)
        self.actions.append(self._conversation.text(tokens))
        self._rewards.append(0.0)
        self._digest.update(self.observations[-1].digest.encode())
        self._digest.update(np.ascontiguousarray(tokens, np.int32).tobytes() + b"|")
        self.state = State.WAITING
        if cut and short:
            self.end(FinishReason.TOKEN_BUDGET)
        elif cut and self._conversation.needs_stop:
            self.end(FinishReason.LENGTH)
        return turn

    def _turn(self, tokens: Array, logprobs: Array, versions: Array, reason: str) -> Turn:
        position = self.start.sample, self.attempt, self.turns, self._before
        read = self.observations[-1], self._reading.tokens, self._reading.branches
        return Turn(*position, *read, tokens, logprobs, versions, str(reason), media=self._reading.observed)

    def end(self, reason: FinishReason) -> None:
        """End the episode, in any state."""
        self.state, self.reason = State.ENDED, reason

    def last_turn(self) -> Turn:
        """Return what is written down of the end of an episode, in state ENDED."""
        self._expect(State.ENDED)
        position = self.start.sample, self.attempt, self.turns, self._digest.hexdigest()
        seen = self.observations[-1] if len(self.observations) > self.turns else EnvironmentAnswer("", self.turns - 1)
        return Turn(*position, seen, _NO_TOKENS, False, _NO_TOKENS, _NO_LOGPROBS, _NO_TOKENS, ended=str(self.reason))

    def repeat(self, turn: Turn) -> bool:
        """Take a turn that was written down; False if it does not follow what the episode has so far."""
        if turn.attempt > self.attempt and turn.number == 0:
            self.attempt = turn.attempt - 1
            self.restart()
        follows = (turn.attempt, turn.number) == (self.attempt, self.turns)
        waits = self.state in (State.OPENING, State.WAITING) or (turn.ended and self.state is State.ENDED)
        if not (follows and waits) or turn.before != self._digest.hexdigest():
            return False
        if turn.ended:
            self._repeat_end(turn)
            return True
        try:
            reading = self._recorded(turn)
        except StoreError:  # the turn is generated again
            return False
        self.observe(turn.observed, reading)
        if self.state is not State.READY:
            return False
        self.begin()
        self.generated(turn.token_ids, turn.logprobs, turn.versions, turn.finish_reason)
        return True

    def _recorded(self, turn: Turn) -> Reading:
        """Return what the model read before a turn that was written down.

        Raises:
            StoreError: media are lost.
        """
        seen, media = turn.media, self.media
        if self._prepare is not None and seen is not None:
            media = self._prepare.again(media if media is not None and seen.start else self._prepare.none, seen)
        return Reading(turn.context, turn.branches, media, seen, () if seen is None else seen.sources)

    def _repeat_end(self, turn: Turn) -> None:
        if self.state is State.WAITING and turn.observed.reward is not None and self._rewards:
            self._rewards[-1] = turn.observed.reward
        if self.state is not State.ENDED:
            self.observations.append(turn.observed)
        self.end(FinishReason(turn.ended))

    @property
    def reward(self) -> float:
        """Sum of the rewards of the turns."""
        return float(np.sum(self._rewards, dtype=np.float64))

    def sample(self, *, trained: bool = True) -> Sample:
        """Return the sample, in state ENDED; with `trained` false its loss mask is empty."""
        sequences = self._sequences or [self._first()]
        joint = "\n" if self._conversation.needs_stop else ""
        metrics = {f"environment/{name}": value for seen in self.observations for name, value in seen.metrics.items()}
        metrics |= {
            "environment_reward": self.reward,
            "turns": float(self.turns),
            "branches": float(self.branches),
            "attempts": float(self.attempt + 1),
        }
        return Sample(
            tuple(sequence.built(trained=trained) for sequence in sequences),
            joint.join(self.actions),
            self.reason or FinishReason.ERROR,
            metrics,
            np.array(self._rewards, np.float32),
            self._said(),
        )

    def _said(self) -> list[dict[str, Any]]:
        """Return the whole conversation, the last answer included, with hashes in place of the bytes of media."""
        said = [dict(message) for message in self.start.messages]
        for i, seen in enumerate(self.observations):
            said += seen.messages
            if i < self.turns:
                said.append({"role": "assistant", "content": self.actions[i]})
        return said

    def _expect(self, *states: State) -> None:
        if self.state not in states:
            msg = f"sample {self.start.sample} is {self.state.name}, not {' or '.join(state.name for state in states)}"
            raise AssertionError(msg)
