"""Placeholders of media: `<image>`, `<video>`, `<audio>` in texts, or content parts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer

from relax_actors.data.task import Medium
from relax_actors.errors import RowError
from relax_actors.media.family import Family
from relax_actors.messages import KINDS_OF_MEDIA, MediaSource

PLACEHOLDER = re.compile(f"<({'|'.join(KINDS_OF_MEDIA)})>")


def split(text: str) -> list[dict[str, str]]:
    """Split a text at its placeholders into content parts."""
    pieces = PLACEHOLDER.split(text)
    parts: list[dict[str, str]] = []
    for text_piece, kind in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
        parts += [{"type": "text", "text": text_piece}] if text_piece else []
        parts += [{"type": kind}] if kind else []
    return parts


def with_parts(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose texts with placeholders are lists of parts."""
    return [
        message | {"content": split(message["content"])}
        if isinstance(message["content"], str) and PLACEHOLDER.search(message["content"])
        else message
        for message in messages
    ]


def with_tokens(content: str | Sequence[dict[str, str]], family: Family, tokenizer: Tokenizer) -> str:
    """Return a message's content as text, with a family's placeholders."""
    if isinstance(content, str):
        return content
    return "".join(
        family.marker(part["type"], tokenizer) if part["type"] in family.kinds else part.get("text", "")
        for part in content
    )


def kinds_of(messages: Sequence[dict[str, Any]]) -> list[str]:
    """Return the kinds of the placeholders of messages, in order."""
    lists = [message["content"] for message in messages if isinstance(message["content"], list)]
    return [part["type"] for parts in lists for part in parts if part["type"] in KINDS_OF_MEDIA]


def arrange(kinds: Sequence[str], media: Sequence[Medium]) -> list[Medium]:
    """Return the media in the order of their placeholders; errors as `arranged_numbers`."""
    return [media[number] for number in arranged_numbers(kinds, media)]


def arranged_numbers(kinds: Sequence[str], media: Sequence[Medium | MediaSource]) -> list[int]:
    """Return the number in `media` of the medium of each placeholder, whose kinds are in order.

    Raises:
        RowError: there are more placeholders of a kind than media, or fewer.
    """
    for kind in KINDS_OF_MEDIA:
        written, given = list(kinds).count(kind), sum(medium.kind == kind for medium in media)
        if written != given:
            remedy = (
                f"add the {kind}, or remove the placeholder" if written > given else f"write <{kind}> where it belongs"
            )
            msg = f"{written} placeholders of kind {kind}, but {given} media of it; {remedy}"
            raise RowError(msg)
    rest: dict[str, Iterator[int]] = {
        kind: iter([n for n, medium in enumerate(media) if medium.kind == kind]) for kind in KINDS_OF_MEDIA
    }
    return [next(rest[kind]) for kind in kinds]
