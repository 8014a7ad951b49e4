"""Ranks that actors of other nodes host: how they join, what they train, and how they end."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.address import Address
from broker.routes import interface_of, local_address
from broker.table import Table
from relax_actors.config import Config
from relax_actors.config.lora import LoraSection
from relax_actors.engines.protocols import train
from relax_actors.engines.ranks.group import TrainerGroup
from relax_actors.engines.ranks.rank_host import RankHost, rank_platform, settings_digest
from relax_actors.engines.ranks.rank_wire import keep, receive_token, send_token, wait_for_end
from relax_actors.engines.ranks.remote_ranks import RemoteRanks
from relax_actors.engines.ranks.rpc import RankError
from relax_actors.errors import ConfigError
from relax_actors.messages.ranks import RankInvitation
from relax_actors.runtime import Context
from relax_actors.runtime.exit_codes import EXIT_PEER_LOST
from relax_actors.runtime.run_folder import RunFolder
from tests.integration.test_megatron_ranks import check_same_training, configured, is_alive
from tests.support.batches import batch_of
from tests.support.contexts import MakeContext
from tests.support.running import processes_of, wait_until
from tests.support.tiny_megatron import DENSE, skip_if_missing
from tests.support.trained_engines import started

skip_if_missing()

from relax_actors.engines.megatron.mcore.engine import MegatronEngine  # noqa: E402 not before the check

LAYOUTS = {"tp2": {"tensor_parallel": 2}, "dp2": {}}
FOUR = {
    "tp2 pp2": (DENSE, {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "dp2 cp2": (DENSE, {"context_parallel": 2}),
    "dp4": (DENSE, {}),
    "dp2 pp2 uneven": (DENSE, {"pipeline_parallel": 2, "first_stage_layers": 1}),
}
"""Layouts of four ranks, of which two are on another node."""
ACTOR = "relax_actors.supervision.actor_process"


class Nodes:
    """The trainer's side in this process, and actors of other nodes in processes of their own."""

    def __init__(self, table: Table, address: Address, make_context: MakeContext, tmp_path: Path) -> None:
        self._table, self._address, self._make_context, self._tmp_path = table, address, make_context, tmp_path
        self.actors: list[subprocess.Popen[bytes]] = []
        self._groups: list[TrainerGroup] = []
        self.ended: list[tuple[int, int]] = []
        """Ranks of groups that ended by themselves, with their exit codes."""

    def configured(self, section: dict[str, Any], model: dict[str, Any] = DENSE, ranks: int = 2) -> Config:
        config = configured(self._tmp_path, model, {**section, "local_ranks": ranks // 2}, ranks)
        run = config.run.model_copy(update={"name": self._table.subjects.run})
        return config.model_copy(update={"run": run})

    def add_actor(self, config: Config) -> subprocess.Popen[bytes]:
        """Start an actor `trainer_rank` with a folder of its own, as the supervisor of a node does."""
        n = len(self.actors)
        folder = RunFolder(self._tmp_path / f"node{n}")
        folder.root.mkdir()
        folder.save_config(config, "")
        self._address.save(folder.address)
        command = [sys.executable, "-m", ACTOR, str(folder.root), "trainer_rank", str(n)]
        self.actors.append(subprocess.Popen(command))
        return self.actors[-1]

    def ranks_of(self, n: int) -> list[int]:
        """Processes of the ranks that an actor hosts."""
        return processes_of(self._tmp_path / f"node{n}", "ranks.rank")

    def context(self, config: Config, incarnation: int) -> Context:
        context = self._make_context("trainer", incarnation=incarnation)
        return replace(context, config=config)

    def group(self, config: Config, incarnation: int = 1) -> TrainerGroup:
        megatron = config.trainer.megatron
        remote = RemoteRanks(self.context(config, incarnation), megatron.own_ranks, megatron.remote_ranks)
        self._groups.append(TrainerGroup(config, lambda *end: self.ended.append(end), remote.join))
        return self._groups[-1]

    def close(self) -> None:
        for group in self._groups:
            group.close()
        for actor in self.actors:
            actor.kill()
            actor.wait()


@pytest.fixture
def spread(table: Table, address: Address, make_context: MakeContext, tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(table, address, make_context, tmp_path)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_on_two_nodes_train_what_one_process_trains(spread: Nodes, tmp_path: Path, name: str) -> None:
    config = spread.configured(LAYOUTS[name])
    spread.add_actor(config)
    alone = started(MegatronEngine(configured(tmp_path, DENSE, {}, ranks=1)))
    check_same_training(started(spread.group(config)), alone, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_on_two_nodes_train_what_one_process_trains(spread: Nodes, tmp_path: Path, name: str) -> None:
    model, section = FOUR[name]
    config = spread.configured(section, model, ranks=4)
    for _ in range(config.trainer.megatron.remote_ranks):
        spread.add_actor(config)
    alone = started(MegatronEngine(configured(tmp_path, model, {}, ranks=1)))
    group = started(spread.group(config))
    check_same_training(group, alone, tmp_path)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    group.save(folder)
    back = MegatronEngine(configured(tmp_path, model, {}, ranks=1))
    back.load(folder)
    assert back.fingerprint() == group.fingerprint()
    losses = [train(engine, batch_of(7), 7, lambda: None).metrics["loss"] for engine in (back, group)]
    assert losses[0] == pytest.approx(losses[1], abs=5e-5)


@pytest.mark.slow
def test_groups_follow_each_other_and_a_dead_rank_ends_its_group_everywhere(spread: Nodes, tmp_path: Path) -> None:
    config = spread.configured(LAYOUTS["dp2"])
    actor = spread.add_actor(config)
    first = started(spread.group(config))
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    first.save(folder)
    wanted = first.fingerprint()
    (rank,) = spread.ranks_of(0)
    first.close()
    wait_until(lambda: not is_alive(rank), "end of the rank with its group")
    assert actor.poll() is None

    second = spread.group(config, incarnation=2)
    second.load(folder)
    assert second.fingerprint() == wanted
    third = spread.group(config, incarnation=3)  # while the second one lives: its trainer was replaced
    wait_until(lambda: spread.ended, "end of the group before")
    assert spread.ended == [(1, EXIT_PEER_LOST)]
    wait_until(lambda: not any(map(is_alive, second.pids)), "end of its rank here")

    (rank,) = spread.ranks_of(0)
    os.kill(rank, signal.SIGKILL)
    assert actor.wait(20) == -signal.SIGKILL  # its supervisor sees how the rank ended
    wait_until(lambda: len(spread.ended) == 2, "end of the group")
    wait_until(lambda: not any(map(is_alive, third.pids)), "end of its rank here")

    spread.add_actor(config)
    fourth = started(spread.group(config, incarnation=4))
    (rank,) = spread.ranks_of(1)
    spread.actors[1].kill()
    wait_until(lambda: not is_alive(rank), "end of the rank with its actor")
    wait_until(lambda: not any(map(is_alive, fourth.pids)), "end of the rank here")
    with pytest.raises(RankError, match="exited with code"):
        fourth.score(batch_of(0), lambda: None)


@pytest.mark.slow
def test_the_error_with_which_a_rank_of_another_node_starts_is_raised_by_the_trainer(spread: Nodes) -> None:
    config = spread.configured(LAYOUTS["dp2"])
    trainer = config.trainer.model_copy(update={"device": "cuda"})
    actor = spread.add_actor(config.model_copy(update={"trainer": trainer}))
    with pytest.raises(ConfigError, match="CUDA is not available"):
        spread.group(config)
    assert (spread.ended, actor.poll()) == ([], None)


def test_a_trainer_without_enough_ranks_says_which_are_missing(spread: Nodes) -> None:
    config = spread.configured(LAYOUTS["dp2"])
    hurried = config.model_copy(update={"supervision": config.supervision.model_copy(update={"patience": 1.0})})
    with pytest.raises(ConfigError, match=r"0 of 1 ranks .*relax node --role trainer_rank=1.*supervision.patience"):
        RemoteRanks(spread.context(hurried, 1), 1, 1).join()


def invitation(config: Config, **changes: object) -> RankInvitation:
    asked = RankInvitation("group", 3, rank_platform(), settings_digest(config))
    return replace(asked, **changes)  # type: ignore[arg-type]


def test_an_actor_refuses_other_code_other_settings_and_an_earlier_trainer(tmp_path: Path) -> None:
    config = configured(tmp_path, DENSE, {})
    host = RankHost(config, tmp_path, lambda *_: None)
    assert host.problem_with(invitation(config)) == ""
    assert "install the same versions" in host.problem_with(invitation(config, platform="torch 1.0"))
    on_gpus = rank_platform().replace("on the CPU", "on GPUs")
    assert "give both GPUs or neither" in host.problem_with(invitation(config, platform=on_gpus))
    other = configured(tmp_path, DENSE, {}, weight_decay=0.5)
    assert "other settings of [trainer]" in host.problem_with(invitation(other))
    for lora in ({"alpha": 8.0}, {"alpha": 8.0, "dropout": 0.1}):
        adapted = config.model_copy(update={"lora": LoraSection.model_validate(lora)})
        assert "other settings of [trainer], [algorithm], [lora]" in host.problem_with(invitation(adapted))
        host = RankHost(adapted, tmp_path, lambda *_: None)
        assert host.problem_with(invitation(adapted)) == ""
    host = RankHost(config, tmp_path, lambda *_: None)
    on_gpu = configured(tmp_path, DENSE, {}, device="cuda")
    assert host.problem_with(invitation(on_gpu)) == ""  # devices may differ
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    host.join(invitation(config, rank=1, host="127.0.0.1", port=port))
    wait_until(lambda: not host.is_hosting, "end of a rank whose trainer is gone")
    assert "incarnation 3" in host.problem_with(invitation(config, incarnation=2))
    assert host.problem_with(invitation(config, incarnation=3)) == ""


def test_only_the_holder_of_the_token_is_let_in() -> None:
    token = "a" * 64
    for said, wanted in (((token, 5), 5), (("b" * 64, 5), None)):
        one, other = socket.socketpair()
        with closing(one), closing(other):
            send_token(one, *said)
            assert receive_token(other, token) == wanted
    one, other = socket.socketpair()
    with closing(other):
        one.sendall(b"GET / HTTP/1.1")
        one.close()
        assert receive_token(other, token) is None


def test_the_end_of_a_connection_is_noticed_without_reading_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as one:
        other, _ = listener.accept()
        keep(one)
        seen: list[bool] = []
        waiting = threading.Thread(target=lambda: seen.append(wait_for_end(one)))
        waiting.start()
        other.sendall(b"a message that nobody reads")
        assert select.select([one], [], [], 10)[0]
        assert not seen
        other.close()
        waiting.join(10)
        assert seen == [True]


def test_loopback_is_reached_by_loopback() -> None:
    assert local_address("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") == ""
