"""The store: segments are complete, verified and inside the store; a full disk is reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from broker.errors import StoreError, StoreFullError
from broker.fields import TensorRef
from broker.segment import INLINE_BYTES
from broker.store import Store
from broker.subjects import RowId
from tests.support.programs import small_file_system

DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    (tmp_path / "store").mkdir()
    return Store(tmp_path / "store")


def large(dtype: str = "float32", extra: int = 0) -> np.ndarray:
    count = INLINE_BYTES // np.dtype(dtype).itemsize + 1 + extra
    return (np.arange(count) % 99).astype(dtype)


def put(store: Store, *arrays: np.ndarray, row: RowId = RowId(3, 4)) -> list[TensorRef]:
    segment = store.segment_writer(row, "own", "role.0#7")
    references = [segment.place(array) for array in arrays]
    assert segment.close()
    return [reference for reference in references if reference is not None]


def files(store: Store) -> list[str]:
    return sorted(str(path.relative_to(store.root)) for path in store.root.rglob("*") if path.is_file())


def test_segment_path_mirrors_the_subject(store: Store) -> None:
    (reference,) = put(store, large(), row=RowId(3, 4, "eval"))
    assert reference.uri == "eval/3/4.own.role.0-7.0.safetensors"
    assert files(store) == ["eval/3/4.own.role.0-7.0.safetensors"]


def test_two_authors_of_one_cell_write_separate_segments(store: Store) -> None:
    found = []
    for author, value in (("role.0#7", 1), ("role.0#8", 2), ("role.1#7", 3)):
        segment = store.segment_writer(RowId(0, 0), "own", author)
        reference = segment.place(np.full(INLINE_BYTES + 1, value, np.uint8))
        assert segment.close()
        assert reference is not None
        found.append(reference)
    assert [int(store.read(reference)[0]) for reference in found] == [1, 2, 3]


def test_segment_is_a_safetensors_file_with_the_arrays_in_order(store: Store) -> None:
    arrays = [large(dtype, i) for i, dtype in enumerate(DTYPES)]
    references = put(store, *arrays)
    found = load_file(store.path(references[0].uri))
    for i, array in enumerate(arrays):
        assert found[str(i)].dtype == array.dtype
        assert np.array_equal(found[str(i)], array)


@settings(max_examples=25)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 70)), min_size=1, max_size=8))
def test_arrays_round_trip_through_aligned_read_only_references(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[str, int]]
) -> None:
    store = Store(tmp_path_factory.mktemp("store"))
    arrays = [large(dtype, extra) for dtype, extra in kinds]
    references = put(store, *arrays)
    load_file(store.path(references[0].uri))
    for array, reference in zip(arrays, references, strict=True):
        found = store.read(reference)
        assert reference.offset % 64 == 0
        assert found.dtype == array.dtype
        assert np.array_equal(found, array)
        assert found.flags.aligned
        assert not found.flags.writeable


def test_shape_and_non_contiguous_view_round_trip(store: Store) -> None:
    array = np.arange(30_000, dtype=np.int64).reshape(100, 300).T
    (reference,) = put(store, array)
    assert np.array_equal(store.read(reference), array)


def test_small_arrays_stay_inline_without_a_segment(store: Store) -> None:
    segment = store.segment_writer(RowId(0, 0), "own", "role.0#7")
    assert segment.place(np.zeros(INLINE_BYTES, np.uint8)) is None
    assert segment.place(np.zeros(INLINE_BYTES + 1, np.uint8)) is not None
    empty = store.segment_writer(RowId(0, 1), "own", "role.0#7")
    assert not empty.close()
    assert files(store) == []


def test_same_author_never_writes_a_segment_twice(store: Store) -> None:
    first = put(store, np.full(INLINE_BYTES + 1, 1, np.uint8))[0]
    second = put(store, np.full(INLINE_BYTES + 1, 2, np.uint8))[0]
    assert files(store) == ["group/3/4.own.role.0-7.0.safetensors", "group/3/4.own.role.0-7.1.safetensors"]
    assert [int(store.read(reference)[0]) for reference in (first, second)] == [1, 2]


def test_arrays_beyond_the_header_of_a_segment_go_into_a_further_one(store: Store) -> None:
    arrays = [large(extra=i) for i in range(200)]
    references = put(store, *arrays)
    names = files(store)
    assert 1 < len(names) < 10
    for name in names:
        load_file(store.root / name)
    for array, reference in zip(arrays, references, strict=True):
        assert np.array_equal(store.read(reference), array)


def test_full_segment_is_followed_by_another(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.segment.SEGMENT_BYTES", 50_000)
    references = put(store, *[np.full(20_000, i, np.uint8) for i in range(7)])
    assert list(Counter(reference.uri for reference in references).values()) == [3, 3, 1]
    assert [int(store.read(reference)[0]) for reference in references] == list(range(7))


def test_removal_in_the_background_is_complete_after_close(store: Store) -> None:
    for step in range(20):
        put(store, large(), row=RowId(step, 0))
    for step in range(19):
        store.remove_later(f"group/{step}")
    store.close()
    assert files(store) == ["group/19/0.own.role.0-7.19.safetensors"]
    store.remove_later("group/19")
    store.close()
    assert files(store) == []


def test_writer_makes_a_removed_folder_again(store: Store) -> None:
    put(store, large())
    store.remove("group")
    (reference,) = put(store, large())
    assert np.array_equal(store.read(reference), large())


@settings(max_examples=40)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_flipped_bit_is_detected(tmp_path_factory: pytest.TempPathFactory, place: float, bit: int) -> None:
    store = Store(tmp_path_factory.mktemp("store"))
    (reference,) = put(store, large())
    path = store.path(reference.uri)
    data = bytearray(path.read_bytes())
    data[reference.offset + int(place * reference.nbytes)] ^= 1 << bit
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"segment group/3/4\.own\.role\.0-7\.\d\.safetensors is corrupt"):
        store.read(reference)


@pytest.mark.parametrize("left", [0, 1, 4095, 4096, 9000, -1])
def test_truncated_segment_is_detected(store: Store, left: int) -> None:
    (reference,) = put(store, large("uint8"))
    path = store.path(reference.uri)
    path.write_bytes(path.read_bytes()[: left if left >= 0 else reference.offset + reference.nbytes - 1])
    with pytest.raises(
        StoreError, match=r"segment group/3/4\.own\.role\.0-7\.\d\.safetensors (is missing or empty|holds \d+ bytes)"
    ):
        store.read(reference)


def test_removed_segment_is_detected(store: Store) -> None:
    (reference,) = put(store, large())
    store.remove("group/3")
    assert files(store) == []
    with pytest.raises(StoreError, match="missing"):
        store.read(reference)


def test_removing_a_missing_file_does_nothing(store: Store) -> None:
    store.remove("group/77")
    store.remove("weights/1.safetensors")


@pytest.mark.parametrize("uri", ["../secret", "group/../../secret", "/etc/passwd", "group/../.."])
def test_reference_outside_the_store_is_refused(store: Store, uri: str) -> None:
    (store.root.parent / "secret").write_bytes(b"x" * 10)
    reference = TensorRef(uri, 0, 1, "uint8", (1,), "")
    with pytest.raises(StoreError, match="points outside the store"):
        store.read(reference)
    with pytest.raises(StoreError, match="points outside the store"):
        store.write(uri, lambda path: path.write_bytes(b"y"))
    with pytest.raises(StoreError, match="points outside the store"):
        store.remove(uri)
    assert (store.root.parent / "secret").read_bytes() == b"x" * 10


def test_link_out_of_the_store_is_refused(store: Store, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_bytes(b"x")
    (store.root / "folder").symlink_to(tmp_path / "elsewhere")
    (store.root / "file").symlink_to(tmp_path / "elsewhere" / "secret")
    for uri in ("folder/secret", "file"):
        with pytest.raises(StoreError, match="points outside the store"):
            store.read(TensorRef(uri, 0, 1, "uint8", (1,), ""))
        with pytest.raises(StoreError, match="points outside the store"):
            store.remove(uri)
    assert (tmp_path / "elsewhere" / "secret").exists()


def test_store_root_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    store = Store(tmp_path / "link")
    (reference,) = put(store, large())
    assert np.array_equal(store.read(reference), large())


def test_write_returns_the_result_of_save_and_renames(store: Store) -> None:
    seen: list[Path] = []

    def save(path: Path) -> str:
        seen.append(path)
        path.write_bytes(b"abc")
        assert not (store.root / "weights" / "1").exists()
        return "fingerprint"

    assert store.write("weights/1", save) == "fingerprint"
    assert (store.root / "weights" / "1").read_bytes() == b"abc"
    assert files(store) == ["weights/1"]
    assert seen[0].parent == store.root / "weights"


def test_failing_save_keeps_the_old_file_and_no_temporary(store: Store) -> None:
    store.write("weights/1", lambda path: path.write_bytes(b"old"))

    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        msg = "interrupted"
        raise RuntimeError(msg)

    with pytest.raises(RuntimeError, match="interrupted"):
        store.write("weights/1", fail)
    assert files(store) == ["weights/1"]
    assert (store.root / "weights" / "1").read_bytes() == b"old"


def test_other_errors_of_save_propagate_unchanged(store: Store) -> None:
    with pytest.raises(FileNotFoundError):
        store.write("weights/1", lambda path: (path / "no" / "folder").write_bytes(b""))


def test_full_device_is_reported_with_the_remedy(store: Store) -> None:
    def save(_: Path) -> None:
        with Path("/dev/full").open("wb", buffering=0) as file:
            file.write(b"x")

    with pytest.raises(StoreFullError, match=r"too little for segment weights/1; free space"):
        store.write("weights/1", save)
    assert files(store) == []


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "tiny"
    folder.mkdir()
    with small_file_system(folder, "64k") as why:
        if why:
            pytest.skip(why)
        yield folder


def test_full_store_refuses_a_segment_without_leaving_a_partial_file(tiny: Path) -> None:
    store = Store(tiny)
    (fits,) = put(store, large("uint8"), row=RowId(0, 0))
    with pytest.raises(StoreFullError, match=r"too little for segment group/0/1\.own\.role\.0-7\.\d\.safetensors"):
        put(store, np.zeros(60_000, np.uint8), row=RowId(0, 1))
    assert files(store) == ["group/0/0.own.role.0-7.0.safetensors"]
    assert np.array_equal(store.read(fits), large("uint8"))
    store.remove("group/0")
    (after,) = put(store, large("uint8"), row=RowId(0, 1))
    assert np.array_equal(store.read(after), large("uint8"))
