"""Section [algorithm]: presets, overrides, sources, and refusals of what makes no sense."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from relax_actors.algorithms.formulas import formulas, needs
from relax_actors.algorithms.function_check import notes
from relax_actors.algorithms.refusals import refusals
from relax_actors.algorithms.specs import settings_read
from relax_actors.cli.algorithms import algorithm_lines
from relax_actors.cli.main import build
from relax_actors.config import load_config
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.config.load import set_by
from relax_actors.config.presets import PRESETS, leaves
from relax_actors.errors import ConfigError
from relax_actors.registry import Registry, catalog
from relax_actors.supervision.resume import compare
from tests.support.messages import assert_says

EXAMPLES = Path(__file__).parents[2] / "examples"
DEMO = EXAMPLES / "demo" / "demo.toml"


def run_with(preset: str) -> Path:
    """Return a configuration whose rows are those of a preset."""
    rows = PRESETS[preset].settings.get("rows")
    return DEMO if rows is None else EXAMPLES / ("dpo/dpo.toml" if rows == "pairs" else "sft/sft.toml")


@pytest.mark.parametrize("name", PRESETS)
def test_preset_sets_its_settings(name: str) -> None:
    algorithm = dict(leaves(AlgorithmSection(name=name).model_dump()))
    for key, value in leaves(PRESETS[name].settings):
        assert algorithm[key] == value, key
    defaults = dict(leaves(AlgorithmSection().model_dump()))
    losses = {key for key in (*algorithm, *defaults) if key.startswith("pairs.losses.")}
    named = {"name", *losses, *dict(leaves(PRESETS[name].settings))}
    assert {key: value for key, value in algorithm.items() if key not in named} == {
        key: value for key, value in defaults.items() if key not in named
    }


@pytest.mark.parametrize("name", PRESETS)
def test_any_setting_of_a_preset_can_be_overridden(name: str) -> None:
    config = load_config(
        run_with(name), [f"algorithm.name={name}", "algorithm.clip_high=0.5", "algorithm.kl.coefficient=0.7"]
    )
    assert config.algorithm.clip_high == 0.5
    assert config.algorithm.kl.coefficient == 0.7
    assert config.algorithm.kl.place == AlgorithmSection(name=name).kl.place


def test_unknown_preset_is_refused_with_a_suggestion() -> None:
    known = ", ".join(PRESETS)
    message = f"{DEMO}: algorithm: algorithm.name = 'gsop' is not a known preset; did you mean 'gspo'? known: {known}"
    with pytest.raises(ConfigError) as caught:
        load_config(DEMO, ["algorithm.name=gsop"])
    assert str(caught.value) == message


def test_resolved_settings_are_stored_and_compared_when_a_run_resumes() -> None:
    saved = load_config(DEMO, ["algorithm.name=dr_grpo"])
    spelled = [f"algorithm.{key}={json.dumps(value)}" for key, value in leaves(PRESETS["dr_grpo"].settings)]
    changed = compare(saved, load_config(DEMO, spelled))
    assert {change.key for change in changed} - {"run.folder"} == {"algorithm.name"}
    assert {c.key for c in compare(saved, load_config(DEMO))} > {"algorithm.scale", "algorithm.aggregate"}


def test_sources_of_settings_are_shown() -> None:
    overrides = ["algorithm.name=dr_grpo", "algorithm.clip_high=0.28"]
    shown = [line.split() for line in algorithm_lines(load_config(DEMO, overrides), set_by(DEMO, overrides))]
    assert shown[0][:2] == ["algorithm:", "dr_grpo;"]
    assert "settings have their defaults" in " ".join(shown[0])
    found = {name: (value, " ".join(source)) for name, value, *source in shown[1:]}
    assert found["clip_high"] == ("0.28", "override")
    assert found["scale"] == ('"none"', "preset dr_grpo")
    assert found["length"] == ("6", "from rollout.max_tokens")
    assert "dual_clip" not in found
    assert "tau_pos" not in found
    assert "kl.coefficient" not in found


def test_lengths_follow_from_the_longest_completion() -> None:
    assert load_config(DEMO, ["algorithm.name=dapo", "rollout.max_tokens=50"]).algorithm.shaping.overlong_buffer == 10
    assert load_config(DEMO, ["algorithm.shaping.overlong=true"]).algorithm.shaping.overlong_buffer == 1
    kept = load_config(DEMO, ["algorithm.name=dapo", "algorithm.shaping.overlong_buffer=3"])
    assert kept.algorithm.shaping.overlong_buffer == 3


def test_settings_of_the_file_are_named_as_such(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[algorithm]\nclip_low = 0.1\n[algorithm.kl]\nplace = 'loss'\n")
    assert set_by(file, ["algorithm.clip_high=0.3"]) == {
        "algorithm.clip_low": "file",
        "algorithm.kl.place": "file",
        "algorithm.clip_high": "override",
    }


def test_override_of_a_table_replaces_the_settings_of_the_file_in_it(tmp_path: Path) -> None:
    file = tmp_path / "distil.toml"
    file.write_text('[algorithm.distil]\nplace = "loss"\ntop_k = 12\n')
    assert set_by(file, ['algorithm.distil={place="advantage"}']) == {"algorithm.distil.place": "override"}


def test_check_prints_the_settings_and_refuses_what_makes_no_sense() -> None:
    result = CliRunner().invoke(build(["check"]), ["check", str(DEMO), "algorithm.whiten=samples"])
    assert result.exit_code == 2
    assert_says(result.stderr, 'algorithm.whiten = "samples"', 'algorithm.scale = "group_std"')
    assert 'set algorithm.scale = "none"' in result.stderr
    assert '\n  whiten                       "samples"                override\n' in result.stderr


ON_POLICY = "staleness.max=0"
OVERLONG = "algorithm.shaping.overlong=true"
ECHO = "environment.name=tests.support.environments.Echo"


SPELLED = {
    "algorithm.scale": ("rae", "algorithm.scale=group_std", 'algorithm.advantage = "ema"'),
    "algorithm.ratio": ("vespo", "algorithm.ratio=token", 'algorithm.surrogate = "gamma"'),
    "algorithm.clip_high": ("sapo", "algorithm.clip_high=0.2", 'algorithm.surrogate = "gate"'),
}


@pytest.mark.parametrize("setting", SPELLED)
def test_settings_that_are_spelled_with_their_default_are_refused_if_nothing_reads_them(setting: str) -> None:
    name, override, cause = SPELLED[setting]
    overrides = [f"algorithm.name={name}", override]
    found = list(refusals(load_config(DEMO, overrides), set_by(DEMO, overrides)))
    assert [line.split("; ")[0].partition(" has no effect with ")[::2] for line in found] == [
        (override.replace("=", " = ") if "clip" in override else override.replace("=", ' = "') + '"', cause)
    ]
    shown = CliRunner().invoke(build(["check"]), ["check", str(DEMO), *overrides])
    assert (shown.exit_code, f"error: {found[0]}" in shown.stderr) == (2, True)


def test_settings_that_repeat_the_preset_are_not_refused() -> None:
    overrides = ["algorithm.name=vespo", "algorithm.ratio=sequence_product"]
    assert list(refusals(load_config(DEMO, overrides), set_by(DEMO, overrides))) == []


def test_overlong_penalty_of_an_episode_follows_from_its_token_budget() -> None:
    config = load_config(DEMO, [OVERLONG, ECHO, "environment.token_budget=90"])
    assert config.algorithm.shaping.overlong_buffer == 18
    assert list(refusals(config)) == []


def test_kl_cov_of_one_update_on_policy_is_noted() -> None:
    note = (
        'algorithm.surrogate = "kl_cov" with staleness.max = 0 and one update of a batch is the plain policy gradient: '
        "log-ratios are 0, and so is the gradient of their penalty; set trainer.minibatches or trainer.epochs above 1, "
        "or staleness.max above 0"
    )
    assert note in notes(load_config(DEMO, ["algorithm.name=kl_cov", ON_POLICY]))
    assert note not in notes(load_config(DEMO, ["algorithm.name=kl_cov", ON_POLICY, "trainer.epochs=2"]))


EPISODES = ("environment.name=x.Environment", "reward.function=environment")
COMPLETED = {
    "echo": EPISODES,
    "hierarchical_grpo": (*EPISODES, "environment.players=['a', 'b']", "algorithm.rivals=['a', 'b']"),
    "vapo": ("critic.warmup_steps=0",),
    "ppo": ("critic.warmup_steps=0", "roles.reference.replicas=1"),
    "rloo": ("roles.reference.replicas=1",),
    "reinforce_pp": ("roles.reference.replicas=1",),
    "optimal_token_baseline": ("roles.squares.actor=x.Squares",),
    "optimal_turn_baseline": ("roles.squares.actor=x.Squares",),
    "opd": ("roles.teacher.actor=x.Teacher",),
    "self_distill": ("roles.teacher.actor=x.Teacher",),
}


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_not_refused_with_what_it_needs(name: str) -> None:
    overrides = [f"algorithm.name={name}", ON_POLICY, *COMPLETED.get(name, ())]
    assert list(refusals(load_config(run_with(name), overrides))) == []


@pytest.mark.parametrize("registry", [catalog.ADVANTAGES, catalog.POLICY_LOSSES], ids=["advantages", "losses"])
def test_functions_have_formulas_and_read_settings_of_the_section(registry: Registry[Any]) -> None:
    for name in registry.built_in:
        function = registry.load(name, "")
        assert function.spec.formula, name
        assert function.spec.latex, name
        assert settings_read(function) <= set(AlgorithmSection.model_fields), name


@pytest.mark.parametrize(
    ("registry", "name", "settings"),
    [
        (catalog.ADVANTAGES, "gae", {"gamma", "gae_lambda", "gae_alpha", "critic_lambda"}),
        (catalog.ADVANTAGES, "ema", {"ema_decay"}),
        (catalog.POLICY_LOSSES, "score", set()),
        (catalog.POLICY_LOSSES, "geometric", {"clip_low", "clip_high"}),
        (catalog.POLICY_LOSSES, "kl_cov", {"ratio", "covariance_share", "covariance_coefficient"}),
        (
            catalog.POLICY_LOSSES,
            "clip_cov",
            {"ratio", "clip_low", "clip_high", "covariance_share", "covariance_bounds"},
        ),
    ],
)
def test_settings_of_a_function_are_its_parameters_and_those_read_for_it(
    registry: Registry[Any], name: str, settings: set[str]
) -> None:
    assert settings_read(registry.load(name, "")) == settings


def commands(*arguments: str) -> str:
    result = CliRunner().invoke(build(["algorithms"]), ["algorithms", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_algorithms_are_listed_with_formula_source_and_needs() -> None:
    listed = [json.loads(line) for line in commands("--json").splitlines()]
    assert [found["name"] for found in listed] == list(PRESETS)
    ppo = next(found for found in listed if found["name"] == "ppo")
    assert ppo["source"] == "arXiv 1707.06347"
    assert all(found["figures"] for found in listed)
    assert ppo["needs"] == ["reference", "critic"]
    table = commands()
    assert all(name in table for name in PRESETS)
    assert "2507.18071" in table


def test_algorithm_is_shown_in_full() -> None:
    shown = commands("gspo")
    assert shown.startswith("gspo: GSPO, arXiv 2507.18071\n")
    assert "  ratio        R = exp(mean over the sample of (lp - old))\n" in shown
    assert "  needs        rewards only\n" in shown
    settings = shown.split("sets\n", 1)[1]
    assert tomllib.loads(settings) == dict(leaves(PRESETS["gspo"].settings))


def test_formulas_follow_overridden_settings() -> None:
    section = AlgorithmSection.model_validate({"name": "gspo", "scale": "none", "kl": {"place": "loss"}})
    plain = {formula.part: formula.plain for formula in formulas(section)}
    assert plain["advantage"] == "A = r - mean(r)"
    assert plain["KL"] == "+ coefficient (exp(-x) - 1 + x) in the loss of each token, with x = lp - ref"
    assert needs(section) == ["reference"]


def every_formula() -> Iterator[str]:
    for name in PRESETS:
        yield from (formula.latex for formula in formulas(AlgorithmSection(name=name)))


def test_braces_of_formulas_are_balanced() -> None:
    for latex in every_formula():
        assert latex.replace(r"\{", "").replace(r"\}", "").count("{") == latex.replace(r"\}", "").count("}"), latex


OWN = """
from relax_actors.algorithms.specs import AdvantageSpec, LossSpec

@AdvantageSpec(equal_rewards="signal", formula="r - 1", latex="r_i - 1")
def shifted(group): return group.rewards - 1

@LossSpec(ratio="none", formula="-A lp / 2", latex=r"-A lp / 2")
def half(inputs): return -inputs.advantages * inputs.logprobs / 2
"""


def test_functions_of_the_user_declare_facts_as_built_in_ones_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_facts.py").write_text(OWN)
    filtered = "algorithm.shaping.filter_zero_variance=true"
    overrides = ["algorithm.advantage=own_facts.shifted", "algorithm.surrogate=own_facts.half", filtered]
    config = load_config(DEMO, [*overrides, "staleness.max=1"])
    lines = list(refusals(config))
    assert any("own_facts.shifted" in line and "has a signal" in line for line in lines)
    assert any("own_facts.half" in line and "has no ratio" in line for line in lines)
    plain = {formula.part: formula.plain for formula in formulas(config.algorithm)}
    assert plain["loss"] == "-A lp / 2"
    assert "r - 1" in plain["advantage"]
    assert "on-policy data" in needs(config.algorithm)
