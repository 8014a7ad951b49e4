"""Dotted paths load the object that they name; errors name the cause and the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_actors.errors import ConfigError
from relax_actors.registry.dotted import import_extra, load


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "dotted_" + "".join(c if c.isalnum() else "_" for c in tmp_path.name)
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "rewards.py").write_text("def shortest(completion, prompt):\n    return 1.0\n")
    (folder / "broken.py").write_text("raise RuntimeError('the disk is on fire')\n")
    (folder / "lacking.py").write_text("import a_package_nobody_has\n")
    (folder / "leaving.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.mark.parametrize("path", ["json.dumps", "json:dumps"])
def test_both_forms_name_the_same_object(path: str) -> None:
    assert load(path, "data.function") is json.dumps


def test_a_module_on_the_import_path_is_imported(package: str) -> None:
    assert callable(load(f"{package}.rewards.shortest", "reward.function"))


@pytest.mark.parametrize("path", ["", "json", "json.", ".dumps", "json:", ":dumps", "a b.c", "json:a:b", "json..dumps"])
def test_a_malformed_path_is_refused_with_the_form(path: str) -> None:
    with pytest.raises(ConfigError, match=r"write package.module.name or package.module:name") as caught:
        load(path, "data.function")
    assert repr(path) in str(caught.value)


def test_a_missing_attribute_suggests_close_ones(package: str) -> None:
    with pytest.raises(ConfigError, match=r"^reward.function = .*has no 'shortes'; did you mean shortest\?"):
        load(f"{package}.rewards.shortes", "reward.function")


def test_a_missing_submodule_suggests_close_ones(package: str) -> None:
    with pytest.raises(ConfigError, match=rf"module {package}.reward not found; did you mean rewards\?"):
        load(f"{package}.reward.shortest", "reward.function")


def test_a_missing_top_module_names_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"module qqxyzzy not found; .*PYTHONPATH"):
        load("qqxyzzy.inner.function", "data.function")


def test_hints_name_modules_of_the_project_alone(package: str) -> None:
    with pytest.raises(ConfigError, match=rf"module {package[:-1]} not found; did you mean {package}\?"):
        load(f"{package[:-1]}.rewards.shortest", "reward.function")
    for installed in ("jsom.dumps", "numpyy.array", "pydantik.BaseModel"):
        with pytest.raises(ConfigError, match="not found") as caught:
            load(installed, "reward.function")
        assert "did you mean" not in str(caught.value)


def test_hints_name_what_a_module_defines_alone(package: str, tmp_path: Path) -> None:
    (tmp_path / package / "own.py").write_text("from json import dumps\nimport math\nROWS = 3\n")
    for name in ("dump", "meth"):
        with pytest.raises(ConfigError, match=f"has no '{name}'") as caught:
            load(f"{package}.own.{name}", "reward.function")
        assert "did you mean" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"did you mean ROWS\?"):
        load(f"{package}.own.ROW", "reward.function")


def test_a_plain_module_has_no_submodules(package: str) -> None:
    with pytest.raises(ConfigError, match=rf"module {package}.rewards.inner not found"):
        load(f"{package}.rewards.inner.name", "data.function")


@pytest.mark.parametrize(
    ("module", "shown"),
    [
        ("broken", "RuntimeError: the disk is on fire"),
        ("lacking", "ModuleNotFoundError: No module named 'a_package_nobody_has'"),
        ("leaving", "SystemExit: 3"),
    ],
)
def test_an_exception_on_import_is_shown(package: str, module: str, shown: str) -> None:
    with pytest.raises(ConfigError, match=shown) as caught:
        load(f"{package}.{module}.name", "data.function")
    assert f"importing {package}.{module} raised" in str(caught.value)


def test_a_missing_extra_names_the_command() -> None:
    with pytest.raises(ConfigError, match=r"^data.kind = 'parquet' needs .*pip install 'relax-actors\[parquet\]'"):
        import_extra("a_package_nobody_has.inner", "parquet", "data.kind = 'parquet'")


def test_an_extra_that_breaks_on_import_is_shown(package: str) -> None:
    with pytest.raises(ConfigError, match="the disk is on fire"):
        import_extra(f"{package}.broken", "parquet", "data.kind = 'parquet'")
