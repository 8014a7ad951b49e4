"""The views of rows, batch anatomy and samples in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from broker.subjects import RowId
from tests.support.browsers import needs_browser, opened
from tests.support.consoles import ServedConsole, WrittenRun
from tests.support.hostile_markup import PAYLOADS
from tests.support.media_files import image_file, picture
from tests.support.running import wait_until
from tests.support.shown_rows import quarantine, stored_medium, write_batch, write_row

pytestmark = [needs_browser, pytest.mark.slow]


@pytest.fixture
def console(written: WrittenRun) -> Iterator[ServedConsole]:
    """A console of a run whose rows hold hostile texts, turns with tools, and an image."""
    image = stored_medium(written, "image", image_file(picture()), "media/cat.png")
    write_row(written, RowId(0, 0), PAYLOADS, tool=PAYLOADS[0])
    write_row(written, RowId(0, 1), ["seen", "said"], media=[image], own=12)
    write_row(written, RowId(0, 2), ["lost"])
    quarantine(written, RowId(0, 2), PAYLOADS[1])
    write_batch(written, 0, [0, 1])
    console = ServedConsole(written, written.cwd, "--operator")
    yield console
    console.stop()


def test_rows_are_followed_from_the_step_to_a_token(browser: Any, console: ServedConsole) -> None:
    watched = opened(browser, console)
    page = watched.page
    watched.show("#/rows", "Rows of step 0")
    page.get_by_text(f"quarantined by reward: {PAYLOADS[1]}").click()
    page.get_by_role("button", name="Requeue").click()
    page.get_by_text("Requeued: its task is admitted again.").wait_for()
    page.get_by_role("link", name="Where their time went").click()
    page.get_by_text("23 samples over").wait_for()
    page.get_by_role("link", name="group.0.1, 1").click()
    page.get_by_role("heading", name="group.0.1").wait_for()
    page.get_by_text("trained by step 0; from the table").wait_for()
    page.get_by_role("img", name="image cat.png").wait_for()
    wait_until(lambda: page.evaluate("document.querySelector('.medium img').naturalWidth") == 80, "the image")
    strip = page.locator("pre.strip span")
    wait_until(lambda: strip.count() == 16, "all tokens")
    strip.nth(9).click()
    page.get_by_text("token 9, id 5, version 0, trained").wait_for()
    for by, classes in (("advantage", "s6"), ("version", "v0"), ("mask", "trained")):
        page.get_by_label("Colour by").select_option(by)
        page.locator(f"pre.strip .{classes}").first.wait_for()
    page.get_by_role("button", name="Sample 0").click()
    page.wait_for_url(lambda url: "sample=1" not in url)
    watched.check()


def test_texts_stay_texts_and_every_view_is_accessible(browser: Any, console: ServedConsole) -> None:
    views = {"rows": "Rows of step 0", "anatomy": "Samples of step 0", "sample?row=group.0.0": "Turns and branches"}
    for scheme in ("light", "dark"):
        watched = opened(browser, console, scheme=scheme)
        for view, text in views.items():
            watched.show(f"#/{view}", text)
            assert watched.serious_findings() == [], f"{view}, {scheme}"
        for summary in watched.page.locator("summary").all():
            summary.click()
        for number in range(len(PAYLOADS)):
            watched.show(f"#/sample?row=group.0.0&sample={number}", f"Sample {number}")
            watched.page.locator(f"section[aria-label='sample {number}']").wait_for()
        assert watched.page.evaluate("window.owned") is None
        assert watched.page.locator("main iframe, main script, main img, main form, main base").count() == 0
        watched.check()


def test_a_row_that_is_gone_is_said(browser: Any, console: ServedConsole) -> None:
    watched = opened(browser, console)
    watched.show("#/sample?row=group.7.7", "record.every = 1 keeps all rows of a run")
    watched.show("#/sample", "Choose a row in")
    watched.show("#/rows?step=5", "This step has no rows yet.")
    watched.show("#/anatomy?step=5", "Neither the table nor the record has rows of this step")
