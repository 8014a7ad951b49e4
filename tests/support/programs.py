"""Programs of the system that some tests need, and reasons to skip these where a program is missing."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from relax_actors.isolation import bubblewrap


def needs_programs(package: str, *names: str) -> pytest.MarkDecorator:
    """Skip a test where a program is not on the PATH.

    Args:
        package: package of Debian and Ubuntu that has them; several packages with spaces between them.
        names: the programs; the package if there are none.
    """
    missing = [name for name in names or (package,) if shutil.which(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)} (apt install {package})")


_no_sandbox = bubblewrap.problem()
needs_bubblewrap = pytest.mark.skipif(bool(_no_sandbox), reason=f"needs bubblewrap: {_no_sandbox}")


@contextmanager
def small_file_system(folder: Path, size: str) -> Iterator[str]:
    """Mount a file system in memory, and yield why that is not possible here, or an empty string.

    Args:
        folder: where to mount it.
        size: its size, as tmpfs takes it.
    """
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if mount is None or umount is None:
        yield "a small file system needs mount and umount (apt install mount)"
        return
    command = [mount, "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        yield f"a small file system cannot be mounted here: {done.stderr.strip()}"
        return
    yield ""
    subprocess.run([umount, "-l", str(folder)], check=True)
