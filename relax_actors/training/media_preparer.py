"""Preparation of prompts with media: features, expanded tokens, rotary positions.

The role `media` writes the result as a column; the warm start and readers of a lost segment compute it again. All of
them get the same bits.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import xxhash

from broker.fields import TensorRef
from broker.store import Store
from relax_actors.config import Config
from relax_actors.config.data import DataSection
from relax_actors.config.media import MediaSection
from relax_actors.data.prompt_maker import room, tokens_left
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.protocols.media import PromptMedia, items_of
from relax_actors.errors import ConfigError, RowError, StoreError
from relax_actors.media import VERSION, Expanded, Features, check_settings, expand, family_of, process
from relax_actors.messages import Media, MediaSource, PreparedPrompt, Prompt
from relax_actors.training.media_segments import MediaSegments

DEADLINE_SHARE = 0.8
"""Share of the role's deadline in which one medium must be decoded, so that its row fails before the actor does."""


class MediaPreparer:
    """Prepares prompts of one run; raises ConfigError if model or settings do not fit."""

    def __init__(self, config: Config, store: Store) -> None:
        family, media = family_of(config.model_path), config.media
        if family is None or media is None:
            msg = f"{config.model_path} is a model of text alone; remove [media]"
            raise ConfigError(msg)
        self.family = family
        self._section = media
        check_settings(media, family)
        self._tokenizer = Tokenizer(config.model_path).inner
        self._whole, self._max_tokens, self._data = room(config), config.rollout.max_tokens, config.data
        self._store, self._segments = store, MediaSegments(store)
        self.processed = 0
        """Media that were decoded."""
        self.shared = 0
        """Media whose features another row had left."""
        self.seconds = 0.0
        """CPU time of decoding and of the features."""

    def prepare(
        self,
        prompt: Prompt,
        folder: str,
        progress: Callable[[], None] = lambda: None,
        data: DataSection | None = None,
    ) -> PreparedPrompt:
        """Prepare a prompt, with its features in segments of a folder of the store.

        `progress` is called after each medium. `data` is the section of the prompt's source; [data] by default.

        Raises:
            RowError: a medium cannot be read or exceeds a limit, or the prompt is too long.
            StoreError: the store has lost a file that the data held itself.
        """
        features, references = self.stored(prompt.media, folder, progress)
        whole = self.expand(prompt, features, data or self._data)
        return PreparedPrompt(whole.tokens, self.records(features, references, whole), whole.positions, whole.delta)

    def prepare_mapped(self, prompt: Prompt, folder: str) -> tuple[np.ndarray, PromptMedia]:
        """Return a prompt's expanded tokens `[prompt_len] int32` and its mapped media."""
        features, references = self.stored(prompt.media, folder)
        return self._mapped(self.expand(prompt, features, self._data), features, references)

    def hinted(self, prompt: Prompt, tokens: np.ndarray, folder: str) -> tuple[np.ndarray, PromptMedia]:
        """As `prepare_mapped`, with tokens `[n] int32` in place of the prompt's."""
        features, references = self.stored(prompt.media, folder)
        return self._mapped(self.expand_tokens(tokens, features), features, references)

    def _mapped(
        self, whole: Expanded, features: Sequence[Features], references: Sequence[tuple[int, TensorRef]]
    ) -> tuple[np.ndarray, PromptMedia]:
        items = items_of(self.records(features, references, whole), [one.array for one in features])
        return whole.tokens, PromptMedia(items, whole.positions, whole.delta)

    def stored(
        self, sources: Sequence[MediaSource], folder: str, progress: Callable[[], None] = lambda: None
    ) -> tuple[list[Features], list[tuple[int, TensorRef]]]:
        """Return the features of media, and each one's number and reference; see `prepare`."""
        features: list[Features] = []
        references: list[tuple[int, TensorRef]] = []
        for number, source in enumerate(sources):
            known, stored = self.stored_features(source, folder)
            features += known
            references += [(number, reference) for reference in stored]
            progress()
        return features, references

    def records(
        self, features: Sequence[Features], references: Sequence[tuple[int, TensorRef]], whole: Expanded
    ) -> list[Media]:
        """Return the media of an expanded prompt or observation as cells hold them."""
        return [
            Media(
                kind=one.kind,
                source=number,
                features=reference,
                grid=one.grid.astype(np.int32),
                start=start,
                tokens=count,
                seconds_per_grid=one.seconds_per_grid,
                inside=one.inside,
                seconds=one.seconds,
                version=VERSION,
            )
            for one, (number, reference), start, count in zip(
                features, references, whole.starts, whole.counts, strict=True
            )
        ]

    def stored_features(self, source: MediaSource, folder: str) -> tuple[list[Features], list[TensorRef]]:
        """Return a medium's features and their references, computed unless they are stored."""
        before = self.processed
        segment = self._segments.get(self.key(source), folder, lambda: self.features(source))
        self.shared += self.processed == before
        return segment

    def features(self, source: MediaSource) -> Sequence[Features]:
        """Decode a medium and compute its features.

        Raises:
            RowError: it cannot be read, has changed since its row was admitted, or exceeds a limit.
            StoreError: the store has lost a file that the data held itself.
        """
        began = time.thread_time()
        deadline = time.monotonic() + DEADLINE_SHARE * self._section.deadline
        features = process(
            self._content(source),
            source.kind,
            self.family,
            self._settings_of(source),
            # A copy in the store has a name that says nothing to whom the medium is from.
            name=f"{source.origin}: {source.kind}" + (f" {source.name}" if source.url or not source.stored else ""),
            start=source.start or 0.0,
            end=source.end,
            deadline=deadline,
        )
        self.processed += 1
        self.seconds += time.thread_time() - began
        return features

    def key(self, source: MediaSource) -> str:
        """Name of the segment of a medium."""
        settings = self._settings_of(source)
        own = getattr(settings, source.kind)
        used = [own.model_dump(), settings.audio.model_dump() if getattr(own, "audio", False) else None]
        facts = [source.digest, source.kind, source.start, source.end, VERSION, self.family.model_type]
        specs = [self.family.vision, self.family.audio]
        plain = [*facts, *used, *(None if one is None else asdict(one) for one in specs)]
        return xxhash.xxh3_128_hexdigest(json.dumps(plain, sort_keys=True).encode())

    def expand(self, prompt: Prompt, features: Sequence[Features], data: DataSection) -> Expanded:
        """Expand the placeholders of a prompt; raises RowError if it is then too long."""
        expanded = self.expand_tokens(prompt.tokens, features)
        left, left_by = tokens_left(data, self._max_tokens)
        if len(expanded.tokens) > (most := self._whole - left):
            where = prompt.media[0].origin if prompt.media else "prompt"
            keep = "" if data.oversize == "keep" else ", or set data.oversize = 'keep'"
            msg = (
                f"{where}: {len(prompt.tokens)} tokens of text and {sum(expanded.counts)} of media make a prompt of "
                f"{len(expanded.tokens)}, more than the {most} that {left_by} leaves of {self._whole} (the model's "
                "context, or trainer.max_tokens_per_microbatch if that is smaller); lower max_pixels, fps or "
                f"max_seconds in [media]{keep}"
            )
            raise RowError(msg)
        return expanded

    def expand_tokens(self, tokens: np.ndarray, features: Sequence[Features], first: float = 0) -> Expanded:
        """Expand placeholders from the position `first` on; raises RowError if media do not fit."""
        return expand(np.asarray(tokens), features, self.family, self._tokenizer, first)

    def _settings_of(self, source: MediaSource) -> MediaSection:
        if not source.options:
            return self._section
        section = getattr(self._section, source.kind)
        try:
            own = type(section).model_validate(section.model_dump() | source.options)
            settings = self._section.model_copy(update={source.kind: own})
            check_settings(settings, self.family)
        except (ValueError, ConfigError) as error:
            msg = f"{source.origin}: settings of {source.kind} {source.name}: {error}"
            raise RowError(msg) from error
        return settings

    def _content(self, source: MediaSource) -> bytes:
        """Read a file whose hash was taken when its row was admitted."""
        path = self._store.path(source.path) if source.stored else Path(source.path)
        try:
            with path.open("rb") as file:
                data = file.read(self._section.limits.max_bytes + 1)
        except OSError as error:
            if source.stored:
                msg = f"{source.kind} {source.path} of {source.origin} is gone from the store: {error.strerror}"
                raise StoreError(msg) from error
            msg = (
                f"{source.origin}: {source.kind} {str(path)!r} cannot be read ({error.strerror}); every node needs the "
                "data's files at the same path"
            )
            raise RowError(msg) from error
        name = "xxh3" if source.xxh3_128 else "sha256"
        if (xxhash.xxh3_128_hexdigest if source.xxh3_128 else _sha256)(data) != source.digest:
            msg = (
                f"{source.origin}: {source.kind} {str(path)!r} has changed since its row was admitted: its hash is not "
                f"{name}:{source.digest}; restore the file, or requeue the row"
            )
            raise StoreError(msg) if source.stored else RowError(msg)
        return data


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
