"""Code of the user: which files a role runs, their version, and copies of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from relax_actors.config import Config, load_config
from relax_actors.config.load import CODE_VARIABLE
from relax_actors.runtime.user_code import CODE, code_files, keep_code, kept_code, version_of
from tests.support.running import SUPPORT, TINY

JUDGE = """
from relax_actors.roles.reward import RewardRole

class Judge(RewardRole):
    reads = (*RewardRole.reads, "lengths")
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A run whose role imports modules beside the TOML file, one of them in a function."""
    monkeypatch.setattr(sys, "path", sys.path.copy())  # another test's modules of these names would be found first
    (tmp_path / "own_role.py").write_text("import json\nfrom own_tools.text import length\n\nclass Role: pass\n")
    (tmp_path / "own_tools").mkdir()
    (tmp_path / "own_tools" / "__init__.py").write_text("")
    (tmp_path / "own_tools" / "text.py").write_text("from . import words\n\ndef length():\n    import own_late\n")
    (tmp_path / "own_tools" / "words.py").write_text("from .. import nowhere\n")
    (tmp_path / "own_late.py").write_text("x = 1\n")
    (tmp_path / "own_reward.py").write_text("x = 1\n")
    (tmp_path / "numpy.py").write_text("not the numpy of the role\n")
    path = tmp_path / "run.toml"
    path.write_text(
        TINY.read_text().replace("tiny_tasks.share_of_sevens", "own_reward.score")
        + '\n[roles.own]\nactor = "own_role.Role"\nuses = "numpy.array"\n'
    )
    return load_config(path)


def test_files_are_those_that_the_modules_of_the_settings_import(config: Config, tmp_path: Path) -> None:
    own = code_files(config, "own", tmp_path)
    assert list(own) == [
        "own_late.py",
        "own_role.py",
        "own_tools/__init__.py",
        "own_tools/text.py",
        "own_tools/words.py",
    ]
    assert list(code_files(config, "reward", tmp_path)) == ["own_reward.py"]


def test_version_changes_with_the_content_of_a_file_and_not_with_its_time(config: Config, tmp_path: Path) -> None:
    before = version_of(code_files(config, "own", tmp_path))
    os.utime(tmp_path / "own_late.py", (1, 1))
    assert version_of(code_files(config, "own", tmp_path)) == before
    (tmp_path / "own_late.py").write_text("x = 2\n")
    assert version_of(code_files(config, "own", tmp_path)) != before
    assert version_of({}) == ""


def test_copy_is_imported_instead_of_the_edited_file(config: Config, tmp_path: Path) -> None:
    version = keep_code(tmp_path / "store", code_files(config, "own", tmp_path))
    copy = kept_code(tmp_path / "store", version)
    assert copy is not None
    (tmp_path / "own_late.py").write_text("x = 2\n")
    program = (
        f"from pathlib import Path; from relax_actors.config import make_importable; "
        f"make_importable(Path({str(tmp_path)!r})); import own_late; print(own_late.x)"
    )
    environment = {**os.environ, CODE_VARIABLE: str(copy)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
    assert done.stdout.strip() == b"1"


def test_incomplete_or_foreign_copy_is_none(config: Config, tmp_path: Path) -> None:
    store = tmp_path / "store"
    version = keep_code(store, code_files(config, "own", tmp_path))
    (store / CODE / version / "own_late.py").write_text("x = 3\n")
    assert kept_code(store, version) is None
    assert kept_code(store, "../store") is None
    assert keep_code(store, code_files(config, "own", tmp_path)) == version
    assert kept_code(store, version) is not None


@pytest.mark.parametrize(
    "content",
    [b"x = 1\r\ny = 2\r\n", "# -*- coding: latin-1 -*-\nname = 'Zoë'\n".encode("latin-1")],
    ids=["CRLF", "latin-1"],
)
def test_copy_has_the_bytes_of_the_file(config: Config, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "own_late.py").write_bytes(content)
    copy = kept_code(tmp_path / "store", keep_code(tmp_path / "store", code_files(config, "own", tmp_path)))
    assert copy is not None
    assert (copy / "own_late.py").read_bytes() == content


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A run whose reward and role are modules of one package, which do not import each other."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    package = tmp_path / "own_package"
    (package / "parts" / "deep").mkdir(parents=True)
    (package / ".hidden").mkdir()
    files = ("__init__.py", "lengths.py", "parts/by_name.py", "parts/deep/last.py", ".hidden/other.py", "notes.txt")
    for file in files:
        (package / file).write_text("")
    (package / "lengths.py").write_text((SUPPORT / "tiny_lengths.py").read_text())
    (package / "judge.py").write_text(JUDGE)
    (package / "parts" / "again").symlink_to(package, target_is_directory=True)
    path = tmp_path / "run.toml"
    path.write_text(
        TINY.read_text().replace("[reward]", '[reward]\nactor = "own_package.judge.Judge"')
        + '\n[roles.lengths]\nactor = "own_package.lengths.Lengths"\n'
    )
    return load_config(path)


def test_all_modules_of_a_package_are_copied(packed: Config, tmp_path: Path) -> None:
    names = ["__init__", "judge", "lengths", "parts/by_name", "parts/deep/last"]
    files = [f"own_package/{name}.py" for name in names]
    assert [name for name in code_files(packed, "reward", tmp_path) if name.startswith("own_package")] == files
    assert list(code_files(packed, "lengths", tmp_path)) == files
    imported = code_files(packed, "lengths", tmp_path, whole_packages=False)
    assert list(imported) == ["own_package/__init__.py", "own_package/lengths.py"]


def test_role_runs_from_a_copy_although_another_role_lies_in_its_package(packed: Config, tmp_path: Path) -> None:
    copy = kept_code(tmp_path / "store", keep_code(tmp_path / "store", code_files(packed, "reward", tmp_path)))
    assert copy is not None
    program = (
        "import sys; from pathlib import Path; from relax_actors.config import load_config; "
        "from relax_actors.roles import make_role; "
        f"role = make_role(load_config(Path({str(tmp_path / 'run.toml')!r})), 'reward'); "
        "print(sys.modules[type(role).__module__].__file__, 'own_package.lengths' in sys.modules)"
    )
    environment = {**os.environ, CODE_VARIABLE: str(copy)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(copy / "own_package" / "judge.py"), "True"], done.stderr


def test_copy_of_a_package_finds_modules_that_were_added_later(packed: Config, tmp_path: Path) -> None:
    copy = kept_code(tmp_path / "store", keep_code(tmp_path / "store", code_files(packed, "lengths", tmp_path)))
    (tmp_path / "own_package" / "lengths.py").write_text("Lengths = 'edited'\n")
    (tmp_path / "own_package" / "later.py").write_text("from own_package.lengths import Lengths\n")
    program = (
        f"from pathlib import Path; from relax_actors.config import make_importable; "
        f"make_importable(Path({str(tmp_path)!r})); import own_package.later as later; print(later.Lengths.__name__)"
    )
    environment = {**os.environ, CODE_VARIABLE: str(copy)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
    assert done.stdout.strip() == b"Lengths", "the later module has been imported, and the others are those of the copy"
