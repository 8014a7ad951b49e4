"""Models with media under Megatron-Core in one process: the numbers of the torch engine, exact resumption, export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForMultimodalLM

from relax_actors.config import Config
from relax_actors.config.training import MegatronSection
from relax_actors.engines.megatron.layout import Layout
from relax_actors.engines.megatron.tower_shares import Features, TowerShares
from relax_actors.engines.protocols import PromptMedia, TrainSample, train
from relax_actors.engines.protocols.media import MediaItem
from relax_actors.engines.ranks import wire
from relax_actors.engines.ranks.rpc import pack_samples, unpack_samples
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.torch.model import build, tensors_of
from relax_actors.engines.torch.scorer import TorchScorer
from relax_actors.engines.torch.towers import in_tower_order, works_of
from relax_actors.errors import ConfigError
from relax_actors.weights import files as weights
from tests.support.batches import routed, silent
from tests.support.media_batches import media_batch
from tests.support.tiny_media_models import MOE, OF_MEGATRON, TEXT, architecture_of
from tests.support.tiny_megatron import config_of, media_architecture, skip_if_missing
from tests.support.trained_engines import max_difference, started, weights_of

skip_if_missing()

from relax_actors.engines.megatron.mcore.engine import MegatronEngine  # noqa: E402 not before the check
from relax_actors.engines.megatron.mcore.micro_batches import plan_micro_batches  # noqa: E402
from relax_actors.engines.megatron.mcore.scorer import MegatronScorer  # noqa: E402

ALGORITHM = {"kl": {"place": "loss", "coefficient": 0.1, "kind": "k3"}, "entropy": {"coefficient": 0.01}}
QUICK = ("qwen3_vl", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
"""Families that together have all towers, both rules of positions, deepstack and experts."""
SMOOTH = {"learning_rate": 1.0, "epsilon": 1.0, "max_grad_norm": 1e9}
"""Settings with which AdamW moves weights by about their gradients."""


def configured(folder: Path, model_type: str, **trainer: Any) -> Config:
    settings = {"max_tokens_per_microbatch": 600} | trainer
    algorithm, rollout = ALGORITHM, {"temperature": 0.7}
    return config_of(folder, architecture_of(model_type), trainer=settings, algorithm=algorithm, rollout=rollout)


@pytest.mark.parametrize(
    "model_type", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in OF_MEGATRON]
)
def test_two_steps_have_the_numbers_of_the_torch_engine(tmp_path: Path, model_type: str) -> None:
    replays = model_type == "qwen3_omni_moe_thinker"
    config = configured(tmp_path / "run", model_type, **SMOOTH, max_tokens_per_microbatch=120, router_replay=replays)
    megatron, theirs = started(MegatronEngine(config)), started(TorchEngine(config))
    assert megatron.fingerprint() == theirs.fingerprint()
    samples = media_batch(config)
    if replays:
        samples = routed(samples, 3, TEXT | MOE)
    for ours, other in zip(megatron.score(samples, silent), theirs.score(samples, silent), strict=True):
        np.testing.assert_allclose(ours, other, atol=1e-5)
    for step in range(2):
        found, expected = train(megatron, samples, step, silent).metrics, train(theirs, samples, step, silent).metrics
        assert found.keys() == expected.keys()
        for name in expected:
            assert found[name] == pytest.approx(expected[name], abs=1e-5, rel=1e-4), name
    assert max_difference(weights_of(megatron, tmp_path / "a"), weights_of(theirs, tmp_path / "b")) < 1e-5


def test_a_step_without_media_moves_the_towers_as_the_torch_engine_does(tmp_path: Path) -> None:
    config = configured(tmp_path / "run", "qwen2_5_omni_thinker", **SMOOTH, weight_decay=0.1)
    megatron, theirs, samples = started(MegatronEngine(config)), started(TorchEngine(config)), media_batch(config)
    text = [sample for sample in samples if sample.media is not None and not sample.media.items]
    for step, batch in enumerate((text, samples, text, text)):
        for engine in (megatron, theirs):
            before = weights_of(engine, tmp_path / "before")
            train(engine, batch, step, silent)
            after = weights_of(engine, tmp_path / "after")
            assert [name for name in after if after[name].equal(before[name]) and before[name].any()] == []
    assert max_difference(weights_of(megatron, tmp_path / "a"), weights_of(theirs, tmp_path / "b")) < 1e-5


@pytest.mark.parametrize(
    ("model_type", "precision"),
    [
        ("qwen3_vl_moe", "float32"),
        ("qwen2_5_vl", "bfloat16"),
        pytest.param("qwen2_audio", "float32", marks=pytest.mark.slow),
    ],
)
def test_training_resumes_exactly_from_a_checkpoint(tmp_path: Path, model_type: str, precision: str) -> None:
    config = configured(tmp_path / "run", model_type, precision=precision, learning_rate=1e-3)
    samples, one = media_batch(config), started(MegatronEngine(config))
    train(one, samples, 0, silent)
    (folder := tmp_path / "checkpoint").mkdir()
    one.save(folder)
    other = MegatronEngine(config)
    other.load(folder)
    assert other.fingerprint() == one.fingerprint()
    before = weights_of(one, tmp_path / "before")
    for step in (1, 2):
        assert train(one, samples, step, silent).metrics == train(other, samples, step, silent).metrics
    assert other.fingerprint() == one.fingerprint()
    after = weights_of(one, tmp_path / "after")
    assert [name for name in after if "visual" in name or "_tower" in name if not after[name].equal(before[name])]


def test_recomputed_activations_give_the_same_weights(tmp_path: Path) -> None:
    found = []
    for recompute in ("none", "full"):
        config = configured(tmp_path / "run", "qwen3_vl_moe", recompute=recompute, learning_rate=1e-3)
        engine, samples = started(MegatronEngine(config)), media_batch(config)
        for step in range(2):
            train(engine, samples, step, silent)
        found.append(engine.fingerprint())
    assert found[0] == found[1]


def test_half_precision_stays_close_to_the_torch_engine(tmp_path: Path) -> None:
    config = configured(tmp_path / "run", "qwen3_omni_moe_thinker", precision="bfloat16")
    samples = media_batch(config)
    ours, theirs = (started(kind(config)).score(samples, silent) for kind in (MegatronEngine, TorchEngine))
    differences = np.concatenate(
        [a[s.loss_mask] - b[s.loss_mask] for a, b, s in zip(ours, theirs, samples, strict=True)]
    )
    assert 0 < np.abs(differences).max() < 0.05


def test_frozen_towers_stay_and_have_no_optimizer_state(tmp_path: Path) -> None:
    config = configured(tmp_path / "run", "qwen3_vl", freeze=["*visual*", "*embed_tokens*"], learning_rate=1e-2)
    engine, theirs = started(MegatronEngine(config)), started(TorchEngine(config))
    before, samples = weights_of(engine, tmp_path / "before"), media_batch(config)
    found, expected = train(engine, samples, 0, silent).metrics, train(theirs, samples, 0, silent).metrics
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    after = weights_of(engine, tmp_path / "after")
    moved = {name for name in before if not before[name].equal(after[name])}
    assert moved
    assert not [name for name in moved if "visual" in name or "embed_tokens" in name]
    (folder := tmp_path / "checkpoint").mkdir()
    engine.save(folder)
    held = (folder / "state" / "rank.0.json").read_text()
    assert "towers.model.visual" in held
    assert [name for name in held.split('"') if name.startswith("optimizer") and "towers" in name] == []


def test_the_exported_folder_loads_in_transformers_and_starts_another_run(tmp_path: Path) -> None:
    config = configured(tmp_path / "run", "qwen3_omni_moe_thinker", learning_rate=1e-2)
    engine = started(MegatronEngine(config))
    train(engine, media_batch(config), 0, silent)
    engine.export(folder := tmp_path / "model")
    loaded = AutoModelForMultimodalLM.from_pretrained(folder)
    assert weights.fingerprint(tensors_of(loaded)) == engine.fingerprint()
    section = config.model.model_copy(update={"path": folder, "architecture": None, "tokenizer": None})
    other = MegatronEngine(config.model_copy(update={"model": section}))
    other.initialise(9)
    assert other.fingerprint() == engine.fingerprint()


def test_a_scorer_gives_the_log_probs_of_the_torch_scorer(tmp_path: Path) -> None:
    config = configured(tmp_path / "run", "qwen3_vl_moe")
    path, samples = tmp_path / "weights", media_batch(config)
    tensors = {name: 2 * tensor for name, tensor in tensors_of(build(config.model_path, seed=7)).items()}
    weights.save(tensors, path)
    ours, theirs = MegatronScorer(config), TorchScorer(config)
    for scorer in (ours, theirs):
        scorer.load(3, weights.fingerprint(tensors), [path])
    for name in ("score", "squares"):
        for found, expected in zip(*(getattr(s, name)(samples, silent) for s in (ours, theirs)), strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-5)
    found, expected = ours.score_top(samples, 4, silent), theirs.score_top(samples, 4, silent)
    assert all(np.array_equal(a.top_ids, b.top_ids) for a, b in zip(found, expected, strict=True))


def test_samples_of_a_prompt_share_its_media_in_a_message(tmp_path: Path) -> None:
    samples = media_batch(configured(tmp_path / "run", "qwen3_omni_moe_thinker"))
    first = samples[0].media
    assert first is not None
    extended = replace(first, position_delta=0.0)
    message = wire.encode(
        pack_samples([*samples, replace(samples[0], media=None), replace(samples[0], media=extended)])
    )
    found = unpack_samples(wire.decode(message))
    assert found[-2].media is None
    assert found[-1].media is not found[0].media
    assert found[-1].media.items[0] is found[0].media.items[0]  # type: ignore[union-attr]
    for one, other in zip(samples, found, strict=False):
        assert one.media is not None
        assert other.media is not None
        assert one.media.position_delta == other.media.position_delta
        np.testing.assert_array_equal(one.media.positions, other.media.positions, strict=True)
        for item, copy in zip(one.media.items, other.media.items, strict=True):
            np.testing.assert_array_equal(item.features, copy.features, strict=True)
            assert (item.kind, item.start, item.tokens) == (copy.kind, copy.start, copy.tokens)
    assert all(found[row].media is found[row + 1].media for row in range(0, len(samples), 2))
    media = [sample.media for sample in samples[::2] if sample.media is not None]
    features = sum(int(item.features.nbytes) for one in media for item in one.items)
    assert features < len(message) < 1.6 * features


def test_samples_of_a_prompt_stay_on_one_rank_and_count_their_media_once() -> None:
    layout = Layout.of(MegatronSection(ranks=2))
    given = [sample for row, tokens in enumerate((25, 5, 5, 5)) for sample in pair_with_image(row, tokens)]
    plans = plan_micro_batches(given, layout, 50, share_prefixes=False)
    found = [[batch.indices for batch in plan] for plan in plans]
    assert found == [[[0, 1], [6, 7]], [[2, 3, 4, 5], []]]
    alone = plan_micro_batches(given[:2], layout, 50, share_prefixes=False)
    assert [[batch.indices for batch in plan] for plan in alone] == [[[0]], [[1]]]


@pytest.mark.parametrize("most", [None, 6])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_shares_of_the_towers_give_each_medium_its_own_features(ranks: int, most: int | None) -> None:
    kinds, sizes = ("image", "video", "audio", "image", "audio"), (7, 3, 5, 2, 4)
    items = [
        MediaItem(kind, np.zeros(1), np.ones(3, np.int32), 0, size)  # type: ignore[arg-type]
        for kind, size in zip(kinds, sizes, strict=True)
    ]
    media = [PromptMedia(tuple(items[begin:end]), np.zeros((3, 1)), 0) for begin, end in ((0, 3), (3, 5))]
    shares = TowerShares.of(works_of(media), ranks, Features(hidden=1, deepstack=2))
    whole = torch.full((ranks * shares.longest, 1), -1.0)
    loads = []
    for rank in range(ranks):
        loads.append(0)
        for works, rows in shares.groups(rank, most):
            numbers = [1000 * items.index(item) + n for work in works for item in work for n in range(item.tokens)]
            features = [n + 100_000 * layer for layer in (1, 2) for n in numbers if items[n // 1000].visual]
            whole[rank * shares.longest + rows] = torch.tensor([*numbers, *features]).float()[:, None]
            loads[-1] += len(numbers)
            assert most is None or len(numbers) <= most or len(works) == 1
    assert sum(loads) == sum(sizes)
    assert max(loads) <= max(*sizes, 5 + (sum(sizes) - 1) // ranks)
    for some in (media, media[1:]):
        encoded = shares.select(whole, some)
        expected = [1000 * items.index(item) + n for item in in_tower_order(some) for n in range(item.tokens)]
        visual = [n for n in expected if items[n // 1000].visual]
        assert encoded.embeddings[:, 0].tolist() == expected
        assert [layer[:, 0].tolist() for layer in encoded.deepstack] == [
            [n + 100_000 * layer for n in visual] for layer in (1, 2)
        ]


def pair_with_image(row: int, tokens: int) -> list[TrainSample]:
    """Return two sequences of 10 tokens that read one image of `tokens` placeholders."""
    item = MediaItem("image", np.zeros(1, np.uint8), np.ones(3, np.int32), 1, tokens)
    media = PromptMedia((item,), np.zeros((3, 2), np.int32), 0)
    ids = np.full(10, row, np.int32)
    return [TrainSample(ids, np.arange(10) > 2, media=media, row=row, sample=n) for n in range(2)]


def test_a_partly_frozen_projection_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^trainer.freeze matches \[.*q_proj.bias'\], which Megatron-Core stores in"):
        MegatronEngine(configured(tmp_path, "qwen2_5_vl", freeze=["*q_proj.bias"]))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen2_5_vl"])
def test_an_architecture_that_ranks_can_share_has_the_numbers_of_the_torch_engine(
    tmp_path: Path, model_type: str
) -> None:
    config = config_of(tmp_path, media_architecture(model_type), trainer={"max_tokens_per_microbatch": 600})
    samples = media_batch(config)
    ours, theirs = (started(kind(config)).score(samples, silent) for kind in (MegatronEngine, TorchEngine))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
