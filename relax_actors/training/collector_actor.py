"""Actor that sweeps the table while the trainer works."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from relax_actors.runtime.actor import Actor
from relax_actors.training.collector import CHECK_SECONDS, Collector


@dataclass(frozen=True, slots=True)
class Check:
    """Sweep if it is due; sent by a timer."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """Sweep now."""


Message: TypeAlias = Check | Sweep


class CollectorActor(Actor):
    """Runs a collector, which it checks every `CHECK_SECONDS`. `stop` sweeps a last time."""

    name = "collector"

    def __init__(self, collector: Collector) -> None:
        super().__init__(collector.context)
        self._collector = collector

    def on_start(self) -> None:
        """Start the timer."""
        super().on_start()
        self.tell_later(CHECK_SECONDS, Check())

    def on_receive(self, message: Message) -> None:
        """Sweep as a message says."""
        match message:
            case Check():
                self._collector.check()
                self.tell_later(CHECK_SECONDS, message)
            case Sweep():
                self._collector.sweep_or_report()

    def on_stop(self) -> None:
        """Sweep a last time."""
        self._collector.close()
