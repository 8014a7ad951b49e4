"""Plugin of pytest that chooses and orders slow tests in CI: `-p tests.support.rotation`.

CI runs the tests of a list for each change; the others take turns, as many as there is time for.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import pytest

OUTPUT = "skipped_files"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--listed", metavar="FILE", help="run only tests whose names begin with a line of FILE")
    parser.addoption("--unlisted", metavar="FILE", help="run only tests whose names begin with no line of FILE")
    parser.addoption(
        "--shuffle", metavar="SEED", help="run tests in an order that follows from SEED; parameters stay together"
    )
    parser.addoption("--record-skipped", metavar="FILE", help="write the names of skipped tests and files to FILE")
    parser.addoption(
        "--until", type=float, metavar="TIME", help="skip tests that would start later, in seconds since 1970"
    )


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--record-skipped")
    if file is not None:
        output = getattr(config, "workeroutput", None)
        config.pluginmanager.register(Skipped(Path(file)) if output is None else SkippedFiles(output))


class Skipped:
    """Names of the tests, and of the files whose tests all, were skipped."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._names: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self._names.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._names.add(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        # A worker that crashed has none.
        self._names.update(getattr(node, "workeroutput", {}).get(OUTPUT, ()))

    def pytest_sessionfinish(self) -> None:
        self._file.write_text("".join(f"{name}\n" for name in sorted(self._names)))


class SkippedFiles:
    """Names of the files that a worker of pytest-xdist skipped as it collected them, which it does not report."""

    def __init__(self, output: dict[str, Any]) -> None:
        self._names: list[str] = output.setdefault(OUTPUT, [])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._names.append(report.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for option, wanted in (("--listed", True), ("--unlisted", False)):
        if (file := config.getoption(option)) is not None:
            keep(config, items, names_of(Path(file)), wanted=wanted)
    if (seed := config.getoption("--shuffle")) is not None:
        items.sort(key=lambda item: order_of(seed, item.nodeid.split("[", 1)[0]))


def names_of(file: Path) -> tuple[str, ...]:
    """Names of tests and files in a list; a line that begins with `#` is a comment."""
    lines = (line.strip() for line in file.read_text().splitlines())
    return tuple(line for line in lines if line and not line.startswith("#"))


def keep(config: pytest.Config, items: list[pytest.Item], names: tuple[str, ...], *, wanted: bool) -> None:
    """Deselect tests that are in the list, or those that are not.

    Raises:
        pytest.UsageError: a name of the list is that of no file, or of no test of a collected file, so that the list is
            out of date.
    """
    tests = {item.nodeid.split("[", 1)[0] for item in items}
    collected = {test.split("::", 1)[0] for test in tests}
    missing = [
        name
        for name in names
        if not Path(config.rootpath, name.split("::", 1)[0]).exists()
        or (name.split("::", 1)[0] in collected and not any(t.startswith(name.split("[", 1)[0]) for t in tests))
    ]
    if missing:
        msg = f"no such test: {', '.join(missing)}; correct the list"
        raise pytest.UsageError(msg)
    others = [item for item in items if item.nodeid.startswith(names) is not wanted]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item.nodeid.startswith(names) is wanted]


def order_of(seed: str, name: str) -> str:
    """Return what tests are sorted by: each seed gives another order, the same in every worker."""
    return hashlib.sha256(f"{seed} {name}".encode()).hexdigest()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    until = item.config.getoption("--until")
    if until is not None and time.time() >= until:
        pytest.skip("no time was left for its turn")
