"""Section [algorithm]: presets, overrides, sources, and refusals of what makes no sense."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from relax_actors.algorithms.formulas import formulas, needs
from relax_actors.algorithms.notes import notes
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

DEMO = Path(__file__).parents[2] / "examples" / "demo" / "demo.toml"


@pytest.mark.parametrize("name", PRESETS)
def test_preset_sets_its_settings(name: str) -> None:
    algorithm = dict(leaves(AlgorithmSection(name=name).model_dump()))
    for key, value in leaves(PRESETS[name].settings):
        assert algorithm[key] == value, key
    defaults = dict(leaves(AlgorithmSection().model_dump()))
    named = {"name", *dict(leaves(PRESETS[name].settings))}
    assert {key: value for key, value in algorithm.items() if key not in named} == {
        key: value for key, value in defaults.items() if key not in named
    }


@pytest.mark.parametrize("name", PRESETS)
def test_any_setting_of_a_preset_can_be_overridden(name: str) -> None:
    config = load_config(DEMO, [f"algorithm.name={name}", "algorithm.clip_high=0.5", "algorithm.kl.coefficient=0.7"])
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
    assert f"error: {REFUSED['whiten and scale'].message}\n" in result.stderr
    assert '\n  whiten                       "samples"                override\n' in result.stderr


ON_POLICY = "staleness.max=0"
FILTERED = "algorithm.shaping.filter_zero_variance=true"
OVERLONG = "algorithm.shaping.overlong=true"
ECHO = "environment.name=tests.support.environments.Echo"
TAUGHT = ("algorithm.name=opd", "roles.teacher.actor=x.Teacher")


class Refused(NamedTuple):
    """Settings that are refused, and the whole message."""

    overrides: tuple[str, ...]
    message: str


REFUSED = {
    "idle bound": Refused(
        ("algorithm.name=sapo", "algorithm.clip_high=0.5"),
        'algorithm.clip_high = 0.5 has no effect with algorithm.surrogate = "gate"; set algorithm.surrogate '
        'to "clip" or "clip_weight" or "geometric" or "divergence_mask" or "clip_cov", or remove it',
    ),
    "idle dual clip": Refused(
        ("algorithm.name=cispo", "algorithm.dual_clip=3"),
        'algorithm.dual_clip = 3.0 has no effect with algorithm.surrogate = "clip_weight"; set '
        'algorithm.surrogate = "clip", or remove it',
    ),
    "idle length": Refused(
        ("algorithm.length=9",),
        'algorithm.length = 9 has no effect with algorithm.aggregate = "token_mean"; set algorithm.aggregate '
        '= "constant", or remove it',
    ),
    "idle coefficient": Refused(
        ("algorithm.kl.coefficient=0.1",),
        'algorithm.kl.coefficient = 0.1 has no effect with algorithm.kl.place = "none"; set '
        'algorithm.kl.place to "loss" or "reward", or remove it',
    ),
    "idle bound of tis": Refused(
        ("algorithm.proximal=trainer", "algorithm.correction.kind=tis", "algorithm.correction.low=0.2"),
        'algorithm.correction.low = 0.2 has no effect with algorithm.correction.kind = "tis"; set '
        'algorithm.correction.kind = "icepop", or remove it',
    ),
    "idle lambda": Refused(
        ("algorithm.gae_lambda=0.9",),
        'algorithm.gae_lambda = 0.9 has no effect with algorithm.advantage = "group"; set '
        'algorithm.advantage = "gae", or remove it',
    ),
    "one sample": Refused(
        ("rollout.group_size=1",),
        'rollout.group_size = 1 leaves algorithm.advantage = "group" no other sample to compare with; set '
        'rollout.group_size to 2 or more, or algorithm.advantage to "greedy", "ema", "returns" or "gae"',
    ),
    "no critic": Refused(
        ("algorithm.advantage=gae", "algorithm.scale=none"),
        'algorithm.advantage = "gae" needs the values of a critic; add the section [critic]',
    ),
    "no squared probabilities": Refused(
        ("algorithm.name=optimal_token_baseline",),
        'algorithm.advantage = "optimal_token" needs the sum of the squared probabilities at each token; add '
        "[roles.squares]",
    ),
    "no greedy sample": Refused(
        ("algorithm.name=remax", ON_POLICY, "rollout.actor=my.Rollout"),
        'algorithm.advantage = "greedy" needs one more, greedy sample of each prompt, which rollout.actor = '
        '"my.Rollout" does not generate; use the built-in rollout, or another algorithm.advantage',
    ),
    "negative rewards": Refused(
        ("algorithm.name=max_rl", "algorithm.shaping.overlong=true"),
        'algorithm.advantage = "mean_ratio" divides by the mean reward and needs rewards of at least 0, '
        "which algorithm.shaping.overlong = true can make negative; remove one of them",
    ),
    "whiten and scale": Refused(
        ("algorithm.whiten=samples",),
        'algorithm.whiten = "samples" with algorithm.scale = "group_std" normalises twice; set '
        'algorithm.scale = "none", or algorithm.whiten = "none"',
    ),
    "whiten rloo": Refused(
        ("algorithm.name=rloo", ON_POLICY, "algorithm.whiten=samples"),
        'algorithm.whiten = "samples" puts back the standard deviation that algorithm.advantage = "rloo" '
        'leaves out; set algorithm.whiten = "none", or algorithm.advantage = "group"',
    ),
    "decoupled rloo": Refused(
        ("algorithm.name=gdpo", "algorithm.advantage=rloo", "algorithm.whiten=none"),
        'algorithm.components = "decoupled" normalises each component within the group; set '
        'algorithm.advantage = "group" instead of "rloo", or algorithm.components = "sum"',
    ),
    "one component": Refused(
        ("algorithm.name=gdpo", "reward.function.exact_match=1", "reward.components=['only']"),
        'algorithm.components = "decoupled" needs 2 or more reward components, this run has 1; make '
        "reward.function a table of functions with weights, or set reward.components",
    ),
    "unknown component": Refused(
        ("algorithm.name=gdpo", "algorithm.weights.style=2"),
        "algorithm.weights names 'style'; the reward components of the run are 'exact_match', 'positional_match'",
    ),
    "length-weighted ratio": Refused(
        ("algorithm.name=gspo", "algorithm.aggregate=token_mean"),
        'algorithm.ratio = "sequence_mean" with algorithm.aggregate = "token_mean" weighs samples by their '
        'length; set algorithm.aggregate = "sample_mean_of_means", or "sample_weight_length" for LUSPO',
    ),
    "luspo of tokens": Refused(
        ("algorithm.aggregate=sample_weight_length",),
        'algorithm.aggregate = "sample_weight_length" with algorithm.ratio = "token" is the mean of sums; '
        'set algorithm.ratio = "sequence_mean" for LUSPO, or algorithm.aggregate = "sample_mean_of_sums"',
    ),
    "clip of no ratio": Refused(
        ("algorithm.name=rloo", "algorithm.surrogate=clip"),
        'algorithm.surrogate = "clip" reads a ratio, and algorithm.ratio is "none"; set algorithm.ratio = '
        '"token", or algorithm.surrogate = "score"',
    ),
    "covariance without a ratio": Refused(
        ("algorithm.name=clip_cov", "algorithm.ratio=none"),
        'algorithm.surrogate = "clip_cov" reads a ratio, and algorithm.ratio is "none"; set algorithm.ratio = '
        '"token", or algorithm.surrogate = "score"',
    ),
    "samples whitened by tokens": Refused(
        ("algorithm.advantage=returns", "algorithm.scale=none", "algorithm.whiten=samples"),
        'algorithm.whiten = "samples" needs one advantage for each sample, and algorithm.advantage = "returns" has '
        'one for each token; set algorithm.whiten = "tokens" or "none"',
    ),
    "overlong buffer": Refused(
        ("algorithm.name=dapo", "rollout.max_tokens=6", "algorithm.shaping.overlong_buffer=100"),
        "algorithm.shaping.overlong_buffer = 100 is more than rollout.max_tokens = 6; set it to at most that, or leave "
        "it out for a fifth of it",
    ),
    "opsm of equal policies": Refused(
        ("algorithm.proximal=trainer", "algorithm.reject.opsm=1e-4"),
        "algorithm.reject.opsm = 0.0001 bounds the log-ratio of the proximal to the trained policy, which is 0 while a "
        'batch is trained once; set algorithm.proximal = "rollout", or trainer.minibatches above 1',
    ),
    "stale score": Refused(
        ("algorithm.name=rloo",),
        'algorithm.surrogate = "score" has no ratio, and staleness.max = 1 trains samples of older weights; '
        'set staleness.max = 0, algorithm.correction.kind = "tis", or algorithm.surrogate = "clip"',
    ),
    "score in several updates": Refused(
        ("algorithm.name=rloo", ON_POLICY, "trainer.epochs=2"),
        'algorithm.surrogate = "score" has no ratio, and 2 updates of a batch train samples of older '
        'weights; set trainer.minibatches = 1 and trainer.epochs = 1, algorithm.correction.kind = "tis", or '
        'algorithm.surrogate = "clip"',
    ),
    "bound below zero": Refused(
        ("algorithm.clip_low=1.5",),
        "algorithm.clip_low = 1.5 is the distance of the lower bound from 1, which is then below 0; set it "
        "to 1 for no lower bound, or to less",
    ),
    "k1 in the loss": Refused(
        ("algorithm.kl.place=loss", "algorithm.kl.kind=k1"),
        'algorithm.kl.kind = "k1" as a term of the loss has an expected gradient of 0; set algorithm.kl.kind '
        '= "k2" or "k3", or algorithm.kl.place = "reward"',
    ),
    "KL without a reference": Refused(
        ("algorithm.name=reinforce_pp",),
        'algorithm.kl.place = "reward" needs log-probs of the reference before the advantages; add '
        '[roles.reference], or set algorithm.kl.place = "loss"',
    ),
    "weight of 1": Refused(
        ("algorithm.correction.kind=tis",),
        'algorithm.correction.kind = "tis" weighs by the proximal policy over the rollout policy, which are '
        'the same here; set algorithm.proximal to "trainer" or "actor_fwd"',
    ),
    "normalised weights inside a sample": Refused(
        (
            *("algorithm.name=vespo", "algorithm.proximal=trainer", "algorithm.correction.kind=tis"),
            "algorithm.correction.normalise=tokens",
        ),
        'algorithm.correction.normalise = "tokens" with algorithm.surrogate = "gamma" would scale the weights inside a '
        "number of the whole sample, before their mean over the step is known; set algorithm.correction.normalise = "
        '"none"',
    ),
    "no lower bound": Refused(
        ("algorithm.proximal=trainer", "algorithm.correction.kind=icepop", "algorithm.correction.low=0"),
        "algorithm.correction.low = 0 is no lower bound of a ratio; set it between 0 and 1, such as 0.5, or "
        'use algorithm.correction.kind = "tis"',
    ),
    "no teacher": Refused(
        ("algorithm.name=opd",),
        'algorithm.distil.place = "advantage" needs a teacher; add [roles.teacher] with model = "<folder>", '
        "server = <URL>, or hint for self-distillation",
    ),
    "nothing to train": Refused(
        ("algorithm.advantage=none",),
        'algorithm.advantage = "none" trains nothing without distillation; set algorithm.distil.place, or '
        "another algorithm.advantage",
    ),
    "decoupled scale": Refused(
        ("algorithm.name=gdpo", "algorithm.scale=batch_std"),
        'algorithm.scale = "batch_std" has no effect with algorithm.components = "decoupled"; set algorithm.components '
        '= "sum", or remove it',
    ),
    "decoupled penalty": Refused(
        ("algorithm.name=gdpo", "algorithm.shaping.overlong=true"),
        'algorithm.shaping.overlong = true changes the sum of the rewards, which algorithm.components = "decoupled" '
        "does not read; make it a function of reward.function with a weight of its own, or remove it",
    ),
    "decoupled length penalty": Refused(
        ("algorithm.name=gdpo", "algorithm.shaping.length_penalty=0.5"),
        "algorithm.shaping.length_penalty = 0.5 changes the sum of the rewards, which algorithm.components = "
        '"decoupled" does not read; make it a function of reward.function with a weight of its own, or remove it',
    ),
    "decoupled KL": Refused(
        ("algorithm.name=gdpo", "algorithm.kl.place=reward", "algorithm.kl.kind=k1", "roles.reference.replicas=1"),
        'algorithm.kl.place = "reward" changes the sum of the rewards, which algorithm.components = "decoupled" does '
        'not read; set algorithm.kl.place = "loss" with algorithm.kl.kind = "k2" or "k3"',
    ),
    "divergence of an advantage": Refused(
        (*TAUGHT, "algorithm.distil.kind=jsd"),
        'algorithm.distil.kind = "jsd" has no effect with algorithm.distil.place = "advantage"; set '
        'algorithm.distil.place = "loss", or remove it',
    ),
    "top tokens of an advantage": Refused(
        (*TAUGHT, "algorithm.distil.top_k=5"),
        'algorithm.distil.top_k = 5 has no effect with algorithm.distil.place = "advantage"; set '
        'algorithm.distil.place = "loss", or remove it',
    ),
    "tail of nothing": Refused(
        (*TAUGHT, "algorithm.distil.place=loss", "algorithm.distil.tail=drop"),
        'algorithm.distil.tail = "drop" has no effect with algorithm.distil.top_k unset; set algorithm.distil.top_k, '
        "or remove it",
    ),
    "mixture of one": Refused(
        (*TAUGHT, "algorithm.distil.place=loss", "algorithm.distil.top_k=5", "algorithm.distil.teacher_weight=0.3"),
        'algorithm.distil.teacher_weight = 0.3 has no effect with algorithm.distil.kind = "reverse_kl"; set '
        'algorithm.distil.kind = "jsd", or remove it',
    ),
    "whitened zeros": Refused(
        (*TAUGHT, "algorithm.whiten=tokens"),
        'algorithm.whiten = "tokens" acts on the advantages of rewards, which are 0 with algorithm.advantage = "none", '
        'and not on the signal of a teacher; set algorithm.whiten = "none"',
    ),
    "scaled zeros": Refused(
        (*TAUGHT, "algorithm.scale=batch_std"),
        'algorithm.scale = "batch_std" acts on the advantages of rewards, which are 0 with algorithm.advantage = '
        '"none", and not on the signal of a teacher; set algorithm.scale = "none"',
    ),
    "scaled signal of zeros": Refused(
        (*TAUGHT, "algorithm.signal_scale=true"),
        "algorithm.signal_scale = true acts on the advantages of rewards, which are 0 with algorithm.advantage = "
        '"none", and not on the signal of a teacher; set algorithm.signal_scale = false',
    ),
    "filtered rows of a teacher": Refused(
        (*TAUGHT, FILTERED),
        "algorithm.shaping.filter_zero_variance = true drops rows of equal rewards, in which a teacher "
        '(algorithm.distil.place = "advantage") has a signal; set algorithm.shaping.filter_zero_variance = false',
    ),
    "filtered rows of a running mean": Refused(
        ("algorithm.name=rae", FILTERED),
        'algorithm.shaping.filter_zero_variance = true drops rows of equal rewards, and algorithm.advantage = "ema" '
        "has a signal in them; set algorithm.shaping.filter_zero_variance = false",
    ),
    "signal of every row": Refused(
        ("algorithm.name=remax", ON_POLICY, "algorithm.signal_scale=true"),
        "algorithm.signal_scale = true takes groups of equal rewards for groups without a signal, but with "
        'algorithm.advantage = "greedy" they have one; set algorithm.signal_scale = false',
    ),
    "signal of components": Refused(
        ("algorithm.name=gdpo", "algorithm.signal_scale=true"),
        "algorithm.signal_scale = true takes groups of equal rewards for groups without a signal, but with "
        'algorithm.components = "decoupled" they have one; set algorithm.signal_scale = false',
    ),
    "geometric mean of tokens": Refused(
        ("algorithm.surrogate=geometric",),
        'algorithm.surrogate = "geometric" with algorithm.aggregate = "token_mean" weighs samples by their length; set '
        'algorithm.aggregate = "sample_mean_of_means"',
    ),
    "reversed covariances": Refused(
        ("algorithm.name=clip_cov", "algorithm.covariance_bounds=[5, 1]"),
        "algorithm.covariance_bounds = [5, 1] has no covariance between its bounds, so that no token would be chosen; "
        "write the lower bound first",
    ),
    "correction of p3o": Refused(
        ("algorithm.name=p3o", "algorithm.proximal=trainer", "algorithm.correction.kind=tis"),
        'algorithm.correction.kind = "tis" with algorithm.surrogate = "p3o" counts the distance from the rollout '
        'twice: the ratio of p3o is to the rollout already; set algorithm.correction.kind = "none"',
    ),
    "overlong turn": Refused(
        (OVERLONG, ECHO),
        "algorithm.shaping.overlong = true lowers the reward of episodes that come close to environment.token_budget, "
        "which is not set (rollout.max_tokens is the limit of one turn); set environment.token_budget, or "
        "algorithm.shaping.overlong = false",
    ),
    "overlong player": Refused(
        (OVERLONG, ECHO, "environment.token_budget=90", "environment.players=['a', 'b']"),
        "algorithm.shaping.overlong = true lowers the reward of episodes that come close to environment.token_budget, "
        "which is shared by environment.players (rollout.max_tokens is the limit of one turn); set "
        "algorithm.shaping.overlong = false",
    ),
    "overlong buffer of an episode": Refused(
        (OVERLONG, ECHO, "environment.token_budget=90", "algorithm.shaping.overlong_buffer=91"),
        "algorithm.shaping.overlong_buffer = 91 is more than environment.token_budget = 90; set it to at most that, or "
        "leave it out for a fifth of it",
    ),
    "overlong answer of an agent": Refused(
        (OVERLONG, "agent.function=x.solve"),
        "algorithm.shaping.overlong = true lowers the reward of samples that come close to rollout.max_tokens, which "
        "is the limit of one answer of an agent and not of its sample; set algorithm.shaping.overlong = false",
    ),
    "nucleus": Refused(
        ("rollout.top_p=0.9",),
        "rollout.top_p = 0.9 samples from another distribution than the one that the trainer's log-probs are "
        "of; set rollout.top_p = 1 for training",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_make_no_sense_are_refused_with_the_fix(case: str) -> None:
    overrides, message = REFUSED[case]
    assert list(refusals(load_config(DEMO, list(overrides)))) == [message]


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


COMPLETED = {
    "ppo": ("critic.warmup_steps=0", "roles.reference.replicas=1"),
    "reinforce_pp": ("roles.reference.replicas=1",),
    "optimal_token_baseline": ("roles.squares.actor=x.Squares",),
    "optimal_turn_baseline": ("roles.squares.actor=x.Squares",),
    "opd": ("roles.teacher.actor=x.Teacher",),
    "self_distill": ("roles.teacher.actor=x.Teacher",),
}


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_not_refused_with_what_it_needs(name: str) -> None:
    overrides = [f"algorithm.name={name}", ON_POLICY, *COMPLETED.get(name, ())]
    assert list(refusals(load_config(DEMO, overrides))) == []


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
        (catalog.ADVANTAGES, "gae", {"gamma", "gae_lambda"}),
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
    assert ppo["paper"] == "1707.06347"
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
