"""Suite of `TrainingEngine`: a step is a function of weights, optimizer state, batch and step number alone.

`TrainingEngineConformance` holds for every engine, `GradientConformance` for those that compute a real model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_actors.engines.protocols import TrainingEngine, train
from tests.support.batches import answers, batch_of, parts_of, silent
from tests.support.models import STOP, request_of

MakeEngine = Callable[..., Any]
PROMPTS = [request_of(text, 0).tokens for text in ("12>", "9081>", "5>")]


def begun(engine: Any, seed: int = 5) -> Any:
    """An engine at version 0."""
    engine.initialise(seed)
    engine.finish_warm_start()
    return engine


def folder_of(path: Path) -> Path:
    """A new folder."""
    path.mkdir()
    return path


class TrainingEngineConformance:
    """Laws of every engine; subclasses provide fixture `make`, which makes engines of one configuration."""

    implements: str
    """Name in the registry."""

    @pytest.fixture
    def make(self, tmp_path: Path) -> MakeEngine:
        raise NotImplementedError

    @pytest.fixture
    def engine(self, make: MakeEngine) -> TrainingEngine:
        return begun(make())

    def test_the_first_weights_follow_from_the_seed(self, make: MakeEngine) -> None:
        engine = make()
        found = [begun(engine, seed).fingerprint() for seed in (5, 6, 5)]
        assert found[0] == found[2] != found[1]
        assert begun(make(), 5).fingerprint() == found[0]

    def test_the_weights_are_a_function_of_the_batches(self, make: MakeEngine) -> None:
        def after(*seeds: int) -> str:
            engine = begun(make())
            for step, seed in enumerate(seeds):
                train(engine, batch_of(seed), step, silent)
            return str(engine.fingerprint())

        assert after(1, 2) == after(1, 2)
        assert after(1, 2) != after(1, 3)
        assert after(1, 2) != after(2, 1)

    def test_accumulated_rows_change_the_weights_at_the_step_only(self, engine: Any) -> None:
        before, calls = engine.fingerprint(), []
        for part in parts_of(batch_of(1)):
            engine.accumulate(part, lambda: calls.append(None))
        assert engine.fingerprint() == before
        assert calls
        result = engine.step(0, silent)
        assert engine.fingerprint() != before
        assert np.isfinite(list(result.metrics.values())).all()
        assert {"loss", "grad_norm"} <= set(result.metrics)

    def test_discarded_rows_leave_no_trace(self, make: MakeEngine) -> None:
        one, other = begun(make()), begun(make())
        one.accumulate(batch_of(7), silent)
        one.discard()
        for engine in (one, other):
            train(engine, batch_of(1), 0, silent)
        assert one.fingerprint() == other.fingerprint()

    @pytest.mark.parametrize("steps", [0, 2], ids=["version 0", "after two steps"])
    def test_training_resumes_from_a_checkpoint_exactly(self, make: MakeEngine, tmp_path: Path, steps: int) -> None:
        one = begun(make())
        for step in range(steps):
            train(one, batch_of(step), step, silent)
        folder = folder_of(tmp_path / "checkpoint")
        one.save(folder)
        one.save(folder)  # as after a full disk
        other = make()
        other.load(folder)
        assert other.fingerprint() == one.fingerprint()
        for step in range(steps, steps + 3):
            a, b = train(one, batch_of(step), step, silent), train(other, batch_of(step), step, silent)
            assert a.metrics == b.metrics
        assert other.fingerprint() == one.fingerprint()

    def test_published_weights_have_the_fingerprint_of_the_engine(self, engine: Any, tmp_path: Path) -> None:
        path = tmp_path / "published.safetensors"
        first = engine.publish(path)
        assert first == engine.fingerprint()
        train(engine, batch_of(1), 0, silent)
        assert path.exists()
        second = engine.publish(path)
        assert second == engine.fingerprint() != first

    def test_a_warm_start_step_reports_its_loss(self, engine: Any) -> None:
        engine.initialise(5)
        calls: list[None] = []
        found = engine.warm_start(answers(PROMPTS, [STOP]), 1e-2, lambda: calls.append(None)).metrics
        assert np.isfinite(found["loss"])
        assert calls
