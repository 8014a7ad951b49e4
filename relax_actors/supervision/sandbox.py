"""Sandbox of an actor: what a process of bubblewrap sees of this machine.

No network but a loopback interface of its own, no files but those of the list below, all read-only except the actor's
black box and an empty /tmp, no other processes, no capabilities.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from broker.address import CREDENTIALS_FILE, Address
from broker.files import make_private_folder
from relax_actors.config import Config
from relax_actors.config.masking import masked
from relax_actors.config.pools import RoleSection
from relax_actors.data.files import folder_of
from relax_actors.errors import ConfigError
from relax_actors.isolation import bubblewrap, control_group
from relax_actors.roles import section_of
from relax_actors.runtime.run_folder import RunFolder

SANDBOX = "sandbox"
KEEPER_MODULE = "relax_actors.supervision.sandbox_keeper"
PORT = 4222
"""Port of the loopback interface in a sandbox at which the broker answers."""
TMP, TMP_MIB = "/tmp", 256  # noqa: S108 the sandbox's own
SHARED_MEMORY, SHARED_MEMORY_MIB = "/dev/shm", 64  # noqa: S108
"""For semaphores and arrays that processes of the sandbox share."""
COVER_BYTES = 1 << 20
KEY_LEVELS = 5
"""Levels of folders below the code that are searched for credentials, as RUNS/RUN/broker/keys/USER of another run."""
SIGNING_KEYS = ("keys.json", "private")
"""Name of the file that signs the credentials of all users, and of its folder."""
BESIDE_CREDENTIALS = ("ca.pem", "cert.pem", "key.pem")


def is_sandboxed(config: Config, role: str) -> bool:
    """Whether the actors of a role run in a sandbox."""
    return getattr(section_of(config, role), "isolation", "none") == SANDBOX


def max_processes(config: Config, role: str) -> int | None:
    """Limit of processes and threads in the sandbox of an actor of a role; None for no limit."""
    limit: int | None = getattr(section_of(config, role), "max_processes", None)
    return limit


def check_sandbox(config: Config, roles: Iterable[str]) -> None:
    """Check that this machine can run the roles that need a sandbox, with its limits; raises ConfigError."""
    for role in roles:
        if not is_sandboxed(config, role):
            continue
        key = f"roles.{role}" if role in config.roles else role
        problem = bubblewrap.problem()
        if config.simulate is not None:
            problem = "simulated actors share files of the run folder"
        elif (
            max_processes(config, role) is not None and os.geteuid() == 0 and (unbound := control_group.problem("pids"))
        ):
            msg = f"{key}.max_processes does not bind root here: {unbound}; run as another user, or leave it out"
            raise ConfigError(msg)
        if problem:
            msg = f'{key}.isolation = "sandbox": {problem}; or set {key}.isolation = "none" if you trust its code'
            raise ConfigError(msg)


@dataclass(frozen=True)
class SandboxFiles:
    """The files of one actor that its sandbox shows.

    Attributes:
        folder: folder of the actor's node.
        role: the actor's role.
        n: its number.
    """

    folder: RunFolder
    role: str
    n: int

    @property
    def view(self) -> Path:
        """Folder that stands for the run folder in the sandbox."""
        return self.folder.root / "sandboxes" / f"{self.role}.{self.n}"

    @property
    def address(self) -> Address:
        """Address with which the actor signs in outside."""
        return Address.load(self.folder.address).for_user(self.role)

    def prepare(self) -> list[str]:
        """Write the view, and return the arguments of bwrap that show files; later ones cover earlier ones.

        Raises:
            ConfigError: the home directory would be shown, or other runs or credentials through a link.
        """
        if self.view.exists():
            shutil.rmtree(self.view)
        make_private_folder(self.view)
        config, view = self.folder.load_config(), RunFolder(self.view)
        view.save_config(self._without_secrets(config), self.folder.import_path)
        self.address.inside(PORT).save(view.address)
        arguments = [*bubblewrap.system_files(), "--proc", "/proc", "--dev", "/dev"]
        arguments += bubblewrap.empty_folder(SHARED_MEMORY, SHARED_MEMORY_MIB << 20)
        arguments += bubblewrap.empty_folder(TMP, TMP_MIB << 20)
        shown = self._code(config)
        for path in shown:
            arguments += ["--ro-bind-try", str(path), str(path)]
        covered = self._covered(config, shown)
        for path in covered:
            arguments += bubblewrap.empty_folder(str(path), COVER_BYTES)
        arguments += ["--ro-bind", str(self.view), str(self.folder.root)]
        arguments += self._show(self.folder.black_box(f"{self.role}.{self.n}"), "--bind")
        for path in (config.store_path, config.model_path, *self._credentials()):
            if path.exists():
                arguments += self._show(path.absolute())
        # Folders that bwrap made for mount points are on the first file system and on those that cover.
        return [*arguments, *(part for path in ("/", "/dev", *map(str, covered)) for part in ("--remount-ro", path))]

    def _show(self, path: Path, how: str = "--ro-bind") -> list[str]:
        """Arguments that show a file or a folder; creates its mount point if it is below the run folder."""
        if path.is_relative_to(self.folder.root):
            point = self.view / path.relative_to(self.folder.root)
            (point if path.is_dir() else point.parent).mkdir(parents=True, exist_ok=True)
            if not path.is_dir():
                point.touch()
        return [how, str(path), str(path)]

    def _without_secrets(self, config: Config) -> Config:
        """Return the settings without the broker's address and the secrets of other roles."""
        hidden = {"url": None, "credentials": None, "ca": None, "published": None}
        roles = {
            name: section if name == self.role else RoleSection(**masked(section.model_dump()))
            for name, section in config.roles.items()
        }
        return config.model_copy(update={"broker": config.broker.model_copy(update=hidden), "roles": roles})

    def _code(self, config: Config) -> list[Path]:
        """Folders with code, and those that the settings name."""
        readable = getattr(section_of(config, self.role), "readable", None) or ()
        code = [Path(self.folder.import_path), *_python_folders()]
        shown = list(dict.fromkeys([*code, *readable, *_media_folders(config)]))
        home = Path.home().resolve()
        for path in shown:
            if home.is_relative_to(path.resolve()):
                msg = (
                    f"the sandbox of {self.role} would show {path}, and with it the home directory {home}; move the "
                    "configuration and its modules to a folder of their own"
                )
                raise ConfigError(msg)
            if hidden := self._behind_link(config, path):
                msg = (
                    f"the sandbox of {self.role} would show {path}, which leads through a link to {path.resolve()}, "
                    f"and cannot hide {hidden} there; name {path.resolve()} itself"
                )
                raise ConfigError(msg)
        return shown

    def _behind_link(self, config: Config, path: Path) -> Path | None:
        """Return a folder that must not be seen below a path that leads through a link, where bwrap covers nothing."""
        real = path.resolve()
        if real == path or not real.is_dir():
            return None
        secret = (folder for folder in self._secret(config) if folder.resolve().is_relative_to(real))
        return next(secret, None) or next(_key_folders(real, ()), None)

    def _secret(self, config: Config) -> list[Path]:
        """Folders of other runs, and of credentials of other roles."""
        secret = [config.folder.absolute().parent, self.folder.root.parent]
        if self.address.credentials:
            own = Path(self.address.credentials).parent
            secret += [own.parent, own]
        return secret

    def _covered(self, config: Config, shown: list[Path]) -> list[Path]:
        """Folders below the code that must not be seen: other runs, and credentials of other roles."""
        secret = self._secret(config)
        secret += [path for code in shown if code == code.resolve() for path in _key_folders(code, tuple(secret))]
        return [
            path for path in dict.fromkeys(secret) if any(path != code and path.is_relative_to(code) for code in shown)
        ]

    def _credentials(self) -> list[Path]:
        """This role's own credentials; the folder where it is the role's, so that renewed ones are seen."""
        address = self.address
        files = [Path(path) for path in (address.credentials, address.ca) if path]
        if address.credentials:
            own = Path(address.credentials).parent
            if own.name == self.role:
                return [own, *(path for path in files if path.parent != own)]
            files += [own / name for name in BESIDE_CREDENTIALS]
        return files


