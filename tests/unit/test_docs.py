"""The documentation agrees with the code: generated pages, links, commands, keys and examples."""

from __future__ import annotations

import ast
import re
import runpy
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from pydantic import BaseModel
from safetensors.numpy import save_file

import relax_actors
from relax_actors.checks import examine
from relax_actors.cli.main import build
from relax_actors.config import Config, load_config
from relax_actors.config.load import stages_of
from relax_actors.data.model_folder import prepare
from relax_actors.monitoring.progress import Progress
from tests.support.log_messages import metric
from tests.support.omni_data import small_data

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
GENERATED = ("config.md", "subjects.md", "algorithms.md", "refusals.md", "families.md", "rules.md")
WRITTEN = [page for page in PAGES if page.name not in GENERATED]
FILE_TYPES = ("json", "md", "png", "py", "toml")


def test_configuration_page_matches_the_schema() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "make_config.py"))["page"]
    assert (ROOT / "docs" / "config.md").read_text() == page()


def test_subjects_page_matches_the_code() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "make_subjects.py"))["page"]
    assert (ROOT / "docs" / "subjects.md").read_text() == page()


@pytest.mark.slow
def test_page_of_refusals_matches_the_checks() -> None:
    """Each case is refused for one reason, with a remedy, or the page cannot be made."""
    page = runpy.run_path(str(ROOT / "docs" / "make_refusals.py"))["page"]
    assert (ROOT / "docs" / "refusals.md").read_text() == page()


def test_algorithms_page_matches_the_presets_and_docstrings() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "make_algorithms.py"))["page"]
    assert (ROOT / "docs" / "algorithms.md").read_text() == page()


def test_page_of_rules_matches_the_rules() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "make_rules.py"))["page"]
    assert (ROOT / "docs" / "rules.md").read_text() == page()


def test_page_of_families_matches_the_tested_models() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "make_families.py"))["page"]
    assert (ROOT / "docs" / "families.md").read_text() == page()


def test_readme_shows_the_example_role() -> None:
    readme = (ROOT / "README.md").read_text()
    code = (ROOT / "examples" / "custom_role" / "length_penalty.py").read_text()
    shown = readme.split("```python\n", 1)[1].split("```", 1)[0]
    body = [line for line in shown.splitlines() if line.strip()]
    written = code.splitlines()
    assert all(line in written for line in body)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    for part in page.read_text().split("](")[1:]:
        target = part.split(")", 1)[0].split("#", 1)[0]
        if target and "://" not in target:
            assert (page.parent / target).exists(), target


def test_readme_terms_are_in_the_glossary() -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    headings = {title.lower().replace(" ", "-") for title in re.findall(r"^## (.+)$", glossary, re.MULTILINE)}
    linked = re.findall(r"\]\(docs/glossary\.md#([\w-]+)\)", (ROOT / "README.md").read_text())
    assert linked
    assert set(linked) <= headings


def test_code_blocks_show_tested_files_as_they_are() -> None:
    samples = runpy.run_path(str(ROOT / "docs" / "make_samples.py"))
    assert sum(page.read_text().count("<!-- examples/") for page in samples["pages"]()) > 5
    for page in samples["pages"]():
        assert page.read_text() == samples["filled"](page.read_text()), f"{page}: python docs/make_samples.py"
        markers = re.findall(r"^<!-- examples/", page.read_text(), re.MULTILINE)
        assert len(markers) == len(samples["BLOCK"].findall(page.read_text())), page


def test_index_lists_every_page() -> None:
    listed = set(re.findall(r"\]\(([\w/-]+\.md)\)", (ROOT / "docs" / "index.md").read_text()))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert listed == pages - {"index.md"}


@cache
def all_commands() -> Any:
    return typer.main.get_command(build([]))


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_options_exist(page: Path) -> None:
    for words in relax_commands(page.read_text()):
        command = all_commands()
        for word in words:
            command = getattr(command, "commands", {}).get(word, command)
        assert not getattr(command, "commands", {}), f"no command in {words}"
        known = {option for parameter in command.params for option in parameter.opts}
        used = {word.split("=", 1)[0] for word in words if re.match(r"--[a-z]", word)}
        assert used <= known, f"{command.name}: {used - known}"


def relax_commands(text: str) -> Iterator[list[str]]:
    """Arguments of every `relax` command in a page's code, without comments."""
    code = "\n".join(re.findall(r"```\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ").splitlines()
    for line in [*code, *re.findall(r"`(relax [^`]+)`", text.replace("\n", " "))]:
        command = re.match(r"(?:\S*/)?relax (.*)", line.strip())
        if command:
            yield shlex.split(command[1].replace("[", "").replace("]", ""), comments=True)


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_configuration_keys_exist(page: Path) -> None:
    text = page.read_text()
    named = re.findall(r"`((?:[a-z_]+\.)+[a-z_]+)(?: ?= ?[^`]*)?`", text)
    for key in {*named, *re.findall(r"\s([a-z]+\.[a-z_.]+)=\S", text)}:
        section, *names = key.split(".")
        if section in Config.model_fields and section != "roles" and names[-1] not in FILE_TYPES:
            assert is_key(Config, [section, *names]), key


def is_key(model: object, names: list[str]) -> bool:
    """Whether a path of names leads to a setting below a section of the schema."""
    if not names:
        return True
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return model is not None
    field = model.model_fields.get(names[0])
    if field is None:
        return False
    options = [field.annotation, *getattr(field.annotation, "__args__", ())]
    inner = next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)
    return is_key(inner if inner or len(names) == 1 else dict, names[1:])


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_make_targets_exist(page: Path) -> None:
    targets = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    used = re.findall(r"(?:^|`)make ([a-z][\w-]*)", page.read_text(), re.MULTILINE)
    assert set(used) <= set(targets)


