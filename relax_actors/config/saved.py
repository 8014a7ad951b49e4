"""Settings of a run as its folder holds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from relax_actors.errors import ConfigError

FILE = "config.json"
"""File in the folder of a run that holds its settings."""


def holds_run(path: Path) -> bool:
    """Whether a path is the folder of a run."""
    return (path / FILE).is_file()


def saved_tree(folder: Path) -> dict[str, Any]:
    """Return the settings in the folder of a run; `run.rows` is left out where it follows from the data.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no settings.
    """
    tree = json.loads((folder / FILE).read_text()).get("config")
    if not isinstance(tree, dict) or not isinstance(run := tree.get("run"), dict):
        msg = f"{folder / FILE} holds no settings of a run"
        raise ValueError(msg)  # noqa: TRY004 reported like a file that is no TOML
    if run.get("epochs") is not None:
        run["rows"] = None
    return tree


def import_path_of(path: Path) -> str:
    """Return the folder in which dotted paths are imported: that of a TOML file, or what a run has saved."""
    if not holds_run(path):
        return str(path.resolve().parent)
    return str(json.loads((path / FILE).read_text()).get("import_path", ""))


class SavedSettings:
    """Settings that were validated when they were saved; read by the same names as those of `Config`.

    Building the models of `Config` takes half a second, which commands that only read a run need not spend.
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
        """The folder of the store; see `Config.store_path`."""
        return Path(self.store.path or Path(self.run.folder or Path("runs", self.run.name), "store"))
