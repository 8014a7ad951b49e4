"""Requests between gateway and rollout actors over NATS: answered once, never stored."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.messages.environment import EnvironmentAnswer

Array = NDArray[Any]
MAX_CHOICES = 16
"""Most answers of one request (`n`)."""
MAX_STOPS = 16
"""Most stop strings of a request, and most stop tokens."""
MAX_GRAMMAR = 64 << 10
"""Most characters of the grammar of a request."""
STILL_WORKING = b"working"
"""What an actor sends, in no envelope, while a client waits. An empty message would end the answers: the server forgets
the reply subject of a request behind one."""


def _no_ints() -> Array:
    return np.zeros(0, np.int32)


def _no_floats() -> Array:
    return np.zeros(0, np.float32)


class Refusal(StrEnum):
    """Why a request was not answered."""

    BUSY = "busy"
    """Too many requests wait; try again."""
    ELSEWHERE = "elsewhere"
    """This actor does not hold the session; another one may."""
    ENDED = "ended"
    """The session is over."""
    INVALID = "invalid"
    """The request itself is wrong."""
    TOO_LONG = "too_long"
    """The conversation leaves no room for an answer."""
    ENVIRONMENT = "environment"
    """The environment of the session failed."""
    FAILED = "failed"
    """The actor failed, or the broker or store that it writes to; try again."""


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """Ask for one answer of the policy.

    Attributes:
        call: id of the request; the same id always has the same answer.
        tokens: `[len] int32`, the prompt, unless it is a text or a conversation of a session; with one placeholder for
            each medium of `messages`.
        session: the session that the conversation belongs to; empty for none.
        player: player of the session whose conversation it is; empty in a run without players.
        text: the prompt of a session as text, which its actor tokenizes.
        messages: the conversation of a session, as chat messages; without a session, one that shows media.
        tools: tools that the model may call, as JSON schemas.
        settings: further variables of the chat template.
        max_tokens: largest number of tokens of the answer; 0 for rollout.max_tokens.
        temperature: None for rollout.temperature; 0 chooses the most likely tokens. Ignored in a session.
        top_p: None for rollout.top_p. Ignored in a session.
        seed: sole source of the random numbers. Ignored in a session, whose seeds follow from its row.
        stop: strings that end the answer, besides rollout.stop.
        ends: further strings that end the answer; unlike `stop`, they are part of what the client sees.
        stop_ids: tokens that end the answer, besides those of the tokenizer.
        n: number of answers; without a session one.
        affinity: requests with the same text share a prefix that an engine may have cached.
        is_retry: whether the client repeats a request whose answer it did not get.
        seconds: time after which nobody waits for the answer.
        stream: whether pieces of the answer are wanted while it is generated.
        counts: whether the tokens of the prompt alone are wanted, and no answer.
        grammar: that the answer follows; empty for none. Not in a session, whose samples are trained.
    """

    call: str
    tokens: Array = field(default_factory=_no_ints)
    session: str = ""
    player: str = ""
    text: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    seed: int = 0
    stop: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    stop_ids: list[int] = field(default_factory=list)
    n: int = 1
    affinity: str = ""
    is_retry: bool = False
    seconds: float = 60.0
    stream: bool = False
    counts: bool = False
    grammar: str = ""

    def __post_init__(self) -> None:
        if self.grammar and (self.session or len(self.grammar) > MAX_GRAMMAR):
            msg = f"request {self.call[:80]!r} has a grammar in a session, or one of more than {MAX_GRAMMAR} characters"
            raise ValueError(msg)
        if self.tokens.ndim != 1 or self.tokens.dtype != np.int32:
            msg = f"tokens of a request are {self.tokens.dtype}{list(self.tokens.shape)}, not [len] int32"
            raise ValueError(msg)
        if self.max_tokens < 0 or len(self.stop) > MAX_STOPS or "" in self.stop or not 0 < self.seconds <= 1e6:  # noqa: PLR2004
            msg = f"max_tokens, stop or seconds of request {self.call[:80]!r} are out of bounds"
            raise ValueError(msg)
        if not 1 <= self.n <= (MAX_CHOICES if self.session else 1):
            msg = f"request {self.call[:80]!r} asks for {self.n} answers"
            raise ValueError(msg)
        if len(self.stop_ids) > MAX_STOPS or any(not 0 <= token < 2**31 for token in self.stop_ids):
            msg = f"stop_ids of request {self.call[:80]!r} are out of bounds"
            raise ValueError(msg)
        if self.temperature is not None and not 0 <= self.temperature <= 100:  # noqa: PLR2004
            msg = f"temperature of a request is {self.temperature}"
            raise ValueError(msg)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            msg = f"top_p of a request is {self.top_p}"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class GeneratePiece:
    """New tokens of an answer; the `GenerateAnswer` that follows has all of them.

    Attributes:
        start: position of the first of the tokens in the answer. Tokens that an engine had to sample again come again.
        prompt: `[prompt_len] int32`, what the model read.
        tokens: `[count] int32`.
        logprobs: `[count] float32`.
        index: number of the answer, where a call asks for several.
    """

    start: int
    prompt: Array = field(default_factory=_no_ints)
    tokens: Array = field(default_factory=_no_ints)
    logprobs: Array = field(default_factory=_no_floats)
    index: int = 0

    def __post_init__(self) -> None:
        if self.start < 0 or self.tokens.shape != self.logprobs.shape or self.tokens.ndim != 1 or self.prompt.ndim != 1:
            msg = f"tokens and log-probs from position {self.start} of an answer differ in length"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class CallNote:
    """What became of a call at its client. It has no answer.

    Attributes:
        call: id of the call.
        arrived: whether the client has the answer; else the client has left, and generation ends.
    """

    call: str
    arrived: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the answers to a call.

    Attributes:
        tokens: `[len] int32`, with the stop token.
        logprobs: `[len] float32`.
        versions: `[len] int32`, version of the weights that sampled each token.
        finish_reason: a `FinishReason`.
        fingerprint: fingerprint of the newest of these versions.
        call: id of the call that it was first given to; ids of tool calls follow from it.
    """

    tokens: Array = field(default_factory=_no_ints)
    logprobs: Array = field(default_factory=_no_floats)
    versions: Array = field(default_factory=_no_ints)
    finish_reason: str = ""
    fingerprint: str = ""
    call: str = ""

    def __post_init__(self) -> None:
        lengths = {len(array) for array in (self.tokens, self.logprobs, self.versions) if array.ndim == 1}
        if len(lengths) != 1:
            msg = "tokens, logprobs and versions of an answer differ in length"
            raise ValueError(msg)