@pytest.mark.parametrize("target", ["omni", "agents"])
def test_make_trains_all_tasks_or_those_that_are_named(target: str) -> None:
    def tasks(*settings: str) -> list[str]:
        command = ["make", "-n", target, *settings]
        told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=True).stdout
        found = re.search(rf"^for task in (.*); do .*\n\t*.* up examples/{target}/\$task\.toml ", told, re.MULTILINE)
        assert found is not None, told
        return found[1].split()

    every = tasks()
    assert len(every) == 4
    assert all((ROOT / "examples" / target / f"{task}.toml").is_file() for task in every)
    assert tasks(f"TASKS={every[2]} {every[0]}") == [every[2], every[0]]


THREATS = (ROOT / "docs" / "threat-model.md").read_text()
CLAIM = re.compile(
    r"\b(cannot|never|nobody|nothing|neither|no \w+|only|alone|refuse[sd]?|ignored?|out of reach)\b", re.IGNORECASE
)


def notes_of(page: str) -> dict[str, str]:
    """Footnotes of a page by name."""
    return dict(re.findall(r"^\[\^([\w-]+)\]: (.+)$", page, re.MULTILINE))


def test_notes_of_the_threat_model_name_tests_that_exist() -> None:
    notes = notes_of(THREATS)
    assert set(re.findall(r"\[\^([\w-]+)\](?!:)", THREATS)) == set(notes)
    for name, text in notes.items():
        files = re.findall(r"\[`([\w/.]+)`\]\(\.\./tests/\1\): ((?:`\w+`(?:, )?)+)(?:; |$)", text)
        assert "; ".join(f"[`{file}`](../tests/{file}): {tests}" for file, tests in files) == text, name
        for file, tests in files:
            nodes = ast.walk(ast.parse((ROOT / "tests" / file).read_text()))
            defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
            named = set(re.findall(r"`(\w+)`", tests))
            assert all(test.startswith("test_") for test in named), name
            assert named <= defined, f"{name}: {named - defined} not in {file}"


def test_claims_of_the_threat_model_have_a_note() -> None:
    """Each row of a table, item of a list, or paragraph that calls something impossible."""
    claims, _, _ = THREATS.partition("\n## Not defended against")
    _, _, claims = claims.partition("\n\n")[2].partition("\n\n")  # without the introduction
    blocks = [block for block in re.split(r"\n\n|\n(?=[-|])", claims) if CLAIM.search(block)]
    assert len(blocks) > 20
    assert [block for block in blocks if "[^" not in block] == []


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_source_files_exist(page: Path) -> None:
    folders = ("relax_actors", "broker", "benchmarks", "examples", "deploy", "docs", "tests")
    files = [f"/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.py")]
    for name in re.findall(r"`([\w./-]+\.py)(?: [^`]*)?`", page.read_text()):
        assert any(file.endswith(f"/{name}") for file in files), name


def test_pages_of_the_site_are_in_its_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n", 1)[1]
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert set(re.findall(r": (\S+\.md)", navigation)) == pages


def test_picture_of_the_live_view_loads_no_font(tmp_path: Path) -> None:
    progress = Progress("demo", 10)
    progress.take(metric("trainer", kind="step", step=3, reward=0.5, time=1))
    draw = runpy.run_path(str(ROOT / "docs" / "make_pictures.py"))["draw"]
    draw(progress, tmp_path / "picture.svg")
    text = (tmp_path / "picture.svg").read_text().replace("&#160;", " ")
    assert "4 of 10" in text
    assert "@font-face" not in text


def test_lines_of_the_pictured_live_view_are_explained() -> None:
    picture = (ROOT / "docs" / "live-view.svg").read_text().replace("&#160;", " ")
    page = (ROOT / "docs" / "first-run.md").read_text()
    shown = page.split("| line | shows |", 1)[1].split("\n\n", 1)[0]
    lines = re.findall(r"^\| (\w[\w -]*) \|", shown, re.MULTILINE)
    assert len(lines) > 5
    for line in lines:
        assert re.search(rf">{line} *<", picture), line


def test_package_and_project_have_the_same_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == relax_actors.__version__


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.toml")), ids=lambda path: path.stem)
def test_example_passes_the_check(path: Path, tmp_path: Path) -> None:
    config = load_config(path, [f"run.stage={name}" for name in stages_of(path)[:1]])
    for role, trained in {"teacher": "demo/demo", "judge": "judge/judge"}.items():
        if role in config.roles:
            # The model that another example trains.
            prepare(load_config(ROOT / "examples" / f"{trained}.toml"), tmp_path / "trained")
            save_file({"weight": np.zeros(1, np.float32)}, tmp_path / "trained" / "model.safetensors")
            config = load_config(path, [f"roles.{role}.model={tmp_path / 'trained'}"])
    if path.parent.name == "omni":
        config = load_config(path, small_data(path.stem, tmp_path))
    if config.model.path is None:
        assert examine(config).errors == ()
