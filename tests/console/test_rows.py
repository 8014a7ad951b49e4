"""Rows, samples, batch anatomy and media in the console, from the table and from the record of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from broker.store import Store
from broker.subjects import RowId
from relax_actors.config.record import RecordSection
from relax_actors.console.app import Console
from relax_actors.console.guard import Tokens
from relax_actors.console.runs import ConsoleRuns
from relax_actors.messages import Checkpoint, MediaSource
from relax_actors.record.recorder import Recorder
from tests.support.consoles import WrittenRun
from tests.support.shown_rows import quarantine, stored_medium, write_batch, write_row

TOKENS = Tokens("observer-token", "operator-token")
HEAD = {"Authorization": f"Bearer {TOKENS.observer}"}
Ask = Callable[[str], Awaitable[httpx.Response]]
PNG = b"\x89PNG\r\n\x1a\n" + bytes(100)


def asked(run: WrittenRun, work: Callable[[Ask], Awaitable[Any]]) -> Any:
    """Run `work` with a function that asks a console."""

    async def main() -> Any:
        runs = ConsoleRuns(str(run.folder.root))
        transport = httpx.ASGITransport(app=Console(runs, {}).app(TOKENS))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=HEAD) as client:
            try:
                return await work(lambda path: client.get(f"/api/{path}"))
            finally:
                await runs.close()

    return asyncio.run(main())


def record_of(run: WrittenRun, **rules: Any) -> None:
    """Record what the run has trained so far."""
    section = RecordSection.model_validate({"every": 1, **rules})
    store = Store(run.folder.root / "store")
    with closing(Recorder(run.connection, run.subjects, store, section, 7, run.folder.record)) as recorder:
        recorder.catch_up()


def collect(run: WrittenRun, step: int) -> None:
    """Remove the rows of a step, as a checkpoint does."""
    stream = run.subjects.table_stream
    purge = run.connection.js.purge_stream(stream, subject=f"{run.subjects.prefix}.group.{step}.>")
    run.connection.call(purge, 20)
    run.table.put(run.subjects.numbered("checkpoint", step + 1), Checkpoint(step + 1, "x", "f" * 32, step + 1))


@pytest.fixture
def shown(written: WrittenRun) -> WrittenRun:
    """A run with a step of three rows; one of them failed."""
    write_row(written, RowId(0, 0), ["four", "five"], tool="search")
    write_row(written, RowId(0, 1), ["six", "seven"], own=3)
    write_row(written, RowId(0, 2), ["eight"])
    quarantine(written, RowId(0, 2), "ValueError: bad")
    write_batch(written, 0, [0, 1])
    return written


def test_events_that_name_a_row_are_shown_with_it(shown: WrittenRun) -> None:
    node = shown.journal("node")
    node.event("crashed", role="rollout", n=0, reason="killed by SIGKILL", rows=["group.0.1", "group.0.10"])
    node.event("crashed", role="rollout", n=1, reason="killed by SIGKILL", rows=["group.0.10"])
    shown.trainer.event("row_dropped", row="group.0.1", reason="surplus")
    for journal in (node, shown.trainer):
        assert journal.flush(10)

    async def work(ask: Ask) -> list[list[str]]:
        rows = [(await ask(f"row?row=group.0.{index}")).json() for index in (0, 1)]
        return [[f"{event['sender']} {event['kind']}" for event in row["events"]] for row in rows]

    none, both = asked(shown, work)
    assert (none, sorted(both)) == ([], ["rollout.0 crashed", "trainer.0 row_dropped"])


def test_rows_of_a_step_from_the_table_and_from_the_record_are_the_same(shown: WrittenRun) -> None:
    async def work(ask: Ask) -> Any:
        return (await ask("rows?step=0")).json(), (await ask("anatomy?step=0")).json()

    rows, anatomy = asked(shown, work)
    assert [(row["end"], row["reward"], row["signal"], row["staleness"]) for row in rows["rows"]] == [
        ("trained", 0.5, True, 0),
        ("trained", 0.5, True, 0),
        ("quarantined", 0.0, False, 0),
    ]
    assert rows["rows"][2]["trace"] == "Traceback: ValueError: bad"
    assert [row["kept"] for row in rows["rows"]] == [False] * 3
    record_of(shown)
    collect(shown, 0)
    kept, later = asked(shown, work)
    assert [row["kept"] for row in kept["rows"]] == [True] * 3
    same = ("row", "end", "reason", "reward", "rewards", "signal", "staleness", "tokens", "shown")
    assert [[row[name] for name in same] for row in kept["rows"]] == [
        [row[name] for name in same] for row in rows["rows"]
    ]
    assert later == anatomy
    assert (anatomy["missing"], len(anatomy["lanes"])) == (0, 5)
    lane = anatomy["lanes"][0]
    assert [span["name"] for span in lane["spans"]][-1] == "wait for the step"
    assert all(span["begin"] <= span["end"] for span in lane["spans"])
    assert [(turn["number"], turn["calls"]) for turn in lane["turns"]] == [(0, ["search"]), (1, []), (2, [])]
    assert (lane["versions"], lane["trained"], anatomy["lanes"][4]["trained"]) == ([[0, 5]], 5, 0)


def test_a_sample_has_its_tokens_with_numbers_and_its_turns(shown: WrittenRun) -> None:
    async def work(ask: Ask) -> Any:
        return (await ask("row?row=group.0.0&sample=1")).json(), (await ask("row?row=group.0.0&first=3")).json()

    second, rest = asked(shown, work)
    first = second["detail"]["samples"][0]
    assert (first["strips"], second["trained"], second["lengths"]) == ([], True, [10])
    sample = second["detail"]["samples"][1]
    assert (sample["reward"], sample["components"], sample["advantage"]) == (1.0, {"form": 0.5}, 0.5)
    (strip,) = sample["strips"]
    assert (strip["prompt"], strip["mask"]) == (4, [False] * 5 + [True] * 5)
    assert strip["numbers"]["logprob"][:5] == [None] * 5
    assert strip["numbers"]["advantage"][5:] == [0.5] * 5
    assert strip["numbers"]["entropy"] == [None] * 5 + [0.75] * 5
    assert strip["texts"] == []  # no tokenizer
    assert [(turn["number"], turn["parent"]) for turn in first["turns"]] == [(0, -1), (1, 0), (2, 0)]
    assert first["turns"][0]["calls"] == [{"name": "search", "arguments": {"x": 1}}]
    assert [part["column"] for part in second["detail"]["parts"]] == [
        "prompt",
        "turns.0.0",
        "trajectory",
        "reward",
        "advantage",
    ]
    assert len(rest["detail"]["samples"][0]["strips"][0]["ids"]) == 7


def test_what_cannot_be_shown_is_said(shown: WrittenRun) -> None:
    record_of(shown, every=0, highest=0, lowest=1)
    collect(shown, 0)

    async def work(ask: Ask) -> None:
        rows = (await ask("rows?step=0")).json()["rows"]
        assert [row["shown"] for row in rows] == [False, False, True]
        lost = await ask("row?row=group.0.0")
        assert (lost.status_code, "record.every" in lost.json()["error"]["message"]) == (404, True)
        assert "no rows yet" in (await ask("rows?step=9")).json()["problem"]
        assert (await ask("row?row=../../etc/passwd")).status_code == 400
        assert (await ask("anatomy?step=x")).status_code == 400

    asked(shown, work)


def test_a_damaged_record_is_named(shown: WrittenRun) -> None:
    record_of(shown)
    collect(shown, 0)
    for path in shown.folder.record.glob("0*.rows"):
        path.write_bytes(path.read_bytes()[:-5] + b"wrong")

    async def work(ask: Ask) -> None:
        answers = [(await ask(f"row?row=group.0.{index}")) for index in (0, 1)]
        assert sorted(answer.status_code for answer in answers) == [200, 409]
        failed = next(answer for answer in answers if answer.status_code == 409)
        assert "is damaged at byte" in failed.json()["error"]["message"]

    asked(shown, work)


def test_media_are_served_by_digest_from_folders_of_the_run_only(written: WrittenRun, tmp_path: Path) -> None:
    own = stored_medium(written, "image", PNG, "media/cat.png")
    page = stored_medium(written, "image", b"<script>alert(1)</script>", "media/page.html")
    outside = tmp_path / "outside.png"
    outside.write_bytes(PNG + b"other")
    elsewhere = stored_medium(written, "image", PNG + b"other", "media/copy.png")
    foreign = MediaSource("image", str(outside), xxh3_128=elsewhere.digest, size=5)
    climbing = MediaSource("image", "../../../outside.png", xxh3_128="1" * 32, size=5, stored=True)
    changed = stored_medium(written, "image", PNG + b"x", "media/changed.png")
    (written.folder.root / "store/media/changed.png").write_bytes(PNG)
    write_row(written, RowId(0, 0), ["a"], media=[own, page, climbing, changed])
    write_row(written, RowId(0, 1), ["a"], media=[foreign])

    async def work(ask: Ask) -> None:
        good = await ask(f"media?row=group.0.0&digest={own.digest}")
        assert (good.status_code, good.headers["content-type"], good.content) == (200, "image/png", PNG)
        assert good.headers["x-content-type-options"] == "nosniff"
        refused = {
            f"row=group.0.0&digest={page.digest}": 415,
            f"row=group.0.0&digest={climbing.digest}": 404,
            f"row=group.0.0&digest={changed.digest}": 409,
            f"row=group.0.1&digest={foreign.digest}": 404,
            f"row=group.0.1&digest={own.digest}": 404,
            "row=group.0.0&digest=../../../outside.png": 404,
        }
        for query, status in refused.items():
            answer = await ask(f"media?{query}")
            assert answer.status_code == status, (query, answer.text)
            assert str(tmp_path) not in answer.text

    asked(written, work)
