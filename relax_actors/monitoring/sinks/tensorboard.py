"""A run's steps and evaluations as files that TensorBoard reads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from relax_actors.errors import ConfigError
from relax_actors.monitoring.sinks import Heard


class TensorBoard:
    """Writes scalars `step/<name>` by optimizer step, and `eval/reward` by version.

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            msg = f"--tensorboard needs TensorBoard: pip install 'relax-actors[tensorboard]' ({error})"
            raise ConfigError(msg) from error
        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        folder.mkdir(parents=True, exist_ok=True)
        self._writer: Any = EventFileWriter(str(folder))

    def take(self, heard: Heard) -> None:
        """Write what is a step's or an evaluation's."""
        if (found := heard.scalars()) is None:
            return
        step, scalars = found
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        at = heard.body.get("time")
        time = float(at) if isinstance(at, int | float) and abs(at) <= sys.float_info.max else 0.0
        self._writer.add_event(self._event(wall_time=time, step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
