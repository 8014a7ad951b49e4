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
    parts = {"python": platform.python_version(), "nats-server": _server()}
    parts |= {name: package_version(name) for name in PACKAGES}
    lines = [f"relax-actors {package_version('relax-actors')}", *(f"{name} {found}" for name, found in parts.items())]
    return "\n".join(lines)


def _server() -> str:
    try:
        done = subprocess.run([find_binary(), "--version"], capture_output=True, text=True, timeout=10, check=True)  # noqa: S603 our own binary
    except (BrokerError, OSError, subprocess.SubprocessError):
        return "not installed"
    return done.stdout.strip().rpartition("v")[2]
