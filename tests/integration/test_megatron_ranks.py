"""Several ranks are one trainer: every layout gives the weights of one process, and the ranks end together."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax_actors.config import Config
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.config.training import MegatronSection
from relax_actors.engines.protocols import TrainingEngine, TrainSample, train
from relax_actors.engines.ranks.group import TrainerGroup
from relax_actors.engines.ranks.rpc import RankError
from relax_actors.weights import files as weights
from tests.support.batches import batch_of, routed, silent
from tests.support.running import wait_until
from tests.support.tiny_megatron import DENSE, MOE, config_of, ranks_of, skip_if_missing
from tests.support.trained_engines import max_difference, started

skip_if_missing()

from relax_actors.engines.megatron.mcore.engine import MegatronEngine  # noqa: E402 not before the check

STEPS = 5
ALGORITHM = {
    "kl": {"place": "loss", "coefficient": 0.1},
    "aggregate": "sample_mean_of_means",
    "reject": {"kind": "geometric", "low": 0.9, "high": 1.1},
}
# An odd number of tokens: two ranks hold unequal parts of the vocabulary.
ODD = {"vocab_size": 13}
SHARED: dict[str, Any] = {"tensor_parallel": 2, "sequence_parallel": True}
"""Layout of the ranks that the quick tests share; their model has experts, which are replayed where given."""

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp2": (DENSE | ODD, {"tensor_parallel": 2}),
    "tp2_sp": (DENSE | ODD, {"tensor_parallel": 2, "sequence_parallel": True}),
    "pp2": (DENSE, {"pipeline_parallel": 2}),
    "pp2 uneven": (DENSE, {"pipeline_parallel": 2, "last_stage_layers": 1}),
    "pp2_vpp2": (DENSE, {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    "dp2": (DENSE, {}),
    "dp2_plain": (DENSE, {"distributed_optimizer": False}),
    "cp2": (DENSE, {"context_parallel": 2}),
    "ep2": (MOE, {"expert_parallel": 2, "grouped_experts": True}),
    "moe_pp2": (MOE, {"pipeline_parallel": 2}),
    "moe_tp2_sp": (MOE, {"tensor_parallel": 2, "sequence_parallel": True}),
    "moe_tp2_sp_ep2": (
        MOE,
        {**SHARED, "expert_parallel": 2, "expert_tensor_parallel": 1, "grouped_experts": True},
    ),
    "tp2_recompute": (DENSE, {"tensor_parallel": 2, "recompute": "full"}),
}
REPLAYED: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2_sp": {"tensor_parallel": 2, "sequence_parallel": True},
    "pp2_recompute": {"pipeline_parallel": 2, "recompute": "full"},
    "pp2_vpp2_recompute": {"pipeline_parallel": 2, "virtual_pipeline": 2, "recompute": "full"},
    "cp2": {"context_parallel": 2},
    "ep2": {"expert_parallel": 2},
    "tp2_sp_ep2": {**SHARED, "expert_parallel": 2, "expert_tensor_parallel": 1, "grouped_experts": True},
}


def configured(
    tmp_path: Path, model: dict[str, Any], section: dict[str, Any], ranks: int = 2, **trainer: Any
) -> Config:
    settings = {"learning_rate": 1e-3, **ranks_of(section, ranks), **trainer}
    return config_of(tmp_path, model, algorithm=ALGORITHM, trainer=settings)


def trained(engine: TrainingEngine, steps: range) -> list[float]:
    return [train(engine, batch_of(step), step, silent).metrics["loss"] for step in steps]


def weights_of(engine: TrainingEngine, path: Path) -> dict[str, torch.Tensor]:
    paths = [path.with_name(f"{path.name}.{n}") for n in range(engine.shards)]
    assert engine.publish(*paths) == engine.fingerprint()
    return weights.load(paths)


class SharedRanks:
    """Two ranks for several tests; started again after a test has killed them."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._groups: list[TrainerGroup] = []
        self.ended: list[tuple[int, int]] = []
        """Ranks that ended by themselves, with their exit codes."""

    def begun(self) -> TrainerGroup:
        """The ranks, at version 0."""
        if not self._groups or not all(map(is_alive, self._groups[-1].pids)):
            self._groups.append(TrainerGroup(self._config, lambda *end: self.ended.append(end)))
        started(self._groups[-1])
        return self._groups[-1]

    def close(self) -> None:
        for group in self._groups:
            group.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedRanks]:
    made = SharedRanks(configured(tmp_path_factory.mktemp("shared"), MOE | ODD, SHARED, router_replay=True))
    yield made
    made.close()


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def alone_of(tmp_path: Path) -> TrainingEngine:
    """One process with the model of the shared ranks."""
    return started(MegatronEngine(configured(tmp_path, MOE | ODD, {}, ranks=1, router_replay=True)))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", ["ep2", "pp2"])
