"""Stop strings found in sampled tokens, whatever tokens spell them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

START = 0
"""State of a sample without tokens."""


class StopStrings:
    """Finds the token with which the text of a sample first contains one of several strings.

    The text is that of the sampled tokens alone, as UTF-8 with special tokens spelled out. A string may begin and end
    within a token. The state of a sample is one number, which depends on its tokens only: an automaton (Aho and
    Corasick, 1975) over bytes, whose steps over whole tokens are computed once. For one thread. No string is empty.
    """

    def __init__(self, strings: Sequence[str], token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._next, self._ends = _automaton([string.encode() for string in strings])
        self._steps: dict[tuple[int, int], tuple[int, bool]] = {}

    def advance(self, state: int, token: int) -> tuple[int, bool]:
        """Return the state after another token, and whether a string ends in this token."""
        step = self._steps.get((state, token))
        if step is None:
            after, has_ended = state, False
            for byte in self._token_bytes(token):
                after = self._next[after].get(byte, START)
                has_ended = has_ended or self._ends[after]
            step = self._steps[state, token] = after, has_ended
        return step

    def find(self, tokens: Sequence[int]) -> int | None:
        """Return the number of tokens up to the one in which a string first ends; None if there is none."""
        state = START
        for i, token in enumerate(tokens):
            state, has_ended = self.advance(state, token)
            if has_ended:
                return i + 1
        return None


def _automaton(strings: Sequence[bytes]) -> tuple[list[dict[int, int]], list[bool]]:
    """Return the next states by byte, except for START, and whether a string ends, of each state."""
    children: list[dict[int, int]] = [{}]
    ends = [False]
    for string in strings:
        state = START
        for byte in string:
            if byte not in children[state]:
                children[state][byte] = len(children)
                children.append({})
                ends.append(False)
            state = children[state][byte]
        ends[state] = True
    # In order of depth: a state continues as its longest proper suffix that is a state does, except for its children.
    suffix = [START] * len(children)
    table: list[dict[int, int]] = [{} for _ in children]
    queue = deque([START])
    while queue:
        state = queue.popleft()
        table[state] = (table[suffix[state]] if state != START else {}) | children[state]
        ends[state] = ends[state] or ends[suffix[state]]
        for byte, child in children[state].items():
            suffix[child] = table[suffix[state]].get(byte, START) if state != START else START
            queue.append(child)
    return table, ends
