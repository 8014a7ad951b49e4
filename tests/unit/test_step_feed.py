"""Feeding a step to an engine: streaming, step-wide statistics, and rows that turn out unusable."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from relax_actors.config import Config
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.errors import ConfigError
from relax_actors.messages import Advantage, Dropped, Trajectory
from relax_actors.training.step_feed import Section, StepFeed, diverged
from relax_actors.training.step_rows import StepReader, StepRows, UnusableRows
from tests.support.messages import assert_says
from tests.support.models import QWEN3, config_of

ROWS = 3


class Rows:
    """Rows of a step by index; row 2 is lost when it is read."""

    def columns(self, index: int) -> dict[str, Any]:
        trajectory = Trajectory(
            np.array([1, 2, 3], np.int32),
            np.array([2, 3], np.int32),
            np.array([index, 2, 3, 4, 5], np.int32),
            np.full(5, -1.0, np.float32),
            np.zeros(5, np.int32),
            ["a", "b"],
            ["stop", "stop"],
        )
        size = 10.0 * (index + 1)
        advantage = Advantage(
            np.array([size, -size], np.float32), 0.0, rewards=np.array([size, 0.0]), role="ab"[index % 2]
        )
        return {"trajectory": trajectory, "advantage": advantage}

    def empty(self) -> StepRows:
        return StepRows([], [], [])

    def read(self, step: int, indices: Sequence[int]) -> tuple[StepRows, UnusableRows]:  # noqa: ARG002 the signature of StepReader
        rows, unusable = self.empty(), {}
        for index in indices:
            if index == 2:
                unusable[index] = Dropped("lost_segment", "x")
            else:
                rows.add(index, self.columns(index))
        return rows, unusable

    def read_again(self, step: int, indices: Sequence[int]) -> StepRows:
        return self.read(step, indices)[0]


class DivergingRows(Rows):
    """Rows with an advantage whose gradient overflows."""

    def columns(self, index: int) -> dict[str, Any]:
        found = super().columns(index)
        values = np.array([3e38, 0.0], np.float32)
        return found | {"advantage": Advantage(values, 0.0, rewards=np.zeros(2, np.float32), role="a")}


def feed_of(config: Config, rows: Rows | None = None, section: Section = "trainer") -> tuple[StepFeed, TorchEngine]:
    engine = TorchEngine(config)
    engine.initialise(5)
    engine.finish_warm_start()
    context = SimpleNamespace(config=config, device_lock=nullcontext, progress=lambda: None)
    return StepFeed(cast("Any", context), engine, cast("StepReader", rows or Rows()), section=section), engine


@pytest.mark.parametrize(("release", "streams"), [("none", True), ("host", False)])
def test_engine_that_leaves_its_device_computes_when_the_whole_step_is_there(
    tmp_path: Path,
    release: str,
    streams: bool,  # noqa: FBT001
) -> None:
    trainer = {"max_tokens_per_microbatch": 12, "prompts_per_step": ROWS}
    placement = {"colocate": [["rollout", "trainer"]], "release": release}
    feed, _ = feed_of(config_of(tmp_path, QWEN3, trainer=trainer, placement=placement))
    feed.take(0, {0: 0, 1: 1, 2: 3}, (0, 1).__contains__, ROWS)
    assert feed.has_begun is streams
    feed.take(0, {0: 0, 1: 1, 2: 3}, lambda _: True, ROWS)
    rows = feed.complete(ROWS)
    assert rows is not None
    assert rows.ids == [0, 1, 3]


@pytest.mark.parametrize("settings", [{}, {"scale": "batch_std"}, {"whiten": "samples"}, {"advantage": "ema"}])
@pytest.mark.parametrize("stream", [True, False])
def test_replay_of_a_step_with_a_replaced_row_gives_the_same_weights(
    tmp_path: Path,
    settings: dict[str, str],
    stream: bool,  # noqa: FBT001
) -> None:
    trainer = {"max_tokens_per_microbatch": 12, "prompts_per_step": ROWS, "stream": stream, "learning_rate": 1e-2}
    config = config_of(tmp_path, QWEN3, algorithm=settings, trainer=trainer)
    feed, engine = feed_of(config)
    unusable = feed.take(0, {0: 0, 1: 1, 2: 2}, lambda _: True, ROWS)
    assert set(unusable) == {2}
    assert feed.complete(ROWS) is None
    assert feed.take(0, {0: 0, 1: 1, 2: 3}, lambda _: True, ROWS) == {}
    rows = feed.complete(ROWS)
    assert rows is not None
    assert rows.ids == [0, 1, 3]
    live = feed.finish(lambda: None).metrics
    other, again = feed_of(config)
    other.replay(0, [0, 1, 3])
    replayed = other.finish(lambda: None).metrics
    assert replayed["loss"] == live["loss"]
    assert again.fingerprint() == engine.fingerprint()


@pytest.mark.parametrize("section", ["trainer", "critic"])
def test_a_diverged_step_is_named_with_the_learning_rate_to_lower(tmp_path: Path, section: Section) -> None:
    feed, engine = feed_of(config_of(tmp_path, QWEN3), DivergingRows(), section)
    before = engine.fingerprint()
    feed.replay(3, [0])
    with pytest.raises(ConfigError) as caught:
        feed.finish(lambda: None)
    assert_says(caught.value, "step 3", "nan", f"{section}.learning_rate", "clip")
    assert engine.fingerprint() == before


def test_a_finite_loss_of_the_user_with_another_gradient_is_named(tmp_path: Path) -> None:
    own = "tests.support.wrong_losses.infinite_slope"
    feed, _ = feed_of(config_of(tmp_path, QWEN3, algorithm={"surrogate": own, "proximal": "trainer"}))
    feed.replay(3, [0])
    with pytest.raises(ConfigError) as caught:
        feed.finish(lambda: None)
    assert_says(
        caught.value,
        "step 3",
        "nan",
        f"algorithm.surrogate = '{own}'",
        "(x * x + 1e-12).sqrt()",
        "trainer.learning_rate",
    )


def test_a_diverged_warm_start_names_its_own_learning_rate() -> None:
    error = FloatingPointError("the gradient norm is inf")
    assert_says(diverged(error, AlgorithmSection(), "trainer.warm_start"), "inf", "trainer.warm_start.learning_rate")
