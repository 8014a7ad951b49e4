"""Roles of users with a spec: what it permits, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from broker.subjects import Subjects
from relax_actors.checks import examine
from relax_actors.config import load_config
from relax_actors.errors import ConfigError
from relax_actors.messages import Dropped, Prompt
from relax_actors.registry.catalog import ROLES
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.roles import built_in_spec, role_class, role_names, spec_of, table_kinds
from relax_actors.roles.permissions import permissions
from relax_actors.runtime import StatefulRole, check_role
from relax_actors.supervision.assignment import parse, whole
from tests.support.installed import Install
from tests.support.running import TINY
from tests.unit.test_registries import DEMO

pytestmark = pytest.mark.usefixtures("own_import_path")


@pytest.mark.parametrize("name", ROLES.built_in)
def test_a_role_is_single_if_it_owns_state_or_is_a_service_that_decides_for_the_run(name: str) -> None:
    cls = ROLES.load(name, "role")
    single = issubclass(cls, StatefulRole) or name == "autoscaler"
    assert built_in_spec(name).single == cls.spec.single == single  # type: ignore[attr-defined]


def test_roles_start_in_the_order_of_their_specs() -> None:
    config = load_config(DEMO, ["roles.actor_fwd.replicas=1"])
    assert role_names(config) == ["reward", "advantages", "evaluator", "prompts", "rollout", "actor_fwd", "trainer"]
    orders = [built_in_spec(name).start_order for name in role_names(config)]
    assert orders == sorted(orders)


def test_a_stateful_role_of_the_user_gets_the_permissions_that_its_spec_states(install: Install) -> None:
    install("acme_roles", "[relax_actors.roles]\nkeeper = acme_roles:Archivist\n")
    config = load_config(DEMO, ["run.name=demo", "roles.keeper.replicas=1"])
    allowed = permissions(config, "keeper")
    assert allowed.allows("relax.demo.group.3.1.archived", publish=True)
    assert allowed.allows("relax.demo.archive.3", publish=True)
    assert not allowed.allows("relax.demo.weights.3", publish=True)
    kinds = table_kinds([spec_of(config, "keeper")])
    assert kinds.numbered == (*table_kinds().numbered, "archive")
    assert "relax.demo.archive.*" in Subjects("demo").table_subjects(kinds)
    assert whole(config).single == ["keeper", "evaluator", "prompts", "trainer"]
    with pytest.raises(ConfigError, match="keeper owns state and has one actor"):
        parse(config, 1, "far", ["keeper=2"])
    assert parse(config, 1, "far", ["keeper"]).actors(config, "keeper") == ["keeper.0"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Usurper", "roles.own writes column 'trajectory', which a built-in role writes"),
        ("Judgement", "roles.own writes 'evaluation' cells, which the role evaluator writes"),
        ("Forger", "roles.own writes 'critic' cells, which are CriticVersion, not Archive; rename the kind"),
    ],
)
def test_a_stateful_role_cannot_write_the_cells_of_another_role(install: Install, name: str, said: str) -> None:
    install("acme_roles", "")
    (error,) = examine(load_config(DEMO, [f"roles.own.actor=acme_roles.{name}"])).errors
    assert said in error


def test_two_roles_of_the_user_cannot_write_the_same_numbered_cells(install: Install) -> None:
    install("acme_roles", "")
    settings = [f"roles.{name}.actor=acme_roles.Shelf{name}" for name in ("a", "b")]
    (error,) = examine(load_config(DEMO, settings)).errors
    assert "roles.b writes 'archive' cells, which roles.a writes" in error


def test_a_stateful_role_has_one_actor(install: Install) -> None:
    install("acme_roles", "")
    config = load_config(DEMO, ["roles.own.actor=acme_roles.Silent", "roles.own.replicas=2"])
    assert examine(config).errors == ("roles.own.replicas = 2: the role owns state and has one actor; set 1",)


def test_a_node_may_report_its_inference_servers() -> None:
    allowed = permissions(load_config(DEMO, ["run.name=demo"]), "node")
    assert allowed.allows("relax.demo.event.server.0.crashed", publish=True)


def test_a_stateful_role_without_a_spec_may_write_its_column_only(install: Install) -> None:
    install("acme_roles", "[relax_actors.roles]\nsilent = acme_roles:Silent\nteller = acme_roles:Teller\n")
    config = load_config(DEMO, ["run.name=demo", "roles.silent.replicas=1", "roles.teller.replicas=1"])
    cells = [f"relax.demo.{cell}" for cell in ("group.3.1.told", "group.3.1.dropped", "batch.3", "eval.3.1.told")]
    allowed = {name: permissions(config, name) for name in ("silent", "teller")}
    assert [cell for cell in cells if allowed["teller"].allows(cell, publish=True)] == cells[:1]
    assert not any(allowed["silent"].allows(cell, publish=True) for cell in cells)
    assert allowed["silent"].allows("relax.demo.event.silent.0.ready", publish=True)


@pytest.mark.parametrize(
    ("numbered", "said"),
    [
        (("summary",), "give the dataclass of each kind"),
        ({"summary": "Summary"}, "give the dataclass of each kind"),
        ({"summary": Dropped("too_old", "")}, "give the dataclass of each kind"),
        ({5: Prompt}, "give the dataclass of each kind"),
        ({"group": Prompt}, "'group', a kind of rows"),
        ({"event": Prompt}, "'event' cannot name cells"),
        ({"request": Prompt}, "'request' cannot name cells"),
        ({"*": Prompt}, "'*' cannot be part of a subject"),
        ({"env.>": Prompt}, "'env.>' cannot be part of a subject"),
    ],
)
def test_numbered_cells_of_a_spec_without_a_usable_kind_or_class_are_refused(numbered: Any, said: str) -> None:
    own = type("Own", (StatefulRole,), {"spec": RoleSpec(numbered=numbered), "reads": ("reward",)})
    with pytest.raises(ConfigError, match=re.escape(said)) as refused:
        check_role(own, "roles.own.actor")
    assert str(refused.value).startswith("roles.own.actor: Own.spec.numbered")


@pytest.mark.parametrize("section", ["reward", "rollout", "roles.judge"])
def test_a_role_of_a_pool_has_no_numbered_cells(install: Install, section: str) -> None:
    install("acme_roles", "")
    config = load_config(DEMO, [f"{section}.actor=acme_roles.Batch{section.removeprefix('roles.')}"])
    with pytest.raises(
        ConfigError, match=rf"{section}\.actor: .*numbered: a numbered cell has one owner.*StatefulRole"
    ):
        permissions(config, section.removeprefix("roles."))


def test_a_note_of_a_spec_under_the_key_of_another_is_refused() -> None:
    class Noter(StatefulRole):
        spec = RoleSpec(notes=("lease.trainer.0",))

    with pytest.raises(ConfigError, match=r"'lease\.trainer\.0'; .*'note\.'"):
        check_role(Noter, "roles.own.actor")


OWN_ROLES = """
from relax_actors import Role, StatefulRole

