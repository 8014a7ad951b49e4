"""Expansion of a prompt: placeholders of its media, and rotary positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from tokenizers import Tokenizer

from relax_actors.errors import ConfigError, RowError
from relax_actors.media.family import Family
from relax_actors.media.features import Features
from relax_actors.media.text_around import with_text_around
from relax_actors.media.timestamps import Timestamps


@dataclass(frozen=True, slots=True)
class Expanded:
    """Expanded prompt.

    Attributes:
        tokens: [length] int32 token ids, with as many placeholders as each medium has tokens.
        starts: index of the first placeholder of each medium.
        counts: number of placeholders of each medium; other tokens can lie between them.
        positions: [3, length] rotary positions, of type `Family.position_dtype`.
        delta: what the position of a later token exceeds its index by, counted from the first expanded token; a whole
            number but for Qwen3-Omni.
    """

    tokens: np.ndarray
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    positions: np.ndarray
    delta: float


def expand(
    tokens: np.ndarray, features: Sequence[Features], family: Family, tokenizer: Tokenizer, first: float = 0
) -> Expanded:
    """Expand the placeholders of a prompt or an observation, and compute its rotary positions.

    Args:
        tokens: ids of the prompt, with one placeholder for each medium.
        features: features of all media in the order of their placeholders; the sound of a video follows it.
        family: the model.
        tokenizer: writes the timestamps of videos, and the text around images.
        first: position of the first token.

    Raises:
        RowError: the placeholders do not fit the media, or the tokenizer cannot write a text.
    """
    ids = [int(token) for token in tokens]
    if family.spec.around and features:
        ids = with_text_around(ids, {*family.marks.values()}, family.spec.around, tokenizer)
    media = _paired(features)
    builder, at = _Builder(family, tokenizer, next=first), 0
    for place, (medium, sound) in zip(_places(ids, media, family), media, strict=True):
        # The tokens around a video with its sound are written with it.
        around = int(sound is not None)
        builder.text(ids[at : place - around])
        if sound is None:
            builder.medium(medium)
        else:
            builder.video_with_sound(medium, sound)
        at = place + 1 + around
    builder.text(ids[at:])
    return builder.result()


def _paired(features: Sequence[Features]) -> list[tuple[Features, Features | None]]:
    """Return each medium of a prompt with the sound that is inside it, if any."""
    pairs: list[tuple[Features, Features | None]] = []
    for medium in features:
        if medium.inside:
            pairs[-1] = (pairs[-1][0], medium)
        else:
            pairs.append((medium, None))
    return pairs


def _places(ids: list[int], media: Sequence[tuple[Features, Features | None]], family: Family) -> list[int]:
    """Return the indices of the placeholders of media.

    Raises:
        RowError: their number or their kinds differ from those of the media, or the placeholder of a video with its
            sound lacks the tokens around it that the sound is put between.
    """
    kinds, marks = family.kinds_by_id, {*family.marks.values()}
    if stray := next((kinds[token] for token in ids if token in kinds and token not in marks), ""):
        texts = family.spec.tokens
        msg = (
            f"the text holds {texts[stray]}, which only features of {stray} may stand for; remove it, or write "
            f"{texts[family.spec.marks[stray]]} with a medium"
        )
        raise RowError(msg)
    places = [index for index, token in enumerate(ids) if token in kinds]
    if len(places) != len(media):
        msg = f"the prompt has {len(places)} placeholders for media and {len(media)} media; it needs one for each"
        raise RowError(msg)
    for number, (place, (medium, sound)) in enumerate(zip(places, media, strict=True)):
        if (kind := kinds[ids[place]]) != medium.kind:
            msg = f"placeholder {number} of the prompt is for {kind}, and medium {number} is {medium.kind}"
            raise RowError(msg)
        around = [family.ids.get("vision_start"), ids[place], family.ids.get("vision_end")]
        if sound is not None and ids[max(place - 1, 0) : place + 2] != around:
            texts = family.spec.tokens
            msg = (
                f"the placeholder of a video with its sound must stand between {texts['vision_start']} and "
                f"{texts['vision_end']}"
            )
            raise RowError(msg)
    return places


@dataclass
class _Builder:
    """Tokens and positions so far.

    Attributes:
        family: the model.
        tokenizer: tokenizer of the model.
        tokens: token ids.
        positions: pieces of [3, n].
        next: position of the next token.
    """

    family: Family
    tokenizer: Tokenizer
    tokens: list[int] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    next: float = 0
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def text(self, ids: Sequence[int], step: int = 1) -> None:
        """Add tokens of text, each `step` positions after the one before."""
        if ids:
            self._add(ids, np.tile(np.arange(len(ids)) * step, (3, 1)))

    def medium(self, medium: Features) -> None:
        """Add an image, a video, or a sound."""
        ids, spec = self.family.ids, self.family.spec
        if spec.brackets:
            self.text([ids["vision_start"]])
        self.starts.append(len(self.tokens))
        if not medium.visual:
            count = self._sound_tokens(medium)
            self.text([ids[medium.kind]] * count)
        elif spec.positions.sections == "one axis" and self.family.vision is not None:
            count = int(np.prod(medium.grid)) // self.family.vision.merge**2
            self.text([ids[medium.kind]] * count)
        elif medium.timestamps and spec.timestamp:
            count = self._timed_video(medium)
        else:
            places = vision_positions(medium.grid, self.family, medium.seconds_per_grid or None)
            count = int(places.shape[1])
            self._vision([ids[medium.kind]] * count, places, medium.grid)
        if spec.brackets:
            self.text([ids["vision_end"]])
        self.counts.append(count)

    def _sound_tokens(self, medium: Features) -> int:
        if self.family.audio is None:
            msg = f"a {self.family.model_type} model takes no sound"
            raise RowError(msg)
        return self.family.audio.tokens(int(medium.grid[0]))

    def _timed_video(self, medium: Features) -> int:
        """Add a video with times as text; returns the number of placeholders."""
        ids, writer = self.family.ids, Timestamps(self.tokenizer, self.family.spec.timestamp)
        frame = np.array([1, *medium.grid[1:]])
        places = vision_positions(frame, self.family, None)
        start, count = 0, int(places.shape[1])
        for index, seconds in enumerate(medium.timestamps):
            written = writer.after(self.tokens, seconds)
            removed = written.removed
            if removed:
                self._remove(removed)
            self.text([*written.ids, ids["vision_start"]])
            start = start if index else len(self.tokens)
            self._vision([ids[medium.kind]] * count, places, frame)
            self.text([ids["vision_end"]])
        self.starts[-1] = start
        return count * len(medium.timestamps)

    def _remove(self, count: int) -> None:
        """Take back the last tokens, which are text: their positions go up by one."""
        places = np.concatenate(self.positions, axis=1)
        self.next = float(places[0, -count])
        del self.tokens[-count:]
        self.positions = [places[:, :-count]]

    def video_with_sound(self, video: Features, sound: Features) -> None:
        """Add a video with its sound placed in time between vision_start and vision_end."""
        ids = self.family.ids
        if missing := {"audio_start", "audio_end"} - ids.keys():
            msg = f"the model's config and tokenizer have no {' and no '.join(sorted(missing))} token; add it"
            raise ConfigError(msg)
        step = self.family.spec.positions.start_step
        self.text([ids["vision_start"], ids["audio_start"]], step)
        places = vision_positions(video.grid, self.family, video.seconds_per_grid)
        heard = self._sound_tokens(sound)
        both = np.concatenate([places, np.tile(np.arange(heard), (3, 1)).astype(places.dtype)], axis=1)
        order, last = interleaved(video.grid, heard, self.family, video.seconds_per_grid)
        both_ids = [ids[video.kind], ids[sound.kind]]
        kinds = np.where(order < places.shape[1], both_ids[0], both_ids[1])
        first = len(self.tokens)
        self.starts += [first + int(np.argmax(kinds == token)) for token in both_ids]
        self.counts += [places.shape[1], heard]
        self._add(kinds.tolist(), both[:, order], last=last)
        self.text([ids["audio_end"], ids["vision_end"]], step)

    def _vision(self, ids: list[int], places: np.ndarray, grid: np.ndarray) -> None:
        before = self.next
        self._add(ids, places)
        if self.family.spec.positions.after_side and self.family.vision is not None:
            self.next = before + max(int(grid[1]), int(grid[2])) // self.family.vision.merge

    def _add(self, ids: Sequence[int], places: np.ndarray, last: int = 0) -> None:
        """Add tokens; the next position follows that of the `last` ones, or of all."""
        dtype = self.family.position_dtype
        placed = places.astype(dtype) + np.array(self.next, dtype)
        self.tokens += ids
        self.positions.append(placed)
        self.next = float(placed[:, -last:].max() + 1)

    def result(self) -> Expanded:
        """Return the expanded prompt."""
        dtype = self.family.position_dtype
        empty = np.zeros((3, 0), dtype)
        positions = np.concatenate([empty, *self.positions], axis=1)
        most = positions.max() + 1 if positions.size else np.array(self.next, dtype)
        # In the type of the positions, so that the sum of both is rounded as in transformers.
        delta = float(np.array(most - len(self.tokens), dtype))
        tokens = np.array(self.tokens, np.int32)
        return Expanded(tokens, tuple(self.starts), tuple(self.counts), positions, delta)


def vision_positions(grid: np.ndarray, family: Family, seconds: float | None) -> np.ndarray:
    """Return the positions of an image or video, which begins at 0.

    Args:
        grid: [t, h, w] patches.
        family: the model.
        seconds: seconds of a temporal patch of a video; None for an image.

    Returns:
        [3, tokens]: time, row and column, of type `Family.position_dtype`.
    """
    rule, merge = family.spec.positions, family.vision.merge if family.vision is not None else 1
    t, h, w = int(grid[0]), int(grid[1]) // merge, int(grid[2]) // merge
    times = np.arange(t, dtype=np.float32)
    if seconds is not None:
        times = rule.times(times, np.float32(seconds), np.float32(family.seconds_scale))
    shape = (t, h, w)
    parts = (times[:, None, None], np.arange(h)[None, :, None], np.arange(w)[None, None, :])
    return np.stack([np.broadcast_to(part, shape).reshape(-1) for part in parts]).astype(rule.dtype)


def interleaved(grid: np.ndarray, sound: int, family: Family, seconds: float) -> tuple[np.ndarray, int]:
    """Return the order of the tokens of a video and its sound.

    Args:
        grid: [t, h, w] patches of the video.
        sound: tokens of the sound.
        family: the model.
        seconds: seconds of a temporal patch.

    Returns:
        [video + sound] int64 indices into the tokens of the video followed by those of the sound, and the number of
        tokens of one kind in the last round.
    """
    merge = family.vision.merge if family.vision is not None else 1
    each = int(grid[1]) // merge * (int(grid[2]) // merge)
    video = np.repeat(np.arange(int(grid[0])), each) * seconds * family.seconds_scale
    step = int(family.seconds_scale * family.chunk_seconds)
    both = (video, np.arange(sound, dtype=np.float64))
    rounds = np.concatenate([family.spec.positions.rounds(times, step) for times in both])
    heard = np.arange(len(rounds)) >= len(video)
    order = np.lexsort((heard, rounds))
    last = (rounds == rounds[order[-1]]) & (heard == heard[order[-1]])
    return order, int(np.count_nonzero(last))
