"""Settings of a run as its folder holds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relax_actors.errors import ConfigError


class SavedSettings:
    """Settings that were validated when they were saved; read by the same names as those of `Config`.

    Building the models of `Config` takes half a second, which commands that only read a run need not spend.

    Args:
        tree: the saved settings, with all defaults.
        section: dotted name of the section that they belong to; empty for all.
    """

    def __init__(self, tree: dict[str, Any], section: str = "") -> None:
        self._tree, self._section = tree, section

    def __getattr__(self, name: str) -> Any:
        if name not in self._tree:
            msg = f"the saved configuration has no {self._section}{name}; restore config.json of the run's folder"
            raise ConfigError(msg)
        value = self._tree[name]
        return SavedSettings(value, f"{self._section}{name}.") if isinstance(value, dict) else value

    @property
    def store_path(self) -> Path:
        """As `Config.store_path`."""
        return Path(self.store.path or Path(self.run.folder or Path("runs", self.run.name), "store"))
