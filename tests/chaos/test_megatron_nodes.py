"""A trainer whose ranks are on two nodes: it trains the bits of ranks on one node, whichever process is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.support.faults import story_of
from tests.support.guarded import MakeGuarded
from tests.support.nodes import Node
from tests.support.running import ON_POLICY, Run, processes_of, wait_until
from tests.support.tiny_megatron import skip_if_missing

skip_if_missing()

RANKS = (
    *ON_POLICY,
    "run.steps=10",
    "rollout.max_tokens=4",
    "model.architecture.num_key_value_heads=2",
    "trainer.backend=megatron",
    "trainer.megatron.ranks=2",
    "trainer.megatron.tensor_parallel=2",
)
RANK, SUPERVISOR = "relax_actors.engines.ranks.rank", "relax_actors.supervision.node"


@dataclass
class Spread:
    """A run whose second rank is on a node of its own."""

    run: Run
    add_node: Callable[[str], Node]

    def process(self, node: Node, module: str) -> int:
        """Process of a node that runs a module, as soon as there is one."""

        def find() -> int | None:
            for pid in processes_of(node.work):
                with suppress(OSError):
                    if module in Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0"):
                        return pid
            return None

        return int(wait_until(find, f"{module} of node {node.work}", 120))

    def wait_for(self, cell: str) -> None:
        wait_until(partial(self.run.table.get, f"relax.{self.run.name}.{cell}"), cell, 240)


@pytest.fixture
def spread(make_run: Callable[..., Run], make_guarded: MakeGuarded, nodes: Callable[..., Node]) -> Iterator[Spread]:
    settings = [*RANKS, "trainer.megatron.local_ranks=1"]
    guarded = make_guarded(["run.name=spread", *settings])
    guarded.make()
    guarded.start()
    broker = [f"broker.url=nats://127.0.0.1:{guarded.port}", f"broker.credentials={guarded.keys}"]
    run = make_run("spread", *settings, *broker).start()
    yield Spread(run, lambda name: nodes(guarded, run, name, "trainer_rank"))
    run.stop()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_on_two_nodes_do_not_change_the_weights(spread: Spread, make_run: Callable[..., Run]) -> None:
    run, first = spread.run, spread.add_node("first")
    spread.wait_for("weights.0")
    os.kill(spread.process(first, RANK), signal.SIGKILL)
    spread.wait_for("batch.1")
    os.kill(spread.process(first, SUPERVISOR), signal.SIGKILL)
    spread.wait_for("batch.3")
    run.kill("trainer.0")
    spread.wait_for("batch.4")
    first.end(signal.SIGKILL)  # its supervisor, actor and rank die with it
    second = spread.add_node("second")
    run.disconnect()
    code, result, said = run.finish(400)
    assert code == 0, said
    assert (result["dropped"], result["quarantined"], result["in_flight"]) == (0, 0, 0)
    story = story_of(run)
    assert story.of("replay_diverged") == []
    crashed = [event["reason"] for event in story.of("crashed") if event["role"] == "trainer"]
    assert len(crashed) >= 4
    assert sum("SIGKILL" in reason for reason in crashed) == 1  # the others are deaths on the other node
    assert second.end()[0] == 0
    assert processes_of(run.folder.root) == []
    assert result["weights_fingerprint"] == make_run("calm", *RANKS).complete(400)["weights_fingerprint"]
