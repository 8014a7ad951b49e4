"""Verified sets of weights that the actors of a node share: one copy of a version, in memory or in a file.

Each process has a folder of its own in the room of its node, and a folder in it for each set that it holds, with a link
to memory without a name (memfd) or a hard link to a file. A process looks for a set in the folders of all others. The
first one that needs a set makes it, and the others wait. A set lasts as long as any process holds it.

Invariant: only complete sets whose bytes have their fingerprint are visible, and a process that holds a set has
verified the bytes that it has mapped. Any other process of the node removes what a killed one leaves.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import stat
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

import structlog
import xxhash
from torch import Tensor

from broker.files import open_lock, try_lock
from relax_actors.errors import ActorError, StoreError
from relax_actors.runtime import Context
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.weights import files as weights

FILE = "model.safetensors"
MEMORY = "relax-weights-"
"""Beginning of the names of memory with weights, which `/proc/<pid>/fd` and `/proc/<pid>/maps` show."""
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
POLL_SECONDS, PATIENCE_SECONDS = 0.01, 600.0
log = structlog.get_logger()

Named: TypeAlias = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
Source: TypeAlias = Callable[[], tuple[Mapping[str, weights.TensorForm], Iterator[tuple[str, Tensor]]]]
"""Returns the forms of the tensors of a set, and the tensors one after the other."""


class OtherNamesError(StoreError):
    """A set whose file has the names of another engine."""


class NodeSet(Mapping[str, Tensor]):
    """Set that this process holds until the last reference to it is gone; its tensors cannot be written.

    Attributes:
        fingerprint: of the tensors.
        folder: folder of this process with the file, for a server to read.
    """

    def __init__(self, fingerprint: str, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        self.fingerprint, self.folder, self._tensors = fingerprint, folder, tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class NodeSets:
    """Sets of a node, of which this process makes, joins and holds those that it needs.

    Args:
        room: folder that the processes of the node share, and no other machine or container.
        in_memory: whether sets that it makes are in memory; otherwise in files of the room.
        patience: seconds to wait for a process that makes a set.
    """

    def __init__(self, room: Path, *, in_memory: bool = True, patience: float = PATIENCE_SECONDS) -> None:
        self._room, self._in_memory, self._patience = room, in_memory, patience
        self._changing = threading.Lock()
        self._held: weakref.WeakValueDictionary[str, NodeSet] = weakref.WeakValueDictionary()
        self._releases: list[weakref.finalize[..., NodeSet]] = []
        self._count, self._is_closed = 0, False
        room.mkdir(parents=True, exist_ok=True)
        self._sweep()
        self._lock, self._folder = _own_folder(room)

    def hold(self, version: int, fingerprint: str, source: Source, named: Named | None = None) -> NodeSet:
        """Return a set that the node has, or make it of the tensors of `source`.

        `named` returns what the header of the file has in place of tensors, see `TensorFile`; without it any will do.

        Raises:
            StoreError: the tensors do not have the fingerprint.
            ActorError: another process makes it for longer than `patience`.
            OSError: there is no room for it.
        """
        name, refused = f"{version}-{fingerprint}", set[tuple[int, int]]()
        while True:
            with self._changing:
                if (held := self._held.get(name)) is not None:
                    return held
            if (found := self._find(name, refused)) is None:
                with self._turn(version):
                    if (found := self._find(name, refused)) is None:
                        return self._make(name, fingerprint, source, named)
            refused.add(_identity(found))
            if (joined := self._join(found, name, fingerprint, named)) is not None:
                return joined

    def close(self) -> None:
        """Release all sets."""
        with self._changing:
            if self._is_closed:
                return
            self._is_closed = True
        for release in self._releases:
            release()
        os.close(self._lock)
        self._sweep()

    def _find(self, name: str, refused: Collection[tuple[int, int]]) -> int | None:
        """Return a descriptor of a complete set of any process; `refused` are identities of files."""
        for path in sorted(self._room.glob(f"*/{name}.*/{FILE}")):
            try:
                # The number in /proc may be that of another file by now, even of a terminal.
                if not stat.S_ISREG(path.stat().st_mode):
                    continue
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
            except OSError:
                continue
            if _identity(descriptor) not in refused and (not path.is_symlink() or _is_sealed(descriptor)):
                return descriptor
            os.close(descriptor)
        return None

    def _make(self, name: str, fingerprint: str, source: Source, named: Named | None) -> NodeSet:
        path = self._folder / f"{name}.part"
        if self._in_memory:
            descriptor = os.memfd_create(f"{MEMORY}{_version(name)}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        else:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            forms, tensors = source()
            with weights.TensorFile(descriptor, forms, named=named) as file:
                for tensor in tensors:
                    file.write(*tensor)
            if self._in_memory:
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
            return self._kept(descriptor, name, fingerprint, named, own=path)
        except BaseException:
            os.close(descriptor)
            raise
        finally:
            path.unlink(missing_ok=True)

    def _join(self, descriptor: int, name: str, fingerprint: str, named: Named | None) -> NodeSet | None:
        """Hold a set that another process has made; None if it is gone, or is not what its name says."""
        try:
            return self._kept(descriptor, name, fingerprint, named)
        except (FileNotFoundError, OtherNamesError):  # released meanwhile, or of no use here
            os.close(descriptor)
            return None
        except (StoreError, OSError) as error:
            os.close(descriptor)
            log.warning("shared_weights_refused", name=name, error=str(error))
            return None
        except BaseException:
            os.close(descriptor)
            raise

    def _kept(
        self, descriptor: int, name: str, fingerprint: str, named: Named | None, own: Path | None = None
    ) -> NodeSet:
        """Map a complete set, verify it, and link to it in the folder of this process, so that others find it.

        The file `own`, which this process has written, is moved there, because some file systems have no links.

        Raises:
            OtherNamesError: it has the names of another engine.
            StoreError: it has another fingerprint.
            OSError: the file has been removed, or cannot be linked to.
        """
        opened, in_memory = Path(f"/proc/self/fd/{descriptor}"), _is_sealed(descriptor)
        tensors, names = weights.mapped(opened)
        if named is not None and names != set(named(tensors)):
            msg = "its names are those of another engine"
            raise OtherNamesError(msg)
        weights.check(tensors, _version(name), fingerprint)
        with self._changing:
            if self._is_closed:
                msg = f"weights {_version(name)} are not kept: the actor stops"
                raise ActorError(msg)
            self._count += 1  # another thread may still remove the folder of an earlier hold
            for left in self._folder.glob("*.*/"):  # NFS keeps the folder of a file that is still mapped
                with suppress(OSError):
                    left.rmdir()
            folder = self._folder / f"{name}.{self._count}"
            folder.mkdir()
            if in_memory:
                (folder / FILE).symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
            elif own is not None:
                own.rename(folder / FILE)
            else:
                _link(opened, folder / FILE)
            held = NodeSet(fingerprint, folder, tensors)
            release = weakref.finalize(held, _release, folder, descriptor)
            self._releases = [*(one for one in self._releases if one.alive), release]
            self._held[name] = held
            return held

    @contextmanager
    def _turn(self, version: int) -> Iterator[None]:
        """Make a set in the block, alone on the node.

        Raises:
            ActorError: another process makes one for longer than `patience`.
        """
        self._sweep()
        end, lock = time.monotonic() + self._patience, open_lock(self._room / "making")
        try:
            while not try_lock(lock):
                if time.monotonic() > end:
                    maker = os.pread(lock, 200, 0).decode(errors="replace").strip()
                    msg = (
                        f"weights {version} wait for {maker}, for longer than {self._patience:g} s; look at the log of "
                        "that process, or raise trainer.deadline"
                    )
                    raise ActorError(msg)
                time.sleep(POLL_SECONDS)
            maker = f"process {os.getpid()}, which prepares weights {version} for this node"
            os.pwrite(lock, maker.encode().ljust(200), 0)
            yield
        finally:
            os.close(lock)

    def _sweep(self) -> None:
        """Remove the folders of processes that have ended."""
        for path in self._room.glob("*.lock"):
            with suppress(OSError):
                lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    if try_lock(lock):
                        shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                        path.unlink()
                finally:
                    os.close(lock)


def check_file(folder: Path, fingerprint: str) -> None:
    """Verify the file in the folder of a set, which may have been written long before; memory is sealed.

    Raises:
        StoreError: it holds other weights, or none.
    """
    file = folder / FILE
    if not file.is_symlink() and (digest := weights.fingerprint(weights.mapped(file)[0])) != fingerprint:
        msg = f"{file} holds weights with fingerprint {digest}, not those of version {_version(folder.name)}"
        raise StoreError(msg)


def node_sets(context: Context) -> NodeSets:
    """Return the sets, in memory, that an actor shares with others of its node."""
    return NodeSets(RunFolder(context.node_folder).weights, patience=context.config.trainer.deadline)


def files_of_node(context: Context) -> Path:
    """Return the folder in the run's folder for files that the actors of this node share: a node's own may be small."""
    digest = xxhash.xxh3_64_hexdigest(str(context.node_folder).encode())
    return context.folder.weights / f"{platform.node()}-{digest}"


def _own_folder(room: Path) -> tuple[int, Path]:
    """Create a folder of this process, and a lock beside it that says that the process lives."""
    while True:
        lock, path = tempfile.mkstemp(".lock", f"{os.getpid()}-", room)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            break
        os.close(lock)  # taken for that of a dead process before it was locked
    folder = Path(path).with_suffix("")
    folder.mkdir()
    return lock, folder


def _link(opened: Path, target: Path) -> None:
    """Link to the file of an open descriptor; OSError if it has no link any more."""
    directory = os.open(opened.parent, os.O_PATH | os.O_CLOEXEC)
    try:
        # With a folder Python calls linkat, which follows the link in /proc; without, link, which does not.
        os.link(opened.name, target, src_dir_fd=directory, follow_symlinks=True)
    finally:
        os.close(directory)


def _release(folder: Path, descriptor: int) -> None:
    os.close(descriptor)
    shutil.rmtree(folder, ignore_errors=True)


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _is_sealed(descriptor: int) -> bool:
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:  # no memory without a name
        return False


def _version(name: str) -> str:
    return name.partition("-")[0]
