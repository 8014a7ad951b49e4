"""Megatron engine with one rank: same numbers as the torch engine, and exact resumption from checkpoints."""

from __future__ import annotations

import errno
import json
import multiprocessing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax_actors.config import Config
from relax_actors.engines.protocols import train
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.torch.model import build, tensors_of
from relax_actors.errors import ConfigError
from relax_actors.weights import files as weights
from tests.support.batches import batch_of, silent
from tests.support.tiny_megatron import DENSE, LLAMA, MOE, config_of, skip_if_missing
from tests.support.trained_engines import max_difference, weights_of

skip_if_missing()

from relax_actors.engines.megatron.mcore.engine import MegatronEngine  # noqa: E402 after the check


def both(config: Config) -> tuple[MegatronEngine, TorchEngine]:
    engines = MegatronEngine(config), TorchEngine(config)
    for engine in engines:
        engine.initialise(5)
        engine.finish_warm_start()
    return engines


@pytest.mark.parametrize("architecture", [DENSE, LLAMA, MOE], ids=["qwen3", "llama", "qwen3_moe"])
def test_five_steps_match_torch_engine(tmp_path: Path, architecture: dict[str, Any]) -> None:
    algorithm = {"kl": {"place": "loss", "coefficient": 0.1}, "reject": {"kind": "geometric", "low": 0.9, "high": 1.1}}
    settings = {"learning_rate": 1e-3, "weight_decay": 0.1, "schedule": "cosine", "warmup_steps": 2}
    config = config_of(tmp_path, architecture, algorithm=algorithm, trainer=settings, rollout={"temperature": 0.7})
    megatron, torch_engine = both(config)
    assert megatron.fingerprint() == torch_engine.fingerprint()
    for step in range(5):
        batch = batch_of(step)
        ours = train(megatron, batch, step, silent).metrics
        theirs = train(torch_engine, batch, step, silent).metrics
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert ours[name] == pytest.approx(theirs[name], abs=1e-5 if name != "grad_norm" else 1e-4), name
    assert ours["rejected"] > 0
    assert max_difference(weights_of(megatron, tmp_path / "a"), weights_of(torch_engine, tmp_path / "b")) < 5e-5


@pytest.mark.parametrize("tied", [False, True])
def test_the_embedding_of_padding_is_not_trained_as_in_the_torch_engine(tmp_path: Path, *, tied: bool) -> None:
    architecture = DENSE | {"tie_word_embeddings": tied, "pad_token_id": 3}
    megatron, torch_engine = both(config_of(tmp_path, architecture, trainer={"learning_rate": 1e-3}))
    assert any((sample.token_ids[:-1] == 3).any() for sample in batch_of(0))
    for step in range(3):
        ours, theirs = (train(engine, batch_of(step), step, silent).metrics for engine in (megatron, torch_engine))
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    assert max_difference(weights_of(megatron, tmp_path / "a"), weights_of(torch_engine, tmp_path / "b")) < 5e-5


def started(config: Config) -> MegatronEngine:
    engine = MegatronEngine(config)
    engine.initialise(5)
    engine.finish_warm_start()
    return engine


@pytest.mark.parametrize(("architecture", "steps"), [(DENSE, 0), (MOE, 2)], ids=["qwen3", "qwen3_moe after two steps"])
def test_training_resumes_exactly_from_checkpoint(tmp_path: Path, architecture: dict[str, Any], steps: int) -> None:
    config = config_of(tmp_path, architecture, algorithm={"kl": {"place": "loss", "coefficient": 0.1}})
    one = started(config)
    for step in range(steps):
        train(one, batch_of(step), step, silent)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    one.save(folder)
    assert multiprocessing.active_children() == []
    one.save(folder)  # again, as after a full disk
    other = MegatronEngine(config)
    other.load(folder)
    assert other.fingerprint() == one.fingerprint()
    counters = [state["step"] for part in other._optimizer.parts for state in part.optimizer.state.values() if state]
    assert len({counter.data_ptr() for counter in counters}) == len(counters)
    assert {float(counter) for counter in counters} == ({steps} if steps else set())
    for step in range(steps, steps + 3):
        a, b = train(one, batch_of(step), step, silent), train(other, batch_of(step), step, silent)
        assert a.metrics == b.metrics
    assert a.metrics["kl"] > 0
    assert other.fingerprint() == one.fingerprint()


def test_checkpoint_without_the_number_of_updates_goes_on(tmp_path: Path) -> None:
    one = started(config_of(tmp_path, DENSE))
    train(one, batch_of(0), 0, silent)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    one.save(folder)
    facts = json.loads((folder / weights.ENGINE).read_text())
    del facts["updates"]
    (folder / weights.ENGINE).write_text(json.dumps(facts))
    other = MegatronEngine(config_of(tmp_path, DENSE))
    other.load(folder)
    assert train(one, batch_of(1), 1, silent).metrics == train(other, batch_of(1), 1, silent).metrics
    assert other.fingerprint() == one.fingerprint()


