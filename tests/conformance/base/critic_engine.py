"""Suite of `CriticEngine`: an update is a function of weights, optimizer state, batch and step number alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_actors.config import Config
from relax_actors.engines.protocols.training import SupportsAsyncSave
from relax_actors.engines.torch.model import build, tensors_of
from tests.support.batches import batch_of, silent, valued
from tests.support.models import publish

MakeCritic = Callable[..., Any]


def policy_of(config: Config, folder: Path) -> list[Path]:
    """Files of a version 0 of the policy."""
    return publish(tensors_of(build(config.model_path, seed=5)), folder / "policy")[1]


def updated(critic: Any, step: int) -> dict[str, float]:
    """Update a critic with the batch of a step; returns the metrics."""
    critic.accumulate(valued(batch_of(step), step), silent)
    return dict(critic.step(step, silent).metrics)


class CriticConformance:
    """Laws of every critic; subclasses provide fixture `make`, which makes engines at version 0 from a policy.

    `make(path)` makes one of a folder that a critic exported; further arguments are settings of section `trainer`.
    """

    implements: str
    """Name in the registry."""

    @pytest.fixture
    def make(self, tmp_path: Path) -> MakeCritic:
        raise NotImplementedError

    def test_a_new_critic_values_everything_at_zero(self, make: MakeCritic) -> None:
        one, other = make(), make()
        assert one.fingerprint() == other.fingerprint()
        assert not any(values.any() for values in one.values(batch_of(1), silent))

    def test_values_are_those_of_the_trained_tokens(self, make: MakeCritic) -> None:
        critic, batch = make(), batch_of(2)
        updated(critic, 0)
        calls: list[None] = []
        values = critic.values(batch, lambda: calls.append(None))
        assert calls
        for sample, found in zip(batch, values, strict=True):
            assert (found.dtype, found.shape) == (np.float32, sample.token_ids.shape)
            assert found[sample.loss_mask].all()
            assert not found[~sample.loss_mask].any()
        for found, again in zip(values, critic.values(batch, silent), strict=True):
            np.testing.assert_array_equal(found, again)

    def test_the_weights_are_a_function_of_the_batches(self, make: MakeCritic) -> None:
        prints = []
        for second in (1, 1, 2):
            critic = make()
            updated(critic, 0)
            before = critic.fingerprint()
            critic.accumulate(valued(batch_of(3), 3), silent)
            assert critic.fingerprint() == before
            critic.discard()
            updated(critic, second)
            prints.append(critic.fingerprint())
        assert prints[0] == prints[1] != prints[2]

    def test_a_step_without_rows_is_refused(self, make: MakeCritic) -> None:
        with pytest.raises(ValueError, match=r"step 3.*call accumulate"):
            make().step(3, silent)

    def test_a_critic_learns_its_returns(self, make: MakeCritic) -> None:
        critic = make()
        measured = []
        for _ in range(40):
            critic.accumulate(valued(batch_of(1), 1), silent)
            measured.append(critic.step(0, silent).metrics)
        assert measured[-1]["value_loss"] < measured[0]["value_loss"]
        assert measured[-1]["explained_variance"] > 0.5 > abs(measured[0]["explained_variance"])

    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_training_continues_bit_for_bit_from_a_checkpoint(
        self, make: MakeCritic, tmp_path: Path, *, asynchronous: bool
    ) -> None:
        critic = make()
        updated(critic, 0)
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        if asynchronous:
            assert isinstance(critic, SupportsAsyncSave)
            finish = critic.begin_save(folder)
            updated(critic, 1)
            finish()
        else:
            critic.save(folder)
            updated(critic, 1)
        other = make()
        other.load(folder)
        updated(other, 1)
        assert other.fingerprint() == critic.fingerprint()

    def test_memory_that_goes_to_the_disk_meanwhile_changes_no_bit(self, make: MakeCritic, tmp_path: Path) -> None:
        stayed, left = make(), make()
        for step in range(2):
            assert left.release_memory(tmp_path / "away") > 0
            before = left.fingerprint()  # read while it is away
            assert left.resume_memory() > 0
            assert before == stayed.fingerprint()
            left.accumulate(valued(batch_of(step), step), silent)
            left.release_memory(tmp_path / "away")
            left.resume_memory()
            a, b = updated(stayed, step), dict(left.step(step, silent).metrics)
            assert a == b
        assert left.fingerprint() == stayed.fingerprint()

    @pytest.mark.slow
    def test_an_overflow_in_float16_skips_the_update_and_halves_the_loss_scale(
        self, make: MakeCritic, tmp_path: Path
    ) -> None:
        settings = {"precision": "float16", "loss_scale": {"initial": 2.0**17, "growth_interval": 1}}
        critic, found, folder = make(**settings), [], tmp_path / "checkpoint"
        for step in range(6):
            before = critic.fingerprint()
            found.append(updated(critic, step))
            assert (critic.fingerprint() == before) == bool(found[-1]["skipped_updates"])
            if step == 1:
                folder.mkdir()
                critic.save(folder)
        scales, skipped = [m["loss_scale"] for m in found], [m["skipped_updates"] for m in found]
        assert (skipped[0], scales[0]) == (1, 2.0**17)
        assert 0 in skipped
        assert scales[1:] == [s / 2 if skip else 2 * s for s, skip in zip(scales, skipped, strict=True)][:-1]
        other = make(**settings)
        other.load(folder)
        assert [updated(other, step) for step in range(2, 6)] == found[2:]
        assert other.fingerprint() == critic.fingerprint()

    def test_another_critic_starts_from_an_exported_folder(self, make: MakeCritic, tmp_path: Path) -> None:
        critic, batch = make(), batch_of(4)
        updated(critic, 0)
        critic.export(tmp_path / "critic")
        other = make(tmp_path / "critic")
        assert other.fingerprint() == critic.fingerprint()
        for found, expected in zip(other.values(batch, silent), critic.values(batch, silent), strict=True):
            np.testing.assert_array_equal(found, expected)
