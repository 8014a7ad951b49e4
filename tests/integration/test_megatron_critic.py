"""Several ranks are one critic: every layout gives the values and weights of the torch critic."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_actors.config import Config
from relax_actors.config.training import CriticSection, MegatronSection
from relax_actors.engines.ranks.group import CriticGroup
from relax_actors.engines.ranks.rpc import RankError
from relax_actors.engines.torch.critic import TorchCritic
from relax_actors.weights import files as weights
from tests.conformance.base.critic_engine import policy_of, updated
from tests.support.batches import batch_of, parts_of, silent, valued
from tests.support.running import wait_until
from tests.support.tiny_megatron import DENSE, MOE, config_of, skip_if_missing

skip_if_missing()

ODD = {"vocab_size": 13}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp2": (DENSE | ODD, {"tensor_parallel": 2}),
    "tp2_sp": (DENSE | ODD, {"tensor_parallel": 2, "sequence_parallel": True}),
    "pp2": (DENSE, {"pipeline_parallel": 2}),
    "pp2_vpp2": (DENSE, {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    "dp2": (DENSE, {}),
    "dp2_plain": (DENSE, {"distributed_optimizer": False}),
    "cp2": (DENSE, {"context_parallel": 2}),
    "moe_tp2_sp_ep2": (
        MOE,
        {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2, "expert_tensor_parallel": 1},
    ),
    "tp2_pp2": (DENSE, {"ranks": 4, "tensor_parallel": 2, "pipeline_parallel": 2}),
}
GroupOf = Callable[..., CriticGroup]


@pytest.fixture
def group_of() -> Iterator[GroupOf]:
    groups: list[CriticGroup] = []

    def make(config: Config, section: dict[str, Any], lost: Callable[[int, int], None] = lambda *_: None) -> Any:
        settings = settings_of(backend="megatron", megatron=MegatronSection(**{"ranks": 2, **section}))
        started = config.model_copy(update={"critic": settings})
        groups.append(CriticGroup(started, lost))
        return groups[-1]

    yield make
    for group in groups:
        group.close()


def settings_of(**fields: Any) -> CriticSection:
    return CriticSection(learning_rate=1e-3, max_grad_norm=0.5, value_clip=0.05, **fields)


def check_same(ours: Any, theirs: Any) -> None:
    for found, expected in zip(ours.values(batch_of(9), silent), theirs.values(batch_of(9), silent), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_of_any_layout_train_what_the_torch_critic_trains(tmp_path: Path, group_of: GroupOf, name: str) -> None:
    model, section = LAYOUTS[name]
    config = config_of(tmp_path, model, trainer={"recompute": "full" if name == "pp2" else "none"})
    ours, theirs = group_of(config, section), TorchCritic(config, settings_of())
    for critic in (ours, theirs):
        critic.initialise(policy_of(config, tmp_path))
    assert ours.fingerprint() == theirs.fingerprint()
    for step in range(3):
        own, other = updated(ours, step), updated(theirs, step)
        for metric in other.keys() - {"micro_batches"}:
            assert own[metric] == pytest.approx(other[metric], abs=1e-4), metric
        check_same(ours, theirs)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    finish = ours.begin_save(folder)
    finish()
    kept = ours.fingerprint()
    assert updated(ours, 3)["grad_norm"] == pytest.approx(updated(theirs, 3)["grad_norm"], abs=1e-4)
    last = ours.fingerprint()
    ours.load(folder)
    assert ours.fingerprint() == kept
    updated(ours, 3)
    assert ours.fingerprint() == last
    for critic, exported in ((ours, tmp_path / "ours"), (theirs, tmp_path / "theirs")):
        critic.export(exported)
    files = [sorted((tmp_path / at).glob("model*.safetensors")) for at in ("ours", "theirs")]
    own_weights, others = map(weights.load, files)
    assert own_weights.keys() == others.keys()
    for tensor, expected in others.items():
        np.testing.assert_allclose(own_weights[tensor], expected, atol=1e-4, err_msg=tensor)


@pytest.mark.slow
def test_parts_of_a_step_give_the_weights_of_the_whole_and_a_killed_rank_ends_all(
    tmp_path: Path, group_of: GroupOf
) -> None:
    config = config_of(tmp_path, DENSE)
    ended: list[tuple[int, int]] = []
    group = group_of(config, {"pipeline_parallel": 2}, lambda *end: ended.append(end))
    prints = []
    for cut in (lambda batch: [batch], parts_of):
        group.initialise(policy_of(config, tmp_path))
        for part in cut(valued(batch_of(1), 1)):
            group.accumulate(part, silent)
        group.step(0, silent)
        prints.append(group.fingerprint())
    assert prints[0] == prints[1]
    os.kill(group.pids[1], signal.SIGKILL)
    wait_until(lambda: ended, "report of the rank that ended")
    assert ended == [(1, -signal.SIGKILL)]
    with pytest.raises(RankError) as raised:
        updated(group, 1)
    assert str(raised.value) in {
        f"rank {rank} of the critic exited with code -9; restart the critic" for rank in range(2)
    }