def _fields(choice: Choice) -> dict[str, Any]:
    return {field.name: getattr(choice, field.name) for field in fields(Choice)}


@dataclass(frozen=True, slots=True)
class GenerateAnswer(Choice):
    """Answers to a call, the first one in its own fields; or why there is none.

    Attributes:
        refusal: a `Refusal`; empty if there is an answer.
        detail: text for the client that asked.
        prompt: `[prompt_len] int32`, what the model read.
        others: the answers behind the first.
    """

    refusal: str = ""
    detail: str = ""
    prompt: Array = field(default_factory=_no_ints)
    others: list[Choice] = field(default_factory=list)

    def __post_init__(self) -> None:
        Choice.__post_init__(self)
        if self.prompt.ndim != 1:
            msg = f"the prompt of an answer has the shape {list(self.prompt.shape)}"
            raise ValueError(msg)

    @property
    def first(self) -> Choice:
        """The first answer alone."""
        return Choice(**_fields(self))

    @property
    def choices(self) -> list[GenerateAnswer]:
        """The answers, each as if it were the only one."""
        return [GenerateAnswer(prompt=self.prompt, **_fields(one)) for one in (self, *self.others)]


@dataclass(frozen=True, slots=True)
class SessionCall:
    """Take a waiting sample, keep it, step its environment, or end it.

    Attributes:
        kind: "take", "keep", "show", "environment" or "end".
        session: the session; empty to take one.
        lease: seconds without a request after which the session is offered again.
        reward: the agent's own reward, with "end"; None if it has none.
        rewards: those of players by name, with "end"; a player that is not named has reward 0.
        error: why the agent failed, with "end"; empty if it did not.
        metrics: measurements of the agent, with "end".
        turn: number of the action, with "environment"; -1 resets the environment.
        action: text for the environment.
    """

    kind: str
    session: str = ""
    lease: float = 30.0
    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    error: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    turn: int = -1
    action: str = ""

    def __post_init__(self) -> None:
        numbers = [self.lease, *self.metrics.values(), *self.rewards.values(), self.reward or 0.0]
        is_known = self.kind in ("take", "keep", "show", "environment", "end")
        if not is_known or not np.isfinite(numbers).all() or self.lease <= 0 or self.turn < -1:
            msg = (
                f"call {self.kind[:40]!r} of session {self.session[:80]!r} has an unknown kind or a number that is none"
            )
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class SessionAnswer:
    """State of a session, or why the call was refused.

    Attributes:
        refusal: a `Refusal`; empty if the call was done. A "take" that finds no sample has no session.
        detail: text for the client that asked.
        session: the session.
        task: what the agent is to do: `prompt` (text), `messages`, `answer` if agent.shows_answer, `metadata`.
        seconds: time until the session ends by itself.
        turns: answers given so far.
        seen: what the environment answered; None to other calls.
    """

    refusal: str = ""
    detail: str = ""
    session: str = ""
    task: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    turns: int = 0
    seen: EnvironmentAnswer | None = None
