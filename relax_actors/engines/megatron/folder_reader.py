"""Weights of a model folder by the names of transformers' modules, each read on access."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import safetensors
from torch import Tensor

from relax_actors.engines.megatron.families import TEXT_FAMILIES
from relax_actors.media.families import FAMILIES

OLD_PREFIXES = tuple(pair for spec in FAMILIES.values() for pair in spec.stored_prefixes)
"""Prefixes of modules in transformers, each with the older prefix that some checkpoints have in its place."""
STORED_NAMES = tuple(family.stored_names for family in TEXT_FAMILIES.values() if family.stored_names)
"""Of each family whose files have other names than transformers, parts of names with those in files."""
THINKER = "thinker."
"""Prefix in the files of an omni model that also speaks."""


class SafetensorsReader(Mapping[str, Tensor]):
    """Tensors of safetensors files, each read on access.

    A tensor that the files hold under an older prefix, or in an omni model that also speaks, is found as well.
    """

    def __init__(self, paths: list[Path]) -> None:
        files = [safetensors.safe_open(path, framework="pt") for path in paths]
        self._file_of = {name: file for file in files for name in file.keys()}  # type: ignore[no-untyped-call]  # noqa: SIM118

    def _stored(self, name: str) -> str | None:
        """Name of a tensor in the files; None if they lack it."""
        prefixed = (old + name.removeprefix(new) for new, old in OLD_PREFIXES if name.startswith(new))
        renamed = (_renamed(name, parts) for parts in STORED_NAMES)
        return next((given for given in (name, THINKER + name, *prefixed, *renamed) if given in self._file_of), None)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._stored(name) is not None

    def __getitem__(self, name: str) -> Tensor:
        stored = self._stored(name)
        if stored is None:
            raise KeyError(name)
        tensor: Tensor = self._file_of[stored].get_tensor(stored)  # type: ignore[no-untyped-call]
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def stored_weights(folder: Path) -> SafetensorsReader:
    """Weights of a model folder."""
    return SafetensorsReader(sorted(folder.glob("*.safetensors")))


def _renamed(name: str, parts: Iterable[tuple[str, str]]) -> str:
    for new, old in parts:
        name = name.replace(new, old)
    return name
