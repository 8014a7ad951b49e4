"""Every sink of `relax monitor` writes what a run measures."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path
from typing import Any

from tests.conformance.base.monitor_sink import RUN, MonitorSinkConformance, Scalars
from tests.support.wandb_files import scalars_of


class TestPrometheus(MonitorSinkConformance):
    implements = "prometheus"
    keeps_history = False
    names = {"step/reward": "relax_step_reward", "step/loss": "relax_step_loss"}  # noqa: RUF012 read only

    def target(self, folder: Path) -> str:  # noqa: ARG002
        return "prometheus=0"

    def written(self, sink: Any, folder: Path) -> Scalars:  # noqa: ARG002
        with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10) as reply:
            page = reply.read().decode()
        sink.close()
        found = re.findall(rf'^(\w+)\{{run="{RUN}"\}} (\S+)$', page, re.MULTILINE)
        return {name: [(-1, float(value))] for name, value in found}


class TestTensorBoard(MonitorSinkConformance):
    implements = needs = "tensorboard"
    names = {name: name for name in ("step/reward", "step/loss", "eval/reward")}  # noqa: RUF012 read only

    def target(self, folder: Path) -> str:
        return f"tensorboard={folder / 'board'}"

    def written(self, sink: Any, folder: Path) -> Scalars:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        sink.close()
        board = EventAccumulator(str(folder / "board"))
        board.Reload()
        return {name: [(event.step, event.value) for event in board.Scalars(name)] for name in board.Tags()["scalars"]}


class TestWeightsAndBiases(MonitorSinkConformance):
    implements = needs = "wandb"
    names = {name: name for name in ("step/reward", "step/loss", "eval/reward")}  # noqa: RUF012 read only

    def target(self, folder: Path) -> str:  # noqa: ARG002
        return "wandb=checks"

    def written(self, sink: Any, folder: Path) -> Scalars:
        """Read the file of the offline run."""
        import wandb

        sink.close()
        wandb.teardown()  # the next test has a folder of its own
        (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
        return scalars_of(path)
