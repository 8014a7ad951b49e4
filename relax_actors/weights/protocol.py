"""What an engine must do to be given weights by version."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Content:
    """What a file of weights holds, in memory: whole tensors, or a delta to those of fingerprint `base`."""

    base: str | None
    tensors: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """The files of one published version: whole tensors, or a delta to the version before it on the way.

    `content` is what came of it from the sender's memory; the files are then not read.
    """

    version: int
    fingerprint: str
    shards: Sequence[Path]
    content: Content | None = None


class WeightsCopy(Protocol):
    """Weights of one version in host memory, or nothing. What is here has the fingerprint that was published."""

    @property
    def version(self) -> int | None:
        """Version of what is here, None if nothing is."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of what is here, empty if nothing is."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """What is here, for `TakesWeights.stage`."""

    def take(self, way: Sequence[Step]) -> None:
        """Go to the last version of a way that begins with whole tensors, or with a delta to what is here.

        Raises:
            StoreError: a shard is missing, corrupt, or a delta to something else, or the end does not have the
                fingerprint that was published; nothing is here then.
        """


class TakesWeights(Protocol):
    """Computes with one set of weights at a time; serves nothing before the first."""

    @property
    def version(self) -> int | None:
        """Version of the weights that are loaded, None before the first."""

    def empty_copy(self) -> WeightsCopy:
        """A copy in host memory, with nothing in it yet, of the kind that this engine stages."""

    def stage(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Prepare verified tensors of a copy beside the weights in use: torch, on the CPU, in Hugging Face names.

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


class PublishesWeights(Protocol):
    """An engine whose weights are published version by version."""

    def publish(self, path: Path) -> str:
        """Write the weights as safetensors in Hugging Face names to `path`; gives their fingerprint."""

    def remember(self) -> None:
        """Take the weights as they are now for what the next `delta` is to."""

    def delta(self) -> Callable[[Path], str] | None:
        """What writes, as `publish` does, only the change since `remember`; None if that is not worth it."""

    def fingerprint(self) -> str:
        """Fingerprint of the weights as `publish` would write them."""

    def export(self, folder: Path) -> None:
        """Write a model folder that `AutoModelForCausalLM.from_pretrained` loads."""


@runtime_checkable
class Offers(Protocol):
    """An engine whose weights can be given out from memory."""

    def contents(self) -> Sequence[Content]:
        """What `publish` or `delta` wrote last, the shortest first, and always all weights as they are now.

        In tensors by Hugging Face names that no later step changes, on any device.
        """
