"""A real browser for the tests of the console: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.consoles import LinkedConsole, ServedConsole
from tests.support.running import wait_until

ARGUMENTS = [
    "--no-sandbox",  # for the user root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), "")
_MISSING = [
    *([] if CHROMIUM else ["Chromium (apt install chromium)"]),
    *([] if find_spec("playwright") else ["Playwright (pip install 'relax-actors[browser]')"]),
]
needs_browser = pytest.mark.skipif(bool(_MISSING), reason=f"needs {' and '.join(_MISSING)}")
AXE = Path(__file__).parents[1] / "console" / "vendor" / "axe.min.js"
"""axe-core 4.14.1 of npm (MPL-2.0): checks of accessibility."""


class Watched:
    """A page whose errors and requests are recorded.

    Args:
        browser: browser of Playwright.
        origin: the only origin that the page may ask.
        width: width of the window in pixels.
        scheme: preferred colours, `light` or `dark`.
    """

    def __init__(self, browser: Any, origin: str, width: int = 1280, scheme: str = "light") -> None:
        self.origin = origin
        self.errors: list[str] = []
        self.foreign: list[str] = []
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page.set_default_timeout(20_000)
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", self._asked)

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((f"{self.origin}/", "blob:", "data:")):
            self.foreign.append(request.url)

    def show(self, fragment: str, text: str) -> None:
        """Go to a state of the page, and wait until a text is shown in it."""
        self.page.evaluate("to => { location.hash = to }", fragment)
        self.page.locator("main").get_by_text(text).first.wait_for()

    def follow_log(self) -> None:
        """Wait until the page follows the log: it shows messages that are published from then on."""
        wait_until(lambda: self.page.evaluate("'logBegun' in document.body.dataset"), "the log of the run")

    def serious_findings(self) -> list[str]:
        """Return what axe finds serious or critical in the present state."""
        if not self.page.evaluate("'axe' in window"):
            # As the test's own code: the policy of the page admits no script from elsewhere.
            self.page.evaluate(AXE.read_text())
        result = self.page.evaluate("axe.run(document, { runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa'] })")
        return [
            f"{found['id']}: {node['html'][:200]}"
            for found in result["violations"]
            if found["impact"] in ("serious", "critical")
            for node in found["nodes"]
        ]

    def check(self) -> None:
        """Check that the page had no error, and asked nobody else."""
        assert self.errors == []
        assert self.foreign == []


def opened(browser: Any, console: ServedConsole | LinkedConsole, **options: Any) -> Watched:
    """Open a console's link in a browser; options as of `Watched`."""
    watched = Watched(browser, console.url, **options)
    watched.page.goto(console.link)
    watched.page.locator("main h2").first.wait_for()
    return watched
