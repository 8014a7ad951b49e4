"""Numbers with their nouns."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or plural: "1 restart", "2 restarts"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
