"""A real SGLang server under a real supervisor, and engines that use it."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from relax_actors.config import Config, validate
from relax_actors.data.model_folder import measure, prepare
from relax_actors.engines.sglang import presence
from relax_actors.engines.sglang.engine import SglangEngine
from relax_actors.engines.sglang.loading import FromDisk, FromGroup, FromTensors, Loader
from relax_actors.engines.sglang.record import ServerRecord
from relax_actors.errors import ConfigError
from relax_actors.runtime.blackbox import Snapshot
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.janitor import members
from relax_actors.supervision.node import actor_environment
from relax_actors.supervision.pools import server_launch
from relax_actors.supervision.processes import ProcessTree
from relax_actors.supervision.spec import Backoff, ChildSpec, Exit, Limits, Strategy
from relax_actors.supervision.supervisor import GiveUp, Supervisor
from tests.support.running import wait_until

ALPHABET = "0123456789>#"
STOP = ALPHABET.index("#")
DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
MOE = DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
START_SECONDS = 400.0


def skip_if_missing() -> None:
    """Skip a module's tests where SGLang is not installed."""
    try:
        presence.require()
    except ConfigError as error:
        pytest.skip(str(error), allow_module_level=True)


def config_of(folder: Path, architecture: dict[str, Any], **sections: dict[str, Any]) -> Config:
    """A run with a tiny model of random weights, its folder made and its configuration saved."""
    tree: dict[str, Any] = {
        "run": {"name": "sglang", "folder": str(folder), "seed": 5, "steps": 10},
        "model": {"architecture": architecture, "tokenizer": {"alphabet": ALPHABET}},
        "data": {"kind": "python", "function": "nothing"},
        "rollout": {"backend": "sglang", "max_concurrent_prompts": 4, "group_size": 8},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    config = validate(tree, "test")
    folder.mkdir(parents=True, exist_ok=True)
    prepare(config, config.model_path)
    RunFolder(folder).save_config(config, str(folder))
    return config


class Kept:
    """A server that is started again whenever it ends."""

    def __init__(self, config: Config) -> None:
        self.config, self.folder = config, RunFolder(config.folder)
        spec = ChildSpec("server.0", start_deadline=START_SECONDS)
        limits = Limits(20, 60)
        pool = Supervisor([spec], Strategy.ONE_FOR_ONE, limits, Backoff(0.1, 1.0), random.Random(0))
        environment = actor_environment(config)
        self.starts = 0
        self._tree = ProcessTree({"server": pool}, lambda _: server_launch(self.folder, 0, environment), self, 30.0)
        # The thread that starts a child must live as long as that may.
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
        """The processes of its group, with their titles."""
        found = {}
        for pid in members(self.record.group):
            with suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        return found

    def kill(self, part: str) -> None:
        """SIGKILL the process of it whose title has a part."""
        (pid,) = [pid for pid, title in self.processes().items() if part in title]
        os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self._tree.stop()
        self._thread.join()


@contextmanager
def engine_of(kept: Kept, loader: Loader | None = None, **settings: Any) -> Iterator[SglangEngine]:
    """One life of an actor's engine."""
    path, config = kept.folder.server(0), kept.config
    loader = loader or FromDisk(path.with_suffix(""))
    defaults: dict[str, Any] = {"rows": 4, "patience": START_SECONDS, "stall": 60.0}
    length = measure(config.model_path).context_length
    engine = SglangEngine(lambda: ServerRecord.load(path), loader, length, **(defaults | settings))
    try:
        yield engine
    finally:
        engine.close()


__all__ = [
    "ALPHABET",
    "DENSE",
    "MOE",
    "STOP",
    "FromGroup",
    "FromTensors",
    "Kept",
    "config_of",
    "engine_of",
    "skip_if_missing",
]
