"""Two Megatron-Core ranks that train many algorithms one after another, so that they start once.

`train_cases` runs this module as `python -m tests.support.megatron_pair FOLDER RANK`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch._C._distributed_c10d import FileStore

from relax_actors.config import Config
from relax_actors.config.load import validate
from relax_actors.engines.protocols import TrainingEngine, TrainSample
from relax_actors.weights import files as weights
from tests.support.batches import observing, silent, two_rows
from tests.support.models import VOCABULARY

RANKS = 2
TIMEOUT = 300.0
Trained = tuple[dict[str, float], dict[str, torch.Tensor]]
"""Metrics of a step, and the weights after it."""


def taught(samples: list[TrainSample], k: int | None) -> list[TrainSample]:
    """Add log-probs of a teacher, and its `k` most likely tokens."""
    random, found = np.random.default_rng(7), []
    for sample in samples:
        logits = random.normal(size=(len(sample), VOCABULARY))
        logprobs = (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)
        own = logprobs[np.arange(len(sample)), sample.token_ids]
        ids = np.argsort(-logprobs, axis=-1)[:, :k].astype(np.int32) if k is not None else None
        top = None if ids is None else np.take_along_axis(logprobs, ids, -1)
        found.append(replace(sample, teacher_logprobs=own, teacher_top_ids=ids, teacher_top_logprobs=top))
    return found


def supervised(samples: list[TrainSample], config: Config) -> list[TrainSample]:
    """Add what the terms beside the policy loss read: factors of tokens, observations, log-probs of a teacher."""
    algorithm, random = config.algorithm, np.random.default_rng(11)
    if algorithm.positive_nll or algorithm.observation_nll:
        factors = [random.uniform(0, 2, len(sample)).astype(np.float32) for sample in samples]
        samples = [replace(sample, imitated=own) for sample, own in zip(samples, factors, strict=True)]
    if algorithm.observation_nll:
        samples = [observing(sample) for sample in samples]
    return taught(samples, algorithm.distil.top_k) if algorithm.distil.place == "loss" else samples


def trained_once(engine: TrainingEngine, config: Config, path: Path) -> dict[str, float]:
    """Train one step from the weights of seed 5, and write the weights; returns the metrics."""
    engine.initialise(5)
    engine.finish_warm_start()
    engine.accumulate(supervised(two_rows(), config), silent)
    metrics = dict(engine.step(0, silent).metrics)
    engine.publish(path)
    return metrics


def train_cases(folder: Path, cases: Sequence[Config]) -> list[Trained]:
    """Train one step of each case on two ranks.

    Args:
        folder: empty folder for the ranks.
        cases: configurations with the same layout.
    """
    (folder / "cases.json").write_text(json.dumps([case.model_dump(mode="json") for case in cases]))
    command = [sys.executable, "-m", "tests.support.megatron_pair", str(folder)]
    with (folder / "log").open("wb") as log:
        ranks = [subprocess.Popen([*command, str(rank)], stdout=log, stderr=log) for rank in range(RANKS)]
        try:
            codes = [rank.wait(TIMEOUT) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    assert codes == [0] * RANKS, (folder / "log").read_text()[-3000:]
    metrics: list[dict[str, float]] = json.loads((folder / "metrics.json").read_text())
    return [(found, weights.load([folder / f"{i}.safetensors"])) for i, found in enumerate(metrics)]


def main() -> None:
    """Entry point of a rank."""
    from relax_actors.engines.megatron.mcore.engine import MegatronEngine

    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    store = FileStore(str(folder / "rendezvous"), RANKS)
    found = []
    for i, tree in enumerate(json.loads((folder / "cases.json").read_text())):
        config = validate(tree, "case")
        found.append(trained_once(MegatronEngine(config, rank, store), config, folder / f"{i}.safetensors"))
    if rank == 0:
        (folder / "metrics.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
