"""relax-actors' side of `grpo_vs_trl.py` and `ppo_vs_trl.py`: write the TOML file, collect the metrics of `relax up`.

The follower reads the log's stream from its first message, so a late connection misses nothing.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_workload import Workload

from broker.address import Address
from broker.connection import Connection
from broker.errors import RelaxError
from broker.ordered_consumer import OrderedConsumer
from broker.permissions import OPERATOR
from broker.streams import wait_for_stream
from broker.subjects import Subjects

WAIT_SECONDS = 120.0

TOML = """
[run]
name = "{name}"
folder = {folder}
seed = {seed}
steps = {steps}
threads = {threads}

[model]
path = {model}

[data]
kind = "jsonl"
path = {prompts}

[rollout]
device = "{device}"
replicas = {rollouts}
group_size = {samples}
temperature = 1.0
max_tokens = {new_tokens}
min_tokens = {new_tokens}

[reward]
function = "grpo_workload.digits"

[trainer]
device = "{device}"
precision = "{precision}"
prompts_per_step = {rows}
epochs = {epochs}
learning_rate = {learning_rate}
checkpoint_every = {steps}

[staleness]
max = {staleness}

[placement]
colocate = {colocate}

{algorithm}
"""

LORA = """
[lora]
rank = {rank}
alpha = {alpha}
"""
"""Section of an adapter."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """TOML sections of an algorithm, and the roles that compute on a device, which they share."""

    toml: str
    roles: tuple[str, ...] = ("rollout", "trainer")


GRPO = Algorithm("""
[algorithm]
# The ratio of a step's only update is 1, as in TRL: tokens are not clipped for being a step old.
proximal = "trainer"
""")


def write_toml(work: Workload, name: str, staleness: int, algorithm: Algorithm = GRPO) -> Path:
    """Write the run's TOML file, with the sections of the algorithm; the run's folder is beside it."""
    folder = Path(work.folder) / name
    text = TOML.format(
        name=name,
        folder=json.dumps(str(folder)),
        model=json.dumps(str(work.model)),
        prompts=json.dumps(str(work.prompts)),
        staleness=staleness,
        algorithm=algorithm.toml
        + (LORA.format(rank=work.lora_rank, alpha=2 * work.lora_rank) if work.lora_rank else ""),
        colocate=json.dumps([algorithm.roles] if work.device == "cuda" else []),
        **{
            field: getattr(work, field)
            for field in (
                *("seed", "steps", "threads", "samples", "new_tokens", "rows", "learning_rate", "epochs"),
                *("device", "precision", "rollouts"),
            )
        },
    )
    path = Path(work.folder) / f"{name}.toml"
    path.write_text(text)
    return path


class Steps(threading.Thread):
    """Collects the trainer's metrics of every step of a starting or live run."""

    def __init__(self, work: Workload, name: str) -> None:
        super().__init__(name="steps", daemon=True)
        self.steps: list[dict[str, Any]] = []
        self.error: str | None = None
        self._address = Path(work.folder) / name / "broker.json"
        self._subjects = Subjects(name)
        self._wanted = work.steps

    def run(self) -> None:
        """Collect until the last step."""
        try:
            self._listen()
        except RelaxError as error:
            self.error = str(error)

    def _listen(self) -> None:
        end = time.monotonic() + WAIT_SECONDS
        while not self._address.exists() and time.monotonic() < end:
            time.sleep(0.05)
        connection = Connection(Address.load(self._address).for_user(OPERATOR), "benchmark", deadline=WAIT_SECONDS)
        stream = self._subjects.log_stream
        try:
            connection.call(wait_for_stream(connection, stream, WAIT_SECONDS), WAIT_SECONDS + 1)
            connection.call(self._follow(connection, stream), threading.TIMEOUT_MAX)
        finally:
            with contextlib.suppress(RelaxError):
                connection.close()

    async def _follow(self, connection: Connection, stream: str) -> None:
        async for messages in OrderedConsumer(connection, stream, [self._subjects.metric("trainer", "*")]).batches():
            for message in messages:
                body = json.loads(message.data)
                if body.get("kind") == "step":
                    self.steps.append(body)
            if len(self.steps) >= self._wanted:
                return
