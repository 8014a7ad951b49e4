"""Files of the page: vendored modules with their licences, nothing from elsewhere, and modules that compute."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from relax_actors.console.app import PAGE
from tests.support.programs import needs_programs

CHECK = Path(__file__).with_name("check_modules.js")
OWN = sorted(path for path in PAGE.rglob("*") if path.is_file() and "vendor" not in path.parts)
VENDORED = {
    # htm 3.1.1, preact/standalone.module.js: htm (Apache-2.0) with preact (MIT)
    "htm-preact.js": ("72284e8e9079c87817145df1110f74e8", ("htm-LICENSE", "preact-LICENSE")),
    # uPlot 1.6.32, dist/uPlot.esm.js and dist/uPlot.min.css (MIT)
    "uplot.js": ("5dd9b3281aa64b461b42d9945f6adb26", ("uplot-LICENSE",)),
    "uplot.css": ("df630c6a8d6f8eeaff264b50f73ce5b1", ("uplot-LICENSE",)),
}
"""First 32 digits of the SHA-256 of each vendored file as npm has it, and the files of its licences."""


def test_vendored_files_are_unchanged_and_have_their_licences() -> None:
    licences = {name for _, names in VENDORED.values() for name in names}
    assert {path.name for path in (PAGE / "vendor").iterdir()} == VENDORED.keys() | licences
    for name, (digest, _) in VENDORED.items():
        assert hashlib.sha256((PAGE / "vendor" / name).read_bytes()).hexdigest()[:32] == digest, name
    texts = {name: (PAGE / "vendor" / name).read_text() for name in licences}
    assert "Apache License" in texts["htm-LICENSE"]
    assert all("Permission is hereby granted" in texts[name] for name in ("preact-LICENSE", "uplot-LICENSE"))


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_page_loads_nothing_from_elsewhere_and_writes_no_markup(path: Path) -> None:
    text = path.read_text()
    addresses = [url for url in re.findall(r"(?:https?:)?//[\w.]+[\w/.]*", text) if "://" in url]
    assert {url for url in addresses if "w3.org" not in url} <= {"http://127.0.0.1"}
    for risk in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert risk not in text
    if path.suffix == ".html":  # the policy refuses inline handlers
        assert not re.search(r"\son\w+=", text)


def imported(module: Path) -> set[Path]:
    """Modules that a module imports when it is loaded, and those that they import."""
    found = {(module.parent / path).resolve() for path in re.findall(r'from "(\.{1,2}/[^"]+)"', module.read_text())}
    return found.union(*(imported(path) for path in found))


def test_modules_of_the_first_view_are_loaded_at_once() -> None:
    page = PAGE.resolve()
    first = page / "views" / "run.js"
    needed = {first} | imported(page / "main.js") | imported(first)
    loaded = re.findall(r'rel="modulepreload" href="([^"]+)"', (page / "index.html").read_text())
    assert {page / path for path in loaded} == needed


@needs_programs("nodejs", "node")
def test_modules_compute(tmp_path: Path) -> None:
    shutil.copytree(PAGE, tmp_path / "page")
    (tmp_path / "package.json").write_text('{"type": "module"}')
    shutil.copy(CHECK, tmp_path)
    done = subprocess.run(
        [shutil.which("node") or "node", CHECK.name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
