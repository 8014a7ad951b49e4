"""Sets of weights that several actors of a node hold: one verified copy, whichever of them has made it."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor

from broker.errors import StoreError
from relax_actors.errors import ActorError
from relax_actors.weights import deltas
from relax_actors.weights import files as weights
from relax_actors.weights.host_copy import HostCopy
from relax_actors.weights.node_sets import FILE, MEMORY, SEALS, NodeSet, NodeSets
from relax_actors.weights.protocols import WeightUpdate
from tests.support.sglang_servers import opened_by

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(40, dtype=torch.bfloat16)}
PRINT = weights.fingerprint(TENSORS)


@pytest.fixture(params=[True, False], ids=["memory", "disk"])
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[NodeSets, NodeSets]]:
    """Two actors of a node."""
    actors = NodeSets(tmp_path / "room", in_memory=request.param), NodeSets(tmp_path / "room", in_memory=request.param)
    yield actors
    for actor in actors:
        actor.close()
    assert [path.name for path in (tmp_path / "room").iterdir()] in ([], ["making"])
    assert MEMORY not in opened_by(os.getpid())


def source(tensors: dict[str, Tensor] = TENSORS) -> tuple[dict[str, weights.TensorForm], Iterator[tuple[str, Tensor]]]:
    return {name: weights.TensorForm.of(tensor) for name, tensor in tensors.items()}, iter(tensors.items())


def never() -> tuple[dict[str, weights.TensorForm], Iterator[tuple[str, Tensor]]]:
    pytest.fail("the set is there")


def file_of(held: NodeSet) -> os.stat_result:
    return (held.folder / FILE).stat()


def test_second_actor_holds_the_set_of_the_first_and_keeps_it(pair: tuple[NodeSets, NodeSets]) -> None:
    first, second = pair
    made = first.hold(3, PRINT, source)
    assert first.hold(3, PRINT, never) is made
    joined = second.hold(3, PRINT, never)
    assert os.path.samestat(file_of(made), file_of(joined))
    assert made.folder != joined.folder
    inode = file_of(made).st_ino
    del made
    first.close()
    assert file_of(joined).st_ino == inode
    assert {name: tensor.tolist() for name, tensor in joined.items()} == {n: t.tolist() for n, t in TENSORS.items()}
    assert weights.load([joined.folder / FILE]).keys() == TENSORS.keys()


def test_set_is_made_again_after_the_last_actor_has_released_it(pair: tuple[NodeSets, NodeSets]) -> None:
    first, second = pair
    kept = first.hold(3, PRINT, source)["a"]
    assert not list(first.hold(4, PRINT, source).folder.parent.glob("3-*")), "released with the last reference"
    assert kept.tolist() == TENSORS["a"].tolist(), "a tensor keeps its memory"
    changed = TENSORS | {"a": TENSORS["a"] + 1}
    with pytest.raises(StoreError, match="published was"):
        second.hold(3, PRINT, lambda: source(changed))


def test_weights_with_another_fingerprint_are_not_held(pair: tuple[NodeSets, NodeSets]) -> None:
    first, second = pair
    for actor in pair:
        with pytest.raises(StoreError, match=r"weights 3 have fingerprint .*, published was 00"):
            actor.hold(3, "0" * 32, source)
    assert first.hold(3, PRINT, source).keys() == second.hold(3, PRINT, never).keys()


def plant(room: Path, name: str, descriptor: int) -> None:
    """Link to a file of this process as an actor does that holds it."""
    folder = room / "0-planted" / name
    folder.mkdir(parents=True)
    (folder / FILE).symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")


@pytest.mark.parametrize("kind", ["other bytes", "not sealed", "a pipe", "no weights"])
def test_memory_that_does_not_hold_the_set_is_refused(
    pair: tuple[NodeSets, NodeSets], tmp_path: Path, kind: str
) -> None:
    if kind == "a pipe":
        descriptors = list(os.pipe())
    else:
        descriptors = [os.memfd_create("planted", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)]
        if kind == "no weights":
            os.write(descriptors[0], b"x" * 100)
        else:
            changed = TENSORS["a"] + (kind == "other bytes")
            weights.save(TENSORS | {"a": changed}, descriptors[0])
        if kind != "not sealed":
            fcntl.fcntl(descriptors[0], fcntl.F_ADD_SEALS, SEALS)
    plant(tmp_path / "room", f"3-{PRINT}.1", descriptors[0])
    held = pair[0].hold(3, PRINT, source)
    assert torch.equal(held["a"], TENSORS["a"])
    assert file_of(held).st_ino != os.fstat(descriptors[0]).st_ino
    assert os.path.samestat(file_of(pair[1].hold(3, PRINT, never)), file_of(held))
    for descriptor in descriptors:
        os.close(descriptor)
    shutil.rmtree(tmp_path / "room" / "0-planted")


def test_file_that_was_changed_is_refused_and_made_again(tmp_path: Path) -> None:
    first, second = NodeSets(tmp_path, in_memory=False), NodeSets(tmp_path, in_memory=False)
    held = first.hold(3, PRINT, source)
    with (held.folder / FILE).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    own = second.hold(3, PRINT, source)
    assert not os.path.samestat(file_of(own), file_of(held))
    assert torch.equal(own["b"], TENSORS["b"])
    first.close()
    second.close()


def test_waiting_for_another_actor_ends_at_its_deadline_and_names_the_actor(tmp_path: Path) -> None:
    slow, other, began, go_on = (
        NodeSets(tmp_path),
        NodeSets(tmp_path, patience=0.05),
        threading.Event(),
        threading.Event(),
    )

    def slowly() -> tuple[dict[str, weights.TensorForm], Iterator[tuple[str, Tensor]]]:
        began.set()
        assert go_on.wait(60)
        return source()

    making = threading.Thread(target=slow.hold, args=(3, PRINT, slowly))
    making.start()
    assert began.wait(60)
    with pytest.raises(
        ActorError, match=rf"weights 4 wait for process {os.getpid()}, which prepares weights 3.*0.05 s"
    ):
        other.hold(4, PRINT, never)
    go_on.set()
    making.join(60)
    assert other.hold(4, PRINT, source).keys() == TENSORS.keys()
    slow.close()
    other.close()


def test_delta_is_added_to_the_mapped_set_by_the_first_actor_alone(
    pair: tuple[NodeSets, NodeSets], tmp_path: Path
) -> None:
    copies, updates, before = [HostCopy(sets) for sets in pair], list[WeightUpdate](), TENSORS
    weights.save(before, tmp_path / "0")
    updates.append(WeightUpdate(0, PRINT, [tmp_path / "0"]))
    for version in (1, 2, 3):
        after = before | {"b": before["b"] + version}
        weights.save(deltas.encode(before, after), tmp_path / str(version), weights.fingerprint(before))
        updates.append(WeightUpdate(version, weights.fingerprint(after), [tmp_path / str(version)]))
        before = after
    for update in updates:
        copies[0].apply([update])
        update.shards[0].rename(tmp_path / "away")
        if update.version != 2:
            copies[1].apply([update])  # needs no file
        (tmp_path / "away").rename(update.shards[0])
    for copy in copies:
        assert (copy.version, copy.fingerprint) == (3, weights.fingerprint(before))
        assert torch.equal(copy.tensors["b"], before["b"])
    late = HostCopy()
    late.apply(updates)
    assert weights.fingerprint(late.tensors) == weights.fingerprint(before)
    with pytest.raises(StoreError, match="begin with a full set"):
        copies[0].apply([WeightUpdate(5, PRINT, [tmp_path / "1"])])
    assert (copies[0].version, copies[0].tensors) == (None, {})
    copies[0].apply(updates)
    assert torch.equal(copies[0].tensors["b"], before["b"])


def test_without_links_each_actor_makes_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "the file system has no links")

    monkeypatch.setattr(os, "link", refused)
    first, second = (NodeSets(tmp_path / "room", in_memory=False) for _ in range(2))
    with closing(first), closing(second):
        made, own = first.hold(3, PRINT, source), second.hold(3, PRINT, source)
        assert not os.path.samestat(file_of(made), file_of(own))
        assert weights.fingerprint(own) == PRINT


def test_a_copy_that_finds_no_room_is_as_good_as_before(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.safetensors" for number in range(2)]
    changed = TENSORS | {"a": TENSORS["a"] + 1}
    for path, tensors in zip(paths, (TENSORS, changed), strict=True):
        weights.save(tensors, path)
    sets = NodeSets(tmp_path / "room")
    copy = HostCopy(sets)
    copy.apply([WeightUpdate(3, PRINT, [paths[0]])])
    sets.close()
    with pytest.raises(ActorError, match="the actor stops"):
        copy.apply([WeightUpdate(4, weights.fingerprint(changed), [paths[1]])])
    assert (copy.version, copy.fingerprint) == (3, PRINT)
    assert copy.tensors["a"].tolist() == TENSORS["a"].tolist()


def test_a_base_that_its_disk_has_changed_is_told_from_a_damaged_delta(tmp_path: Path) -> None:
    after = TENSORS | {"b": TENSORS["b"] + 1}
    weights.save(TENSORS, tmp_path / "0")
    weights.save(deltas.encode(TENSORS, after), tmp_path / "1", PRINT)
    updates = [WeightUpdate(0, PRINT, [tmp_path / "0"]), WeightUpdate(1, weights.fingerprint(after), [tmp_path / "1"])]
    with closing(NodeSets(tmp_path / "room", in_memory=False)) as sets:
        copy = HostCopy(sets)
        copy.apply(updates[:1])
        (file,) = (tmp_path / "room").glob(f"*/0-*/{FILE}")
        with file.open("r+b") as opened:
            opened.seek(-1, os.SEEK_END)
            opened.write(b"\xff")
        with pytest.raises(StoreError, match="has changed on its disk") as raised:
            copy.apply(updates[1:])
        assert isinstance(raised.value.__cause__, OSError), "the published files are not removed"
        copy.apply(updates)
        assert torch.equal(copy.tensors["b"], after["b"])


def test_a_mapped_set_cannot_be_written(tmp_path: Path) -> None:
    weights.save(TENSORS, tmp_path / FILE)
    code = "import sys, pathlib; from relax_actors.weights import files\n"
    code += "tensors, _ = files.mapped(pathlib.Path(sys.argv[1])); tensors['a'].zero_()"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / FILE)], capture_output=True, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert weights.fingerprint(weights.mapped(tmp_path / FILE)[0]) == PRINT


def test_what_is_no_file_in_a_link_of_a_dead_actor_is_not_opened(tmp_path: Path) -> None:
    sets = NodeSets(tmp_path / "room")
    left = tmp_path / "room" / "1-dead" / f"3-{PRINT}.1"
    left.mkdir(parents=True)
    (left / FILE).symlink_to("/dev/tty")
    with closing(sets):
        assert sets.hold(3, PRINT, source)["a"].tolist() == TENSORS["a"].tolist()
