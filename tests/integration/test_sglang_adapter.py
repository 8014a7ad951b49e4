"""Adapters in SGLang: the server's log-probs move with them, and are those of the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax_actors.config import Config
from relax_actors.data.adapter import form_of
from relax_actors.engines.protocols import train
from relax_actors.engines.sglang.adapter_form import check_served
from relax_actors.engines.sglang.adapter_loader import AdapterLoader
from relax_actors.engines.sglang.engine import SglangEngine
from relax_actors.engines.sglang.merged_adapter import MergedAdapter
from relax_actors.engines.sglang.server import Server
from relax_actors.engines.sglang.weight_loaders import pickled_by_name, to_checkpoint_names
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.errors import EngineError
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.weights import files as weights
from tests.conformance.base.inference_engine import pairs_of
from tests.conformance.base.training_engine import begun
from tests.support.adapters import adapter_config, base_folder
from tests.support.batches import batch_of, batch_of_generations, silent
from tests.support.models import request_of
from tests.support.sglang_servers import DENSE, MOE, Kept, engine_of, skip_if_missing

skip_if_missing()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
WITH_BIASES = DENSE | {"model_type": "qwen2"}
TOLERANCE = 1e-5


def config_for(folder: Path, base: Path, lora: dict[str, Any], **sglang: Any) -> Config:
    rollout = {"backend": "sglang", "group_size": 4, "sglang": sglang}
    return adapter_config(folder, base, lora, rollout=rollout, trainer={"max_tokens_per_microbatch": 4096})


def started(config: Config) -> Kept:
    config.folder.mkdir()
    RunFolder(config.folder).save_config(config, str(config.folder))
    return Kept(config)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    folder = tmp_path_factory.mktemp("run")
    base = base_folder(folder, WITH_BIASES)
    stored = weights.load([base / "model.safetensors"])
    random = torch.Generator().manual_seed(3)
    biases = {name: torch.randn(t.shape, generator=random) for name, t in stored.items() if name.endswith(".bias")}
    assert biases
    weights.save(stored | biases, base / "model.safetensors")
    kept = started(config_for(folder / "run", base, {}))
    yield kept
    kept.close()


def loader_of(config: Config) -> AdapterLoader:
    assert config.lora is not None
    return AdapterLoader(config.model_path, form_of(config.lora), config.folder / "shared")


def loaded(kept: Kept) -> set[str]:
    server = Server(kept.record)
    try:
        return server.adapters()
    finally:
        server.close()


def check_versions(engine: SglangEngine, trainer: TorchEngine, folder: Path) -> None:
    """Serve three versions of a trained adapter, and compare the log-probs of each with the trainer's."""
    request, found = request_of("12>", 3), []
    for version in (0, 1, 2):
        path = folder / f"{version}.safetensors"
        engine.load(version, trainer.publish(path), [path])
        made = pairs_of([request], engine.generate([request], silent))
        batch = batch_of_generations(made)
        for mine, (_, sample), item in zip(trainer.score(batch, silent), made, batch, strict=True):
            np.testing.assert_allclose(sample.logprobs, mine[item.loss_mask], atol=TOLERANCE)
            assert set(sample.versions) == {version}
        found.append(np.concatenate(trainer.score(batch_of(9), silent)))
        train(trainer, batch_of(version), version, silent)
    assert np.abs(found[0] - found[1]).max() > 1e-3, "a step changes the trainer's log-probs"


@pytest.mark.parametrize(
    "lora", [{}, {"rank": 3, "rslora": True, "targets": ["v_proj", "model.layers.1.mlp.up_proj"]}], ids=["all", "some"]
)
def test_log_probs_of_a_server_move_with_the_adapter_and_are_the_trainers(
    kept: Kept, tmp_path: Path, lora: dict[str, Any]
) -> None:
    config = config_for(tmp_path / "run", kept.config.model_path, lora)
    with engine_of(kept, loader_of(config)) as engine:
        check_versions(engine, begun(TorchEngine(config)), tmp_path)
    (name,) = loaded(kept)  # adapters of older versions were unloaded
    assert name.startswith("2:")


