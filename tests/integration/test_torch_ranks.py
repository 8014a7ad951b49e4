"""Ranks of the torch engine share a model and train what one process trains."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from relax_actors.engines.protocols import TrainSample, train
from relax_actors.engines.ranks import rank_group
from relax_actors.engines.ranks.group import TrainerGroup, profile_of_rank
from relax_actors.engines.ranks.rpc import RankError
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.torch.model import tensors_of
from relax_actors.engines.torch.stored_weights import fingerprint_of
from relax_actors.weights import files as weights
from tests.support.batches import batch_of, parts_of, routed, silent
from tests.support.models import QWEN3, qwen3_moe
from tests.support.torch_ranks import ranks_config, ranks_of, trained
from tests.support.trained_engines import max_difference, started, weights_of

UNTIED = QWEN3 | {"tie_word_embeddings": False}
MOE = qwen3_moe(QWEN3)
LIMIT = 1e-5
Figures = tuple[list[dict[str, float]], dict[str, Any]]


class Pair:
    """Two ranks for several tests, which share a model with experts, and one process with the same model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ranks = TrainerGroup(self.config(2), lambda *_: None)

    def config(self, ranks: int) -> Any:
        """Configuration with a number of ranks."""
        return ranks_config(self._folder, MOE, ranks, router_replay=True)

    def alone(self) -> Any:
        """The one process."""
        return TorchEngine(self.config(1))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("pair"))
    yield made
    made.ranks.close()


def replayed(step: int) -> list[TrainSample]:
    """Sequences of which a share replays recorded experts."""
    batch = batch_of(step)
    return [*routed(batch[:6], step, MOE), *batch[6:]]


def assert_close(one: Figures, other: Figures) -> None:
    """Compare metrics of steps and the weights after them.

    Micro-batches are counted for each rank, and the first one of a step is compared with a pass without router replay.
    """
    for ours, theirs in zip(one[0], other[0], strict=True):
        sides = [
            {name: value for name, value in side.items() if not name.startswith(("micro_batches", "unreplayed"))}
            for side in (ours, theirs)
        ]
        assert sides[0] == pytest.approx(sides[1], rel=LIMIT, abs=LIMIT)
    assert max_difference(one[1], other[1]) < LIMIT


@pytest.mark.slow
def test_two_ranks_train_and_score_what_one_process_does(pair: Pair, tmp_path: Path) -> None:
    both = []
    for engine in (started(pair.ranks), started(pair.alone())):
        scored = engine.score(replayed(9), silent)
        figures = trained(engine, batches=replayed), weights_of(engine, tmp_path / f"{len(both)}")
        both.append((figures, scored))
    assert_close(both[0][0], both[1][0])
    for one, other in zip(both[0][1], both[1][1], strict=True):
        np.testing.assert_allclose(one, other, atol=LIMIT)


@pytest.mark.slow
def test_profile_that_one_rank_cannot_make_is_refused_and_leaves_none_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_group, "GRACE_SECONDS", 0.0)  # as for a trace that takes long to write
    config = ranks_config(tmp_path, QWEN3, 2, backend="tests.support.wrong_engines.ProfilerTaken")
    with ranks_of(config) as group:
        started(group)
        first, second, third = (tmp_path / "profiles" / f"{n}.json.gz" for n in range(3))
        with pytest.raises(RankError, match="rank 1: RuntimeError: the profiler is used by another tool"):
            group.begin_profile()
        assert not any(file.exists() for file in group.end_profile(first)), "no rank recorded"
        group.begin_profile()
        trained(group, range(1))
        assert all(file.stat().st_size for file in group.end_profile(second))
        (third.with_name("2.rank1.json.gz") / "in the way").mkdir(parents=True)
        group.begin_profile()
        with pytest.raises(RankError, match=r"rank 1: IsADirectoryError.*2\.rank1"):
            group.end_profile(third)
        assert profile_of_rank(third, 0).exists()
        assert trained(group, range(1, 2))[0]["loss"]


def test_two_ranks_give_the_same_bits_after_discarded_rows(pair: Pair) -> None:
    prints = []
    for discards in (False, True, False):
        engine = started(pair.ranks)
        for step in range(2):
            for _ in range(2 if discards else 1):
                engine.discard()
                for row in parts_of(replayed(step)):  # as a trainer that streams gets them
                    engine.accumulate(row, silent)
            engine.step(step, silent)
        prints.append(engine.fingerprint())
    assert len(set(prints)) == 1