def _key_folders(top: Path, known: Collection[Path]) -> Iterator[Path]:
    """Find the folders with credentials or signing keys below a folder, outside known ones; links are not followed."""
    level, skipped = [str(top)], {str(path) for path in known}
    for _ in range(KEY_LEVELS + 1):
        below: list[str] = []
        for folder in level:
            with suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        below += [] if entry.path in skipped else [entry.path]
                    elif entry.name == CREDENTIALS_FILE or (entry.name, Path(folder).name) == SIGNING_KEYS:
                        yield Path(folder)
        level = below


@contextmanager
def command(files: SandboxFiles, info: int, inner: list[str]) -> Iterator[tuple[list[str], int]]:
    """Yield the command line of bwrap that runs a command in a sandbox, and the descriptor that it must inherit, too.

    Args:
        files: what the sandbox shows.
        info: descriptor for the id of the sandboxed process.
        inner: the command.
    """
    places = ["--chdir", TMP, "--setenv", "HOME", TMP, "--setenv", "TMPDIR", TMP]
    with bubblewrap.isolated() as (bwrap, descriptor):
        yield [*bwrap, "--as-pid-1", *files.prepare(), *places, "--info-fd", str(info), "--", *inner], descriptor


def limits(config: Config, role: str) -> dict[str, int]:
    """Return the limits of the control group of an actor of a role, by controller.

    The limit of memory holds where a group can have one; the watchdog of the actor is code of the sandbox.
    """
    bounds: dict[str, int] = {}
    if os.geteuid() == 0 and (most := max_processes(config, role)) is not None:  # another user's is set in the sandbox
        bounds["pids"] = most
    mib: int | None = getattr(section_of(config, role), "memory_limit_mib", None)
    if mib is not None and control_group.bounds_memory():
        bounds["memory"] = mib + TMP_MIB + SHARED_MEMORY_MIB << 20
    return bounds


def _media_folders(config: Config) -> list[Path]:
    """Folders with media of prompts, which reward functions may open."""
    if config.media is None:
        return []
    sections = [config.data, *(each.source for each in config.held_out_sets.values())]
    sources = [source for section in sections for source in (section, *section.mixture.values())]
    return [*(folder_of(source.path) for source in sources if source.path is not None), *config.media.folders]


def _python_folders() -> list[Path]:
    """Folders from which this Python imports, without the working directory that `-m` adds."""
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = [Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parent.parent]
    for text in sys.path:
        path = Path(text)
        if path.is_absolute() and path.exists() and (text in named or path.resolve() != Path.cwd().resolve()):
            folders.append(path)
    kept: list[Path] = []
    for path in folders:
        if path != Path("/usr") and not any(path.is_relative_to(other) for other in (*kept, Path("/usr"))):
            kept.append(path)
    return kept
