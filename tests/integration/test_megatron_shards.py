"""Weight versions and models that two ranks write, each its share: what one process writes, and repaired like that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from broker.errors import StoreError
from relax_actors.engines.protocols import train
from relax_actors.engines.ranks.group import TrainerGroup
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.torch.model import tensors_of
from relax_actors.engines.torch.stored_weights import fingerprint_of
from relax_actors.weights import files as weights
from tests.integration.test_megatron_ranks import configured
from tests.support.batches import batch_of
from tests.support.contexts import MakeContext
from tests.support.tiny_megatron import DENSE, MOE, skip_if_missing
from tests.support.trained_engines import started
from tests.support.weight_ends import DELTAS, ReceiverEnd, TrainerEnd

skip_if_missing()

ONE = (*DELTAS, "model.architecture.num_key_value_heads=2")
TWO = (*ONE, "trainer.backend=megatron", "trainer.megatron.ranks=2", "trainer.megatron.tensor_parallel=2")
WIDE = DENSE | {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "head_dim": 64}
MIB = 1 << 20


@pytest.mark.slow
def test_versions_of_two_ranks_are_followed_repaired_and_taken_over_by_one(
    make_context: MakeContext, group_of: Callable[..., TrainerGroup]
) -> None:
    context = make_context("trainer", *TWO)
    group = group_of(context.config)
    trainer, receiver = TrainerEnd(context, group), ReceiverEnd(make_context("rollout", *ONE))
    for version in range(6):
        if version:
            trainer.step()
        assert len(trainer.cell(version).shards) == 2
        assert receiver.bring(trainer, version)
    assert trainer.bases() == [None, 0, 1, 2, None, 4]
    sizes = [[shard.nbytes for shard in trainer.cell(version).shards] for version in (4, 5)]
    assert sum(sizes[1]) < sum(sizes[0]) / 2
    assert max(sizes[0]) < 0.6 * sum(sizes[0])  # each rank wrote about half of it

    store = trainer.table.store
    second = store.path(trainer.cell(5).shards[1].path)
    content = bytearray(second.read_bytes())
    content[-1] ^= 1
    second.write_bytes(content)
    with pytest.raises(StoreError, match="published was"):
        ReceiverEnd(make_context("rollout", *ONE)).bring(trainer, 5)
    second.unlink()  # as the stager of a rollout does
    assert not ReceiverEnd(make_context("rollout", *ONE)).bring(trainer, 5)
    trainer.publisher.repair()
    assert ReceiverEnd(make_context("rollout", *ONE)).bring(trainer, 5)

    # The next incarnation is one process, and finds a version 0 of two files of which one is lost.
    one = TorchEngine(make_context("trainer", *ONE).config)
    store.path(trainer.cell(0).shards[1].path).unlink(missing_ok=True)
    alone = TrainerEnd(replace(context, incarnation=2), one)
    assert alone.cell(0).fingerprint == alone.engine.fingerprint()
    assert ReceiverEnd(make_context("rollout", *ONE)).bring(alone, 0)
    # The one after it has two ranks again.
    for shard in alone.cell(0).shards:
        store.path(shard.path).unlink()
    again = TrainerEnd(replace(context, incarnation=3), group)
    assert ReceiverEnd(make_context("rollout", *ONE)).bring(again, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "section"), [(DENSE, {"pipeline_parallel": 2}), (MOE, {"expert_parallel": 2})], ids=["pp2", "ep2"]
)
def test_a_version_of_one_file_and_of_three_holds_what_two_ranks_hold(
    tmp_path: Path, group_of: Callable[..., TrainerGroup], model: dict[str, object], section: dict[str, object]
) -> None:
    group = started(group_of(configured(tmp_path, model, section)))
    for files in (1, 2, 3):
        paths = [tmp_path / f"{files}.{n}" for n in range(files)]
        assert group.publish(*paths) == group.fingerprint()
        assert weights.fingerprint(weights.load(paths)) == group.fingerprint()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "precision"), [(DENSE, "float32"), (MOE, "bfloat16")], ids=["dense", "experts in half precision"]
)
def test_the_model_folder_of_two_ranks_is_loaded_by_transformers(
    tmp_path: Path, group_of: Callable[..., TrainerGroup], model: dict[str, object], precision: str
) -> None:
    from transformers import AutoModelForCausalLM

    group = started(group_of(configured(tmp_path, model, {"pipeline_parallel": 2}, precision=precision)))
    train(group, batch_of(0), 0, lambda: None)
    group.export(folder := tmp_path / "model")
    names = sorted(path.name for path in folder.glob("*.safetensors*"))
    assert names == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert {tensor.dtype for tensor in tensors_of(loaded).values()} == {getattr(torch, precision)}
    assert weights.fingerprint(tensors_of(loaded)) == group.fingerprint() == fingerprint_of(folder)


def kib(pid: int, field: str) -> int:
    """Read a field of the memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


@pytest.mark.slow
def test_no_rank_holds_more_than_its_shard_and_one_tensor(
    tmp_path: Path, group_of: Callable[..., TrainerGroup]
) -> None:
    group = started(group_of(configured(tmp_path, WIDE, {"pipeline_parallel": 2})))
    paths = [tmp_path / f"weights.{n}" for n in range(2)]
    group.publish(*paths)  # allocates buffers of sockets and files
    train(group, batch_of(0), 0, lambda: None)
    before = {}
    for pid in group.pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
        before[pid] = kib(pid, "VmRSS")
    group.publish(*paths)
    group.export(tmp_path / "model")
    whole = sum(path.stat().st_size for path in paths)
    largest = max(tensor.nbytes for tensor in weights.load(paths).values())
    assert whole > 25 * MIB
    for pid in group.pids:
        grown = (kib(pid, "VmHWM") - before[pid]) * 1024
        assert grown < 4 * largest + 4 * MIB < whole / 3
