"""What the documents say is what the code says."""

from __future__ import annotations

import runpy
import tomllib
from pathlib import Path

import relax_actors
from relax_actors.cli.check import examine
from relax_actors.config import load_config

ROOT = Path(__file__).parents[2]


def test_the_page_of_settings_is_made_from_the_schema_as_it_is() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "make_config.py"))["page"]
    assert (ROOT / "docs" / "config.md").read_text() == page()


def test_the_page_of_subjects_is_made_from_the_code_as_it_is() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "make_subjects.py"))["page"]
    assert (ROOT / "docs" / "subjects.md").read_text() == page()


def test_the_readme_shows_the_example_role_as_it_is() -> None:
    readme = (ROOT / "README.md").read_text()
    code = (ROOT / "examples" / "custom_role" / "length_penalty.py").read_text()
    shown = readme.split("```python\n", 1)[1].split("```", 1)[0]
    body = [line for line in shown.splitlines() if line.strip()]
    written = code.splitlines()
    assert all(line in written for line in body)


def test_links_of_the_documents_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")]:
        for part in page.read_text().split("](")[1:]:
            target = part.split(")", 1)[0].split("#", 1)[0]
            if target and "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_version_is_said_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == relax_actors.__version__


def test_the_examples_can_be_run() -> None:
    for path in (ROOT / "examples").rglob("*.toml"):
        config = load_config(path)
        if config.model.path is None:
            assert examine(config).errors == (), path
