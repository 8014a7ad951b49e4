"""Sink that writes event files of TensorBoard."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from relax_actors.errors import ConfigError
from relax_actors.monitoring.log_message import LogMessage
from relax_actors.monitoring.sinks.base import KnownNames


class TensorBoard:
    """Sink of scalars `step/<name>` and `eval/reward`, in the folder `target`.

    Raises:
        ConfigError: TensorBoard is not installed.
        OSError: the folder cannot be written.
    """

    def __init__(self, target: str, run: str) -> None:  # noqa: ARG002 the signature of every sink
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            msg = f"--sink tensorboard needs TensorBoard: pip install 'relax-actors[tensorboard]' ({error})"
            raise ConfigError(msg) from error
        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        self._names = KnownNames()
        Path(target).mkdir(parents=True, exist_ok=True)
        self._writer: Any = EventFileWriter(target)

    def take(self, message: LogMessage) -> None:
        """Write the scalars of a step or an evaluation, with the time of the message."""
        if (figures := message.scalars()) is None:
            return
        step, scalars = figures
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in self._names.keep(scalars).items()]
        at = message.body.get("time")
        time = float(at) if isinstance(at, int | float) and abs(at) <= sys.float_info.max else 0.0
        self._writer.add_event(self._event(wall_time=time, step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()
