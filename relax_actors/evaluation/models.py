"""Models to evaluate: folders, and the models of runs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import xxhash

from relax_actors.data.model_folder import measure
from relax_actors.errors import ConfigError

INITIAL = "initial"
"""Name of the model with which a run starts."""
SUFFIXES = (".safetensors", ".json", ".jinja")
"""Files of a model folder that answers depend on."""
CHUNK = 1 << 24


def model_folder(given: str) -> Path:
    """Return the folder of a model: a model folder, or that of a run by its name or folder.

    Raises:
        ConfigError: it is neither, the run has no model yet, or the folder holds no weights.
    """
    for path in (Path(given), Path("runs") / given):
        if _is_run(path):
            _require_finished(path, given)
            return (path / "model").resolve()
    path = Path(given)
    if not path.is_dir():
        msg = f"MODEL = {given!r} is no folder, and runs/{given} holds no run; give a model folder or a finished run"
        raise ConfigError(msg)
    measure(path, setting="MODEL")
    if not any(path.glob("*.safetensors")):
        msg = f"MODEL {path} holds no weights: it has no *.safetensors; give a folder with weights"
        raise ConfigError(msg)
    return path.resolve()


def _require_finished(path: Path, given: str) -> None:
    """Check that a run's model is that of its last step."""
    if not (path / "model" / "config.json").exists():
        msg = f"run {given} has no model yet: it is written after the last step; finish the run with `relax up`"
        raise ConfigError(msg)
    steps = json.loads((path / "config.json").read_text())["config"]["run"]["steps"]
    done = None
    with suppress(OSError, ValueError, LookupError, TypeError):
        done = json.loads((path / "summary.json").read_text())["steps"]
    if done is None or done < steps:
        of = "an unknown step" if done is None else f"step {done}"
        msg = (
            f"run {given} has steps left, and its model is that of {of}, not of step {steps}; finish the run with "
            f"`relax up`, or give the folder {path / 'model'} to evaluate that model"
        )
        raise ConfigError(msg)


def _is_run(path: Path) -> bool:
    """Whether a folder holds a run; the config.json of a model folder is another one."""
    with suppress(OSError, ValueError):
        body = json.loads((path / "config.json").read_text())
        return isinstance(body, dict) and {"import_path", "config"} <= body.keys()
    return False


def digest_of_files(model: Path | None, files: Iterable[Path]) -> str:
    """Return a digest of the files of a model folder, if there is one, and of other files.

    A file that cannot be read counts as empty: the check of the data says why.
    """
    digest = xxhash.xxh3_128()
    below = model.iterdir() if model is not None and model.is_dir() else ()
    for path in [*sorted(path for path in below if path.suffix in SUFFIXES), *files]:
        digest.update(path.name.encode())
        with suppress(OSError), path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    return digest.hexdigest()
