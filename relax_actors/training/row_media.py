"""Media of rows for the roles that compute with the model; nothing for a model that reads text only."""

from __future__ import annotations

import numpy as np

from broker.codec import Array
from broker.subjects import RowId
from relax_actors.config import Config
from relax_actors.engines.protocols.media import PromptMedia
from relax_actors.errors import RelaxError, RowError
from relax_actors.messages import PreparedPrompt
from relax_actors.runtime import Context
from relax_actors.runtime.cells import read_column
from relax_actors.training.prompt_media import MediaReader

MEDIA = "media"
"""Column of the expanded prompt and its media."""


def with_media(columns: tuple[str, ...], config: Config) -> tuple[str, ...]:
    """Return the columns to read of a role that computes with the model: also `media` if the model takes media."""
    return columns if config.media is None else (*columns, MEDIA)


class RowMedia:
    """Resolves the column `media` of rows.

    Args:
        context: context of the actor.
    """

    def __init__(self, context: Context) -> None:
        self._table = context.table
        self._reader = MediaReader(context)

    def of(self, prepared: PreparedPrompt, row: RowId, prompt_tokens: Array | None = None) -> PromptMedia:
        """Return the media of a row; one object for all of its samples.

        Args:
            prepared: column `media` of the row.
            row: id of the row.
            prompt_tokens: `[prompt_len] int32`, the prompt of the row's trajectory; None before there is one.

        Raises:
            StoreError: a segment is lost, and cannot be made again.
            RowError: the trajectory was sampled from another prompt.
        """
        if prompt_tokens is not None and not np.array_equal(prompt_tokens, prepared.tokens):
            msg = "the trajectory's prompt is not the one in the column media; the rollout must sample from it"
            raise RowError(msg)
        return self._reader.read(prepared, row)

    def read(self, rows: list[RowId], prompts: list[Array | None]) -> list[PromptMedia | RelaxError]:
        """Read the media of rows from the table; an error in place of media that cannot be read.

        Args:
            rows: ids of the rows.
            prompts: prompt of the trajectory of each row; None where it could not be read.
        """
        cells, found = read_column(self._table, rows, MEDIA, PreparedPrompt), list[PromptMedia | RelaxError]()
        for row, prompt, prepared in zip(rows, prompts, cells, strict=True):
            try:
                found.append(prepared if isinstance(prepared, RelaxError) else self.of(prepared, row, prompt))
            except RelaxError as error:
                found.append(error)
        return found
