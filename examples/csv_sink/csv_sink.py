"""A sink of `relax monitor` that appends the reward and loss of every step to a CSV file."""

from __future__ import annotations

import csv
from pathlib import Path

from relax_actors import LogMessage


class CsvSink:
    """Write `run, step, reward, loss` for every optimizer step; the target is the path of the file."""

    def __init__(self, target: str, run: str) -> None:
        self._run = run
        self._file = Path(target).open("a", newline="")  # noqa: SIM115 open for the whole run
        self._writer = csv.writer(self._file)

    def take(self, message: LogMessage) -> None:
        """Write a row if the message is the metric of a step."""
        scalars = message.scalars()
        if scalars is not None and "step/reward" in scalars[1]:
            step, values = scalars
            self._writer.writerow([self._run, step, values["step/reward"], values.get("step/loss", "")])
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
