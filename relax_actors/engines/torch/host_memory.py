"""Memory of an engine that leaves its device for the host or the disk while other actors compute there, and returns.

`MovableTensors` moves tensors one by one: other threads read the same numbers meanwhile, from either place.
`MovableStorages` moves storages with all views of them, as ranks need, whose weights and gradients are views of flat
buffers; nothing can be read until they return.
"""

from __future__ import annotations

import ctypes
import mmap
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from relax_actors.weights.files import memory_of

Tensors = Callable[[], Iterable[Tensor]]
ALIGNMENT = 64
"""Tensors begin at multiples of so many bytes in a file."""


class Movable(ABC):
    """Memory of an engine. Within `with` it can be read, and does not move; blocks may be nested in one thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        """Keep the memory where it is."""
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let it move again."""
        self._lock.release()

    @abstractmethod
    def release(self, folder: Path | None) -> int:
        """Leave the device; return the bytes that became free there. May be called twice.

        Args:
            folder: folder of a file without a name that gets the numbers, of tensors on the CPU as well; None for
                pinned host memory, which tensors on the CPU do not need.

        Raises:
            OSError: the disk is full; what has not moved stays.
        """

    @abstractmethod
    def resume(self) -> int:
        """Return to the device; return the bytes that moved. May be called twice."""


class MovableTensors(Movable):
    """Moves tensors one by one, in place.

    Args:
        tensors: returns the tensors on the device.
        device: device to return to.
    """

    def __init__(self, tensors: Tensors, device: torch.device) -> None:
        super().__init__()
        self._tensors, self._device = tensors, device
        # Addresses of tensors on the CPU that are mapped from a file.
        self._mapped: set[int] = set()

    def release(self, folder: Path | None) -> int:
        """Move tensors to pinned memory, or to a file that is mapped in their place; see `Movable`."""
        with self._lock:
            here = [t for t in _unique(self._tensors()) if t.device.type == self._device.type and t.numel()]
            moved = [t for t in here if t.is_cuda or (folder is not None and t.data_ptr() not in self._mapped)]
            if not moved:
                return 0
            size = sum(tensor.nbytes for tensor in moved)
            away = [_pinned(t.data) for t in moved] if folder is None else _mapped([t.data for t in moved], folder)
            _synchronize(moved)
            for tensor, host in zip(moved, away, strict=True):
                tensor.data = host
            if self._device.type == "cpu":
                self._mapped.update(tensor.data_ptr() for tensor in moved)
            _give_back()
            return size

    def resume(self) -> int:
        """Copy them to the device; see `Movable`."""
        with self._lock:
            moved = [t for t in _unique(self._tensors()) if t.device.type != self._device.type or self._is_mapped(t)]
            for tensor in moved:
                here = tensor.device.type == self._device.type
                tensor.data = tensor.data.clone() if here else tensor.data.to(self._device, non_blocking=True)
            _synchronize(moved)
            self._mapped.clear()
            return sum(tensor.nbytes for tensor in moved)

    def _is_mapped(self, tensor: Tensor) -> bool:
        return bool(tensor.numel()) and tensor.data_ptr() in self._mapped


@dataclass(frozen=True, slots=True, eq=False)
class _Away:
    """A storage without memory, and its numbers as bytes."""

    storage: torch.UntypedStorage
    numbers: Tensor


