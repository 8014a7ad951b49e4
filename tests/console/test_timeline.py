"""The timeline of the console: its answer, and what the page makes of it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from broker.subjects import RowId
from relax_actors.console.api.timeline import MAX_SPANS, packed
from relax_actors.monitoring.timeline import Instant, Span, Timeline
from tests.support.browsers import needs_browser, opened
from tests.support.consoles import ServedConsole, WrittenRun
from tests.support.hostile_markup import PAYLOADS
from tests.support.running import wait_until
from tests.support.shown_rows import write_batch, write_row

NODE = shutil.which("node")
VIEW = Path(__file__).parents[2] / "relax_actors" / "console" / "page" / "views" / "timeline.js"
SCRIPT = """
const view = await import(process.argv[1]);
const spans = Array.from({ length: 100000 }, (_, k) => [k % 3, k * 0.01, 0.005, k]);
const [lane] = view.prepare({ lanes: [{ actor: "rollout.0", number: 0, spans }] });
const begun = performance.now();
let all = 0;
for (let i = 0; i < 20; i += 1) all = view.bars(lane, 0, 1000, 1000).length;
const frame = (performance.now() - begun) / 20;
const close = view.bars(lane, 10, 10.1, 1000);
console.log(JSON.stringify({
  all, frame, close: close.map(([left, width, i]) => [Math.round(left), Math.round(width), i]),
  on: view.spanAt(lane, 10.002)[3], between: view.spanAt(lane, 10.007),
  zoomed: view.zoomed({ from: 0, to: 10 }, 0.5, 4),
}));
"""


def test_answer_is_packed_by_lanes() -> None:
    spans = (
        Span("trajectory", 100.0, 102.0, "rollout.0", "group.0.0", 0),
        Span("trajectory", 101.0, 103.0, "rollout.0", "group.0.1", 0),
        Span("train", 104.0, 105.5, "trainer.0", step=0),
    )
    answer = packed(Timeline("demo", spans, (Instant("crashed", 101.0, "reward.0", "no"),)))
    assert (answer.begin, answer.end, answer.names) == (100.0, 105.5, ["trajectory", "train"])
    assert [(lane.actor, lane.number, lane.spans) for lane in answer.lanes] == [
        ("rollout.0", 0, [(0, 0.0, 2.0, 0)]),
        ("rollout.0", 1, [(0, 1.0, 2.0, 1)]),
        ("trainer.0", 0, [(1, 4.0, 1.5, -1)]),
    ]
    assert answer.rows == ["group.0.0", "group.0.1"]
    assert packed(Timeline("demo", (), ())).lanes == []


def test_old_spans_are_left_out_and_counted() -> None:
    spans = tuple(Span("train", float(k), k + 0.5, "trainer.0") for k in range(MAX_SPANS + 3))
    answer = packed(Timeline("demo", spans, ()))
    assert (answer.left_out, answer.begin, len(answer.lanes[0].spans)) == (3, 3.0, MAX_SPANS)


@pytest.mark.skipif(NODE is None, reason="needs Node (apt install nodejs)")
def test_page_draws_as_many_bars_as_pixels_of_100000_spans() -> None:
    assert NODE is not None
    done = subprocess.run(
        [NODE, "--input-type=module", "-e", SCRIPT, str(VIEW)], capture_output=True, text=True, timeout=60, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["all"] <= 1000
    assert found["close"] == [[100 * k, 50, 1000 + k] for k in range(10)]
    assert (found["on"], found["between"]) == (1000, None)
    assert found["zoomed"] == {"from": 2, "to": 7}


COUNTED = """() => {
  window.replaced = 0;
  const replace = history.replaceState.bind(history);
  history.replaceState = (...given) => { window.replaced += 1; replace(...given); };
}"""
"""Counts how often the page changes its link in place."""
WHEEL = """(x) => {
  const given = { ctrlKey: true, deltaY: -100, clientX: x, bubbles: true, cancelable: true };
  const event = () => new WheelEvent("wheel", given);
  for (let n = 0; n < 50; n += 1) document.querySelector("canvas").dispatchEvent(event());
}"""
"""Turns the wheel at a place, 50 times at once."""


@needs_browser
@pytest.mark.slow
def test_drag_and_wheel_change_the_link_once(browser: Any, written: WrittenRun) -> None:
    write_row(written, RowId(0, 0), ["yes", "no"])
    write_batch(written, 0, [0])
    console = ServedConsole(written, written.cwd)
    try:
        watched = opened(browser, console)
        watched.show("#/timeline?step=0", "Time by actor")
        page = watched.page
        page.evaluate(COUNTED)
        box = page.locator("canvas").bounding_box()
        assert box is not None
        middle, top = box["x"] + box["width"] / 2, box["y"] + 30
        whole = page.locator("canvas").get_attribute("aria-label")
        page.mouse.move(middle, top)
        page.mouse.down()
        page.mouse.move(middle - 100, top, steps=150)
        assert page.evaluate("[window.replaced, location.hash.includes('from=')]") == [0, False]
        page.mouse.up()
        wait_until(lambda: page.evaluate("location.hash.includes('from=')"), "the place in the link")
        assert page.evaluate("window.replaced") == 1
        dragged = page.evaluate("location.hash")
        page.evaluate(WHEEL, middle)
        wait_until(lambda: page.evaluate("location.hash") != dragged, "the zoom in the link")
        assert page.evaluate("window.replaced") == 2
        wait_until(lambda: page.locator("canvas").get_attribute("aria-label") != whole, "the zoomed timeline")
        watched.check()
    finally:
        console.stop()


@needs_browser
@pytest.mark.slow
def test_timeline_of_a_step_is_drawn_and_leads_to_its_rows(browser: Any, written: WrittenRun) -> None:
    write_row(written, RowId(0, 0), ["yes", "no"])
    write_batch(written, 0, [0])
    written.journal("reward").event("crashed", error=PAYLOADS[0])
    written.folder.profiles.mkdir()
    (written.folder.profiles / "trainer.0-1-0.json.gz").write_bytes(b"a trace")
    written.journal("trainer").event("profiled", files=["trainer.0-1-0.json.gz"])
    console = ServedConsole(written, written.cwd)
    try:
        watched = opened(browser, console)
        watched.show("#/timeline?step=0", "Time by actor")
        page = watched.page
        assert page.locator("canvas").count() == 1
        page.get_by_role("cell", name="trajectory").first.wait_for()
        page.get_by_role("button", name="Zoom in").click()
        page.get_by_role("button", name="All", exact=True).click()
        assert watched.serious_findings() == []
        watched.show("#/timeline", "Events")
        page.get_by_text(PAYLOADS[0]).wait_for()
        with page.expect_download() as saved:
            page.get_by_role("button", name="trainer.0-1-0.json.gz").click()
        assert Path(saved.value.path()).read_bytes() == b"a trace"
        assert page.evaluate("window.owned") is None
        watched.check()
    finally:
        console.stop()