class Training(Role):
    reads = ("prompt", "trajectory")
    writes = "reward"
    def handle(self, row): return [0.0]

class Everything(Training):
    kinds = ("group", "eval")

class Unread(Everything):
    reads = ("trajectory",)

class Nobody(Everything):
    reads = ("prompt", "trajectory", "nobody_writes_this")

class Cycle(Everything):
    reads = ("prompt", "trajectory", "advantage")

class Other(Everything):
    writes = "other"

class Owner(StatefulRole):
    writes = "reward"
"""


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Training", r"has kinds \('group',\); with \[eval\] they must be"),
        ("Unread", r"must read \['prompt', 'trajectory'\]"),
        ("Nobody", "only columns that roles of"),
        ("Cycle", "only columns that roles of"),
        ("Other", "writes column 'reward', not 'other'"),
        ("Owner", "must be a pool role"),
    ],
)
def test_role_that_cannot_replace_a_built_in_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    (tmp_path / "own_rewards.py").write_text(OWN_ROLES)
    monkeypatch.syspath_prepend(tmp_path)
    evaluated = ["eval.data.kind=python", "eval.data.function=tiny_tasks.make"]
    config = load_config(TINY, [f"reward.actor=own_rewards.{name}", *evaluated])
    with pytest.raises(ConfigError, match=why):
        role_class(config, "reward")
    good = load_config(TINY, ["reward.actor=own_rewards.Everything", *evaluated])
    assert role_class(good, "reward").__name__ == "Everything"
