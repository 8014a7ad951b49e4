"""Samples of a prompt as objects: token sequences with masks, log-probs and versions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from broker.errors import CodecError
from broker.items import check_items
from relax_actors.messages.media import ObservedMedia

Array = NDArray[Any]
PLAYER_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}", re.ASCII)
"""Names of the players of an episode."""
PLAYER_REWARD = "reward/"
"""Begin of the names of the metrics with the reward of each player."""
NOT_SAMPLED = -1
"""Version of a token that no policy sampled: from the prompt, a tool's answer or an observation."""


class FinishReason(StrEnum):
    """Why a sample ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ENV_DONE = "env_done"
    MAX_TURNS = "max_turns"
    TOKEN_BUDGET = "token_budget"  # noqa: S105 no password
    TIMEOUT = "timeout"
    ERROR = "error"


TRUNCATED = frozenset(
    {FinishReason.LENGTH, FinishReason.ABORT, FinishReason.MAX_TURNS, FinishReason.TOKEN_BUDGET, FinishReason.TIMEOUT}
)
"""Reasons of samples that were cut off."""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """The tokens that the model read and wrote, in order; arrays are `[len]` unless noted.

    Attributes:
        token_ids: int32, from the first token of the prompt to the last token.
        loss_mask: bool, true for trained tokens, which the policy sampled; false for the first token.
        logprobs: float32, natural log-prob that each token was sampled with; 0 where no policy sampled it.
        versions: int32, version of the weights that sampled each token; -1 where no policy sampled it.
        spans: `[spans, 2] int32`, begin and end of each generation (a turn of the model), in order; None if each run of
            sampled tokens is one generation.
        routed_experts: `[len - 1, moe_layers, experts_per_token] int16`, experts chosen for each token but the last,
            -1 where unknown; only with trainer.router_replay.
        player: player of an episode whose conversation it is; empty in episodes without players.
        observed: media that the sequence reads after its prompt, in order. A first one that starts at token 0 is in
            place of the row's prompt.
        entropies: float32, entropy of the policy in nats at each token; 0 where no policy sampled it. None if they are
            not recorded.

    Raises:
        ValueError: the per-token arrays differ in length.
    """

    token_ids: Array
    loss_mask: Array
    logprobs: Array
    versions: Array
    spans: Array | None = None
    routed_experts: Array | None = None
    player: str = ""
    observed: tuple[ObservedMedia, ...] = ()
    entropies: Array | None = None

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.loss_mask), len(self.logprobs), len(self.versions)}
        if len(lengths) > 1:
            msg = (
                f"a sequence has {len(self.token_ids)} token_ids, {len(self.loss_mask)} loss_mask, "
                f"{len(self.logprobs)} logprobs and {len(self.versions)} versions; give one of each for every token"
            )
            raise ValueError(msg)
        if self.loss_mask.dtype != np.bool_ or (self.loss_mask & (self.versions < 0)).any():
            msg = "loss_mask of a sequence must be bool, and true only where the policy sampled (version of at least 0)"
            raise ValueError(msg)

    @classmethod
    def of_completion(cls, prompt: Array, tokens: Array, logprobs: Array, versions: Array) -> TokenSequence:
        """Build the sequence of a prompt and one sampled completion, all of which is trained.

        Args:
            prompt: `[prompt_len] int32`.
            tokens: `[len] int32`, the completion.
            logprobs: `[len] float32`.
            versions: `[len] int32`.
        """
        before = len(prompt)
        return cls(
            np.concatenate([prompt, tokens]).astype(np.int32),
            np.arange(before + len(tokens)) >= before,
            np.concatenate([np.zeros(before, np.float32), logprobs]).astype(np.float32),
            np.concatenate([np.full(before, NOT_SAMPLED, np.int32), versions]).astype(np.int32),
        )

    def masked(self) -> TokenSequence:
        """Return the sequence with no token trained."""
        return replace(self, loss_mask=np.zeros_like(self.loss_mask))

    @property
    def sampled(self) -> Array:
        """True for tokens that a policy sampled, `[len] bool`."""
        sampled: Array = self.versions >= 0
        return sampled


@dataclass(frozen=True, slots=True)
class Sample:
    """One attempt at the prompt: a completion, or an episode with an environment.

    Attributes:
        sequences: one if the history only grew, as in a completion; several if it branched.
        text: what the model wrote, decoded.
        finish_reason: why the sample ended.
        metrics: measurements of the sample, such as turns, tool calls or the environment's reward.
        turn_rewards: `[turns] float32`, reward of each generation of an episode in the order of the spans of the
            sequences; None if turns have no rewards.
        messages: the conversation of an episode, for reward functions that read it.
    """

    sequences: tuple[TokenSequence, ...]
    text: str = ""
    finish_reason: str = FinishReason.STOP
    metrics: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: Array | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def tokens(self) -> Array:
        """Sampled tokens of all sequences, concatenated, `[sampled] int32`."""
        return np.concatenate([s.token_ids[s.sampled] for s in self.sequences])

    @property
    def logprobs(self) -> Array:
        """Log-probs of `tokens`, `[sampled] float32`."""
        return np.concatenate([s.logprobs[s.sampled] for s in self.sequences])

    @property
    def versions(self) -> Array:
        """Versions of the weights that sampled `tokens`, `[sampled] int32`."""
        return np.concatenate([s.versions[s.sampled] for s in self.sequences])


def runs(flags: Array) -> Array:
    """Find the begin and end of each run of true values, `[runs, 2] int32`."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return edges.reshape(-1, 2).astype(np.int32)


