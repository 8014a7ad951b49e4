"""Protocols of a weight transport and of its two ends."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Protocol

from relax_actors.config import Config
from relax_actors.messages import Weights
from relax_actors.weights.protocols import WeightCopy, WeightProducer, WeightUpdate


class Sender(Protocol):
    """The trainer's end of a transport."""

    def offer(self, published: Weights) -> None:
        """Offer the engine's current weights, whose files are written. Never waits for a receiver."""

    def close(self) -> None:
        """Stop sending."""


class Receiver(Protocol):
    """An actor's end of a transport; used by one thread at a time."""

    def update(self, copy: WeightCopy, target: Weights) -> bool:
        """Advance a copy to a published version; return False if it is not available (yet).

        Raises:
            StoreError: the store's files are not what was published; the copy is then empty.
        """

    def updates_to(self, target: Weights, current: int | None) -> list[WeightUpdate] | None:
        """Return the updates from version `current`, or from the last full set, to `target`.

        Empty if `target` is `current`, None if files are missing.
        """

    def close(self) -> None:
        """Close connections."""


class WeightTransport(Protocol):
    """Makes the two ends; constructed with the context of an actor.

    The module of a transport imports no torch: `relax check` loads it. A subclass inherits what most transports need.
    """

    @staticmethod
    def check(config: Config, here: Collection[str]) -> Iterator[str]:  # noqa: ARG004 of a protocol
        """Check the configuration before the run; `here` are the roles on this machine.

        Yields:
            Notes for the user.

        Raises:
            ConfigError: the transport cannot work with this configuration, or on this machine.
        """
        yield from ()

    def make_sender(self, engine: WeightProducer) -> Sender:
        """Return the trainer's end; raises ConfigError if the engine cannot send."""

    def make_receiver(self, *, follows: bool) -> Receiver:
        """Return an actor's end; unless it `follows`, it requests single, older versions."""
