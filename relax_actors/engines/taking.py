"""What an engine must do to be given weights by version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol


class TakesWeights(Protocol):
    """Computes with one set of weights at a time; serves nothing before the first."""

    @property
    def version(self) -> int | None:
        """Version of the weights that are loaded, None before the first."""

    def stage(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Prepare verified torch tensors on the CPU, in Hugging Face names, beside the weights in use.

        May run in another thread while the engine computes. The tensors are the caller's again when it returns.

        Raises:
            ConfigError: they are not those of the model.
        """

    def swap(self) -> int:
        """Serve what was staged last, from now on, and give its version; takes milliseconds. Not while it computes.

        Raises:
            StoreError: nothing has been staged since the last swap.
        """

    def load(self, version: int, fingerprint: str, shards: Sequence[Path]) -> None:
        """Verify, stage and swap to a whole set of weights in safetensors shards.

        Raises:
            StoreError: their fingerprint is not `fingerprint`; the engine then serves nothing.
        """

    def close(self) -> None:
        """Free what the engine holds."""
