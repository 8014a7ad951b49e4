"""Episode: the session of a sample that the run's environment plays; pure data.

The model reads each `step` of the environment; `ask` gives the request of its turn, and `say` takes the turn, until one
of them ends the episode. With players the model plays each of them: a player sees the observations that the environment
gives to it, and continues its own turns.

Invariant: the tokens of a sequence only grow. A turn holds what the model read and sampled, never decoded and encoded
again; where the chat template would write the conversation in another way, a new sequence begins.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import xxhash

from broker.codec import Array
from relax_actors.engines.protocols import Generation, GenerationRequest
from relax_actors.engines.protocols.media import PromptMedia
from relax_actors.errors import RowError, StoreError, TooLongError
from relax_actors.messages import EnvironmentAnswer, FinishReason, Sample, SessionState, SessionStep, SessionTurn, Turn
from relax_actors.messages.samples import PLAYER_REWARD
from relax_actors.messages.session_log import ROOT
from relax_actors.runtime.seeds import derive_seed
from relax_actors.sessions.conversation import Conversation
from relax_actors.sessions.episode_reader import NO_TOKENS, EpisodeReader
from relax_actors.sessions.episode_start import Limits, Start
from relax_actors.sessions.forest import Continuation, Forest, untrained

Message = dict[str, Any]


class Episode:
    """One sample of a row.

    Attributes:
        attempt: how often the sample has begun again.
        forest: its turns.
        actions: what the model wrote, a text for each turn.
        seen: what the environment answered to its reset and to each action.
        reading: what the model reads before the turn that is being generated; None while the environment has to answer.
        player: player who reads it, or has acted last; empty without players.
        state: how the episode ended; None before.
        failure: last failure of its environment.
    """

    def __init__(self, start: Start, limits: Limits, conversation: Conversation) -> None:
        self.start, self._limits, self._conversation = start, limits, conversation
        self.attempt, self.failure = -1, ""
        self.restart()

    def restart(self) -> None:
        """Begin again, under the next attempt."""
        self.attempt += 1
        self.forest, self.actions, self.seen = Forest(), list[str](), list[EnvironmentAnswer]()
        self.reading: Continuation | None = None
        self.state: SessionState | None = None
        self._players = tuple(self.start.players or ("",))
        self.player = self._players[0]
        self._reader = EpisodeReader(self.start, self._conversation, self.forest)
        # The last turn of each player.
        self._last: dict[str, int] = {}
        # Rewards of turns, and of players that have not acted yet.
        self._rewards: list[float] = []
        self._owed = dict.fromkeys(self._players, 0.0)
        self._budget_left = self._limits.token_budget
        self._digest = xxhash.xxh3_128(f"{self.start.sample}.{self.attempt}".encode())
        self._before = self._digest.hexdigest()

    @property
    def reason(self) -> FinishReason | None:
        """Why the episode ended; None before."""
        return None if self.state is None else FinishReason(self.state.reason)

    @property
    def turns(self) -> int:
        """Number of turns that were generated."""
        return len(self.forest.turns)

    @property
    def tokens(self) -> Array:
        """Tokens that the acting player has read and written, and reads next, `[len] int32`."""
        reading = self.reading or Continuation(self._last.get(self.player, ROOT), NO_TOKENS, [])
        tokens: Array = np.concatenate([self.forest.tokens(reading.parent), reading.observed]).astype(np.int32)
        return tokens

    @property
    def media(self) -> PromptMedia | None:
        """Media of `tokens`; None for a model that reads text only."""
        return self._reader.media[self._last.get(self.player, ROOT)] if self.reading is None else self.reading.media

    @property
    def held(self) -> int:
        """Number of tokens that the conversations of all players hold in the cache of an engine."""
        ends = {**self._last, **({} if self.reading is None else {self.player: self.reading.parent})}
        return sum(map(self.forest.length, ends.values())) + (0 if self.reading is None else len(self.reading.observed))

    @property
    def branches(self) -> int:
        """Sequences that began because the template rewrote the conversation."""
        begins = self.reading is not None and self.reading.parent == ROOT and self.player in self._last
        return sum(turn.parent == ROOT for turn in self.forest.turns) - len(self._last) + begins

    @property
    def max_tokens(self) -> int:
        """Largest number of tokens of the next turn."""
        reading, limits = self._expected(), self._limits
        room = limits.room - self.forest.length(reading.parent) - len(reading.observed)
        budget = room if self._budget_left is None else self._budget_left
        return min(limits.max_tokens, room, budget)

    @property
    def seed(self) -> int:
        """Seed of the next turn, from the row's seed, the sample, the turn and the attempt alone."""
        again = (self.attempt,) if self.attempt else ()
        return derive_seed(self.start.seed, "turn", self.start.sample, self.turns, *again)

    def step(self, seen: EnvironmentAnswer, recorded: Turn | None = None) -> None:
        """Take the environment's answer to the reset or the last action.

        The tokens of a turn that was `recorded` are taken in place of rendering the messages.

        Raises:
            RowError: the messages cannot be rendered, their media cannot be read, or a player is unknown.
            StoreError: media of `recorded` are lost; the episode is unchanged.
        """
        player = seen.player or self.player
        parent = self._last.get(player, ROOT)
        reading = None if recorded is None else self._reader.repeat(parent, seen.messages, recorded)
        self._before = self._digest.hexdigest()
        self.seen.append(seen.without_bytes())
        self._take_rewards(seen)
        if seen.done or seen.truncated:
            self.end(FinishReason.ENV_DONE if seen.done else FinishReason.MAX_TURNS)
        elif self.turns >= self._limits.max_turns:
            self.end(FinishReason.MAX_TURNS)
        else:
            self._check_player(player)
            self.player = player
            try:
                where = f"the observation before turn {self.turns} of sample {self.start.sample}"
                self._read(reading or self._reader.read(parent, seen.messages, player, where))
            except TooLongError:  # like messages that are tokenized and leave no room for an answer
                self.end(FinishReason.TOKEN_BUDGET)

    def _check_player(self, player: str) -> None:
        if player not in self._players:
            msg = f"the environment names the player {player!r}; environment.players are {', '.join(self._players)}"
            raise RowError(msg)

    def _take_rewards(self, seen: EnvironmentAnswer) -> None:
        """Add rewards to the last turn of the player that has acted, and of those that are named."""
        if self._rewards and seen.reward is not None:
            self._rewards[-1] += seen.reward
        for player, reward in seen.rewards.items():
            self._check_player(player)
            if (last := self._last.get(player)) is not None:
                self._rewards[last] += reward
            else:
                self._owed[player] += reward

    def _read(self, reading: Continuation) -> None:
        self.reading = reading
        if self._budget_left is not None and (last := self._last.get(self.player)) is not None:
            known = self.forest.length(last) if reading.parent == ROOT else 0
            self._budget_left -= max(0, len(reading.observed) - known)
        if self.max_tokens < 1:
            self.end(FinishReason.TOKEN_BUDGET)

    def ask(self, template: GenerationRequest) -> GenerationRequest:
        """Return the request of the next turn, with the settings of a template."""
        most = min(self.max_tokens, template.max_tokens)
        return replace(
            template,
            tokens=self.tokens,
            seed=self.seed,
            samples=1,
            greedy_samples=int(self.start.greedy),
            max_tokens=most,
            min_tokens=min(template.min_tokens, most),
            media=self.media,
        )

    def say(self, answer: Generation) -> SessionTurn:
        """Take the model's answer, and return the turn to record; the environment answers next."""
        reading = self._expected()
        before, message = self.forest.length(reading.parent), self._message(answer.tokens)
        return self._enter(reading.turn(answer, before, message, player=self.player))

    def _message(self, tokens: Array) -> Message:
        return {"role": "assistant", "content": self._conversation.text(tokens)}

    def _enter(self, turn: Turn) -> SessionTurn:
        reading, was_cut = self._expected(), turn.finish_reason != FinishReason.STOP
        has_less_room = self.max_tokens < self._limits.max_tokens
        seen, plain = self.seen[-1], replace(turn, messages=[])
        written = SessionTurn(self.start.sample, self.turns, plain, self.attempt, self._before, seen)
        number = self._last[self.player] = self.forest.add(turn)
        self._reader.media[number], self.reading = reading.media, None
        self.actions.append(turn.messages[-1]["content"])
        if self._budget_left is not None:
            self._budget_left -= len(turn.tokens)
        self._rewards.append(self._owed[self.player])
        self._owed[self.player] = 0.0
        self._digest.update(seen.digest.encode())
        self._digest.update(np.ascontiguousarray(turn.tokens, np.int32).tobytes() + b"|")
        if was_cut and has_less_room:
            self.end(FinishReason.TOKEN_BUDGET)
        elif was_cut and self._conversation.needs_stop:
            self.end(FinishReason.LENGTH)
        return written

    def end(self, reason: FinishReason) -> None:
        """End the episode."""
        self.reading, unread = None, self.seen[-1] if len(self.seen) > self.turns else None
        before = self._digest.hexdigest()
        self.state = SessionState(
            self.start.sample, self.attempt, str(reason), number=self.turns, before=before, seen=unread
        )

    def repeat(self, written: SessionTurn | SessionStep | SessionState) -> bool:
        """Replay a recorded turn or end; False if it does not follow."""
        if not isinstance(written, SessionTurn):
            return isinstance(written, SessionState) and self._repeat_end(written)
        if written.attempt > self.attempt and written.number == 0:
            self.attempt = written.attempt - 1
            self.restart()
        seen, turn = written.seen, written.turn
        if self.state is not None or seen is None or not self._follows(written, seen):
            return False
        if turn.player not in ("", seen.player or self.player):
            return False
        try:
            self.step(seen, turn)
        except StoreError:  # lost media: the turn is generated again
            return False
        if (reading := self.reading) is None:
            return False
        messages = [*reading.new, self._message(turn.tokens)]
        self._enter(replace(turn, parent=reading.parent, player=self.player, messages=messages))
        return True

    def _repeat_end(self, written: SessionState) -> bool:
        if not written.reason or not self._follows(written, written.seen):
            return False
        if self.state is None and written.seen is not None:
            self._take_rewards(written.seen)
            self.seen.append(written.seen)
        self.end(FinishReason(written.reason))
        return True

    def _follows(self, written: SessionTurn | SessionState, seen: EnvironmentAnswer | None) -> bool:
        players = () if seen is None else (seen.player or self.player, *seen.rewards)
        place = (written.attempt, written.number, written.before)
        is_next = place == (self.attempt, self.turns, self._digest.hexdigest())
        return is_next and self.reading is None and set(players) <= set(self._players)

    @property
    def rewards(self) -> dict[str, float]:
        """Reward of each player, summed over its turns; without players under the empty name."""
        return {
            player: float(np.sum([*self._turn_rewards(player), self._owed[player]], dtype=np.float64))
            for player in self._players
        }

    def _turn_rewards(self, player: str) -> list[float]:
        turns = zip(self.forest.turns, self._rewards, strict=True)
        return [reward for turn, reward in turns if turn.player == player]

    def sample(self, *, trained: bool = True, everyone: bool = False) -> Sample:
        """Return the sample of an ended episode; its loss mask is empty unless it is trained.

        The mask covers the trained players, or `everyone`, as in held-out rows.
        """
        start, rewards = self.start, self.rewards
        acted = [player for player in self._players if player in self._last] or [self._players[0]]
        counted = start.trained if start.players else ("",)
        joint = "\n" if self._conversation.needs_stop else ""
        metrics = {f"environment/{name}": value for seen in self.seen for name, value in seen.metrics.items()}
        metrics |= {f"{PLAYER_REWARD}{name}": rewards[name] for name in start.players}
        metrics |= {
            "environment_reward": float(sum(rewards[name] for name in counted)),
            "turns": float(self.turns),
            "branches": float(self.branches),
            "attempts": float(self.attempt + 1),
        }
        shown = set(acted if everyone else counted) if trained else set()
        sequences = self.forest.sequences(players=self._players)
        sequences = sequences or [untrained(start.tokens, acted[0], start.observed)]
        return Sample(
            tuple(one if one.player in shown else one.masked() for one in sequences),
            joint.join(self.actions),
            self.reason or FinishReason.ERROR,
            metrics,
            np.array([reward for player in acted for reward in self._turn_rewards(player)], np.float32),
            self._dialogue(),
        )

    def _dialogue(self) -> list[Message]:
        """Return the whole conversation, with hashes in place of the bytes of media."""
        said = [dict(message) for message in self.start.messages]
        player = self._players[0]
        for number, seen in enumerate(self.seen):
            player = seen.player or player
            by = {"player": player} if player else {}
            said += [{**message, **by} for message in seen.messages]
            if number < self.turns:
                said.append({"role": "assistant", "content": self.actions[number], **by})
        return said

    def _expected(self) -> Continuation:
        assert self.reading is not None, f"sample {self.start.sample} has nothing to read"  # noqa: S101
        return self.reading
