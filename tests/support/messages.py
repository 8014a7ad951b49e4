"""Checks of texts for people, by the words that must not be missing."""

from __future__ import annotations


def assert_says(text: object, *words: object) -> None:
    """Check that a message names all of these: the thing, the place, the remedy."""
    assert words, "no word to look for"
    missing = [word for word in map(str, words) if word not in str(text)]
    assert not missing, f"{missing} in: {text}"
