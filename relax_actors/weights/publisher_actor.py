"""Actor that publishes weights while the trainer's next step computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, cast

from relax_actors.runtime.actor import Actor, Answer
from relax_actors.weights.publisher import Publisher


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish the current weights as a version; see `Publisher.publish`."""

    version: int
    kl_coefficient: float | None = None


class Restore(Publish):
    """Publish a version, or rewrite its files; see `Publisher.restore`."""


@dataclass(frozen=True, slots=True)
class Repair:
    """Rewrite missing files of the latest version."""


@dataclass(frozen=True, slots=True)
class Export:
    """Write the trained model as a Hugging Face folder."""


Message: TypeAlias = Publish | Repair | Export


class PublisherActor(Actor):
    """Runs a publisher, one message at a time. `stop` closes it."""

    name = "publisher"

    def __init__(self, publisher: Publisher) -> None:
        super().__init__(publisher.context)
        self._publisher = publisher

    def on_receive(self, message: Message) -> None:
        """Have the publisher do what a message says."""
        match message:
            case Restore(version, kl_coefficient):
                self._publisher.restore(version, kl_coefficient)
            case Publish(version, kl_coefficient):
                self._publisher.publish(version, kl_coefficient)
            case Repair():
                self._publisher.repair()
            case Export():
                self._publisher.export()

    def on_stop(self) -> None:
        """Stop sending weights."""
        self._publisher.close()


class Publications:
    """The trainer's side of its publisher: at most one message is under way.

    The engine's weights must not change between `send` and `flush`.
    """

    def __init__(self, publisher: Publisher) -> None:
        self._actor = PublisherActor.start(publisher)
        self._answer: Answer[None] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no message is under way."""
        return self._answer is None or self._answer.is_settled

    def send(self, message: Message) -> None:
        """Send a message to the publisher, after the one before is done."""
        self.flush()
        self._answer = cast("Answer[None]", self._actor.ask(message, block=False))

    def flush(self) -> None:
        """Wait until the last message is done; raise its error."""
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.get()

    def ask(self, message: Message) -> None:
        """Send a message to the publisher, and wait until it is done."""
        self.send(message)
        self.flush()

    def close(self) -> None:
        """Stop the publisher, after the last message."""
        self._actor.stop()
