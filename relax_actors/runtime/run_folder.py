"""Folder of a run or of a node: all paths below it in one place."""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from broker.files import make_private_folder, open_lock, remove_unfinished, write_private
from broker.schema import SCHEMA
from relax_actors.config.saved import SavedSettings
from relax_actors.errors import ConfigError, UnsafePathError

if TYPE_CHECKING:
    from relax_actors.config import Config


class RunFolder:
    """Paths of a run, created on demand; only the run's user may enter the top folder."""

    def __init__(self, root: Path) -> None:
        # A link in place of the folder stays a link, so that `lock` can refuse it.
        path = Path(os.path.abspath(root))  # noqa: PTH100 `..` must not be the last part
        self.root = path.parent.resolve() / path.name

    @property
    def address(self) -> Path:
        """Address and credentials of the broker; readable by this user only."""
        return self.root / "broker.json"

    @property
    def broker(self) -> Path:
        """Folder of the embedded server."""
        return self.root / "broker"

    @property
    def config(self) -> Path:
        """Resolved configuration of the run."""
        return self.root / "config.json"

    @property
    def discarded(self) -> Path:
        """Configuration of a run that is being removed, see `supervision/discard.py`."""
        return self.root / "discarded.json"

    @property
    def node(self) -> Path:
        """Assignment of the node that works in this folder."""
        return self.root / "node.json"

    @property
    def report(self) -> Path:
        """Report of the supervisor that gave up last."""
        return self.root / "report.json"

    @property
    def summary(self) -> Path:
        """Summary of a run that reached its last step."""
        return self.root / "summary.json"

    @property
    def reward_plot(self) -> Path:
        """Plot of the reward by step."""
        return self.root / "reward.png"

    @property
    def model(self) -> Path:
        """Trained model, written at the end of the run."""
        return self.root / "model"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.root / "checkpoints"

    @property
    def critic_checkpoints(self) -> Path:
        """Folder of the checkpoints of the critic."""
        return self.root / "critic-checkpoints"

    @property
    def critic(self) -> Path:
        """Trained critic, written at the end of the run."""
        return self.root / "critic"

    @property
    def reference(self) -> Path:
        """Copy of weights version 0, for actors that compute reference log-probs."""
        return self.root / "reference"

    @property
    def references(self) -> Path:
        """Folder with copies of later versions that score as a reference, by version."""
        return self.root / "references"

    @property
    def evaluations(self) -> Path:
        """Folder with the answers to held-out prompts, one file for each evaluated version."""
        return self.root / "evaluations"

    @property
    def record(self) -> Path:
        """Folder of the rows that are kept for people; see `relax_actors.record`."""
        return self.root / "record"

    @property
    def profiles(self) -> Path:
        """Folder of the traces that `relax profile` has actors write."""
        return self.root / "profiles"

    def evaluation(self, version: int) -> Path:
        """File with the answers of a version to held-out prompts."""
        return self.evaluations / f"{version}.jsonl"

    @property
    def notified(self) -> Path:
        """Folder with the record of sent notifications."""
        return self.root / "notified"

    @property
    def contents(self) -> list[Path]:
        """Everything that a run leaves in its folder, besides the lock and the configuration."""
        files = [self.address, self.node, self.engines, self.report, self.summary, self.reward_plot]
        names = ("actors", "devices", "logs", "model-config", "notified", "sandboxes", "servers", "simulated", "store")
        models = [
            self.weights,
            self.checkpoints,
            self.reference,
            self.references,
            self.model,
            self.critic_checkpoints,
            self.critic,
        ]
        kept = [self.broker, self.evaluations, self.record, self.profiles]
        return [*files, *kept, *models, *(self.root / n for n in names)]

    @property
    def last_checkpoint(self) -> int | None:
        """Version of the newest checkpoint; None if there is none."""
        names = [path.name for path in self.checkpoints.iterdir()] if self.checkpoints.is_dir() else []
        versions = [int(name.partition(".")[0]) for name in names if name[0].isdigit()]
        return max(versions, default=None)

    def device_lock(self, device: str) -> Path:
        """Lock file of a device that several roles share, by its name."""
        return self.root / "devices" / f"{device}.lock"

    def server(self, number: int) -> Path:
        """Private record of an actor's inference server; the folder beside it holds weights for one elsewhere."""
        return self.root / "servers" / f"{number}.json"

    @property
    def weights(self) -> Path:
        """Folder of the weights that actors of a node share; see `relax_actors.weights.node_sets`."""
        return self.root / "weights"

    @property
    def engines(self) -> Path:
        """Private addresses and keys of external engines that joined the live run."""
        return self.root / "engines.json"

    def black_box(self, child: str) -> Path:
        """Black box of an actor, by its id."""
        return self.root / "actors" / f"{child}.box"

    def log(self, child: str) -> Path:
        """Log file of a process, by its id."""
        return self.root / "logs" / f"{child}.log"

    def lock(self) -> IO[str]:
        """Lock the folder for this process, until the returned file is closed or the process ends.

        Raises:
            ConfigError: another process holds the lock, or the folder cannot be written or is not safe.
        """
        try:
            make_private_folder(self.root)
            file = os.fdopen(open_lock(self.root / "lock"), "r+")
        except UnsafePathError as error:
            msg = f"run folder cannot be used: {error}"
            raise ConfigError(msg) from error
        except OSError as error:
            msg = (
                f"run folder {self.root} cannot be written by user {os.getuid()}: {error}; give that user the folder, "
                "or set another run.name or run.folder"
            )
            raise ConfigError(msg) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            with file:
                pid = file.read().strip() or "unknown"
            msg = f"run folder {self.root} is in use by process {pid}; stop that run, or set run.name or run.folder"
            raise ConfigError(msg) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        for folder in (self.root, self.root / "broker"):
            remove_unfinished(folder)
        return file

    def touch_lock(self) -> None:
        """Touch the lock file: a sign of life for observers outside."""
        with suppress(OSError):
            os.utime(self.root / "lock")

    def save_config(self, config: Config, import_path: str) -> None:
        """Save the resolved configuration, privately: it may hold the broker's password."""
        body = {"schema": SCHEMA, "import_path": import_path, "config": config.model_dump(mode="json")}
        write_private(self.config, json.dumps(body, indent=1))

    def config_fingerprint(self) -> tuple[int, ...]:
        """Return a value that changes with the saved configuration or the node's assignment."""
        states = [path.stat() for path in (self.config, self.node) if path.exists()]
        return tuple(number for stat in states for number in (stat.st_mtime_ns, stat.st_ino))

    def replace_config(self, config: Config) -> None:
        """Replace the saved configuration; the import path stays."""
        body = self.saved_config() or {}
        self.save_config(config, body.get("import_path", ""))

    def load_config(self) -> Config:
        """Load the saved configuration, with importable dotted paths; raises ConfigError."""
        from relax_actors.config import make_importable, validate  # noqa: PLC0415 imports pydantic

        body = self._body()
        make_importable(Path(body["import_path"]))
        return validate(body["config"], str(self.config))

    def load_settings(self) -> SavedSettings:
        """Load the saved settings without validating them again; raises ConfigError."""
        return SavedSettings(self._body()["config"])

    def _body(self) -> dict[str, Any]:
        body = self.saved_config()
        if body is None:
            msg = f"{self.root} holds no run: there is no {self.config.name}"
            raise ConfigError(msg)
        return body

    @property
    def import_path(self) -> str:
        """Folder in which the run's dotted paths are imported."""
        return str((self.saved_config() or {}).get("import_path", ""))

    def saved_config(self) -> dict[str, Any] | None:
        """Content of the saved configuration file; None if there is none.

        Raises:
            ConfigError: another version of relax-actors wrote the run, or the file cannot be read.
        """
        if not self.config.exists():
            return None
        try:
            body: dict[str, Any] = json.loads(self.config.read_text())
        except OSError as error:
            msg = f"{self.config} cannot be read by user {os.getuid()}: {error}; use the user who started the run"
            raise ConfigError(msg) from error
        except ValueError as error:
            msg = f"{self.config} cannot be read: {error}; restore it, or set another run.name"
            raise ConfigError(msg) from error
        if (schema := body.get("schema", 1)) != SCHEMA:
            msg = (
                f"run folder {self.root} was written with cell schema {schema}; this version reads schema {SCHEMA}. "
                "Finish that run with the version that began it, or set another run.name"
            )
            raise ConfigError(msg)
        return body