def test_checkpoint_with_several_buckets_loads_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from relax_actors.engines.megatron.mcore import optimizer

    small = partial(optimizer.DistributedDataParallelConfig, overlap_grad_reduce=True, bucket_size=500)
    monkeypatch.setattr(optimizer, "DistributedDataParallelConfig", small)
    config = config_of(tmp_path, DENSE, trainer={"max_tokens_per_microbatch": 10_000})
    one = started(config)
    (buffer,) = one._optimizer.models[0].buffers
    assert len(buffer.buckets) > 3
    for step in range(2):
        train(one, batch_of(step), step, silent)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    one.save(folder)
    other = MegatronEngine(config)
    other.load(folder)
    for step in range(2, 4):
        train(one, batch_of(step), step, silent)
        train(other, batch_of(step), step, silent)
    assert one.fingerprint() == other.fingerprint()


def test_checkpoint_on_full_disk_raises_enospc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started(config_of(tmp_path, DENSE))
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    mkdir = Path.mkdir

    def make_and_point_at_the_full_device(path: Path, **settings: Any) -> None:
        mkdir(path, **settings)
        if not (path / "rank.0.json").is_symlink():
            (path / "rank.0.json").symlink_to("/dev/full")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", make_and_point_at_the_full_device)
        with pytest.raises(OSError, match="No space left") as found:
            engine.save(folder)
        finish = engine.begin_save(folder)
        with pytest.raises(OSError, match="No space left") as later:
            finish()
    assert found.value.errno == later.value.errno == errno.ENOSPC
    engine.save(folder)
    engine.load(folder)


def test_recomputation_does_not_change_weights(tmp_path: Path) -> None:
    found = []
    for recompute in ("none", "selective", "full"):
        engine = started(config_of(tmp_path, MOE, trainer={"recompute": recompute}))
        for step in range(2):
            train(engine, batch_of(step), step, silent)
        found.append(engine.fingerprint())
    assert found[0] == found[1] == found[2]


def test_bfloat16_weights_are_kept_in_float32_by_the_optimizer(tmp_path: Path) -> None:
    engine = started(config_of(tmp_path, DENSE, trainer={"precision": "bfloat16"}))
    assert {tensor.dtype for tensor in weights_of(engine, tmp_path / "published").values()} == {torch.bfloat16}
    main = [group["params"] for part in engine._optimizer.parts for group in part.optimizer.param_groups]
    assert {tensor.dtype for group in main for tensor in group} == {torch.float32}


def test_warm_start_matches_torch_engine(tmp_path: Path) -> None:
    found = []
    for engine in both(config_of(tmp_path, DENSE)):
        engine.initialise(5)
        losses = [engine.warm_start(batch_of(1), 1e-2, silent).metrics["loss"] for _ in range(10)]
        engine.finish_warm_start()
        found.append((losses, weights_of(engine, tmp_path / type(engine).__name__)))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-4)
    assert found[0][0][-1] < found[0][0][0] - 0.5
    assert max_difference(found[0][1], found[1][1]) < 5e-4


def test_weights_of_model_folder_are_loaded(tmp_path: Path) -> None:
    config = config_of(tmp_path, MOE)
    build(config.model_path, seed=77).save_pretrained(config.model_path)
    megatron, beside = MegatronEngine(config), build(config.model_path, seed=77)
    megatron.initialise(5)
    assert megatron.fingerprint() == weights.fingerprint(tensors_of(beside))


def test_patch_lets_router_run_without_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.moe import moe_utils

    arguments = torch.ones(2, 3), torch.ones(4, 3), None, torch.float32
    assert moe_utils.router_gating_linear(*arguments).shape == (2, 4)
    monkeypatch.delattr(moe_utils, "te_general_gemm")
    with pytest.raises(NameError):
        moe_utils.router_gating_linear(*arguments)


def test_missing_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="CUDA is not available"):
        MegatronEngine(config_of(tmp_path, DENSE, trainer={"device": "cuda"}))


def test_patch_converts_split_sizes_to_ints(tmp_path: Path) -> None:
    from megatron.core.transformer.moe import token_dispatcher

    MegatronEngine(config_of(tmp_path, DENSE))  # creates the process group
    sizes = token_dispatcher.maybe_move_tensor_to_cpu(torch.tensor([3]), as_numpy=True)
    found = torch.zeros(3)
    torch.distributed.all_to_all_single(found, torch.ones(3), sizes, sizes)
    assert sizes.tolist() == [3]
    assert found.tolist() == [1, 1, 1]
    same = torch.tensor([3])
    assert token_dispatcher.maybe_move_tensor_to_cpu(same) is same


def test_patch_reads_and_sets_cpu_random_state() -> None:
    from megatron.core.tensor_parallel import random

    state = random._get_cuda_rng_state()
    drawn = torch.rand(3)
    random._set_cuda_rng_state(state)
    assert torch.equal(torch.rand(3), drawn)


@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL computes with it")
def test_a_layout_that_gloo_cannot_compute_is_refused() -> None:
    from relax_actors.engines.megatron.layout import Layout
    from relax_actors.engines.megatron.mcore import process_groups

    with pytest.raises(ConfigError, match=r"expert_tensor_parallel = 2 needs GPUs.*set expert_tensor_parallel = 1"):
        process_groups.check_backend(Layout(4, 2, 1, 1, 1, 2, 2, sequence=True))
