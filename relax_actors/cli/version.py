"""Versions of relax and its main parts, read from metadata: nothing heavy is imported."""

from __future__ import annotations

import platform
import subprocess

from broker.server import find_binary
from relax_actors.errors import BrokerError
from relax_actors.runtime.code_version import package_version

PACKAGES = ("nats-py", "torch", "transformers")


def versions() -> str:
    """Return one line for relax, and one for each main part."""
    parts = {"relax-actors": package_version("relax-actors"), "python": platform.python_version()}
    parts |= {"nats-server": _server()} | {name: package_version(name) for name in PACKAGES}
    return "\n".join(f"{name} {version}" for name, version in parts.items())


def _server() -> str:
    try:
        done = subprocess.run([find_binary(), "--version"], capture_output=True, text=True, timeout=10, check=True)  # noqa: S603 our own binary
    except (BrokerError, OSError, subprocess.SubprocessError):
        return "not installed"
    return done.stdout.strip().rpartition("v")[2]
