"""The torch scoring engine gives the log-probs of the trainer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from broker.errors import StoreError
from relax_actors.config import Config
from relax_actors.engines.protocols import Generation, TrainSample, train
from relax_actors.engines.protocols.samples import by_row as rows_of
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.torch.scorer import TorchScorer
from tests.support.batches import answers, scored_by, silent
from tests.unit.test_engines import REQUESTS, batch_of, config_of, generate, served

SAMPLES = 4
Scored = list[np.ndarray]


def folder_of(path: Path) -> Path:
    path.mkdir()
    return path


def scorer_of(trainer: TorchEngine, config: Config, tmp_path: Path, version: int = 3) -> TorchScorer:
    scorer = TorchScorer(config)
    shard = tmp_path / f"scored.{version}.safetensors"
    scorer.load(version, trainer.publish(shard), [shard])
    return scorer


def start(tmp_path: Path, **sections: dict[str, object]) -> tuple[TorchEngine, Config, list[TrainSample]]:
    """Return a trainer at version 0, its configuration, and a batch generated with its weights."""
    config = config_of(tmp_path, **sections)
    trainer = TorchEngine(config)
    trainer.initialise(5)
    trainer.finish_warm_start()
    generated: list[list[Generation]] = generate(served(trainer, config, tmp_path), REQUESTS)
    return trainer, config, batch_of(generated, REQUESTS)


def by_row(scorer: TorchScorer, batch: list[TrainSample]) -> Scored:
    return [one for row in rows_of(batch) for one in scorer.score(row, silent)]


def test_scores_equal_the_log_probs_of_the_trainer(tmp_path: Path) -> None:
    trainer, config, batch = start(tmp_path)
    scored = by_row(scorer_of(trainer, config, tmp_path), batch)
    assert [len(s) for s in scored] == [len(sample) for sample in batch]
    assert not any(s[~sample.loss_mask].any() for s, sample in zip(scored, batch, strict=True))
    assert {s.dtype for s in scored} == {np.dtype(np.float32)}
    same = scored_by(batch, scored)
    measured = train(trainer, same, 0, silent).metrics
    assert measured["abs_delta"] < 1e-6
    assert abs(measured["max_ratio"] - 1) < 1e-5
    # Changed weights give other scores.
    moved = by_row(scorer_of(trainer, config, tmp_path, version=4), batch)
    assert max(float(np.abs(a - b).max()) for a, b in zip(scored, moved, strict=True)) > 1e-3


def test_row_scored_alone_has_the_same_bits_in_every_engine(tmp_path: Path) -> None:
    trainer, config, batch = start(tmp_path)
    rows = list(rows_of(batch))
    first = by_row(scorer_of(trainer, config, tmp_path), batch)
    other = scorer_of(trainer, config, tmp_path)
    for n in (2, 0, 1):
        for a, b in zip(first[n * SAMPLES : (n + 1) * SAMPLES], other.score(rows[n], silent), strict=True):
            np.testing.assert_array_equal(a, b)
    together = other.score(batch, silent)
    for a, b in zip(first, together, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("deterministic", [True, False])
def test_reference_role_and_reference_in_the_trainer_give_the_same_weights(
    tmp_path: Path, *, deterministic: bool
) -> None:
    sections = {
        "algorithm": {"kl": {"place": "loss", "coefficient": 0.5, "kind": "k2"}},
        "run": {"deterministic": deterministic},
        "trainer": {"learning_rate": 1e-3},
    }
    inside, config, batch = start(tmp_path, **sections)
    beside = TorchEngine(config_of(tmp_path, **sections, roles={"reference": {}}))
    beside.initialise(5)
    beside.finish_warm_start()
    beside.save(folder_of(tmp_path / "checkpoint"))
    assert not (tmp_path / "checkpoint" / "reference.safetensors").exists()
    scored = by_row(scorer_of(beside, config, tmp_path), batch)
    with_column = scored_by(batch, scored, "reference_logprobs")
    for step in range(3):
        a, b = train(inside, batch, step, silent).metrics, train(beside, with_column, step, silent).metrics
        if deterministic:
            assert a == b
        assert a["kl"] == pytest.approx(b["kl"], abs=1e-6)
    assert a["kl"] > 1e-3
    if deterministic:
        assert inside.fingerprint() == beside.fingerprint()


def test_scores_use_the_sampling_temperature(tmp_path: Path) -> None:
    trainer, config, batch = start(tmp_path, rollout={"temperature": 0.5})
    scored = by_row(scorer_of(trainer, config, tmp_path), batch)
    measured = train(trainer, scored_by(batch, scored), 0, silent).metrics
    assert measured["abs_delta"] < 1e-6


def test_bfloat16_scores_differ_by_rounding_only(tmp_path: Path) -> None:
    trainer, config, batch = start(tmp_path, trainer={"precision": "bfloat16"})
    scored = by_row(scorer_of(trainer, config, tmp_path), batch)
    measured = train(trainer, scored_by(batch, scored), 0, silent).metrics
    assert measured["abs_delta"] < 2e-2


def test_scoring_without_weights_or_above_the_token_limit_is_refused(tmp_path: Path) -> None:
    trainer, config, batch = start(tmp_path)
    with pytest.raises(StoreError, match="no verified weights"):
        TorchScorer(config).score(batch, silent)
    long = answers([np.zeros(60, np.int32)], [0] * 42)
    with pytest.raises(ValueError, match="max_tokens_per_microbatch"):
        scorer_of(trainer, config, tmp_path).score(long, silent)
    empty = answers([np.zeros(3, np.int32)] * 2, [])
    assert [s.tolist() for s in scorer_of(trainer, config, tmp_path).score(empty, silent)] == [[0.0] * 3] * 2
