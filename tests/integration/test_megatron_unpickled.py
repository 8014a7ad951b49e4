"""Ranks exchange and store plain data: nothing is pickled, in memory or on disk."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import relax_actors.engines.megatron
from relax_actors.engines.protocols import train
from relax_actors.engines.ranks import group, rank_group
from tests.support.batches import batch_of
from tests.support.tiny_megatron import DENSE, MOE, config_of, skip_if_missing
from tests.support.trained_engines import started

skip_if_missing()

PICKLES = {"pickle", "cloudpickle", "dill"}
CALLS = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}
REPLACED = {("mcore/process_groups.py", "all_gather_object")}
"""Uses by megatron-core that are replaced."""


def test_no_module_of_the_engine_pickles() -> None:
    folder = Path(relax_actors.engines.megatron.__path__[0])
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(alias.name for alias in node.names)]
            elif isinstance(node, ast.Attribute):
                names = [node.attr]
                if isinstance(node.value, ast.Name) and node.value.id == "torch" and node.attr in ("save", "load"):
                    names.append("pickle")
            found |= {(str(path.relative_to(folder)), name) for name in names if name in PICKLES | CALLS}
    assert found == REPLACED


@pytest.mark.slow
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_two_ranks_train_and_save_without_pickle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, experts: bool
) -> None:
    monkeypatch.setattr(rank_group, "MODULE", "tests.support.unpickled_rank")
    section = {"ranks": 2} | ({"expert_parallel": 2} if experts else {})
    trainer = {"megatron": section, "max_tokens_per_microbatch": 20}
    config = config_of(
        tmp_path / "run",
        MOE if experts else DENSE,
        trainer=trainer,
        algorithm={"kl": {"place": "loss", "coefficient": 0.1}},
    )
    folders = tmp_path / "now", tmp_path / "later"
    for folder in folders:
        folder.mkdir()
    engine = started(group.TrainerGroup(config, lambda *_: None))
    try:
        train(engine, batch_of(0), 0, lambda: None)
        engine.save(folders[0])
        engine.begin_save(folders[1])()
        saved = engine.fingerprint()
        train(engine, batch_of(1), 1, lambda: None)
        after = engine.fingerprint()
        for folder in folders:
            engine.load(folder)
            assert engine.fingerprint() == saved
            train(engine, batch_of(1), 1, lambda: None)
            assert engine.fingerprint() == after
    finally:
        engine.close()
    files = {path.suffix for folder in folders for path in folder.rglob("*") if path.is_file()}
    assert files == {".json", ".msgpack", ".safetensors"}
