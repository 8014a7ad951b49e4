"""The recorded run of `relax console --demo`: read like a run that is over, with keys of its own."""

from __future__ import annotations

import asyncio
import tarfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from relax_actors.console.app import Console
from relax_actors.console.guard import Tokens
from relax_actors.console.recording import ARCHIVE, unpack
from relax_actors.console.runs import ConsoleRuns
from relax_actors.errors import ConfigError
from tests.support.browsers import needs_browser, opened
from tests.support.consoles import ServedConsole
from tests.support.running import relax, wait_until

VIEWS = {
    "run": "admitted",
    "actors": "rollout.1",
    "actors?pick=role:rollout": "3 of",
    "weights": "Fingerprint",
    "evaluation": "Results",
    "evaluation?version=20": "Figures by set",
    "evaluation?index=3": "Answers to prompt 3",
    "scaling": "scale rollout",
    "rows?step=20": "Rewards of the samples",
    "rows?step=20&sort=-tokens": "Rewards of the samples",
    "anatomy?step=20": "Tokens by version",
    "anatomy?step=20&pick=outlier:2": "2 of",
    "sample?row=group.20.0": "What was said",
    "sample?row=group.20.0&colour=version": "Versions",
    "timeline": "Time by actor",
    "timeline?pick=role:trainer": "2 of",
    "advice": "version 0 scored",
}
"""A text of each view when it is complete."""
WIDE, PHONE = 1280, 390
"""Widths of the window in pixels."""
QUERIES = (
    "run",
    "advice",
    "ledger",
    "curves?names=step/reward",
    "events?last=100",
    "actors",
    "weights",
    "evaluations",
    "answers?version=20",
    "rows",
    "rows?step=20",
    "anatomy?step=20",
    "scaling",
    "timeline",
)


async def answers(folder: Path) -> dict[str, Any]:
    """Return the answers of a console about a run."""
    runs = ConsoleRuns(str(folder))
    app = Console(runs, {}).app(Tokens("observer", "operator"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1:1") as client:
        head = {"Authorization": "Bearer observer"}
        try:
            found = {name: await client.get(f"/api/{name}", headers=head) for name in QUERIES}
        finally:
            await runs.close()
    assert {name: answer.text for name, answer in found.items() if answer.status_code != 200} == {}
    return {name: answer.json() for name, answer in found.items()}


def test_recorded_run_fills_every_view(tmp_path: Path) -> None:
    seen = asyncio.run(answers(unpack(tmp_path)))
    run = seen["run"]
    assert run["finished"]
    assert run["step"] == run["steps"] >= 100
    assert run["restarts"] >= 1, "a rollout was killed"
    assert not any(finding["is_problem"] for finding in seen["advice"]["findings"])
    assert seen["ledger"]["adds_up"]
    assert len(seen["curves?names=step/reward"]["curves"]["step/reward"]["steps"]) >= 100
    assert seen["scaling"]["operations"], "the run was scaled"
    assert len(seen["evaluations"]["results"]) >= 5
    assert all(row["shown"] for row in seen["rows?step=20"]["rows"])
    assert seen["anatomy?step=20"]["missing"] == 0
    assert seen["timeline"]["lanes"]


def test_archive_is_small_and_holds_no_keys_and_no_path() -> None:
    assert ARCHIVE.stat().st_size <= 1 << 20
    with tarfile.open(ARCHIVE) as file:
        names = file.getnames()
        assert not [name for name in names if "keys" in name or name.startswith(("/", ".."))]
        for name in names:
            part = file.extractfile(name)
            data = b"" if part is None else part.read()
            assert b"PRIVATE" not in data
            assert b"SEED" not in data
            places = (b"/home/", b"/root/", b"/tmp/", bytes(Path(__file__).parents[2]))
            assert not [place for place in places if place in data], name


@pytest.mark.parametrize("content", [b"", b"no archive"])
def test_damaged_archive_is_named(tmp_path: Path, content: bytes) -> None:
    archive = tmp_path / "demo.tar.xz"
    archive.write_bytes(content)
    with pytest.raises(ConfigError, match=str(archive)):
        unpack(tmp_path / "into", archive)


def test_demo_and_a_run_exclude_each_other(tmp_path: Path) -> None:
    done = relax("console", "other", "--demo", "--no-open", cwd=tmp_path)
    assert done.returncode == 2
    assert "leave out one" in done.stderr


@pytest.mark.slow
def test_demo_needs_no_run_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    console, other = (ServedConsole("demo", tmp_path, "--demo") for _ in range(2))
    for each in (console, other):
        assert each.get("run")["finished"]
        assert each.get("rows?step=20")["rows"]
    console.stop()
    assert other.get("run")["finished"], "each has a folder of its own"
    other.stop()
    wait_until(lambda: not list(tmp_path.iterdir()), "removed folders")


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), [("light", WIDE), ("dark", WIDE), ("light", PHONE), ("dark", PHONE)])
def test_every_view_of_the_recorded_run_is_accessible(tmp_path: Path, browser: Any, scheme: str, width: int) -> None:
    console = ServedConsole("demo", tmp_path, "--demo")
    try:
        watched = opened(browser, console, scheme=scheme, width=width)
        for view, text in VIEWS.items():
            watched.show(f"#/{view}", text)
            if width == WIDE or view in ("run", "actors"):  # the views that are made for a phone, too
                assert watched.serious_findings() == [], f"{view}, {scheme}, {width}"
            seen = watched.page.evaluate("document.documentElement.scrollWidth")
            assert seen <= width, f"{view} scrolls sideways at {width}"
        watched.check()
    finally:
        console.stop()
