"""Distributions with entry points that a test installs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Install = Callable[..., None]
CODE = """\
from dataclasses import dataclass

from relax_actors import Role, RoleSpec, StatefulRole
from relax_actors.data.task import Task
from relax_actors.engines.protocols.footprint import Footprint
from relax_actors.messages import Evaluation

@dataclass(frozen=True)
class Archive:
    step: int

def always(completion, prompt):
    return 1.0

def tasks(settings):
    return [Task("1>", "1")] * (settings.size or 3)

def signs(group):
    return group.rewards - group.rewards.mean()

class Judge(Role):
    reads = ("trajectory",)
    writes = "verdict"
    def handle(self, row):
        return 1

class Archivist(StatefulRole):
    spec = RoleSpec(writes=("archived",), numbered={"archive": Archive})

class Judgement(StatefulRole):
    spec = RoleSpec(numbered={"evaluation": Evaluation})

class Shelfa(StatefulRole):
    spec = RoleSpec(numbered={"archive": Archive})

class Shelfb(Shelfa):
    pass

class Usurper(StatefulRole):
    spec = RoleSpec(writes=("trajectory",))

class Teller(StatefulRole):
    writes = "told"

class Forger(StatefulRole):
    spec = RoleSpec(numbered={"critic": Archive})

class Silent(StatefulRole):
    pass

class Batchjudge(Judge):
    spec = RoleSpec(numbered={"batch": Archive})

class Batchreward(Batchjudge):
    writes = "reward"

class Batchrollout(Batchjudge):
    reads = ("prompt",)
    writes = "trajectory"

class Engine:
    def build(self, context):
        return "built"
    def check(self, config, model):
        yield f"engine of {model.name} takes {sorted(config.rollout.options)}"
    def server(self, config):
        return "acme_server"
    def footprint(self, config):
        return Footprint(parameter_bytes=1)

class NoEngine:
    def build(self, context):
        return "built"
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a distribution: a module and a dist-info with entry points, in a folder on the import path."""

    def make(name: str, entry_points: str, code: str = CODE, version: str = "1.2") -> None:
        site = tmp_path / f"site-{name}"
        info = site / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(entry_points)
        (site / f"{name}.py").write_text(code)
        monkeypatch.syspath_prepend(site)
        monkeypatch.delitem(sys.modules, name, raising=False)

    return make
