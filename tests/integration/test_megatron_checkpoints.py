"""Checkpoints of Megatron ranks: training goes on in the same layout, and in another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax_actors.engines.protocols import TrainingEngine
from relax_actors.engines.ranks.group import TrainerGroup
from tests.integration.test_megatron_ranks import ODD, configured, trained, weights_of
from tests.support.tiny_megatron import DENSE, MOE, skip_if_missing
from tests.support.trained_engines import max_difference, started

skip_if_missing()
from relax_actors.engines.megatron.mcore.engine import MegatronEngine  # noqa: E402 not before the check

RESHARDED = [
    ("tp2", DENSE, {"tensor_parallel": 2}),
    ("pp2", DENSE, {"pipeline_parallel": 2}),
    ("dp2", DENSE, {}),
    ("dp2_plain", DENSE, {"distributed_optimizer": False}),
    ("odd tp2", DENSE | ODD, {"tensor_parallel": 2}),
    ("ep2", MOE, {"expert_parallel": 2}),
    ("pp2 uneven", DENSE, {"pipeline_parallel": 2, "first_stage_layers": 1}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "model", "section"), RESHARDED, ids=[name for name, *_ in RESHARDED])
def test_a_checkpoint_is_loaded_by_another_layout(
    tmp_path: Path, group_of: Callable[..., TrainerGroup], name: str, model: dict[str, Any], section: dict[str, Any]
) -> None:
    alone = started(MegatronEngine(configured(tmp_path, model, {}, ranks=1)))
    trained(alone, range(2))
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    alone.save(one)
    group = group_of(configured(tmp_path, model, section))
    group.load(one)
    assert group.fingerprint() == alone.fingerprint()
    assert trained(group, range(2, 4)) == pytest.approx(trained(alone, range(2, 4)), abs=5e-5)
    group.save(other)
    back = MegatronEngine(configured(tmp_path, model, {}, ranks=1))
    back.load(other)
    assert back.fingerprint() == group.fingerprint()
    assert trained(back, range(4, 6)) == pytest.approx(trained(group, range(4, 6)), abs=5e-5)
    assert max_difference(weights_of(back, tmp_path / "a"), weights_of(group, tmp_path / "b")) < 5e-5


@pytest.mark.slow
def test_training_continues_from_layout_to_layout(tmp_path: Path, group_of: Callable[..., TrainerGroup]) -> None:
    """One rank, then two of tensor parallelism, then two of data parallelism: the loss curve of one rank throughout."""
    alone = started(MegatronEngine(configured(tmp_path, DENSE, {}, ranks=1)))
    wanted = trained(alone, range(9))
    found: list[float] = []
    engine: TrainingEngine = started(MegatronEngine(configured(tmp_path, DENSE, {}, ranks=1)))
    layouts: list[dict[str, Any]] = [{"tensor_parallel": 2}, {}]
    for turn, section in enumerate([*layouts, None]):
        found += trained(engine, range(3 * turn, 3 * turn + 3))
        if section is None:
            break
        folder = tmp_path / f"checkpoint.{turn}"
        folder.mkdir()
        engine.save(folder)
        fingerprint = engine.fingerprint()
        engine = group_of(configured(tmp_path, DENSE, section))
        engine.load(folder)
        assert engine.fingerprint() == fingerprint
    assert found == pytest.approx(wanted, abs=5e-5)
    assert max_difference(weights_of(engine, tmp_path / "a"), weights_of(alone, tmp_path / "b")) < 5e-5


@pytest.mark.slow
def test_two_ranks_resume_from_their_checkpoint_exactly(tmp_path: Path, group_of: Callable[..., TrainerGroup]) -> None:
    config = configured(tmp_path, MOE, {"expert_parallel": 2})
    one = started(group_of(config))
    trained(one, range(2))
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    finish = one.begin_save(folder)
    wanted = trained(one, range(2, 4)), one.fingerprint()
    finish()
    one.close()
    other = group_of(config)
    other.load(folder)
    assert (trained(other, range(2, 4)), other.fingerprint()) == wanted
