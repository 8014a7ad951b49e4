"""Ways to load weights into a server: what is written, and what is released."""

from __future__ import annotations

import base64
import io
import os
import pickle
import resource
import threading
from collections import UserDict
from collections.abc import Iterator, Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import torch

from relax_actors.engines.protocols.server import ServerRecord
from relax_actors.engines.sglang.connection import SglangSettings
from relax_actors.engines.sglang.engine import SglangEngine
from relax_actors.engines.sglang.weight_loaders import (
    FileLoader,
    StagedWeights,
    pickled_by_name,
    to_checkpoint_names,
)
from relax_actors.errors import ActorError
from relax_actors.weights import files as weights
from relax_actors.weights.host_copy import HostCopy
from relax_actors.weights.node_sets import FILE, MEMORY, NodeSet, NodeSets
from relax_actors.weights.protocols import WeightUpdate
from tests.support.http_servers import serving
from tests.support.sglang_servers import opened_by


def test_views_are_pickled_without_their_buffer() -> None:
    body = torch.arange(1 << 16, dtype=torch.uint8)
    views = {str(i): body[i << 12 : (i + 1) << 12].view(torch.float16) for i in range(16)}
    data = base64.b64decode(pickled_by_name(views))
    assert len(data) < 2 * body.nbytes
    found = pickle.load(io.BytesIO(data))  # noqa: S301 our own
    assert all(torch.equal(found[name].view(torch.int16), view.view(torch.int16)) for name, view in views.items())


def in_memory(room: Path) -> FileLoader:
    return FileLoader(room, in_memory=True)


def staged_of(version: int, tensors: Mapping[str, torch.Tensor]) -> StagedWeights:
    return StagedWeights(version, weights.fingerprint(tensors))


def test_shared_weights_are_read_through_a_link_and_cannot_be_changed(tmp_path: Path) -> None:
    loader = in_memory(tmp_path)
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(40, dtype=torch.bfloat16)[::2]}
    loader.stage(staged := staged_of(3, tensors), tensors)
    loader.stage(staged, tensors)  # again, after a failed update
    tensors["a"].zero_()
    (link,) = tmp_path.glob(f"*/*/{FILE}")
    assert link.is_symlink()
    with link.open("r+b") as file, pytest.raises(PermissionError):
        os.pwrite(file.fileno(), b"x", 0)
    read = weights.load([link])
    assert read["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert torch.equal(read["b"], tensors["b"])
    loader.forget(staged)
    assert not list(tmp_path.glob("*/*"))
    assert read["a"].tolist() == [[0, 1, 2], [3, 4, 5]], "a mapping keeps the memory"
    loader.close()


def test_weights_that_cannot_be_written_leave_no_memory(tmp_path: Path) -> None:
    loader, limits = in_memory(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            loader.stage(StagedWeights(3, "ab"), {"a": torch.ones(1 << 14)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert MEMORY not in opened_by(os.getpid())


def test_file_that_is_opened_after_close_gets_no_weights_of_an_unfinished_stage(tmp_path: Path) -> None:
    loader, victim = in_memory(tmp_path / "room"), tmp_path / "victim"

    class Tensors(UserDict[str, torch.Tensor]):
        """Tensors during whose copy another thread closes the loader and opens a file."""

        file: Any = None

        def __getitem__(self, name: str) -> torch.Tensor:
            if name == "b" and self.file is None and MEMORY in opened_by(os.getpid()):
                loader.close()
                self.file = victim.open("wb")
            return self.data[name]

    tensors = Tensors(a=torch.ones(4), b=torch.ones(1 << 16))
    with pytest.raises(ActorError, match="not kept: the actor stops"):
        loader.stage(staged_of(3, tensors), tensors)
    tensors.file.close()
    assert victim.stat().st_size == 0
    assert MEMORY not in opened_by(os.getpid()), "nobody closes the loader again"
    assert not list((tmp_path / "room").glob("*/*"))


def test_experts_lie_in_the_file_by_the_names_of_the_server_and_are_read_whole(tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.mlp.experts.gate_up_proj": torch.randn(11, 6, 4),
        "model.layers.0.mlp.experts.down_proj": torch.randn(11, 4, 3),
        "model.norm.weight": torch.ones(4, dtype=torch.bfloat16),
        "model.router.bias": torch.ones(1),
    }
    weights.save(tensors, tmp_path / "published")
    update = WeightUpdate(1, weights.fingerprint(tensors), [tmp_path / "published"])
    loader = FileLoader(tmp_path / "room")
    copy = HostCopy(loader.sets, partial(to_checkpoint_names, prefixes=[("model.", "served.")]))
    copy.apply([update])
    assert copy.tensors.keys() == tensors.keys()
    assert isinstance(copy.tensors, NodeSet)
    named = weights.load([copy.tensors.folder / FILE])
    expected = to_checkpoint_names(tensors, [("model.", "served.")])
    assert named.keys() == expected.keys()
    assert all(torch.equal(named[name], expected[name]) for name in named)
    other = HostCopy(NodeSets(tmp_path / "room"))  # of an engine that reads the published names
    other.apply([update])
    assert isinstance(other.tensors, NodeSet)
    assert (other.tensors.folder / FILE).samefile(copy.tensors.folder / FILE)
    loader.close()


class Refusing(BaseHTTPRequestHandler):
    """A server that refuses weights."""

    def do_GET(self) -> None:
        self._answer(200)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(400 if self.path == "/update_weights_from_disk" else 200)

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(b'{"weight_version": "default"}')

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def record() -> Iterator[ServerRecord]:
    with serving(Refusing) as url:
        yield ServerRecord(url, "key", "ab", 12)


def test_weights_that_a_server_refuses_are_released(record: ServerRecord, tmp_path: Path) -> None:
    loader = in_memory(tmp_path)
    engine = SglangEngine(lambda: record, loader, SglangSettings(128, rows=1, patience=5, stall=5))
    for version in (3, 4):
        engine.stage(version, {"a": torch.full((4,), float(version))})
        with pytest.raises(ActorError, match=f"weights {version} cannot be served: .*400"):
            engine.swap()
        assert engine.version is None
    assert MEMORY not in opened_by(os.getpid())
    assert not list(tmp_path.glob("*/*"))
    engine.close()


def test_weights_that_are_staged_again_while_a_failed_swap_releases_them_are_kept(
    record: ServerRecord, tmp_path: Path
) -> None:
    class Loader(FileLoader):
        """Has another thread stage weights again before it forgets them for the first time."""

        def forget(self, staged: StagedWeights) -> None:
            if swapping.is_set() and again.ident is None:
                again.start()
                again.join(0.5)  # it waits for the swap
            super().forget(staged)

    engine = SglangEngine(
        lambda: record, Loader(tmp_path, in_memory=True), SglangSettings(128, rows=1, patience=5, stall=5)
    )
    tensors, swapping = {"a": torch.ones(4)}, threading.Event()
    again = threading.Thread(target=engine.stage, args=(3, tensors))
    engine.stage(3, tensors)
    swapping.set()
    with pytest.raises(ActorError, match="weights 3 cannot be served"):
        engine.swap()
    again.join(20)
    assert weights.load(list(tmp_path.glob(f"*/*/{FILE}")))["a"].tolist() == [1, 1, 1, 1]
    engine.close()
    assert MEMORY not in opened_by(os.getpid())
