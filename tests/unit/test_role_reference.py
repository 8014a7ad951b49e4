"""docs/api/role-authors.md is true: its example prints what it says, its options and return values are accepted."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from broker.codec import encode
from broker.errors import CodecError
from broker.store import Store
from broker.subjects import RowId
from relax_actors import Role, Row
from relax_actors.errors import ConfigError

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "api" / "role-authors.md"


@dataclass
class Range:
    low: int
    high: int = 9


class EveryOption(Role):
    """Role with an option of every kind that the page lists."""

    reads = ("prompt",)
    flag: bool = False
    number: int = 1
    share: float = 0.25
    text: str = ""
    how: Literal["sum", "mean"] = "sum"
    parts: list[float] = []  # noqa: RUF012 an option's default, copied
    weights: dict[str, float] = {}  # noqa: RUF012 an option's default, copied
    limit: float | None = None
    between: Range = Range(0)


def test_example_prints_what_the_page_says() -> None:
    script = ROOT / "examples" / "custom_role" / "try_role.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shown = re.search(r"It prints `([^`]+)`", PAGE.read_text())
    assert shown is not None
    assert done.stdout == f"{shown[1]}\n"


def test_every_listed_option_can_be_set_from_toml() -> None:
    given = tomllib.loads(
        'flag = true\nnumber = 3\nshare = 0.5\ntext = "text"\nhow = "mean"\nparts = [0.5, 1.0]\n'
        "weights = { a = 0.5 }\nlimit = 2.5\nbetween = { low = 1 }\n"
    )
    role: Any = EveryOption.build(given, "roles.every")
    assert (role.flag, role.number, role.share, role.text, role.how) == (True, 3, 0.5, "text", "mean")
    assert (role.parts, role.weights, role.limit, role.between) == ([0.5, 1.0], {"a": 0.5}, 2.5, Range(1, 9))
    unset: Any = EveryOption.build({}, "roles.every")
    assert (unset.number, unset.limit, unset.between) == (1, None, Range(0))
    with pytest.raises(ConfigError, match=r"roles.every.how: Input should be 'sum' or 'mean', got 'median'"):
        EveryOption.build({"how": "median"}, "roles.every")


def read_back(value: Any, folder: Path) -> Any:
    """Value of a column as the next role reads it."""
    return Row(RowId(0, 0), {"column": encode(value, "author.0#1")}, Store(folder)).column("column")


@pytest.mark.parametrize("value", [None, True, 3, 0.5, "text", b"bytes", [1, "a"], {"a": {"b": [1.5]}}])
def test_plain_values_are_read_back(value: Any, tmp_path: Path) -> None:
    assert read_back(value, tmp_path) == value


def test_tuple_is_read_back_as_list(tmp_path: Path) -> None:
    assert read_back((1, 2), tmp_path) == [1, 2]


def test_arrays_of_the_listed_types_are_read_back(tmp_path: Path) -> None:
    listed = re.search(r"NumPy arrays of ([^;]+?), also inside", PAGE.read_text())
    assert listed is not None
    names = listed[1].replace(" or ", ", ").split(", ")
    assert {"bool", "float64"} <= set(names)
    for name in names:
        array = np.ones((2, 3), name)
        found = read_back({"inside": [array]}, tmp_path)["inside"][0]
        assert found.dtype == array.dtype
        assert (found == array).all()


@pytest.mark.parametrize("value", [{1, 2}, object(), Range(0)])
def test_other_values_are_refused_by_type(value: Any, tmp_path: Path) -> None:
    with pytest.raises(CodecError, match=type(value).__name__):
        read_back(value, tmp_path)


def test_all_methods_of_a_role_are_listed() -> None:
    text = PAGE.read_text()
    methods = {name for name, member in vars(Role).items() if callable(member) and not name.startswith("_")}
    assert {"handle", "stream"} < methods
    assert [name for name in methods if f"`{name}(" not in text] == []
