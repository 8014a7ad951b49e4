"""Verified weights on their way into a server, kept until newer ones are served: a server that is started anew gets
them again.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from relax_actors.engines.sglang.group import Broadcast
from relax_actors.engines.sglang.server import Server, pickled
from relax_actors.errors import StoreError
from relax_actors.weights import files as weights


@dataclass(frozen=True, slots=True)
class Staged:
    """A version that a server can be given, and the name that it gets there."""

    version: int
    fingerprint: str

    @property
    def identity(self) -> str:
        """Tells these weights from all others."""
        return f"{self.version}:{self.fingerprint}"


class Loader(Protocol):
    """A way to give a server weights."""

    def stage(self, staged: Staged, tensors: Mapping[str, Tensor]) -> None:
        """Keep tensors for `load`, beside those kept before; the tensors are the caller's again."""

    def load(self, server: Server, staged: Staged) -> None:
        """Give them to a server.

        Raises:
            StoreError: what was kept is not what was staged.
        """

    def forget(self, staged: Staged) -> None:
        """Keep them no longer."""

    def close(self) -> None:
        """Keep nothing."""


class FromDisk:
    """A file for each version, in a folder that the server sees.

    Args:
        folder: for nobody else's use.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        shutil.rmtree(folder, ignore_errors=True)

    def _place(self, staged: Staged) -> Path:
        return self._folder / f"{staged.version}-{staged.fingerprint}"

    def stage(self, staged: Staged, tensors: Mapping[str, Tensor]) -> None:
        """Write them; see `Loader`."""
        place = self._place(staged)
        place.mkdir(parents=True, exist_ok=True)
        weights.save(tensors, place / "model.safetensors")

    def load(self, server: Server, staged: Staged) -> None:
        """Have the server read them, which may be long after they were written; see `Loader`."""
        place = self._place(staged)
        found = weights.fingerprint(weights.load([place / "model.safetensors"]).items())
        if found != staged.fingerprint:
            msg = f"{place} holds weights with fingerprint {found}, not those of version {staged.version}"
            raise StoreError(msg)
        server.load_files(place, staged.identity)

    def forget(self, staged: Staged) -> None:
        """Remove the file; see `Loader`."""
        shutil.rmtree(self._place(staged), ignore_errors=True)

    def close(self) -> None:
        """Remove the folder; see `Loader`."""
        shutil.rmtree(self._folder, ignore_errors=True)


class FromTensors:
    """In the request, pickled by us: for a server of our own, that nobody else can reach.

    Args:
        ranks: of the server.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._payloads: dict[Staged, str] = {}

    def stage(self, staged: Staged, tensors: Mapping[str, Tensor]) -> None:
        """Make the request; see `Loader`."""
        self._payloads[staged] = pickled(tensors)

    def load(self, server: Server, staged: Staged) -> None:
        """Send it; see `Loader`."""
        server.load_tensors(self._payloads[staged], self._ranks, staged.identity)

    def forget(self, staged: Staged) -> None:
        """Free it; see `Loader`."""
        self._payloads.pop(staged, None)

    def close(self) -> None:
        """Free all; see `Loader`."""
        self._payloads.clear()


class FromGroup:
    """By broadcast, to a server of our own on this machine.

    Args:
        ranks: of the server.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._kept: dict[Staged, dict[str, Tensor]] = {}
        self._group: Broadcast | None = None

    def stage(self, staged: Staged, tensors: Mapping[str, Tensor]) -> None:
        """Copy them; see `Loader`."""
        self._kept[staged] = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}

    def load(self, server: Server, staged: Staged) -> None:
        """Send them, with a new group to a new server; see `Loader`."""
        if self._group is None or self._group.life != server.record.life:
            self.close_group()
            self._group = Broadcast(server, self._ranks)
        self._group.send(server, self._kept[staged], staged.identity)

    def close_group(self) -> None:
        """Leave the server."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def forget(self, staged: Staged) -> None:
        """Free them; see `Loader`."""
        self._kept.pop(staged, None)

    def close(self) -> None:
        """Free all; see `Loader`."""
        self.close_group()
        self._kept.clear()
