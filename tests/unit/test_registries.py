"""Extensions are found by name, entry point or dotted path, and errors name the remedy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from relax_actors.algorithms.advantages import Group
from relax_actors.algorithms.advantages.estimation import estimator_of
from relax_actors.checks import examine
from relax_actors.config import load_config
from relax_actors.data.sources import open_source
from relax_actors.engines.backends import inference_backend, scoring_backend, training_backend
from relax_actors.errors import ConfigError
from relax_actors.messages import Prompt
from relax_actors.registry import Registry
from relax_actors.registry.catalog import ALL, INFERENCE_ENGINES
from relax_actors.rewards import load_reward
from relax_actors.roles import make_role, spec_of
from tests.support.installed import Install
from tests.support.messages import assert_says

pytestmark = pytest.mark.usefixtures("own_import_path")
DEMO = Path(__file__).parents[2] / "examples" / "demo" / "demo.toml"


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
