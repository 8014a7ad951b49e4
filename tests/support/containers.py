"""A container engine for tests, where one answers and has the image."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

IMAGE = os.environ.get("RELAX_SANDBOX_IMAGE", "python:3.11-slim-bookworm")


def engine(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the engine."""
    name = shutil.which("docker") or shutil.which("podman")
    if name is None:
        return subprocess.CompletedProcess(arguments, 1, "", "there is no engine")
    return subprocess.run([name, *arguments], capture_output=True, text=True, check=False, timeout=60)


def containers(label: str = "") -> list[str]:
    """Return the names of sandboxes, also of those that do not run."""
    where = ["--filter", f"label={label}"] if label else []
    done = engine("ps", "--all", "--filter", "name=relax-", *where, "--format", "{{.Names}}")
    return done.stdout.split() if done.returncode == 0 else []


needs_engine = pytest.mark.skipif(
    engine("image", "inspect", IMAGE).returncode != 0, reason=f"no container engine answers, or it has no {IMAGE}"
)
