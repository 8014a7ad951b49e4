"""Role `media`: prepares prompts with media, once for all roles that compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from relax_actors.errors import ConfigError
from relax_actors.messages import PreparedPrompt
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.runtime import Role, Row
from relax_actors.runtime.role import More, Results


class MediaRole(Role):
    """Decodes media, stores their features, and expands the prompt's placeholders.

    A prompt of text alone gets its column, too: it needs rotary positions.
    """

    reads: ClassVar = ("prompt",)
    writes: ClassVar = "media"
    kinds: ClassVar = ("group", "eval")
    spec: ClassVar = RoleSpec(section="media", requires="media", rows="generated", start_order=30)

    def setup(self) -> None:
        """Load the family of the model, the tokenizer and the settings."""
        from relax_actors.data.download import Downloads  # noqa: PLC0415 `relax check` loads every role
        from relax_actors.training.media_preparer import MediaPreparer  # noqa: PLC0415

        config, store = self.context.config, self.context.table.store
        if config.media is None:
            msg = "role media needs a model that sees or hears"
            raise ConfigError(msg)
        self._preparer = MediaPreparer(config, store)
        self._downloads = Downloads(config.media, store, self.progress)

    def row_limit(self) -> int:
        """Return the number of rows taken at once."""
        media = self.context.config.media
        return 1 if media is None else media.max_concurrent_rows

    def stream(self, rows: Sequence[Row], more: More) -> Iterator[Results]:
        """Prepare one row after the other; each result is written while the next row is prepared."""
        del more
        for row in rows:
            value: Any
            try:
                value = self.handle(row)
            except Exception as error:  # noqa: BLE001 of this row alone
                value = error
            yield [(row, value)]

    def handle(self, row: Row) -> PreparedPrompt:
        """Prepare a row.

        Raises:
            RowError: a medium cannot be read or exceeds a limit, or the prompt is too long.
            StoreError: the store has lost a file that the data held itself.
        """
        for source in row.prompt.media:
            if source.url:
                self._downloads.fetch(source)
        folder = f"{row.id.kind}/{row.id.step}"
        held_out = self.context.config.held_out(row.id)
        data = None if held_out is None else held_out.source
        prepared = self._preparer.prepare(row.prompt, folder, self.progress, data)
        self.progress()
        return prepared

    def metrics(self) -> dict[str, float]:
        """Return media decoded and shared, downloads, and CPU time of decoding."""
        preparer = self._preparer
        return {
            "media_processed": preparer.processed,
            "media_shared": preparer.shared,
            "media_downloads": self._downloads.count,
            "media_cpu_seconds": round(preparer.seconds, 3),
        }
