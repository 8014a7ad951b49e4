"""The locked packages fit pyproject.toml, and every one has a hash."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCK = runpy.run_path(str(ROOT / "deploy" / "lock.py"))
INSTALL = runpy.run_path(str(ROOT / "deploy" / "install.py"))
BASE = (ROOT / "deploy" / "requirements" / "base.txt").read_text()


def test_locked_packages_fit_the_project() -> None:
    assert LOCK["check"]() == []
    assert "torch" not in LOCK["pins"](BASE)
    media = LOCK["pins"]((ROOT / "deploy" / "requirements" / "media.txt").read_text())
    assert "torchaudio" in media
    assert not {"torch", "torchvision", "triton"} & media.keys()
    assert [name for name in media if name.startswith(("nvidia-", "cuda-"))] == ["nvidia-ml-py"]  # reads the driver


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("numpy==", "numpi==", "base.txt lacks numpy"),
        (
            "transformers==",
            "transformers==4.0.0 \\\n#",
            "base.txt has transformers==4.0.0, and pyproject.toml asks for",
        ),
        ("numpy==", "evil==1.0\nnumpy==", "base.txt has no hash for evil==1.0"),
        ("numpy==", "--index-url https://example.org/simple\nnumpy==", "base.txt names the index of a registry"),
    ],
)
def test_lock_that_does_not_fit_is_named(before: str, after: str, problem: str) -> None:
    found = LOCK["problems"]("", BASE.replace(before, after, 1))
    assert any(text.startswith(problem) for text in found), found


def test_locked_packages_are_installed_unless_they_are_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    files = {extra: INSTALL["lock_file"](extra, {}) for extra in ("", "media", "test", "megatron")}
    assert {extra: path.name for extra, path in files.items()} == {
        "": "base.txt",
        "media": "media.txt",
        "test": "test.txt",
        "megatron": "base.txt",
    }
    assert INSTALL["lock_file"]("", {"UNLOCKED": "1"}) is None
    assert INSTALL["requirements"]("test", cpu_sglang=False, locked=True) == [
        ["--no-build-isolation", "--editable", ".[test]"]
    ]


def test_versions_for_different_pythons_stay_apart() -> None:
    text = (
        "# head\n"
        "a==1 ; python_full_version < '3.11.5' \\\n    --hash=sha256:00\n"
        "a==2 ; python_full_version >= '3.11.5' \\\n    --hash=sha256:01\n"
        "b==3 \\\n    --hash=sha256:02\n"
    )
    expected = "a==1 ; python_full_version < '3.11.5'\na==2 ; python_full_version >= '3.11.5'\nb==3\n"
    assert LOCK["pinned_lines"](text) == expected