def test_overflow_skips_the_update_of_all_ranks_which_leave_their_devices_together(
    group_of: Callable[..., TrainerGroup], tmp_path: Path, layout: str
) -> None:
    scaled = {"precision": "float16", "loss_scale": {"initial": 2.0**24, "growth_interval": 1}}
    group, away = group_of(configured(tmp_path, *LAYOUTS[layout], **scaled)), tmp_path / "away"
    both = []
    for leaves in (False, True):
        started(group)
        found, sizes = [], set()
        for step in range(10):
            group.accumulate(batch_of(step), silent)
            if leaves:
                group.release_memory(away)
                group.resume_memory()
            before = group.fingerprint()
            found.append(dict(group.step(step, silent).metrics))
            if leaves:
                sizes.add(group.release_memory(away))
            skipped = bool(found[-1]["skipped_updates"])
            assert (group.fingerprint() == before) == skipped  # read while the memory is away
            group.resume_memory()
        both.append((found, group.fingerprint()))
    assert both[0] == both[1]
    skips = [figures["skipped_updates"] for figures in found]
    assert (skips[0], min(skips)) == (1, 0)
    scales = [figures["loss_scale"] for figures in found]
    assert scales[1:] == [s / 2 if skip else 2 * s for s, skip in zip(scales, skips, strict=True)][:-1]
    assert max(sizes) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_of_any_layout_train_what_one_process_trains(
    tmp_path: Path, group_of: Callable[..., TrainerGroup], name: str
) -> None:
    model, section = LAYOUTS[name]
    alone = started(MegatronEngine(configured(tmp_path, model, {}, ranks=1)))
    check_same_training(started(group_of(configured(tmp_path, model, section))), alone, tmp_path)


@pytest.mark.slow
def test_two_ranks_train_what_one_process_trains(tmp_path: Path, shared: SharedRanks) -> None:
    check_same_training(shared.begun(), alone_of(tmp_path), tmp_path)


def check_same_training(group: TrainingEngine, alone: TrainingEngine, tmp_path: Path) -> None:
    assert group.fingerprint() == alone.fingerprint()  # split over the ranks and put together again, exactly
    progress: list[int] = []
    for step in range(STEPS):
        ours = train(group, batch_of(step), step, lambda: progress.append(1)).metrics
        theirs = train(alone, batch_of(step), step, silent).metrics
        assert ours.keys() == theirs.keys()
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=5e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
        assert ours["ratio_p99"] == pytest.approx(theirs["ratio_p99"], abs=5e-5)
        assert ours["tokens"] == theirs["tokens"]
        assert ours["rejected"] == theirs["rejected"]
    assert progress
    assert max_difference(weights_of(group, tmp_path / "group"), weights_of(alone, tmp_path / "alone")) < 5e-5


WHOLE: dict[str, dict[str, Any]] = {
    "sample ratio, entropy and KL": {
        "ratio": "sequence_mean",
        "aggregate": "sample_mean_of_means",
        "entropy": {"coefficient": 0.05, "quantile": 0.5, "target": 2.0},
        "kl": {"place": "loss", "coefficient": 0.1, "target": 0.01, "horizon": 100},
    },
}
"""Losses that need numbers of whole samples and of the step."""


def in_pairs(batch: Sequence[TrainSample]) -> list[TrainSample]:
    """Make two sequences each one sample."""
    found = []
    for i in range(0, len(batch), 2):
        tokens = sum(sample.trained for sample in batch[i : i + 2])
        found += [replace(sample, row=0, sample=i, sample_tokens=tokens) for sample in batch[i : i + 2]]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "loss"),
    [(layout, "sample ratio, entropy and KL") for layout in ("tp2", "pp2_vpp2", "dp2", "cp2")],
)
def test_two_ranks_know_whole_samples_and_steps(
    tmp_path: Path, group_of: Callable[..., TrainerGroup], name: str, loss: str
) -> None:
    model, section = LAYOUTS[name]
    config = configured(tmp_path, model, {}, ranks=1)
    algorithm = AlgorithmSection.model_validate(WHOLE[loss])
    alone = started(MegatronEngine(config.model_copy(update={"algorithm": algorithm})))
    layout = {"megatron": MegatronSection(**ranks_of(section)["megatron"])}
    ranks = config.trainer.model_copy(update=layout | {"recompute": section.get("recompute", "none")})
    group = started(group_of(config.model_copy(update={"algorithm": algorithm, "trainer": ranks})))
    for step in range(STEPS):
        batch = in_pairs(batch_of(step))
        ours, theirs = train(group, batch, step, silent).metrics, train(alone, batch, step, silent).metrics
        for metric in theirs.keys() - {"micro_batches"}:
            assert ours[metric] == pytest.approx(theirs[metric], abs=5e-5, rel=1e-3), metric
    assert max_difference(weights_of(group, tmp_path / "group"), weights_of(alone, tmp_path / "alone")) < 5e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", REPLAYED)