MAX_ITEMS = 1 << 20
"""Texts, numbers, lists and dicts of the conversations of a row."""


def pack_conversations(conversations: Sequence[Sequence[dict[str, Any]]]) -> NDArray[np.uint8]:
    """Return conversations as `[bytes] uint8`; raises ValueError for other than plain data."""
    try:
        return np.frombuffer(msgpack.packb([list(c) for c in conversations], use_bin_type=True), np.uint8)
    except (TypeError, OverflowError) as error:
        msg = f"the conversation of a sample cannot be stored: {error}"
        raise ValueError(msg) from error


def unpack_conversations(packed: NDArray[Any], samples: int) -> list[list[dict[str, Any]]]:
    """Return the conversations of `pack_conversations`.

    Raises:
        ValueError: the array does not hold a conversation for each sample.
    """
    data = packed.astype(np.uint8).tobytes()
    try:
        check_items(data, MAX_ITEMS)
        conversations: list[list[dict[str, Any]]] = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except (CodecError, ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        msg = f"the conversations of a trajectory are malformed: {str(error)[:200]}"
        raise ValueError(msg) from error
    is_list = isinstance(conversations, list) and len(conversations) == samples
    messages = (m for c in conversations for m in (c if isinstance(c, list) else [c, None])) if is_list else ()
    if not is_list or not all(isinstance(message, dict) for message in messages):
        msg = f"the conversations of a trajectory are not {samples} lists of messages"
        raise ValueError(msg)
    return conversations


def sampling_versions(versions: Array) -> list[int]:
    """Ascending versions that sampled tokens, of `[total]` integers with -1 for none."""
    if len(versions) and versions[0] >= 0 and (versions == versions[0]).all():
        return [int(versions[0])]
    sampled_by: list[int] = np.unique(versions[versions >= 0]).tolist()
    return sampled_by


def fingerprints_of(versions: Array, known: Mapping[int, str]) -> list[str]:
    """Fingerprints as a trajectory stores them.

    Args:
        versions: `[total]` integers, version that sampled each token, or -1.
        known: fingerprints by version; versions without one get an empty string.
    """
    fingerprints = [known.get(version, "") for version in sampling_versions(versions)]
    return fingerprints if any(fingerprints) else []
