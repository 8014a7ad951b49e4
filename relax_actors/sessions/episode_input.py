"""What an episode begins with, what it reads before each turn, and its limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

from relax_actors.engines.protocols.media import PromptMedia
from relax_actors.messages import MediaSource, ObservedMedia

if TYPE_CHECKING:  # imports what only models that see or hear need
    from relax_actors.sessions.observation_media import Observation

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an episode.

    Attributes:
        max_turns: turns of the model.
        max_tokens: sampled tokens of a turn.
        room: tokens of a sequence, observations included.
        token_budget: tokens of all turns and observations behind the prompt; None if only `room` counts.
    """

    max_turns: int
    max_tokens: int
    room: int
    token_budget: int | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """What an episode begins with.

    Attributes:
        sample: index of the sample.
        seed: of the row.
        greedy: whether the model chooses the most likely tokens.
        tokens: `[len] int32`, the prompt; empty if the environment gives it.
        messages: the prompt as chat messages; empty for plain text.
        players: names of the players, of whom the first one begins; empty if there is one side alone.
        trained: players whose tokens are trained; the reward of the sample is the sum of theirs.
        media: media of the prompt; None for a model that reads text only.
        sources: their files.
        observed: media of a prompt that is not the one in the row's column `media`; else None.
    """

    sample: int
    seed: int
    tokens: Array
    messages: Sequence[dict[str, Any]] = ()
    players: Sequence[str] = ()
    trained: Sequence[str] = ()
    media: PromptMedia | None = None
    sources: Sequence[MediaSource] = ()
    observed: ObservedMedia | None = None
    greedy: bool = False


class Media(Protocol):
    """Prepares what environments show to a model that sees or hears; see `relax_actors.sessions.episode_media`.

    Attributes:
        none: media of no tokens.
    """

    none: PromptMedia

    def admit(self, messages: Sequence[dict[str, Any]], where: str) -> tuple[list[dict[str, Any]], list[MediaSource]]:
        """Return messages whose parts are texts and kinds of media, and their media in order.

        Raises:
            RowError: a medium may not be used, or cannot be read.
        """

    def read(
        self, length: int, before: PromptMedia, tokens: Array, sources: Sequence[MediaSource], where: str
    ) -> Observation:
        """Expand the placeholders of tokens that follow `length` others, which have the media `before`.

        Raises:
            RowError: a medium cannot be decoded, or does not fit its placeholder.
        """

    def again(self, before: PromptMedia, observed: ObservedMedia) -> PromptMedia:
        """Return the media of a sequence that reads what was prepared before.

        Raises:
            StoreError: they are lost.
        """


@dataclass(frozen=True, slots=True)
class Reading:
    """What a sequence reads before a turn.

    Attributes:
        tokens: `[len] int32`.
        branches: whether a new sequence begins with them.
        media: media of the sequence up to here; None for a model that reads text only.
        observed: those of these tokens, as cells hold them; empty if they are text alone.
        sources: files of the media in place of those of the whole conversation if it branches, else behind them.
    """

    tokens: Array
    branches: bool
    media: PromptMedia | None = None
    observed: Sequence[ObservedMedia] = ()
    sources: Sequence[MediaSource] = ()
