"""Settings of roles and of what they need from each other: names, placements, notes, and refusals."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from broker.permissions import NODE, OBSERVER, OPERATOR
from broker.subjects import check_name
from relax_actors.algorithms.function_check import notes
from relax_actors.checks import examine
from relax_actors.config import load_config, validate
from relax_actors.config.schema import MAX_ROLE_NAME, NOT_ROLES
from relax_actors.engines.megatron import installation
from relax_actors.errors import ConfigError
from relax_actors.monitoring.log_message import AUTHORS
from relax_actors.registry.catalog import ROLES
from relax_actors.roles import built_in_spec, make_role, replicas, role_class, role_names, section_of
from relax_actors.runtime.row import redelivery_column
from tests.support.messages import assert_says
from tests.support.written_config import Write, refusal
from tests.unit.test_config import DEMO

pytestmark = pytest.mark.usefixtures("own_import_path")


def test_an_unknown_role_is_refused_with_the_list_of_roles(write: Write) -> None:
    with pytest.raises(ConfigError, match="no role 'judge' in run run; its roles are reward, advantages"):
        role_class(load_config(write()), "judge")


@pytest.mark.parametrize("name", [name for name in ROLES.built_in if built_in_spec(name).section != "roles"])
def test_a_role_of_the_user_cannot_have_the_name_of_a_built_in_role(write: Write, name: str) -> None:
    path = write(f'[roles.{name}]\nactor = "a.B"\n')
    assert re.search(
        rf"{re.escape(str(path))}: roles\.{name}: '{name}' is built in; choose another name", refusal(path)
    )


@pytest.mark.parametrize("name", NOT_ROLES)
def test_a_role_cannot_have_the_name_of_another_author_user_or_lease(write: Write, name: str) -> None:
    """With its credentials, a role named `run` could end every view of the run."""
    path = write(f'[roles.{name}]\nactor = "a.B"\n')
    assert_says(refusal(path), f"roles.{name}", f"'{name}'", "choose another name")


def test_names_that_no_role_has_include_all_authors_and_users() -> None:
    built_in = set(ROLES.built_in)
    others = {OBSERVER, OPERATOR, NODE, *(author for authors in AUTHORS.values() for author in authors)}
    assert others - built_in <= set(NOT_ROLES)


@pytest.mark.parametrize("name", ["a.b", "a b", "*"])
def test_a_role_name_that_cannot_be_part_of_a_subject_is_refused(write: Write, name: str) -> None:
    path = write(f'[roles."{name}"]\nactor = "a.B"\n')
    assert_says(refusal(path), path, f"role name '{name}'", "subject")


def test_a_role_name_whose_columns_would_be_too_long_is_refused(write: Write) -> None:
    longest = "r" * MAX_ROLE_NAME
    load_config(write(f'[roles.{longest}]\nactor = "a.B"\n'))
    assert check_name(redelivery_column(longest), "column")
    path = write(f'[roles.{longest}r]\nactor = "a.B"\n')
    assert f"at most {MAX_ROLE_NAME}" in refusal(path)


def test_every_role_has_replicas_and_a_deadline() -> None:
    config = load_config(DEMO)
    for name in role_names(config):
        assert replicas(config, name) >= 1
        assert section_of(config, name).deadline > 0


@pytest.mark.usefixtures("asks_transformers_here")
def test_the_size_of_the_key_value_cache_is_noted() -> None:
    shape = ["num_hidden_layers=30", "num_attention_heads=9", "num_key_value_heads=3", "head_dim=64"]
    settings = [f"model.architecture.{setting}" for setting in shape]
    batch = ["rollout.max_concurrent_prompts=8", "rollout.group_size=8"]
    # 64 samples x 2 x 30 layers x 3 heads x 64 x 4 bytes
    note = "besides, keys and values of 64 samples: 2.81 MiB a token in each rollout actor"
    assert note in examine(load_config(DEMO, [*settings, *batch])).notes
    simulated = examine(load_config(DEMO.parents[1] / "simulate" / "qwen3_4b_16_h800.toml")).notes
    assert not any("keys and values" in note for note in simulated)


def test_a_proximal_policy_needs_a_role_that_computes_it() -> None:
    config = load_config(DEMO, ["algorithm.proximal=actor_fwd"])
    (error,) = examine(config).errors
    assert_says(error, "column actor_fwd", "[roles.actor_fwd]")


KL = "algorithm.kl.place=loss"


def with_roles(*names: str, **algorithm: object) -> list[str]:
    """Overrides that add roles of ours and set the algorithm."""
    return [f"roles.{name}.replicas=1" for name in names] + [f"algorithm.{k}={v}" for k, v in algorithm.items()]


def test_scoring_roles_need_no_actor_and_start_after_light_roles() -> None:
    config = load_config(DEMO, [*with_roles("actor_fwd", "reference"), "roles.reference.max_concurrent_rows=3"])
    order = ["reward", "advantages", "evaluator", "prompts", "rollout", "reference", "actor_fwd", "trainer"]
    assert role_names(config) == order
    reference = make_role(config, "reference")
    assert (reference.reads, reference.writes, reference.max_concurrent_rows) == (("trajectory",), "reference", 3)
    assert make_role(config, "actor_fwd").max_concurrent_rows == 8
    assert validate(config.model_dump(mode="json"), "saved") == config
    with pytest.raises(ConfigError, match=r"roles\.reference\.max_concurrent_rows: Input should be greater than 0"):
        make_role(load_config(DEMO, ["roles.reference.max_concurrent_rows=0"]), "reference")


def test_an_unregistered_role_needs_an_actor(write: Write) -> None:
    assert "roles.own.actor: is missing; add it" in refusal(write("[roles.own]\nreplicas = 1\n"))


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (with_roles("reference"), "roles.reference would compute log-probs that no role reads: algorithm.kl.place"),
        (with_roles("actor_fwd"), 'no role reads: algorithm.proximal is "rollout"; set it to "actor_fwd"'),
        (with_roles("squares"), "roles.squares would compute squared probabilities that no role reads: algorithm.adv"),
        (with_roles("actor_fwd", proximal="trainer"), "roles.actor_fwd would compute log-probs that no role reads"),
        (with_roles(proximal="actor_fwd"), 'add [roles.actor_fwd], or set algorithm.proximal = "trainer"'),
        (
            ["placement.colocate=[['rollout', 'trainer']]", "trainer.device=cpu", "rollout.device=cpu:0"],
            "share one device, but are set to different ones",
        ),
    ],
)
def test_a_placement_that_contradicts_the_algorithm_is_refused(overrides: list[str], error: str) -> None:
    (found,) = examine(load_config(DEMO, overrides)).errors
    assert error in found


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        ([KL], '(algorithm.kl.place = "loss"): computed inside the trainer'),
        ([*with_roles("reference"), KL], "computed by the role reference, from version 0"),
        (with_roles(proximal="trainer"), "those of the trainer's own forward pass, at no further cost"),
        (with_roles("actor_fwd", proximal="actor_fwd"), "computed by the role actor_fwd, from the newest weights"),
        (["placement.colocate=[['rollout','trainer']]"], "one actor at a time: rollout (1), trainer (1)"),
    ],
)
def test_the_check_notes_which_role_computes_log_probs(overrides: list[str], note: str) -> None:
    findings = examine(load_config(DEMO, overrides))
    assert findings.errors == ()
    assert any(note in found for found in findings.notes)


NOTES = {
    "rloo": 'algorithm.advantage = "rloo" with algorithm.scale = "group_std" divides by a standard deviation, which '
    'RLOO (arXiv 2402.14740) does not; set algorithm.scale = "none" for it',
    "length": "the loss of a step is the sum over its tokens, divided by its samples x algorithm.length = 48",
    "half": 'algorithm.aggregate = "constant" with algorithm.scale = "group_std" is half of Dr. GRPO (arXiv '
    '2503.20783), whose advantages are not divided by the standard deviation; set algorithm.scale = "none" for it',
    "clip": "algorithm.clip_high = 0.1 is below algorithm.clip_low = 0.2: tokens may lose more probability than they "
    "may gain",
    "opo": 'algorithm.advantage = "length_weighted" is meant for the plain policy gradient, without a KL (arXiv '
    "2505.23585)",
    "summed": 'algorithm.kl.place = "reward" with algorithm.advantage = "group" subtracts the sum of a sample\'s KL '
    "from its reward, before the group is compared",
}
CONSTANT = ("algorithm.aggregate=constant", "rollout.max_tokens=48")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), []),
        (("algorithm.advantage=rloo",), ["rloo"]),
        (("algorithm.advantage=rloo", "algorithm.scale=none"), []),
        (CONSTANT, ["length", "half"]),
        (("algorithm.clip_high=0.1",), ["clip"]),
        (("algorithm.advantage=length_weighted", KL), ["opo"]),
        (("algorithm.kl.place=reward",), ["summed"]),
        ((*CONSTANT, "algorithm.scale=none"), ["length"]),
    ],
)
def test_unusual_algorithm_settings_are_noted(overrides: tuple[str, ...], expected: list[str]) -> None:
    assert list(notes(load_config(DEMO, list(overrides)))) == [NOTES[name] for name in expected]


def test_the_length_of_the_constant_loss_is_that_of_a_completion_by_default() -> None:
    assert load_config(DEMO, list(CONSTANT)).algorithm.length == 48
    assert load_config(DEMO, [*CONSTANT, "algorithm.length=100"]).algorithm.length == 100


def test_a_scoring_role_with_megatron_needs_it_installed() -> None:
    overrides = ["roles.reference.backend=megatron", "algorithm.kl.place=loss", "algorithm.kl.coefficient=0.1"]
    errors = examine(load_config(DEMO, overrides)).errors
    try:
        installation.require()
    except ConfigError:
        (error,) = errors
        assert error.startswith('roles.reference.backend = "megatron" needs megatron.core')
    else:
        assert errors == ()
    with pytest.raises(
        ConfigError,
        match=r"roles\.reference\.backend: .*'sglang' is not a known scoring engine; known: torch, megatron",
    ):
        make_role(load_config(DEMO, ["roles.reference.backend=sglang"]), "reference")


@pytest.mark.usefixtures("asks_transformers_here")
def test_sglang_supports_only_known_models_with_experts() -> None:
    elsewhere = ["rollout.backend=sglang", "rollout.sglang.urls=['http://127.0.0.1:1']"]
    moe = ["num_experts=8", "num_local_experts=8", "num_experts_per_tok=2", "moe_intermediate_size=32"]
    overrides = [*elsewhere, *(f"model.architecture.{setting}" for setting in moe)]
    assert examine(load_config(DEMO, [*overrides, "model.architecture.model_type=qwen3_moe"])).errors == ()
    (error,) = examine(load_config(DEMO, [*overrides, "model.architecture.model_type=olmoe"])).errors
    assert "with a model of type olmoe" in error
    assert "only qwen2_moe, qwen3_moe, mixtral, glm4_moe, gpt_oss are supported" in error


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rollout.min_tokens=3"], "rollout.min_tokens = 3: log-probs of SGLang"),
        (["rollout.sglang.urls=['http://127.0.0.1:1']", "rollout.replicas=2"], "give each actor one"),
        (
            ["rollout.sglang.tensor_parallel=3"],
            "rollout.sglang.tensor_parallel = 3 does not divide the model's num_attention_heads = 4; lower it",
        ),
        (["rollout.options.x=1"], "rollout.options: the backend 'sglang' takes none; remove x"),
    ],
)
def test_settings_that_sglang_cannot_follow_are_refused(overrides: list[str], said: str) -> None:
    errors = examine(load_config(DEMO, ["rollout.backend=sglang", *overrides])).errors
    assert [error for error in errors if said in error]


def test_head_dim_that_sglang_ignores_is_refused() -> None:
    elsewhere = ["rollout.backend=sglang", "rollout.sglang.urls=['http://127.0.0.1:1']"]
    qwen2 = [*elsewhere, "model.architecture.model_type=qwen2"]
    (error,) = examine(load_config(DEMO, [*qwen2, "model.architecture.head_dim=32"])).errors
    assert_says(error, "head_dim = 32", "SGLang", "qwen2", "num_attention_heads")
    assert 'use "transformers"' in error
    architecture = load_config(DEMO).model.architecture
    assert architecture is not None
    divided = architecture["hidden_size"] // architecture["num_attention_heads"]
    assert examine(load_config(DEMO, [*qwen2, f"model.architecture.head_dim={divided}"])).errors == ()


def test_router_replay_needs_a_model_with_experts() -> None:
    (error,) = examine(load_config(DEMO, ["trainer.router_replay=true"])).errors
    assert "the model (qwen3) has no experts" in error
    moe = ["model_type=qwen3_moe", "num_experts=8", "num_experts_per_tok=2", "moe_intermediate_size=32"]
    overrides = [f"model.architecture.{setting}" for setting in moe]
    findings = examine(load_config(DEMO, [*overrides, "trainer.router_replay=true"]))
    assert findings.errors == ()
    assert any("recorded and replayed: 6 bytes a token" in note for note in findings.notes)


def test_log_probs_that_a_custom_role_reads_are_accepted(write: Write, tmp_path: Path) -> None:
    (tmp_path / "reads_the_reference.py").write_text(
        "from relax_actors import Role\nclass Own(Role):\n    reads = ('reference',)\n    writes = 'own'\n"
        "    def handle(self, row):\n        return 1\n"
    )
    path = write('[roles.reference]\n[roles.own]\nactor = "reads_the_reference.Own"\n')
    assert not any("no role reads" in error for error in examine(load_config(path)).errors)


def test_turn_that_lasts_as_long_as_others_wait_for_it_is_refused(write: Write) -> None:
    path = write("[placement]\npatience = 100\n")
    assert load_config(path).placement.longest_turn == 50
    assert load_config(path, ["placement.turn=99"]).placement.longest_turn == 99
    with pytest.raises(ConfigError, match=r"placement.turn = 100 .*lower placement.turn, or raise placement.patience"):
        load_config(path, ["placement.turn=100"])


@pytest.mark.parametrize(
    ("groups", "error"),
    [
        ("[['trainer']]", "['trainer'] has only one role; name at least two"),
        ("[['trainer', 'rollout'], ['reward', 'rollout']]", "names 'rollout' twice"),
        ("[['trainer', 'reference']]", "names 'reference'; the roles of this run that compute are ['advantages', "),
        ("[['trainer', 'prompts']]", "names 'prompts'; the roles of this run that compute"),
    ],
)
def test_colocated_groups_name_roles_of_the_run_once(write: Write, groups: str, error: str) -> None:
    assert error in refusal(write(), f"placement.colocate={groups}")


def test_the_trainer_keeps_a_reference_only_without_the_role() -> None:
    assert load_config(DEMO, [KL]).computes_reference
    assert not load_config(DEMO, [*with_roles("reference"), KL]).computes_reference
    assert not load_config(DEMO).computes_reference
