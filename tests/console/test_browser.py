"""The page of the console in a real browser."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.subjects import RowId
from relax_actors.messages import Batch, Checkpoint, Weights
from relax_actors.messages.cells import RowCounts
from tests.support.browsers import Watched, needs_browser, opened
from tests.support.consoles import ROWS, UNREAD, LinkedConsole, ServedConsole, WrittenRun
from tests.support.hostile_markup import PAYLOADS
from tests.support.recorded_runs import recorded_machine
from tests.support.running import wait_until

pytestmark = [needs_browser, pytest.mark.slow]
VIEWS = {
    "run": "admitted",
    "actors": "rollout.0",
    "weights": "Versions",
    "evaluation": "Results",
    "evaluation?version=3": "Figures by set",
    "scaling": "Actors by role",
    "timeline": "Time by actor",
    "advice": "Problem",
}
"""A text of each view when it is complete."""
HIDDEN = """(hidden) => {
  Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""
"""Hides the page, or shows it again, as a change of the tab does."""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[WrittenRun]:
    """A run with hostile texts wherever a model or a user writes."""
    run = WrittenRun(tmp_path)
    run.train(range(8))
    run.evaluate(3, list(PAYLOADS))
    run.journal("rollout").event("ready", seconds=1.0)
    for n, payload in enumerate(PAYLOADS):
        run.quarantine(RowId(8, n), payload, payload, role=payload)
        run.journal("reward").event("row_failed", row="group.1.0", reason=payload)
    yield run
    run.stop()


@pytest.fixture
def console(run: WrittenRun) -> Iterator[ServedConsole]:
    console = ServedConsole(run, run.cwd)
    yield console
    console.stop()


def test_every_view_is_accessible_and_shows_texts_as_texts(browser: Any, console: ServedConsole) -> None:
    for scheme in ("light", "dark"):
        watched = opened(browser, console, scheme=scheme)
        for view, text in VIEWS.items():
            watched.show(f"#/{view}", text)
            assert watched.serious_findings() == [], f"{view}, {scheme}"
        watched.show("#/run", PAYLOADS[0])
        watched.show("#/evaluation?version=3", "Prompt and answers")
        watched.page.locator("summary").first.click()
        watched.page.get_by_text(PAYLOADS[1]).first.wait_for()
        assert watched.page.evaluate("window.owned") is None
        assert watched.page.locator("main iframe, main script, main img, main form, main base").count() == 0
        assert console.token not in watched.page.url
        watched.check()


def test_state_has_a_link_keys_and_files(browser: Any, console: ServedConsole) -> None:
    watched = opened(browser, console)
    page = watched.page
    page.keyboard.press("3")
    page.get_by_role("heading", name="Weights").wait_for()
    page.wait_for_url("**/#/weights")
    for key in "687905432":  # views that arrive late do not take the place of the last one
        page.keyboard.press(key)
    page.get_by_role("heading", name="Actors").wait_for()
    page.goto(f"{console.url}/#/run?from=2&to=5&smooth=0.5")
    page.get_by_role("button", name="Show all steps").wait_for()
    chart = page.get_by_role("region", name="chart of step/reward")
    chart.get_by_role("img", name="newest values: seen: 0.505").wait_for()  # until then it shows all steps
    with page.expect_download() as download:
        chart.get_by_role("button", name="save step/reward as JSON").click()
    saved = json.loads(Path(download.value.path()).read_text())
    assert saved["seen"]["steps"] == [2, 3, 4, 5]
    with page.expect_download() as download:
        chart.get_by_role("button", name="save step/reward as PNG").click()
    assert Path(download.value.path()).read_bytes().startswith(b"\x89PNG")
    said = page.locator("#ledger-sum").inner_text()
    assert said == "admitted 36 = trained 16 + in flight 0 + dropped 0 + quarantined 20"
    watched.check()


def test_step_is_chosen_in_a_chart_and_leads_to_its_rows(browser: Any, console: ServedConsole) -> None:
    watched = opened(browser, console)
    page = watched.page
    chart = page.get_by_role("region", name="chart of step/reward")
    drawn = chart.locator(".u-over")
    for whole in (drawn, page.locator("#ledger-sum"), page.get_by_role("region", name="Events")):
        whole.wait_for()  # what loads later moves the chart
    box = drawn.bounding_box()
    assert box is not None
    middle, top = box["x"] + box["width"] * 3 / 7, box["y"] + 40  # of steps 0 to 7
    page.mouse.move(middle, top)
    for name in ("step/reward", "step/loss"):
        page.get_by_role("region", name=f"chart of {name}").get_by_text("step 3", exact=True).wait_for()
    chart.get_by_text("seen 0.503").wait_for()
    page.mouse.down()
    page.mouse.up()
    page.mouse.move(box["x"] + box["width"], top - 100)
    chart.get_by_text("step 3", exact=True).wait_for()
    page.wait_for_url(lambda url: url.endswith("#/run?at=3"))
    page.get_by_role("link", name="Held-out answers").click()
    page.get_by_role("heading", name="Answers of version 3").first.wait_for()
    page.go_back()
    chart.get_by_text("step 3", exact=True).wait_for()
    page.locator("main").get_by_role("link", name="Rows", exact=True).click()
    page.wait_for_url(lambda url: url.endswith("#/rows?step=3"))
    watched.show("#/run?at=5", "seen 0.505")
    page.get_by_role("button", name="Clear").click()
    page.get_by_role("link", name="Held-out answers").wait_for(state="detached")
    page.wait_for_url("**/#/run")
    watched.check()


@pytest.mark.parametrize("view", ["run", "actors"])
def test_phone_shows_run_and_actors_without_scrolling_sideways(browser: Any, console: ServedConsole, view: str) -> None:
    watched = opened(browser, console, width=390)
    watched.show(f"#/{view}", VIEWS[view])
    width = watched.page.evaluate("document.documentElement.scrollWidth")
    assert width <= 390
    assert watched.serious_findings() == []
    watched.check()


@pytest.mark.parametrize("width", [1280, 390])
def test_gpus_of_a_node_are_shown(browser: Any, run: WrittenRun, console: ServedConsole, width: int) -> None:
    watched = opened(browser, console, width=width)
    machine = recorded_machine()
    many = replace(machine, gpus=[replace(machine.gpus[0], number=n) for n in range(8)])
    held = {"rollout.0": [0, 1], "trainer.0": [7]}
    watched.page.goto(f"{console.url}/#/actors")
    gpus = watched.page.get_by_role("region", name="GPUs of node host")

    def renewed() -> bool:
        run.node(0, "rollout.0", "trainer.0", gpus=held, machine=many.plain())
        run.journal("rollout").metric({"rows": 1})
        return bool(gpus.count())

    wait_until(renewed, "GPUs of the node")
    assert gpus.get_by_role("row").count() == 9
    assert gpus.get_by_text("trainer.0").count() == 1
    watched.page.get_by_role("group", name="machine of node host").get_by_text("memory free").wait_for()
    assert watched.page.evaluate("document.documentElement.scrollWidth") <= width
    assert watched.serious_findings() == []
    watched.check()


def test_page_goes_on_after_a_killed_console(browser: Any, run: WrittenRun) -> None:
    console = LinkedConsole(run)
    watched = opened(browser, console)
    page = watched.page
    counted = "document.body.dataset.logLast - document.body.dataset.logFirst + 1 == document.body.dataset.logCount"
    watched.follow_log()
    run.train(range(8, 9))
    # `wait_for_function` evaluates texts in the page, which its policy refuses.
    wait_until(lambda: page.evaluate("Number(document.body.dataset.logCount) >= 1"), "a message")
    last = page.evaluate("Number(document.body.dataset.logLast)")
    console.kill()
    page.get_by_text("The page goes on by itself").wait_for()
    run.train(range(9, 12))
    wait_until(lambda: page.evaluate(f"Number(document.body.dataset.logLast) >= {last + 3}"), "later messages")
    assert page.evaluate(counted), page.evaluate("({...document.body.dataset})")
    page.get_by_text("The page goes on by itself").wait_for(state="detached")
    page.get_by_text("12 of 100").wait_for()
    assert watched.foreign == []
    console.stop()


def test_page_takes_the_new_link_of_a_console_that_was_started_again(
    browser: Any, run: WrittenRun, console: ServedConsole
) -> None:
    watched = opened(browser, console)
    page = watched.page
    watched.show("#/actors", "rollout.0")
    console.kill()
    console.start()
    page.get_by_text("has a new link").wait_for()
    page.goto(console.link)  # only the fragment differs, so the page stays
    page.get_by_text("has a new link").wait_for(state="detached")
    page.wait_for_url("**/#/actors")
    run.train(range(8, 9))
    watched.show("#/run", "9 of 100")
    assert watched.foreign == []


def test_page_of_a_run_that_ends_says_so_and_leaves_the_run_alone(
    browser: Any, run: WrittenRun, console: ServedConsole
) -> None:
    watched = opened(browser, console)
    watched.show("#/run", "8 of 100")
    run.stop()
    watched.page.get_by_text("Reload the page").wait_for()
    run.connect()  # takes the folder, as `relax up` does
    watched.page.reload()
    run.train(range(8, 9))
    watched.page.get_by_text("9 of 100").wait_for()


def test_charts_load_while_answers_take_longer_than_a_pulse(
    browser: Any, run: WrittenRun, console: ServedConsole
) -> None:
    watched = opened(browser, console)
    page = watched.page
    page.route("**/api/curves*", lambda route: (page.wait_for_timeout(2500), route.continue_()))
    run.train(range(8, 9))
    watched.show("#/actors", "rollout.0")
    writer = Writer(run)
    writer.start()
    page.goto(f"{console.url}/#/run")
    page.get_by_role("region", name="chart of step/reward").wait_for()
    writer.halt.set()
    writer.join()


def test_hidden_page_holds_no_connection_and_misses_no_message(
    browser: Any, run: WrittenRun, console: ServedConsole
) -> None:
    watched = opened(browser, console)
    page = watched.page
    watched.follow_log()
    run.train(range(8, 9))
    wait_until(lambda: page.evaluate("Number(document.body.dataset.logCount) >= 1"), "a message")
    last = page.evaluate("Number(document.body.dataset.logLast)")
    with page.expect_event("requestfailed", lambda request: "/api/log" in request.url):
        page.evaluate(HIDDEN, True)
    run.train(range(9, 12))
    page.evaluate(HIDDEN, False)
    wait_until(lambda: page.evaluate(f"Number(document.body.dataset.logLast) >= {last + 3}"), "later messages")
    counted = "document.body.dataset.logLast - document.body.dataset.logFirst + 1 == document.body.dataset.logCount"
    assert page.evaluate(counted), page.evaluate("({...document.body.dataset})")


class Writer(threading.Thread):
    """Writes a message to the log twice a second."""

    def __init__(self, run: WrittenRun) -> None:
        super().__init__(daemon=True)
        self.halt = threading.Event()
        self._journal = run.journal("rollout")

    def run(self) -> None:
        while not self.halt.wait(0.5):
            self._journal.metric({"rows": 1})


def test_page_says_that_the_broker_is_gone(browser: Any, run: WrittenRun, console: ServedConsole) -> None:
    watched = opened(browser, console)
    watched.show("#/run", "admitted")
    server = run.broker()
    server.kill()
    server.wait(10)
    watched.page.get_by_text("does not answer").first.wait_for(timeout=40_000)
    run.restart_broker()
    run.train(range(8, 10))
    watched.page.get_by_text("10 of 100").wait_for(timeout=40_000)
    assert watched.foreign == []


def test_run_that_is_over_is_shown(browser: Any, run: WrittenRun) -> None:
    run.stop()
    console = ServedConsole(run, run.cwd)
    watched = opened(browser, console)
    for view in ("run", "actors", "weights", "evaluation"):
        watched.show(f"#/{view}", VIEWS[view])
    watched.show("#/run", "not up")
    watched.check()
    console.stop()
    run.connect()


@pytest.fixture
def long_run(tmp_path: Path) -> Iterator[WrittenRun]:
    """A run of 400 steps that a checkpoint covers; the batch of step 7 is lost."""
    steps, lost = 400, 7
    run = WrittenRun(tmp_path, steps=steps)
    cells: list[tuple[str, Any]] = []
    for step in range(steps):
        if step != lost:
            cells.append((run.subjects.numbered("batch", step), Batch([0, 1], 1, 1, 0.5, 0, 8, 1e9 + step)))
        cells.append((run.subjects.numbered("weights", step + 1), Weights(step + 1, f"f{step + 1}", [], 1)))
    run.table.put_all(cells)
    totals = RowCounts(admitted=ROWS * steps, trained=ROWS * steps)
    run.table.put(run.subjects.numbered("checkpoint", steps), Checkpoint(steps, "checkpoints/1", "f", steps, totals))
    yield run
    run.stop()


@pytest.fixture
def unread(long_run: WrittenRun) -> Iterator[ServedConsole]:
    """A console that reads the batches of `long_run` when the weights are asked for."""
    console = ServedConsole(long_run, long_run.cwd, program=UNREAD)
    yield console
    console.stop()


def test_lost_batch_of_a_long_run_is_shown_once_all_are_read(browser: Any, unread: ServedConsole) -> None:
    watched = opened(browser, unread)
    watched.page.get_by_text("have not been checked yet").wait_for()
    answered = """["events", "ledger"].every((name) =>
      performance.getEntriesByType("resource").filter((each) => each.name.includes(`/api/${name}?`)).length >= 2)"""
    wait_until(lambda: watched.page.evaluate(answered), "the requests after the beginning of the log")
    unread.get("weights")  # the log brings nothing new
    watched.page.get_by_text("step 7 has weights but no batch").wait_for()
    watched.check()


def test_page_of_a_run_that_ended_asks_no_more_for_its_ledger(
    browser: Any, long_run: WrittenRun, unread: ServedConsole
) -> None:
    watched = opened(browser, unread)
    page = watched.page
    asked: list[str] = []
    page.get_by_text("have not been checked yet").wait_for()
    with page.expect_response(lambda answer: "/api/ledger" in answer.url and answer.status == 409):
        long_run.stop()
    page.get_by_text("Reload the page").wait_for()
    page.on("request", lambda request: asked.append(request.url) if "/api/ledger" in request.url else None)
    page.wait_for_timeout(4000)
    assert len(asked) <= 1, "the last news of the log may come after the answer"
    page.get_by_text("have not been checked yet").wait_for()


def test_wrong_token_gets_an_explanation(browser: Any, console: ServedConsole) -> None:
    watched = Watched(browser, console.url)
    watched.page.goto(f"{console.url}/#token=wrong-token-0123456789")
    watched.page.get_by_text("no valid token").wait_for()
    assert watched.foreign == []
