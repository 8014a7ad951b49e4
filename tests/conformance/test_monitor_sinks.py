"""Every sink of `relax monitor` writes what a run measures."""

from __future__ import annotations

import json
import re
import struct
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.conformance.base.monitor_sink import RUN, MonitorSinkConformance, Scalars


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
        from wandb.proto import wandb_internal_pb2

        sink.close()
        wandb.teardown()  # the next test has a folder of its own
        (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
        found = Scalars()
        for data in records_of(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            for name, value in items.items():
                if name.startswith(("step/", "eval/")):
                    found.setdefault(name, []).append((int(json.loads(items["step"])), float(json.loads(value))))
        return found


def records_of(data: bytes) -> Iterator[bytes]:
    """Records of a file of wandb, which has no public reader: LevelDB's log format after a header of 7 bytes."""
    whole, at = b"", 7
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:  # no header fits into the rest of the block
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield whole
            whole = b""
