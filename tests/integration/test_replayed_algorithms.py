"""A step of each algorithm gives the same bits when it is computed again elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from broker.table import Table
from relax_actors.algorithms.named_functions import needs_whole_step
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.config.sampled_presets import SAMPLED
from relax_actors.config.saved import SavedSettings
from relax_actors.messages import Trajectory
from relax_actors.monitoring.connection import Connected
from relax_actors.replay.recording import Recording
from relax_actors.replay.steps import Replayer
from tests.support.contexts import MakeTrainer
from tests.support.steps import put_step, read_all

WITHOUT_KL = {"place": "none"}


def presets() -> list[str]:
    """Presets whose trainer reads trajectories and advantages alone, as they come from the rows."""
    found = []
    for name in SAMPLED:
        section = AlgorithmSection.model_validate({"name": name, "kl": WITHOUT_KL})
        if (
            section.distil.place == "none"
            and not section.loss_reads_reference
            and section.advantage not in ("gae", "ema")
        ):
            found.append(name)
    return found


def finished(trajectory: Trajectory) -> Trajectory:
    """Samples that are not cut off: DAPO masks those."""
    return replace(trajectory, finish_reasons=["stop"] * len(trajectory.lengths))


def recorded(make_trainer: MakeTrainer, table: Table, scratch: Path, name: str) -> Recording:
    """Train two steps of an algorithm, and return what a replay reads."""
    trainer = make_trainer(f"algorithm.name={name}", "algorithm.kl.place=none", "run.keep_steps=9")
    with_rewards = needs_whole_step(trainer.context.config.algorithm)
    for step in range(2):
        put_step(table, step, version=step, rewards=with_rewards, change=finished)
        read_all(table, trainer)
    context = trainer.context
    settings = SavedSettings(context.config.model_dump(mode="json"))
    at = Connected(context.folder, settings, context.table, context.state, live=True, load=lambda: context.config)
    scratch.mkdir()
    return Recording(at, scratch)


@pytest.mark.slow
@pytest.mark.parametrize("name", presets())
def test_steps_of_an_algorithm_give_the_recorded_bits(
    make_trainer: MakeTrainer, table: Table, tmp_path: Path, name: str
) -> None:
    recording = recorded(make_trainer, table, tmp_path / "scratch", name)
    found = Replayer(recording, recording.config, "policy").replay(1)
    assert found.json()["difference"] is None
    assert (found.steps, found.recorded) == ([0, 1], found.computed)
    assert len(found.figures) > 5
    assert not found.rows or len(found.rows) == len(found.micro_batches)
    assert found.micro_batches
    for part in found.micro_batches:
        assert part["loss"].recorded is not None


def test_gradients_are_measured_on_request(make_trainer: MakeTrainer, table: Table, tmp_path: Path) -> None:
    recording = recorded(make_trainer, table, tmp_path / "scratch", "grpo")
    for measured in (False, True):
        found = Replayer(recording, recording.config, "policy", gradients=measured).replay(1).json()
        assert (found["difference"], found["recorded"]) == (None, found["computed"])
        assert found["micro_batches"]
        for part in found["micro_batches"]:
            assert ("gradient" in part, bool(part["gradients"])) == (measured, measured)
