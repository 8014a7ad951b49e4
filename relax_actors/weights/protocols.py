"""Protocols of the engines that produce weight versions and of those that consume them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

PREFIX_BYTES = 2
"""Bytes of the digest of the first tensors of a set, see `SupportsPrefixes`."""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """A published version: a full set, or a delta to the one before, as safetensors."""

    version: int
    fingerprint: str
    shards: Sequence[Path]


class WeightCopy(Protocol):
    """Weights of one version in host memory: verified, or none at all."""

    @property
    def version(self) -> int | None:
        """Version of the weights; None if the copy is empty."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the weights; empty string if the copy is empty."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """Tensors by name, as `WeightConsumer.stage` takes them."""

    def apply(self, updates: Sequence[WeightUpdate]) -> None:
        """Advance to the last of `updates`.

        The first one is a full set or a delta to this copy.

        Raises:
            StoreError: a shard is missing or corrupt, a delta has another base, or the result does not have the
                published fingerprint. The copy is then empty.
        """


class WeightConsumer(Protocol):
    """An engine that computes with one weight version at a time; none before the first swap."""

    @property
    def version(self) -> int | None:
        """Version in use; None before the first."""

    def empty_copy(self) -> WeightCopy:
        """Return an empty host copy of the kind that this engine stages."""

    def stage(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Prepare verified weights, tensors of a `WeightCopy`, beside those in use.

        May run in another thread while the engine computes. The caller may change `tensors` once this returns, unless
        they are a `NodeSet`, which never changes.

        Raises:
            ConfigError: names, dtypes or shapes are not those of the model.
        """

    def swap(self) -> int:
        """Switch to the staged weights and return their version.

        Takes milliseconds. Not to be called while the engine computes.

        Raises:
            StoreError: nothing has been staged since the last swap.
        """

    def load(self, version: int, fingerprint: str, shards: Sequence[Path]) -> None:
        """Verify, stage and swap to a full set of weights in safetensors shards.

        Raises:
            StoreError: their fingerprint is not `fingerprint`; the engine then has no weights.
        """

    def close(self) -> None:
        """Release the resources of the engine."""


@runtime_checkable
class SharesCopies(Protocol):
    """Engine whose host copies may be those of its node; it releases them when it is closed."""

    def share_copies(self, sets: Any) -> None:
        """Take copies from `NodeSets` from now on."""


class WeightProducer(Protocol):
    """An engine whose weights are published version by version, in one file or in several."""

    @property
    def shards(self) -> int:
        """Number of files that the engine writes at once, each with tensors of its own."""

    def publish(self, *paths: Path) -> str:
        """Write the full weights, with Hugging Face names; return their fingerprint.

        Args:
            paths: files that hold the weights together; as many as `shards`, or as those of a version that another
                layout has published.
        """

    def remember(self) -> None:
        """Make the current weights the base of the next delta."""

    def delta(self) -> Callable[..., str] | None:
        """Return a function that writes the delta since `remember` to `shards` files.

        None if the delta is too large to pay off.
        """

    def fingerprint(self) -> str:
        """Return the fingerprint that `publish` would give, for any number of shards."""

    def export(self, folder: Path) -> None:
        """Write a model folder that `AutoModelForCausalLM.from_pretrained` loads."""


@runtime_checkable
class SupportsPrefixes(Protocol):
    """Engine that can name the first tensor in which its weights differ from others."""

    def prefixes(self) -> bytes:
        """Return 2 bytes a tensor, in order of names: a digest of the tensors up to it."""
