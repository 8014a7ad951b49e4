"""A real SGLang server under a real supervisor, and engines that use it."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from relax_actors.config import Config
from relax_actors.data.model_folder import measure
from relax_actors.engines.protocols.server import ServerRecord
from relax_actors.engines.sglang import presence
from relax_actors.engines.sglang.connection import SglangSettings
from relax_actors.engines.sglang.engine import SglangEngine
from relax_actors.engines.sglang.weight_loaders import FileLoader, WeightLoader
from relax_actors.errors import ConfigError
from relax_actors.isolation.proc import processes
from relax_actors.runtime.blackbox import Snapshot
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.node import actor_environment
from relax_actors.supervision.pools import server_launch
from relax_actors.supervision.processes import ProcessTree
from relax_actors.supervision.spec import Backoff, ChildSpec, Exit, Limits
from relax_actors.supervision.supervisor import GiveUp, Supervisor
from tests.support import models
from tests.support.models import QWEN3, qwen3_moe
from tests.support.running import wait_until


def members(group: int) -> list[int]:
    """Processes of a process group that have not ended."""
    return [pid for pid, process in processes().items() if process.group == group and process.state != "Z"]


DENSE = QWEN3 | {"max_position_embeddings": 512}
MOE = qwen3_moe(DENSE, experts=8)
START_SECONDS = 900.0


def skip_if_missing() -> None:
    """Skip a module's tests where SGLang is not installed."""
    try:
        presence.require()
    except ConfigError as error:
        pytest.skip(str(error), allow_module_level=True)


def config_of(folder: Path, architecture: dict[str, Any], **sections: dict[str, Any]) -> Config:
    """Configure a run with a tiny model, as `tests.support.models.config_of` does, and save its configuration."""
    rollout = {"backend": "sglang", "max_concurrent_prompts": 4, "group_size": 8, **sections.pop("rollout", {})}
    config = models.config_of(folder, architecture, rollout=rollout, **sections)
    RunFolder(folder).save_config(config, str(folder))
    return config


class Kept:
    """A server that is restarted whenever it ends."""

    def __init__(self, config: Config) -> None:
        self.config, self.folder = config, RunFolder(config.folder)
        spec = ChildSpec("server.0", start_deadline=START_SECONDS)
        limits = Limits(20, 60)
        pool = Supervisor([spec], limits, Backoff(0.1, 1.0), random.Random(0))
        environment = actor_environment(config)
        self.starts = 0
        self._tree = ProcessTree({"server": pool}, lambda _: server_launch(self.folder, 0, environment), self, 30.0)
        # Children ask the kernel to die with the thread that started them.
        self._thread = threading.Thread(target=self._tree.run)
        self._thread.start()

    def started(self, _child: str, _pid: int, starts: int) -> None:
        self.starts = starts

    def ready(self, _child: str, _seconds: float) -> None: ...

    def ended(self, _child: str, _outcome: Exit, _last: Snapshot) -> None: ...

    def gave_up(self, _pool: str, _report: GiveUp) -> None: ...

    @property
    def record(self) -> ServerRecord:
        """Where the server is, once it is ready."""
        return wait_until(lambda: ServerRecord.load(self.folder.server(0)), "server", START_SECONDS)

    def processes(self) -> dict[int, str]:
        """Processes of the server, with their titles."""
        found = {}
        for pid in members(self.record.process_group):
            with suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        return found

    def kill(self, part: str) -> None:
        """SIGKILL the process of the server whose title contains `part`."""
        (pid,) = [pid for pid, title in self.processes().items() if part in title]
        os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self._tree.stop()
        self._thread.join()


@contextmanager
def engine_of(
    kept: Kept,
    loader: WeightLoader | None = None,
    *,
    find: Callable[[], ServerRecord | None] | None = None,
    **settings: Any,
) -> Iterator[SglangEngine]:
    """Engine of one incarnation of an actor."""
    path, config = kept.folder.server(0), kept.config
    loader = loader or FileLoader(kept.folder.weights)
    defaults: dict[str, Any] = {"rows": 4, "group": 8, "patience": START_SECONDS, "stall": 60.0}
    facts = measure(config.model_path)
    defaults["parts"] = presence.RENAMED.get(facts.model_type, ())
    engine = SglangEngine(
        find or (lambda: ServerRecord.load(path)), loader, SglangSettings(facts.context_length, **(defaults | settings))
    )
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    kept = Kept(config_of(tmp_path_factory.mktemp("run"), DENSE, run={"deterministic": False}))
    yield kept
    kept.close()


def opened_by(pid: int) -> str:
    """Return the names of the files that a process has opened or mapped."""
    names = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # the descriptor of this list is closed by now
            names.append(str(entry.readlink()))
    return "\n".join([*names, Path(f"/proc/{pid}/maps").read_text()])
