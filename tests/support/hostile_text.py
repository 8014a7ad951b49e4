"""Text that attacks the terminal of the person who reads it."""

from __future__ import annotations

import unicodedata

ATTACKS = (
    "\x1b]0;owned\x07",  # title of the window
    "\x1b]8;;https://evil.invalid\x1b\\link\x1b]8;;\x1b\\",  # hyperlink
    "\x1b]52;c;ZXZpbA==\x07",  # clipboard
    "\x1b[38;5;199mpink\x1b[0m",
    "\x1b[7;7H\x1b[2Jcleared",
    "\x1bc",
    "\x1bP+q544e\x1b\\",  # asks the terminal to answer on standard input
    "\x9b31mred\x9c",  # the same as an escape in 8 bits
    "\x90\x9d0;owned\x9c",
    "a\rforged",
    "a\nrelax: forged line",
    "a\x0bb\x0cc\x08\x08d",
    "\x00\x07\x7f",
    "\u202egnp.exe",  # shown from right to left
    "\u2066\u2067\u2068\u2069\u202a\u202d\u061c",
    "zero\u200bwidth\u200d\ufeff\u2060",
    "\u2028\u2029",
    "\u3164\u115f\u2800\ufe0f\U000e0041\U000e0100",  # letters that take no ink
    "\ud800half",
    "[bold red]markup[/] [link=https://evil.invalid]x[/link] :smile:",
)


def steers(shown: str) -> bool:
    """Whether a text has characters that a terminal obeys or hides, besides newlines."""
    return any(c != "\n" and (unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")) for c in shown)
