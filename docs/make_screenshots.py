"""Write the pictures of the console: `make screenshots`; needs Chromium and the extra `browser`.

A short run of the demo is shown while it trains. It takes about a minute on two cores.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page, sync_playwright
from waiting import wait

from relax_actors.console.link import load_link

HERE = Path(__file__).parent
DEMO = HERE.parent / "examples" / "demo" / "demo.toml"
STEPS = 300
VIEWS = {"run": "admitted", "actors": "trainer.0"}
"""A text of each view that is pictured."""
NAMES = ("chromium", "chromium-browser", "google-chrome")


def main() -> None:
    """Train the demo in a temporary folder, and picture its console."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "demo"
        command = [sys.executable, "-m", "relax_actors.cli.main", "up", str(DEMO), f"run.folder={folder}"]
        with subprocess.Popen([*command, f"run.steps={STEPS}", "eval.every=50"], stdout=subprocess.DEVNULL) as run:
            try:
                wait(lambda: load_link(folder) is not None)
                picture(folder, lambda: run.poll() is None)
            finally:
                run.terminate()


def picture(folder: Path, goes_on: Callable[[], bool]) -> None:
    """Open the console when two thirds of the steps are trained, and write a picture of each view."""
    link = load_link(folder)
    assert link is not None  # noqa: S101
    program = next(filter(None, map(shutil.which, NAMES)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(link.url())
        page.wait_for_selector("#ledger-sum")
        wait(lambda: not goes_on() or _step(page) > 2 * STEPS // 3)
        for view, text in VIEWS.items():
            page.evaluate("to => { location.hash = to }", f"#/{view}")
            page.locator("main").get_by_text(text).first.wait_for()
            page.wait_for_timeout(1000)  # the charts are drawn
            page.screenshot(path=HERE / f"console-{view}.png")
        browser.close()


def _step(page: Page) -> int:
    found = page.evaluate(
        "fetch('/api/run', {headers: {Authorization: `Bearer ${localStorage['relax-console-token']}`}})"
        ".then((answer) => answer.text())"
    )
    return int(json.loads(found).get("step", 0))


if __name__ == "__main__":
    main()
