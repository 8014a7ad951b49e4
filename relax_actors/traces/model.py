"""A trace: one sample of a row with everything that was recorded about it, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
import xxhash
from numpy.typing import NDArray

from relax_actors.errors import RowError
from relax_actors.messages.media import MediaSource
from relax_actors.messages.samples import FinishReason, TokenSequence
from relax_actors.traces.plain import MAX_NUMBER, wrong_field

Array = NDArray[Any]


MAX_LOGPROB = 1e-3
"""Log-prob of a sampled token, at most: rounding may take it a little above 0."""


class TraceError(RowError):
    """Trace that is not exact: what is wrong, in which trace and turn, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One sample of a row, as it was generated, rewarded and trained.

    The loss mask, the log-probs and the versions of the sequences are the ones of the column `trajectory`; a trace of
    another program has version 0 where its policy sampled a token.

    Attributes:
        run: name of the run or program that generated it.
        row: id of its row, such as `group.3.1`; the traces of a row are samples of one prompt. Empty if unknown.
        sample: number of the sample in its row.
        step: step that trained the row; None if no step did.
        prompt_tokens: `[prompt_len] int32`, tokens of the row's prompt.
        sequences: token sequences of the sample, from the first token of the prompt on; several if the history
            branched.
        text: text that the model wrote.
        finish_reason: why the sample ended.
        reward: its reward as float32; None if it has none.
        components: parts of the reward by name.
        token_values: name -> `[total] float32`, one number for each token behind the prompt of all sequences. An
            exported run has `reward`, if its reward function scores tokens.
        turn_rewards: `[turns] float32`, reward of each generation; None if turns have none.
        metrics: measurements of the sample.
        prompt: text of the prompt.
        answer: expected answer of the row.
        metadata: further data of the row.
        prompt_messages: the prompt as chat messages; empty for plain text.
        messages: the conversation of an episode with its prompt and its calls of tools; empty for a completion.
        tools: definitions of the tools that the model was shown; empty in an exported run.
        media: media of the prompt and of its observations by reference; the sequences hold none of their features.
        fingerprints: fingerprint of the weights of each version in the sequences, where it is known.
        greedy: whether the sample is the greedy baseline of the others.
        author: actor that generated it; empty in an exported run.
        origin: place in a file, for errors; not compared.

    Raises:
        TraceError: a sequence or a number does not fit the others.
    """

    run: str = ""
    row: str = ""
    sample: int = 0
    step: int | None = None
    prompt_tokens: Array
    sequences: tuple[TokenSequence, ...]
    text: str = ""
    finish_reason: str = FinishReason.STOP.value
    reward: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    token_values: Mapping[str, Array] = field(default_factory=dict)
    turn_rewards: Array | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    prompt: str = ""
    answer: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    prompt_messages: list[dict[str, Any]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    media: tuple[MediaSource, ...] = ()
    fingerprints: Mapping[int, str] = field(default_factory=dict)
    greedy: bool = False
    author: str = ""
    origin: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        where = self.origin or self.name
        if wrong := wrong_field(self):
            name, what = wrong
            msg = f"{where}: {name} is {getattr(self, name)!r:.60}; write {what}"
            raise TraceError(msg)
        if not self.sequences:
            msg = f"{where}: it has no tokens; record the token ids of every turn"
            raise TraceError(msg)
        for number, sequence in enumerate(self.sequences):
            _check_sequence(sequence, f"{where}, sequence {number}")
        if self.turn_rewards is not None and not np.isfinite(self.turn_rewards).all():
            msg = f"{where}: a reward of a turn is not finite; write finite numbers"
            raise TraceError(msg)
        if self.finish_reason not in set(FinishReason):
            known = ", ".join(FinishReason)
            msg = f"{where}: finish reason {self.finish_reason[:60]!r} is unknown; write one of {known}"
            raise TraceError(msg)
        if self.reward is not None and not abs(self.reward) <= MAX_NUMBER:
            msg = f"{where}: its reward is {self.reward}; write a finite number"
            raise TraceError(msg)

    @property
    def name(self) -> str:
        """Run, row and sample, for messages."""
        return f"{self.run or 'a trace'} {self.row} sample {self.sample}".replace("  ", " ")

    @property
    def versions(self) -> tuple[int, int] | None:
        """Oldest and newest version of the weights that sampled a token; None if none did."""
        sampled = np.concatenate([sequence.versions[sequence.sampled] for sequence in self.sequences])
        return (int(sampled.min()), int(sampled.max())) if len(sampled) else None

    @property
    def trained_tokens(self) -> int:
        """Number of tokens with a true loss mask."""
        return sum(int(sequence.loss_mask.sum()) for sequence in self.sequences)

    @property
    def digest(self) -> str:
        """Checksum of all that training reads; raises TraceError."""
        rewards = None if self.turn_rewards is None else self.turn_rewards.astype("<f4").tobytes()
        parts: list[Any] = [self.prompt_tokens.astype("<i4").tobytes(), self.reward, dict(self.components), self.greedy]
        parts += [rewards, dict(self.metrics), self.text, self.finish_reason, self.messages]
        for each in self.sequences:
            parts += [each.token_ids.astype("<i4").tobytes(), each.loss_mask.tobytes()]
            parts += [each.logprobs.astype("<f4").tobytes(), each.sampled.tobytes(), each.player]
            parts.append(None if each.spans is None else each.spans.astype("<i4").tobytes())
        try:
            return xxhash.xxh3_128_hexdigest(msgpack.packb(parts))
        except (TypeError, ValueError, OverflowError) as error:
            msg = f"{self.origin or self.name}: its messages hold no plain data ({error}); correct or remove them"
            raise TraceError(msg) from error


def _check_sequence(sequence: TokenSequence, where: str) -> None:
    """Raise TraceError if a token id is negative, a log-prob is none, or the player has no name."""
    if not isinstance(sequence.player, str):
        msg = f"{where}: player is {sequence.player!r:.60}; write a text"
        raise TraceError(msg)
    if (sequence.token_ids < 0).any():
        msg = f"{where}: token id {int(sequence.token_ids.min())} is negative; write whole numbers of at least 0"
        raise TraceError(msg)
    if not np.isfinite(sequence.logprobs).all():
        msg = f"{where}: a log-prob is not finite; record log-probs of the sampled tokens"
        raise TraceError(msg)
    if len(above := sequence.logprobs[sequence.sampled & (sequence.logprobs > MAX_LOGPROB)]):
        msg = f"{where}: a sampled token has the log-prob {float(above[0]):.6g}, above 0; write logarithms"
        raise TraceError(msg)
