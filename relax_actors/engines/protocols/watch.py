"""Protocol by which the caller of an engine follows one request while it is generated, and may end it early."""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import NDArray


class Watch(Protocol):
    """Follows the sample of a request. The engine calls it in its own thread; nothing here blocks."""

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody waits for the sample: the engine ends it soon, with the tokens that it has."""

    @property
    def wants_tokens(self) -> bool:
        """Whether the engine calls `on_tokens`, as soon as tokens are sampled."""

    def on_tokens(self, start: int, tokens: NDArray[Any], logprobs: NDArray[Any]) -> None:
        """Take sampled tokens.

        Args:
            start: position of the first of them in the sample. An engine that lost tokens samples them again, so that
                it may be before the end of the tokens taken so far.
            tokens: `[count] int32`.
            logprobs: `[count] float32`.
        """
