"""Segments of media: damaged ones are written again, and several writers never show a partial file."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import numpy as np
import pytest

from broker.shared_files import SharedFiles
from broker.store import Store
from relax_actors.media import Features
from relax_actors.training.media_segments import MediaSegments

PATCHES = Features("image", np.arange(768, dtype=np.uint8).reshape(4, 192), np.array([1, 2, 2], np.int32), width=16)


@pytest.mark.parametrize(("whole", "damaged"), [(b"features", b"featurez"), (b"data_offsets", b"data_offsetz")])
def test_a_segment_with_a_damaged_header_is_written_again(tmp_path: Path, whole: bytes, damaged: bytes) -> None:
    segments, store = MediaSegments(Store(tmp_path)), Store(tmp_path)
    _, (reference,) = segments.get("key", "group/3", lambda: [PATCHES])
    path = store.path(reference.uri)
    path.write_bytes(path.read_bytes().replace(whole, damaged))
    (found,), references = segments.get("key", "group/3", lambda: [PATCHES])
    assert references == [reference]
    np.testing.assert_array_equal(found.array, PATCHES.array)


def test_writers_with_one_process_id_never_show_a_partial_file(tmp_path: Path) -> None:
    """As in containers that share a store, each of which numbers its processes from 1."""
    parts = [bytes([number]) * 4096 for number in range(250)] * 4
    stores, whole, sizes = [Store(tmp_path) for _ in range(4)], sum(map(len, parts)), set[int]()
    failures: list[BaseException] = []

    def write(store: Store) -> None:
        try:
            for number in range(20):
                store.write_parts(f"media/{number}", parts)
                sizes.add(store.path(f"media/{number}").stat().st_size)
        except BaseException as error:  # noqa: BLE001 checked below
            failures.append(error)

    threads = [threading.Thread(target=write, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sizes == {whole}


def test_file_is_made_once_where_the_file_system_has_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(source), None, str(target))

    monkeypatch.setattr("os.link", refuse)
    shared, made = SharedFiles(Store(tmp_path)), list[int]()

    def make() -> list[bytes]:
        made.append(1)
        return [b"features"]

    for step in range(3):
        uri = shared.link("key.safetensors", f"group/{step}", make)
        assert (tmp_path / uri).read_bytes() == b"features"
    assert made == [1]
    assert shared.remove_orphans(60) == 0
    assert shared.remove_orphans(0) == 1
    assert (tmp_path / "group/2/media.key.safetensors").exists()
