"""Checks of a user's role class: one line that names the class and the remedy."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from relax_actors.checks import examine
from relax_actors.config import load_config

DEMO = Path(__file__).parents[2] / "examples" / "demo" / "demo.toml"
ROLES = """\
from abc import ABC, abstractmethod
from relax_actors import Role
from relax_actors.errors import ConfigError

class Base(Role):
    reads = ("trajectory",)
    writes = "own"
    plain = 3
    budget: int = 4

    def handle(self, row):
        return 1

class WithArguments(Base):
    def __init__(self, budget, scale=2):
        self.budget = budget

class Checking(Base):
    def check(self, run):
        yield f"{run.role} may spend {self.budget} of {run.model.facts.context_length}"
        if self.budget > run.model.facts.context_length:
            raise ConfigError(f"roles.{run.role}.budget = {self.budget} is too much; lower it")
        1 / self.budget

class OwnBuild(WithArguments):
    @classmethod
    def build(cls, given, where):
        return cls(3)

class Failing(Base):
    def __init__(self):
        raise OSError("no model")

class Abstract(Base, ABC):
    @abstractmethod
    def score(self):
        pass

class Unhandled(Role):
    reads = ("trajectory",)

class BadAnnotation(Base):
    scale: "Unknown" = 3

no_class = 3
"""
Errors = Callable[..., tuple[str, ...]]


@pytest.fixture
def errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Errors:
    """Check a role of a module of the user, with options."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.chdir(tmp_path)
    files = {"checked_roles": ROLES, "checked_failing": "\n\nprint(undefined)\n", "checked_syntax": "def f(:\n"}
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()

    def check(actor: str, *options: str) -> tuple[str, ...]:
        settings = [f"roles.own.actor={actor}", *(f"roles.own.{option}" for option in options)]
        return examine(load_config(DEMO, settings)).errors

    return check


@pytest.mark.parametrize(
    ("actor", "options", "message"),
    [
        (
            "checked_roles.WithArguments",
            [],
            (
                "roles.own.actor: the constructor of WithArguments takes budget, scale; a role is made without "
                "arguments. Remove __init__, write options as annotated attributes of the class, e.g. "
                "`budget: int = 1`, and do other preparation in setup()"
            ),
        ),
        ("checked_roles.Failing", [], "roles.own: Failing() raised OSError: no model; do preparation in setup()"),
        (
            "checked_roles.Abstract",
            [],
            "roles.own.actor: Abstract is abstract: it lacks score; define them, or name a subclass",
        ),
        (
            "checked_roles.Unhandled",
            [],
            "roles.own.actor: Unhandled defines none of handle, handle_many, stream; define handle(row)",
        ),
        (
            "checked_roles.no_class",
            [],
            "roles.own.actor names 3, which is not a subclass of relax_actors.Role; write `class <Name>(Role):`",
        ),
        (
            "checked_roles.BadAnnotation",
            [],
            "roles.own: the annotations of BadAnnotation give no options: NameError: name 'Unknown' is not defined",
        ),
        ("checked_roles.Base", ["budgte=3"], "roles.own.budgte: unknown option of Base; did you mean 'budget'?"),
        ("checked_roles.Base", ["zzz=3"], "roles.own.zzz: unknown option of Base; known: budget"),
        (
            "checked_roles.Base",
            ["plain=5"],
            "roles.own.plain: Base.plain is no option without an annotation; write `plain: <type> = ...`",
        ),
        (
            "checked_roles.Base",
            ["budget=many"],
            "roles.own.budget: Input should be a valid integer, unable to parse string as an integer, got 'many'",
        ),
    ],
)
def test_a_role_class_that_cannot_run_is_refused(errors: Errors, actor: str, options: list[str], message: str) -> None:
    assert errors(actor, *options) == (message,)


def test_a_role_that_builds_itself_may_have_a_constructor(errors: Errors) -> None:
    assert errors("checked_roles.OwnBuild") == ()


def test_a_role_brings_its_own_check(errors: Errors) -> None:
    assert errors("checked_roles.Checking") == ()
    assert errors("checked_roles.Checking", "budget=65") == ("roles.own.budget = 65 is too much; lower it",)
    (error,) = errors("checked_roles.Checking", "budget=0")
    assert "Checking.check of role own raised ZeroDivisionError" in error


def test_an_import_error_names_file_and_line(errors: Errors, tmp_path: Path) -> None:
    assert errors("checked_failing.Own") == (
        (
            "roles.own.actor = 'checked_failing.Own': importing checked_failing raised NameError: name 'undefined' is "
            f"not defined ({tmp_path / 'checked_failing.py'}, line 3); fix the module"
        ),
    )
    assert errors("checked_syntax.Own") == (
        (
            "roles.own.actor = 'checked_syntax.Own': importing checked_syntax raised SyntaxError: invalid syntax "
            "(checked_syntax.py, line 1); fix the module"
        ),
    )
