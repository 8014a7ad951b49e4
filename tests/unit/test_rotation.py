"""Slow tests take turns in CI."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

pytest_plugins = ["pytester"]
Order = Callable[..., tuple[list[str], str]]
TESTS = """
import pytest

@pytest.mark.parametrize("i", range(3))
def test_first(i): pass

def test_second(): pass

def test_third(): pass
"""


@pytest.fixture
def order(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Order:
    """Run the tests; return their names in the order in which they ran, and the output."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makepyfile(TESTS)

    def run(*options: str) -> tuple[list[str], str]:
        done = pytester.runpytest_inprocess("-p", "tests.support.rotation", "-v", "-rs", *options)
        names = [line.split("::")[1].split()[0] for line in done.outlines if "PASSED" in line]
        return names, done.stdout.str()

    return run


def test_each_seed_gives_an_order_that_keeps_parameters_together(order: Order) -> None:
    orders = {seed: order("--shuffle", seed)[0] for seed in "abcd"}
    assert orders["a"] == order("--shuffle", "a")[0]
    assert len({tuple(names) for names in orders.values()}) > 1
    for names in orders.values():
        first = [i for i, name in enumerate(names) if name.startswith("test_first")]
        assert len(names) == 5
        assert first == list(range(first[0], first[0] + 3))


def test_tests_that_would_start_too_late_are_skipped_with_the_reason(order: Order) -> None:
    assert len(order("--until", str(time.time() + 600))[0]) == 5
    ran, said = order("--until", str(time.time() - 1))
    assert ran == []
    assert "no time was left" in said


@pytest.mark.parametrize("workers", ["0", "2"])
def test_skipped_tests_and_files_are_recorded_and_can_be_run_alone(
    order: Order, pytester: pytest.Pytester, workers: str
) -> None:
    pytester.makepyfile(
        test_file="import pytest\npytest.skip('no package', allow_module_level=True)",
        test_one="import pytest\n@pytest.mark.skip\n@pytest.mark.parametrize('i', 'ab')\ndef test_it(i): pass",
    )
    order("--record-skipped", "skipped.txt", "-n", workers)
    names = (pytester.path / "skipped.txt").read_text().split()
    assert names == ["test_file.py", "test_one.py::test_it[a]", "test_one.py::test_it[b]"]
    pytester.makepyfile(test_file="def test_now(): pass", test_one="def test_it(): pass")
    assert order("--listed", "skipped.txt")[0] == ["test_now"]
    ran = order("--unlisted", "skipped.txt")[0]
    assert "test_it" in ran
    assert "test_now" not in ran


def test_a_list_that_names_a_test_that_has_moved_is_refused(
    order: Order, pytester: pytest.Pytester, capsys: pytest.CaptureFixture[str]
) -> None:
    file = next(path.name for path in pytester.path.glob("test_*.py"))
    (pytester.path / "list.txt").write_text(f"{file}::test_first\n{file}::test_moved[0]\n")
    assert order("--listed", "list.txt")[0] == []
    assert "test_moved[0]" in capsys.readouterr().err
