"""deploy/install.py repairs virtual environments that it, or anything else, left half-made."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.messages import assert_says
from tests.support.running import wait_until

SCRIPT = Path(__file__).parents[2] / "deploy" / "install.py"
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
BACKEND = '''
"""Build the empty package {name}; wait for ever in the middle if a file `hang` exists."""
import time
import zipfile
from pathlib import Path


def build_wheel(folder, settings=None, metadata=None):
    while Path("hang").exists():
        Path("reached").touch()
        time.sleep(0.05)
    wheel = Path(folder, "{name}-2.0-py3-none-any.whl")
    with zipfile.ZipFile(wheel, "w") as file:
        info = "{name}-2.0.dist-info"
        file.writestr(f"{{info}}/METADATA", "Metadata-Version: 2.1\\nName: {name}\\nVersion: 2.0\\n")
        file.writestr(f"{{info}}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        file.writestr(f"{{info}}/RECORD", "")
    return wheel.name


build_editable = build_wheel
'''


@dataclass
class Checkout:
    """A folder with a package in place of relax-actors, and one in place of torch."""

    folder: Path

    def make(self) -> None:
        for name, folder in (("project", self.folder), ("torch", self.folder / "torch")):
            folder.mkdir(exist_ok=True)
            (folder / "pyproject.toml").write_text(PYPROJECT)
            (folder / "backend.py").write_text(BACKEND.format(name=name))

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            cwd=self.folder,
            env=os.environ | {"TORCH": "./torch", "TORCH_INDEX": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def install(self) -> list[str]:
        """Install, and return the printed lines without the times."""
        process = self.start()
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 0, said
        lines = [line for line in said.splitlines() if " s: " not in line]
        assert lines[-1].startswith("installed in ")
        assert lines[-1].endswith(" s; `source .venv/bin/activate` makes `relax` available")
        return lines[:-1]

    def works(self) -> bool:
        code = "import importlib.metadata as m, pip; print(m.version('torch'), m.version('project'))"
        done = subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=False)
        return done.stdout == "2.0 2.0\n" and (self.folder / ".venv" / ".base").exists()

    @property
    def python(self) -> Path:
        return self.folder / ".venv" / "bin" / "python"


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Checkout]:
    made = Checkout(tmp_path)
    made.make()
    yield made
    (tmp_path / "hang").unlink(missing_ok=True)
    (tmp_path / "torch" / "hang").unlink(missing_ok=True)


TORCH = "./torch: about 3000 MB to download; TORCH_INDEX is set"
PROJECT = "relax-actors with its packages: at most 100 MB to download"


@pytest.mark.slow
def test_killed_installation_is_repaired_by_the_next(checkout: Checkout) -> None:
    (checkout.folder / "hang").touch()
    killed = checkout.start()
    wait_until((checkout.folder / "reached").exists, "build in pip")
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    (checkout.folder / "hang").unlink()
    assert not checkout.works()
    again = "creating .venv again: an earlier installation was interrupted"
    assert checkout.install() == [again, TORCH, PROJECT]
    assert checkout.works()


@pytest.mark.slow
def test_second_installation_waits_for_an_orphaned_pip(checkout: Checkout) -> None:
    (checkout.folder / "hang").touch()
    killed = checkout.start()
    wait_until((checkout.folder / "reached").exists, "build in pip")
    killed.kill()
    second = checkout.start()
    assert second.stdout is not None
    assert second.stdout.readline() == f"waiting for another installation into {checkout.folder}/.venv\n"
    (checkout.folder / "hang").unlink()
    said, _ = second.communicate(timeout=120)
    killed.communicate()
    assert second.returncode == 0, said
    assert checkout.works()


@pytest.mark.slow
def test_damaged_environment_is_repaired_without_losing_a_good_one(checkout: Checkout) -> None:
    assert checkout.install() == ["creating .venv", TORCH, PROJECT]
    kept = checkout.folder / ".venv" / "kept"
    kept.touch()
    site = next((checkout.folder / ".venv" / "lib").glob("python*/site-packages"))
    for part in site.glob("pip*"):
        shutil.rmtree(part)
    assert checkout.install() == ["adding pip to .venv", PROJECT]
    assert checkout.works()
    assert kept.exists()
    checkout.python.unlink()
    checkout.python.symlink_to("/nonexistent/python3")
    assert checkout.install() == ["creating .venv again: its python does not start", TORCH, PROJECT]
    assert checkout.works()
    assert not kept.exists()


@pytest.mark.slow
def test_failure_of_pip_is_reported_with_its_last_lines(checkout: Checkout) -> None:
    (checkout.folder / "torch" / "backend.py").write_text("raise SystemExit('the disk is made of cheese')\n")
    process = checkout.start()
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    first, *rest = said[said.index("install: ") :].splitlines()
    command = ".venv/bin/python -m pip install --disable-pip-version-check ./torch"
    assert_says(first, command, "same make command")
    assert any("the disk is made of cheese" in line for line in rest)
