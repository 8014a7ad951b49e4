"""Ways to load verified weights into a server.

Staged weights are kept until newer ones are served, because a restarted server needs them again.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from relax_actors.data.adapter import EXPERTS_DOWN, GATE_UP, of_experts
from relax_actors.engines.sglang.broadcast_group import BroadcastGroup
from relax_actors.engines.sglang.server import Server
from relax_actors.errors import StoreError
from relax_actors.weights import files as weights
from relax_actors.weights.node_sets import PATIENCE_SECONDS, NodeSet, NodeSets, check_file


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """A version that can be loaded into a server."""

    version: int
    fingerprint: str
    quantization: str = "none"
    """How the server quantises them; see `rollout.sglang.quantization`."""

    @property
    def identity(self) -> str:
        """Unique name of these weights on the server, which says how they are quantised."""
        name = f"{self.version}:{self.fingerprint}"
        return name if self.quantization == "none" else f"{name}:{self.quantization}"


class WeightLoader(Protocol):
    """A way to load weights into a server."""

    is_adapter: bool
    """Whether versions are adapters beside each other, which requests name, and not the weights of the server."""

    @property
    def base(self) -> str:
        """Name on the server of the weights that adapters are added to; empty if versions are full sets."""

    def serves(self, server: Server, staged: StagedWeights) -> bool:
        """Whether a server has staged weights."""

    sets: NodeSets | None
    """Where the copies are held that deltas are added to; None if the engine keeps one of its own."""

    def stage(self, staged: StagedWeights, tensors: Mapping[str, Tensor], held: NodeSet | None = None) -> None:
        """Keep tensors for `load`, in addition to those staged before.

        Args:
            staged: name of the tensors.
            tensors: by the names that SGLang expects; the caller may change them afterwards.
            held: the set that they are views of, and which does not change.
        """

    def load(self, server: Server, staged: StagedWeights) -> None:
        """Load staged weights into a server.

        Raises:
            StoreError: the kept tensors are not those that were staged.
        """

    def forget(self, staged: StagedWeights) -> None:
        """Release staged weights."""

    def close(self) -> None:
        """Release all staged weights."""


class FullSets:
    """Versions are full sets of weights, of which a server has one."""

    is_adapter, base = False, ""
    sets: NodeSets | None = None

    def serves(self, server: Server, staged: StagedWeights) -> bool:
        """Whether the weights of a server have the name of staged ones."""
        return server.identity() == staged.identity


class FileLoader(FullSets):
    """Has a server read the files of sets that the actors of a node share; see `WeightLoader`.

    A file lies in memory, which all ranks of the server map, or on the disk. The memory goes with the last process that
    maps it, however these end, and its seals keep the bytes as they were verified.

    Args:
        room: folder of the node's sets.
        in_memory: whether the sets that the actor makes lie in memory.
        patience: seconds to wait for another actor that makes a set.
    """

    def __init__(self, room: Path, *, in_memory: bool = False, patience: float = PATIENCE_SECONDS) -> None:
        self.sets = self._sets = NodeSets(room, in_memory=in_memory, patience=patience)
        self._staged: dict[StagedWeights, NodeSet] = {}

    def stage(self, staged: StagedWeights, tensors: Mapping[str, Tensor], held: NodeSet | None = None) -> None:
        """Hold the set that the tensors are views of, or one of their copies."""
        if held is None:
            held = self._sets.hold(staged.version, staged.fingerprint, partial(_source, tensors))
        self._staged[staged] = held

    def load(self, server: Server, staged: StagedWeights) -> None:
        """Have the server read the file; raises StoreError if one on the disk has changed."""
        # An error would keep a set that a variable refers to.
        folder = self._staged[staged].folder
        check_file(folder, staged.fingerprint)
        server.load_files(folder, staged.identity)

    def forget(self, staged: StagedWeights) -> None:
        """Release the set."""
        self._staged.pop(staged, None)

    def close(self) -> None:
        """Release all sets."""
        self._staged.clear()
        self._sets.close()


def _source(tensors: Mapping[str, Tensor]) -> tuple[dict[str, weights.TensorForm], Iterator[tuple[str, Tensor]]]:
    return {name: weights.TensorForm.of(tensor) for name, tensor in tensors.items()}, iter(tensors.items())


class ModelFolder(FullSets):
    """Has a server read the files of a model folder that does not change, without a copy of them; see `WeightLoader`.

    The names in the files must be those that SGLang expects; see `has_checkpoint_names`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._files = folder, sorted(folder.glob("*.safetensors"))

    def weights(self) -> StagedWeights:
        """Return the weights of the folder as version 0; raises StoreError if a file cannot be read."""
        return StagedWeights(0, weights.fingerprint_of_files(self._files))

    def stage(self, staged: StagedWeights, tensors: Mapping[str, Tensor], held: NodeSet | None = None) -> None:
        """Do nothing: the files are there."""

    def load(self, server: Server, staged: StagedWeights) -> None:
        """Have the server read the files; raises StoreError if they have changed."""
        if (now := self.weights().fingerprint) != staged.fingerprint:
            msg = (
                f"{self._folder} holds weights with fingerprint {now}, and {staged.fingerprint} when the actor "
                "started; leave the files of a frozen model as they are"
            )
            raise StoreError(msg)
        server.load_files(self._folder, staged.identity)

    def forget(self, staged: StagedWeights) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class BroadcastLoader(FullSets):
    """Broadcasts tensors to a server that the run started on this machine; see `WeightLoader`."""

    def __init__(self, ranks: int, sets: NodeSets | None = None) -> None:
        self._ranks, self.sets = ranks, sets
        self._tensors: dict[StagedWeights, tuple[dict[str, Tensor], NodeSet | None]] = {}
        self._group: BroadcastGroup | None = None

    def stage(self, staged: StagedWeights, tensors: Mapping[str, Tensor], held: NodeSet | None = None) -> None:
        """Copy the tensors, unless they are views of a set."""
        is_held = held is not None
        copies = {n: t if is_held else t.detach().clone().contiguous() for n, t in tensors.items()}
        self._tensors[staged] = copies, held  # as long as the set is held, other actors find it

    def load(self, server: Server, staged: StagedWeights) -> None:
        """Broadcast the tensors; a new instance of the server gets a new group."""
        if self._group is None or self._group.instance != server.record.instance:
            self.close_group()
            self._group = BroadcastGroup(server, self._ranks)
        self._group.send(server, self._tensors[staged][0], staged.identity)

    def close_group(self) -> None:
        """Leave the group of the server."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def forget(self, staged: StagedWeights) -> None:
        """Release the copy."""
        self._tensors.pop(staged, None)

    def close(self) -> None:
        """Leave the group and release all copies."""
        self.close_group()
        self._tensors.clear()
        if self.sets is not None:
            self.sets.close()


def has_checkpoint_names(names: Collection[str]) -> bool:
    """Whether tensors have the names that SGLang expects already, so that it can read their files."""
    return not any(map(of_experts, names))


def to_checkpoint_names(
    tensors: Mapping[str, Tensor], prefixes: Sequence[tuple[str, str]] = (), parts: Sequence[tuple[str, str]] = ()
) -> dict[str, Tensor]:
    """Return weights by the names that SGLang expects, without copies.

    Args:
        tensors: by the names in transformers. Experts are one tensor per layer (`gate_up_proj` `[experts, 2 * width,
            hidden]`, `down_proj` `[experts, hidden, width]`), or have tensors of their own already. Experts with biases
            (gpt-oss) stay one tensor.
        prefixes: see `SglangSpec`.
        parts: see `presence.RENAMED`.
    """
    split = {
        name: part
        for whole, tensor in tensors.items()
        for name, part in ([(whole, tensor)] if f"{whole}_bias" in tensors else _split_experts(whole, tensor))
    }
    return {_renamed(name, prefixes, parts): part for name, part in split.items()}


def _renamed(name: str, prefixes: Sequence[tuple[str, str]], parts: Sequence[tuple[str, str]]) -> str:
    for before, after in parts:
        name = name.replace(before, after)
    for before, after in prefixes:
        if name.startswith(before):
            return after + name.removeprefix(before)
    return name


def _split_experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Split the experts of a layer, which transformers 5 holds as one tensor.

    SGLang ignores that name with only a line in its log; in a checkpoint each expert has tensors of its own.
    """
    for ending, parts in ((GATE_UP, ("gate", "up")), (EXPERTS_DOWN, ("down",))):
        if name.endswith(ending):
            prefix = name[: name.rindex(".") + 1]
            for number, expert in enumerate(tensor):
                for part, piece in zip(parts, expert.chunk(len(parts)), strict=True):
                    yield f"{prefix}{number}.{part}_proj.weight", piece
            return
    yield name, tensor


def pickled_by_name(tensors: Mapping[str, Tensor]) -> str:
    """Return the tensors of an adapter in SGLang's request format: base64 of a pickled dict.

    Tensors are copied first: pickle would store a view with the whole buffer that it refers to.
    """
    file = io.BytesIO()
    pickle.dump({n: t.detach().clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}, file)
    return base64.b64encode(file.getvalue()).decode()
