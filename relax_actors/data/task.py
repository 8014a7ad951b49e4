"""Items of a data source."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax_actors.traces import Trace


@dataclass(frozen=True, slots=True)
class Medium:
    """An image, a video or a sound of a task: a file, its bytes, or a URL with a hash.

    Attributes:
        kind: one of `KINDS_OF_MEDIA`.
        path: file, absolute or from `folder`.
        data: content of the file, instead of a path or URL.
        url: http or https address, instead of a path; needs `digest`.
        digest: what the file must hold, "xxh3:<32 hexadecimal digits>" or "sha256:<64 hexadecimal digits>"; may be left
            out of files and bytes.
        start: first second of a video or sound to use.
        end: last second to use.
        options: settings that replace those of [media.<kind>] for this medium, e.g. `{"max_pixels": 65536}`.
        folder: folder that relative paths start from and that files may lie in; by default the working directory.
    """

    kind: str
    path: str = ""
    data: bytes = field(default=b"", repr=False)
    url: str = ""
    digest: str = ""
    start: float | None = None
    end: float | None = None
    options: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt, with the data that its reward needs.

    Attributes:
        prompt: a text, or a chat as a list of `{"role": ..., "content": ...}` messages. Texts with media have a
            placeholder `<image>`, `<video>` or `<audio>` for each; the content of a message may also be a list of parts
            `{"type": "text", "text": ...}` and `{"type": "image"}`, `{"type": "video"}` or `{"type": "audio"}`.
        answer: reference answer; empty if there is none.
        metadata: plain data (types that msgpack encodes).
        origin: file and line, or source and number, for errors; set by the data source.
        media: media of the prompt; those of one kind in the order of their placeholders.
        traces: recorded samples of the prompt, of a source of traces; empty for others.
    """

    prompt: str | list[dict[str, Any]]
    answer: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    origin: str = field(default="", compare=False, repr=False)
    media: tuple[Medium, ...] = ()
    traces: tuple[Trace, ...] = ()