def test_samples_in_progress_continue_with_the_next_adapter(kept: Kept, tmp_path: Path) -> None:
    # Both requests begin alike: a prefix cache that versions shared would have keys and values of the first.
    requests = [request_of("12>", seed, max_tokens=300, stop_ids=frozenset()) for seed in (3, 5)]
    trainer, grown = begun(TorchEngine(kept.config)), 0
    paths = [tmp_path / f"{version}.safetensors" for version in (0, 1)]
    with engine_of(kept, loader_of(kept.config)) as engine:
        engine.load(0, trainer.publish(paths[0]), paths[:1])

        def progress() -> None:
            nonlocal grown
            grown += 1

        def refresh() -> bool:
            if grown < 2 or engine.version == 1:
                return False
            train(trainer, batch_of(1), 0, silent)
            engine.load(1, trainer.publish(paths[1]), paths[1:])
            return True

        made = pairs_of(requests, engine.generate(requests, progress, refresh))
        assert len(loaded(kept)) == 1, "the first adapter was unloaded when its last request had ended"
    batch = batch_of_generations(made)
    scores = [engine.score(batch, silent) for engine in (begun(TorchEngine(kept.config)), trainer)]
    for i, ((_, sample), item) in enumerate(zip(made, batch, strict=True)):
        by_version = np.stack([score[i][item.loss_mask] for score in scores])
        expected = by_version[sample.versions, np.arange(len(sample.versions))]
        np.testing.assert_allclose(sample.logprobs, expected, atol=TOLERANCE)
        assert (np.diff(sample.versions) >= 0).all()
    assert any(set(sample.versions) == {0, 1} for _, sample in made), "a sample has tokens of both versions"


def test_the_next_incarnation_finds_base_and_adapter_and_unloads_what_is_stale(kept: Kept, tmp_path: Path) -> None:
    trainer, path, next_path = begun(TorchEngine(kept.config)), tmp_path / "0.safetensors", tmp_path / "1.safetensors"
    request, given = request_of("12>", 3), trainer.publish(path)
    with engine_of(kept, loader_of(kept.config)) as engine:
        engine.load(0, given, [path])
    with engine_of(kept, loader_of(kept.config)) as engine:
        engine.load(0, given, [path])
        engine.generate([request], silent)
        assert loaded(kept) == {f"0:{given}"}
    train(trainer, batch_of(1), 0, silent)
    newer = trainer.publish(next_path)
    with engine_of(kept, loader_of(kept.config)) as engine:
        engine.load(1, newer, [next_path])
        assert loaded(kept) == {f"1:{newer}"}
    assert kept.starts == 1


def test_a_server_of_adapters_of_a_lower_rank_refuses_in_its_words(kept: Kept) -> None:
    server = Server(kept.record)
    try:
        with pytest.raises(EngineError, match=r"refuses /load_lora_adapter_from_tensors .*rank 64"):
            config = {"peft_type": "LORA", "r": 64, "lora_alpha": 64, "target_modules": ["q_proj"]}
            server.load_adapter("wide", config, [pickled_by_name({})], {})
    finally:
        server.close()


def test_adapter_of_attention_is_served_beside_experts(tmp_path: Path) -> None:
    base = base_folder(tmp_path, MOE)
    file = base / "model.safetensors"
    weights.save(to_checkpoint_names(dict(weights.load([file]))), file)  # as files of the hub
    config = config_for(tmp_path / "run", base, {"targets": ["q_proj", "v_proj", "o_proj"]})
    assert config.lora is not None
    check_served(form_of(config.lora), base, has_experts=True)
    kept = started(config)
    try:
        with engine_of(kept, loader_of(config)) as engine:
            check_versions(engine, begun(TorchEngine(config)), tmp_path)
    finally:
        kept.close()


@pytest.mark.parametrize(
    ("architecture", "targets"),
    [(DENSE, "all-linear"), (MOE, ["all-linear", "experts.gate_up_proj", "experts.down_proj"])],
    ids=["dense", "experts"],
)
def test_merged_adapter_gives_the_log_probs_of_the_trainer(
    tmp_path: Path, architecture: dict[str, Any], targets: str | list[str]
) -> None:
    base = base_folder(tmp_path, architecture)
    config = config_for(tmp_path / "run", base, {"targets": targets}, merge_adapter=True)
    assert config.lora is not None
    merged, kept = MergedAdapter(config.model_path, form_of(config.lora), torch.float32), started(config)
    try:
        with engine_of(kept, merged=merged) as engine:
            check_versions(engine, begun(TorchEngine(config)), tmp_path)
    finally:
        kept.close()