def test_two_ranks_of_any_layout_replay_the_experts_that_one_process_replays(
    tmp_path: Path, group_of: Callable[..., TrainerGroup], name: str
) -> None:
    alone = started(MegatronEngine(configured(tmp_path, MOE, {}, ranks=1, router_replay=True)))
    check_same_replay(started(group_of(configured(tmp_path, MOE, REPLAYED[name], router_replay=True))), alone, tmp_path)


@pytest.mark.slow
def test_two_ranks_replay_the_experts_that_one_process_replays(tmp_path: Path, shared: SharedRanks) -> None:
    check_same_replay(shared.begun(), alone_of(tmp_path), tmp_path)


def check_same_replay(group: TrainingEngine, alone: TrainingEngine, tmp_path: Path) -> None:
    for step in range(STEPS):
        batch = routed(batch_of(step), step, MOE)
        ours, theirs = train(group, batch, step, silent).metrics, train(alone, batch, step, silent).metrics
        assert ours.keys() == theirs.keys()
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=5e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
        assert ours["rerouted"] == pytest.approx(theirs["rerouted"], abs=0.01)
        assert ours["rerouted"] > 0.5  # of experts drawn at random few are the routers' own
    assert max_difference(weights_of(group, tmp_path / "group"), weights_of(alone, tmp_path / "alone")) < 5e-5


@pytest.mark.slow
@pytest.mark.parametrize("section", [{"pipeline_parallel": 2, "recompute": "full"}, {}], ids=["pp2", "dp2"])
def test_two_ranks_freeze_what_one_process_freezes(
    tmp_path: Path, group_of: Callable[..., TrainerGroup], section: dict[str, Any]
) -> None:
    frozen = ["model.embed_tokens.*", "model.layers.3.*"]
    alone = started(MegatronEngine(configured(tmp_path, DENSE, {}, ranks=1, freeze=frozen)))
    group = started(group_of(configured(tmp_path, DENSE, section, freeze=frozen)))
    before = weights_of(group, tmp_path / "before")
    assert trained(group, range(3)) == pytest.approx(trained(alone, range(3)), abs=5e-5)
    after = weights_of(group, tmp_path / "after")
    assert max_difference(after, weights_of(alone, tmp_path / "alone")) < 5e-5
    for name, tensor in after.items():
        assert bool((tensor == before[name]).all()) == name.startswith(("model.embed_tokens", "model.layers.3."))


def test_a_killed_rank_ends_all_ranks(shared: SharedRanks) -> None:
    group = shared.begun()
    os.kill(group.pids[1], signal.SIGKILL)
    wait_until(lambda: shared.ended, "report of the rank that ended")
    assert shared.ended == [(1, -signal.SIGKILL)]
    with pytest.raises(RankError, match="rank"):
        train(group, batch_of(0), 0, silent)
    wait_until(lambda: not any(map(is_alive, group.pids)), "end of all ranks")


@pytest.mark.slow
def test_an_error_on_all_ranks_is_raised_and_the_group_stays_usable(tmp_path: Path, shared: SharedRanks) -> None:
    group = shared.begun()
    before = group.fingerprint()
    with pytest.raises(OSError, match=r"rank 0: .*nowhere"):
        group.publish(tmp_path / "nowhere" / "weights")
    with pytest.raises(OSError, match=r"rank 1: .*nowhere"):
        group.publish(tmp_path / "weights", tmp_path / "nowhere" / "weights")
    tokens = np.ones(66, np.int32)  # the last one is no input
    too_long = TrainSample.of_completion(tokens[:1], tokens[1:])
    with pytest.raises(ValueError, match="holds at most 64"):
        train(group, [too_long], 0, silent)
    assert group.fingerprint() == before


@pytest.mark.slow
def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    config = configured(tmp_path, DENSE, {})
    saved = tmp_path / "config.json"
    saved.write_text(config.model_dump_json())
    code = (
        "import sys, json; from pathlib import Path; from relax_actors.config.load import validate\n"
        "from relax_actors.engines.ranks.group import TrainerGroup\n"
        f"group = TrainerGroup(validate(json.loads(Path({str(saved)!r}).read_text()), 'test'))\n"
        "print(*group.pids, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert parent.stdout is not None
    ranks = [os.pidfd_open(int(pid)) for pid in parent.stdout.readline().split()]
    assert len(ranks) == 2
    parent.kill()
    parent.communicate()
    poll = select.poll()
    for rank in ranks:
        poll.register(rank, select.POLLIN)
    gone: set[int] = set()
    while len(gone) < len(ranks):
        ready = poll.poll(20_000)
        assert ready, "a rank outlives its parent"
        for fd, _ in ready:
            gone.add(fd)
            poll.unregister(fd)
            os.close(fd)
