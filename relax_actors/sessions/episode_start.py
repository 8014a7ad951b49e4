"""What the episodes of a row begin with, and their limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from broker.codec import Array
from broker.subjects import RowId
from relax_actors.config.environment import EnvironmentSection
from relax_actors.engines.protocols import GenerationRequest
from relax_actors.engines.protocols.media import PromptMedia
from relax_actors.messages import MediaSource, ObservedMedia, Prompt
from relax_actors.sessions.conversation import Conversation

if TYPE_CHECKING:  # imports what only models that see or hear need
    from relax_actors.sessions.observation_media import ObservationMedia


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
        row: the row.
        sample: index of the sample.
        seed: seed of the row.
        tokens: `[len] int32`, the prompt; empty if the environment gives it.
        messages: the prompt as chat messages; empty for plain text.
        players: names of the players, the first of whom begins; empty without players.
        trained: players whose tokens are trained; the reward of the sample is the sum of their rewards.
        media: media of the prompt; None for a model that reads text only.
        sources: their files.
        observed: media of a prompt other than that in the row's column `media`; else None.
        greedy: whether the model chooses the most likely tokens.
        prepare: prepares further media; None for a model that reads text only.
    """

    row: RowId
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
    prepare: ObservationMedia | None = None


def starts_of(
    first: Start, template: GenerationRequest, conversation: Conversation, section: EnvironmentSection
) -> list[Start]:
    """Return what the episodes of a row begin with.

    `template` has the number of samples, of which the last ones are greedy. The conversation may add tools to the
    prompt; `section` says where the prompt comes from, and who plays.

    Raises:
        RowError: the prompt cannot be rendered.
    """
    first = replace(first, players=section.players, trained=section.trained_players)
    if section.prompt == "environment":
        none = None if first.prepare is None else first.prepare.reader.none
        first = replace(first, tokens=np.zeros(0, np.int32), messages=[], media=none, sources=())
    elif conversation.offers_tools and first.messages:
        first = replace(first, tokens=conversation.prompt(first.messages))
        if (prepare := first.prepare) is not None:
            where = f"the prompt with its tools of {first.row}"
            read = prepare.append(0, prepare.reader.none, first.tokens, first.sources, first.row, where)
            first = replace(first, tokens=read.tokens, media=read.media, observed=read.observed)
    sampled = template.samples - template.greedy_samples
    return [replace(first, sample=i, greedy=i >= sampled) for i in range(template.samples)]


def task_of(prompt: Prompt) -> dict[str, Any]:
    """Return a row's task for an environment; `stored` media have their paths in the store."""
    task = {"prompt": prompt.messages or prompt.text, "answer": prompt.answer, "metadata": prompt.metadata}
    if prompt.media:
        task["media"] = [{"kind": one.kind, "path": one.path, "stored": one.stored} for one in prompt.media]
    return task
