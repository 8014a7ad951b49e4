"""Version of the code of a process: sources, and libraries that ranks share."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import xxhash

PACKAGES = ("broker", "relax_actors")
LIBRARIES = ("torch", "megatron-core", "transformers")
"""Libraries whose version changes what a rank computes."""


@cache
def source_version() -> str:
    """Return a digest of the Python sources of relax-actors, whichever way it is installed."""
    digest = xxhash.xxh3_64()
    for package in PACKAGES:
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            for path in sorted(Path(folder).rglob("*.py")):
                digest.update(f"{package}/{path.relative_to(folder)}\0".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def package_version(name: str) -> str:
    """Return the version of an installed package, from its metadata."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def git_commit() -> str:
    """Return the commit of this package's checkout, with `+` if changed; empty without one."""
    folder = Path(__file__).resolve().parents[2]
    git = shutil.which("git")
    if git is None or not (folder / ".git").exists():
        return ""
    try:
        commit, changed = (
            subprocess.run(  # noqa: S603
                [git, "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
            ).stdout.strip()
            for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return f"{commit}+" if changed else commit


def rank_version() -> str:
    """Return what a rank computes with, sources and libraries, in one line."""
    return ", ".join([f"relax-actors {source_version()}", *(f"{name} {package_version(name)}" for name in LIBRARIES)])