def test_a_checkpoint_of_two_ranks_goes_on_with_two_and_with_one(pair: Pair, tmp_path: Path) -> None:
    engine, alone = started(pair.ranks), pair.alone()
    trained(engine, range(2), replayed)
    now, later, back = (tmp_path / name for name in ("now", "later", "back"))
    for folder in (now, later, back):
        folder.mkdir()
    engine.save(now)
    finish = engine.begin_save(later)
    at = engine.fingerprint()
    went_on = trained(engine, range(2, 4), replayed), weights_of(engine, tmp_path / "on")
    finish()
    assert fingerprint_of(now) == fingerprint_of(later) == at
    assert {f.name: f.read_bytes() for f in now.iterdir()} == {f.name: f.read_bytes() for f in later.iterdir()}
    engine.load(later)
    assert engine.fingerprint() == at
    assert trained(engine, range(2, 4), replayed) == went_on[0]
    assert engine.fingerprint() == weights.fingerprint(went_on[1])
    alone.load(now)
    assert alone.fingerprint() == at
    assert_close((trained(alone, range(2, 4), replayed), weights_of(alone, tmp_path / "alone")), went_on)
    alone.save(back)
    engine.load(back)
    assert engine.fingerprint() == alone.fingerprint()


def test_ranks_leave_their_devices_together_and_change_no_bit(pair: Pair, tmp_path: Path) -> None:
    away, both, sizes = tmp_path / "away", [], set()
    for leaves in (False, True):
        engine, figures = started(pair.ranks), []
        for step in range(2):
            for part in parts_of(replayed(step)):
                engine.accumulate(part, silent)
                if leaves:
                    assert engine.release_memory(away) > 0
                    assert engine.resume_memory() > 0
            # The first micro-batch of an engine is also compared with a pass without router replay.
            metrics = engine.step(step, silent).metrics
            figures.append({name: value for name, value in metrics.items() if not name.startswith("unreplayed")})
            if leaves:
                sizes.add(engine.release_memory(away))
                engine.publish(tmp_path / "published")  # read while they are away
                assert engine.release_memory(away) == 0
                assert engine.resume_memory() > 0
        both.append((figures, engine.fingerprint()))
    assert both[0] == both[1]
    (tmp_path / "checkpoint").mkdir()
    engine.save(tmp_path / "checkpoint")
    sizes.add(engine.release_memory(away))
    assert len(sizes) == 1  # whatever was read and written meanwhile
    engine.resume_memory()
    assert engine.fingerprint() == both[0][1]


def test_two_ranks_publish_and_export_whole_weights(pair: Pair, tmp_path: Path) -> None:
    engine = started(pair.ranks)
    path, folder, shares = tmp_path / "published", tmp_path / "model", [tmp_path / "share0", tmp_path / "share1"]
    assert engine.publish(path) == engine.fingerprint() == weights.fingerprint(weights.load([path]))
    assert engine.publish(*shares) == engine.fingerprint() == weights.fingerprint(weights.load(shares))
    assert max(share.stat().st_size for share in shares) < 0.7 * path.stat().st_size
    engine.export(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert weights.fingerprint(tensors_of(loaded)) == engine.fingerprint()


def test_a_shared_model_is_published_while_the_next_step_computes(tmp_path: Path) -> None:
    engine = started(TorchEngine(ranks_config(tmp_path, QWEN3, 1, offload=True)))
    prints, done = set(), threading.Event()

    def publish() -> None:
        while not done.is_set():
            prints.add(engine.publish(tmp_path / "published"))

    publisher = threading.Thread(target=publish)
    before = engine.fingerprint()
    publisher.start()
    for _ in range(4):
        engine.accumulate(batch_of(0), silent)
        engine.discard()
    done.set()
    publisher.join(60)
    assert prints == {before}


def test_an_error_of_all_ranks_leaves_them_usable(pair: Pair, tmp_path: Path) -> None:
    engine = started(pair.ranks)
    before = engine.fingerprint()
    tokens = np.ones(60, np.int32)
    with pytest.raises(ValueError, match="holds at most 40"):
        train(engine, [TrainSample.of_completion(tokens[:1], tokens[1:])], 0, silent)
    engine.discard()
    with pytest.raises(OSError, match="nowhere"):
        engine.publish(tmp_path / "nowhere" / "weights")
    assert engine.fingerprint() == before
    train(engine, replayed(0), 0, silent)
    assert engine.fingerprint() != before


def test_fewer_sequences_than_ranks_train(pair: Pair, tmp_path: Path) -> None:
    both = []
    for engine in (started(pair.ranks), started(pair.alone())):
        metrics = trained(engine, range(1), lambda step: batch_of(step, samples=4)[:1])
        both.append((metrics, weights_of(engine, tmp_path / f"{len(both)}")))
    assert_close(*both)


@pytest.mark.slow
def test_a_killed_rank_ends_the_call_and_the_others(tmp_path: Path) -> None:
    ended: list[tuple[int, int]] = []
    group = TrainerGroup(ranks_config(tmp_path, QWEN3, 2), lambda *end: ended.append(end))
    try:
        started(group)
        os.kill(group.pids[1], signal.SIGKILL)
        with pytest.raises(RankError, match="rank 1"):
            train(group, batch_of(0), 0, silent)
        assert ended == [(1, -signal.SIGKILL)]
    finally:
        group.close()


@pytest.mark.slow
def test_ranks_train_and_save_without_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_group, "MODULE", "tests.support.unpickled_rank")
    with ranks_of(ranks_config(tmp_path, QWEN3, 2)) as engine:
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        trained(started(engine))
        engine.save(folder)
        engine.load(folder)
        engine.publish(tmp_path / "weights")
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}
