"""Extensions are found by name, entry point or dotted path, and errors name the remedy."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.subjects import Subjects
from relax_actors.algorithms.advantages import Group
from relax_actors.algorithms.advantages.estimation import estimator_of
from relax_actors.checks import examine
from relax_actors.config import load_config
from relax_actors.data.sources import open_source
from relax_actors.engines.backends import inference_backend, scoring_backend, training_backend
from relax_actors.errors import ConfigError
from relax_actors.messages import Dropped, Prompt
from relax_actors.registry import Registry
from relax_actors.registry.catalog import ALL, INFERENCE_ENGINES, ROLES
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.rewards import load_reward
from relax_actors.roles import built_in_spec, make_role, role_class, role_names, spec_of, table_kinds
from relax_actors.roles.permissions import permissions
from relax_actors.runtime import StatefulRole, check_role
from relax_actors.supervision.assignment import parse, whole
from tests.support.messages import assert_says
from tests.support.running import TINY

DEMO = Path(__file__).parents[2] / "examples" / "demo" / "demo.toml"
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


@pytest.fixture(autouse=True)
def own_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a configuration makes the modules beside it importable; keep that to the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))


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


def prompt() -> Prompt:
    return Prompt("1>", np.zeros(1, np.int32), "1", {}, seed=0, min_version=0)


@pytest.mark.parametrize("registry", ALL, ids=lambda registry: registry.kind)
def test_every_built_in_entry_resolves(registry: Registry[object]) -> None:
    for name in registry.built_in:
        assert registry.load(name, registry.kind) is not None


def test_an_installed_reward_is_used_by_its_name(install: Install) -> None:
    install("acme_rewards", "[relax_actors.rewards]\nalways = acme_rewards:always\n")
    assert load_reward("always")("", prompt()) == 1.0
    assert "always" in next(registry for registry in ALL if registry.group == "relax_actors.rewards").names()


def test_an_installed_module_may_import_transformers(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = "relax_actors.torchaudio_extension"
    others = [finder for finder in sys.meta_path if type(finder).__module__ != hook]
    monkeypatch.setattr(sys, "meta_path", others)
    look = f"import sys\nhooks = [f for f in sys.meta_path if type(f).__module__ == {hook!r}]\n"
    install(
        "acme_media", "[relax_actors.rewards]\nmedia = acme_media:always\n", f"{look}def always(*_): return len(hooks)"
    )
    assert load_reward("media", "reward.function")("", prompt()) == 1


def test_an_installed_data_source_is_used_by_its_name(install: Install) -> None:
    install("acme_data", "[relax_actors.data_sources]\nhub = acme_data:tasks\n")
    assert load_config(DEMO, ["data.kind=hub"]).data.kind == "hub"
    assert len(open_source("hub", size=2)) == 2


def test_an_installed_estimator_is_used_by_its_name(install: Install) -> None:
    install("acme_algorithms", "[relax_actors.advantage_estimators]\nsigns = acme_algorithms:signs\n")
    config = load_config(DEMO, ["algorithm.advantage=signs"])
    advantages = estimator_of(config.algorithm)[0](Group(rewards=np.array([0, 1])))
    assert advantages.tolist() == [-0.5, 0.5]


def test_an_installed_role_is_used_by_its_name(install: Install) -> None:
    install("acme_roles", "[relax_actors.roles]\nreferee = acme_roles:Judge\n")
    for settings in (
        ["roles.referee.replicas=2"],
        ["roles.referee.actor=referee"],
        ["roles.referee.actor=acme_roles:Judge"],
    ):
        config = load_config(DEMO, settings)
        assert type(make_role(config, "referee")).__name__ == "Judge"
        spec = spec_of(config, "referee")
        assert (spec.reads, spec.writes, spec.single) == (("trajectory",), ("verdict", "dropped", "quarantined"), False)
        assert examine(config).errors == ()


def test_an_installed_engine_brings_its_build_its_check_and_its_server(install: Install) -> None:
    install("acme_engine", "[relax_actors.inference_engines]\nacme = acme_engine:Engine\n")
    for backend in ("acme", "acme_engine:Engine", "acme_engine.Engine"):
        config = load_config(DEMO, [f"rollout.backend={backend}", "rollout.options.level=3"])
        engine = inference_backend(config)
        assert engine.build(None) == "built"  # type: ignore[arg-type, comparison-overlap]
        assert engine.server(config) == "acme_server"
        findings = examine(config)
        assert findings.errors == ()
        assert any("takes ['level']" in note for note in findings.notes)


def test_an_engine_without_a_method_is_refused(install: Install) -> None:
    install("acme_engine", "[relax_actors.inference_engines]\nacme = acme_engine:NoEngine\n")
    said = "rollout.backend = 'acme': .* is not a usable inference engine: it has no check, server, footprint"
    with pytest.raises(ConfigError, match=said):
        inference_backend(load_config(DEMO, ["rollout.backend=acme"]))


def test_an_unknown_name_suggests_close_ones_and_lists_all() -> None:
    with pytest.raises(ConfigError, match="did you mean 'sglang'") as caught:
        load_config(DEMO, ["rollout.backend=sglnag"])
    assert "known: transformers, sglang, simulated" in str(caught.value)
    assert "'relax_actors.inference_engines', or a dotted path" in str(caught.value)


def test_an_entry_point_that_does_not_import_names_its_package_the_cause_and_the_remedy(install: Install) -> None:
    install("broken_rewards", "[relax_actors.rewards]\nnice = broken_rewards:nice\n", "import a_package_nobody_has\n")
    (error,) = examine(load_config(DEMO, ["reward.function=nice"])).errors
    assert error.startswith("reward.function = 'nice': entry point 'nice = broken_rewards:nice' of broken_rewards 1.2")
    assert_says(error, "a_package_nobody_has", "reinstall broken_rewards")


def test_an_entry_point_whose_object_is_missing_is_refused(install: Install) -> None:
    install("acme_rewards", "[relax_actors.rewards]\nnice = acme_rewards:absent\n")
    with pytest.raises(ConfigError, match=r"does not import: AttributeError: .*'absent'"):
        load_reward("nice")


def test_two_packages_that_register_one_name_are_refused(install: Install) -> None:
    install("first_engine", "[relax_actors.inference_engines]\nacme = first_engine:Engine\n")
    install("second_engine", "[relax_actors.inference_engines]\nacme = second_engine:Engine\n")
    said = "'acme': entry point .* and entry point .* both register this inference engine; uninstall (first|second)_"
    with pytest.raises(ConfigError, match=said):
        load_config(DEMO, ["rollout.backend=acme"])
    with pytest.raises(ConfigError, match=said):
        INFERENCE_ENGINES.check_installed()


def test_a_package_that_registers_a_built_in_name_is_refused_before_the_start(install: Install) -> None:
    install("shadow", "[relax_actors.rewards]\nexact_match = shadow:always\n")
    (error,) = examine(load_config(DEMO)).errors
    assert error.startswith("entry point 'exact_match = shadow:always' of shadow 1.2 registers the reward function")
    assert "which is built in; uninstall shadow" in error


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


def test_built_in_backends_are_found() -> None:
    config = load_config(DEMO)
    backends = (training_backend(config), scoring_backend("megatron", "roles.reference.backend"))
    assert [type(backend).__name__ for backend in backends] == ["TorchTrainingBackend", "MegatronScoringBackend"]


@pytest.mark.parametrize(
    ("settings", "components"),
    [
        ([], ()),
        (["reward.function={ exact_match = 0.5, positional_match = 1 }"], ("exact_match", "positional_match")),
        (["reward.components=['style', 'truth']"], ("style", "truth")),
    ],
)
def test_reward_components_are_the_keys_of_the_table_or_as_declared(
    settings: list[str], components: tuple[str, ...]
) -> None:
    default = ["reward.function=exact_match"]
    assert load_config(DEMO, [*default, *settings]).reward_components == components


def test_reward_components_are_distinct() -> None:
    with pytest.raises(ConfigError, match=r"reward.components must be distinct"):
        load_config(DEMO, ["reward.components=['style', 'style']"])


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


def test_functions_with_a_spec_are_entries_of_their_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "family_of_two.py").write_text(
        "from relax_actors.algorithms.advantages.baselines import group\n"
        "from relax_actors.algorithms.specs import AdvantageSpec\n"
        "def helper(group): return group.rewards\n"
        "@AdvantageSpec(min_samples=2)\ndef second(group): return helper(group)\n"
        "@AdvantageSpec()\ndef first(group): return helper(group)\n"
    )
    registry: Registry[Callable[..., object]] = Registry("estimator", "some.group", modules=["family_of_two"])
    assert list(registry.names()) == ["second", "first"]
    assert registry.load("first", "setting").__name__ == "first"
    with pytest.raises(ConfigError, match="helper"):
        registry.check("helper")