class MovableStorages(Movable):
    """Moves storages with all views of them. Within `with` the readable ones are on the device.

    Args:
        readable: returns tensors that other calls read while the memory is away: weights, and copies of them.
        others: returns the other tensors on the device.
    """

    def __init__(self, readable: Tensors, others: Tensors) -> None:
        super().__init__()
        self._readable, self._others = readable, others
        self._away: list[_Away] = []
        self._folder: Path | None = None
        self._is_away, self._depth = False, 0

    def __enter__(self) -> None:
        """Bring back what is read, if the memory is away."""
        super().__enter__()
        try:
            if self._is_away and not self._depth:
                wanted = {tensor.untyped_storage()._cdata for tensor in self._readable()}  # noqa: SLF001 its identity
                self._return([away for away in self._away if away.storage._cdata in wanted])  # noqa: SLF001
        except BaseException:
            self._lock.release()
            raise
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let it leave again."""
        try:
            self._depth -= 1
            if self._is_away and not self._depth:
                self._leave(self._readable(), self._folder)
        finally:
            super().__exit__(kind, error, trace)

    def release(self, folder: Path | None) -> int:
        """Copy the bytes of storages, and take their memory; see `Movable`."""
        with self._lock:
            self._is_away, self._folder = True, folder
            return self._leave([*self._readable(), *self._others()], folder)

    def _leave(self, tensors: Iterable[Tensor], folder: Path | None) -> int:
        found = {s._cdata: s for tensor in tensors if (s := tensor.untyped_storage()).nbytes()}  # noqa: SLF001
        moved = [s for s in found.values() if s.resizable() and (s.is_cuda or (folder is not None and not _pins(s)))]
        if not moved:
            return 0
        here = [_bytes_of(storage) for storage in moved]
        away = [_pinned(numbers) for numbers in here] if folder is None else _mapped(here, folder)
        _synchronize(here)
        size = sum(numbers.nbytes for numbers in here)
        del here
        for storage, numbers in zip(moved, away, strict=True):
            storage.resize_(0)
            self._away.append(_Away(storage, numbers))
        _give_back()
        return size

    def resume(self) -> int:
        """Give storages memory, and copy their bytes back; see `Movable`."""
        with self._lock:
            size = self._return(list(self._away))
            self._is_away = False
            return size

    def _return(self, chosen: Sequence[_Away]) -> int:
        for away in chosen:
            away.storage.resize_(away.numbers.nbytes)
            _bytes_of(away.storage).copy_(away.numbers, non_blocking=True)
        _synchronize(_bytes_of(away.storage) for away in chosen)
        self._away = [away for away in self._away if away not in chosen]
        return sum(away.numbers.nbytes for away in chosen)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return the bytes of a storage, which shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _pins(storage: torch.UntypedStorage) -> bool:
    return torch.cuda.is_available() and storage.is_pinned()


def _pinned(tensor: Tensor) -> Tensor:
    """Return a copy in pinned memory, which may not be complete before `_synchronize`."""
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _mapped(tensors: Sequence[Tensor], folder: Path) -> list[Tensor]:
    """Write tensors to a file without a name, and return tensors that are mapped from it.

    A page takes memory from when it is read. The file goes with the last tensor, or with the process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    places = list(_places(tensors))
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for tensor, (begin, _) in zip(tensors, places, strict=True):
            file.seek(begin)
            rest = memory_of(_dense(tensor).cpu())
            while rest:
                rest = rest[file.write(rest) :]
        file.truncate(places[-1][1])
        memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return [_view(memory, begin, tensor) for tensor, (begin, _) in zip(tensors, places, strict=True)]


def _places(tensors: Iterable[Tensor]) -> Iterator[tuple[int, int]]:
    end = 0
    for tensor in tensors:
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        end = begin + tensor.nbytes
        yield begin, end


def _dense(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor in the order of its memory, `[numel]`; its rows may lie in any order."""
    return tensor.permute(_order(tensor)).contiguous().flatten()


def _order(tensor: Tensor) -> list[int]:
    """Return the dimensions of a tensor, that with the largest stride first."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda d: (-strides[d], d))


def _view(memory: mmap.mmap, begin: int, like: Tensor) -> Tensor:
    """Return the tensor whose `_dense` begins at a place of a file, with the strides of the dense original."""
    flat = torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=begin)
    order = _order(like)
    back = [order.index(d) for d in range(like.dim())]
    return flat.view([like.shape[d] for d in order]).permute(back)


def _synchronize(tensors: Iterable[Tensor]) -> None:
    """Wait for copies between GPUs, on which some of the tensors are, and the host."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)


def _give_back() -> None:
    """Return free memory to the device and to the system."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # glibc
        libc.malloc_trim(0)


def _unique(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())
