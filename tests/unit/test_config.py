"""Reading a configuration: strict validation, and errors that name the file, the key and the remedy."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from broker.permissions import NODE, OBSERVER, OPERATOR
from broker.subjects import check_name
from relax_actors.algorithms.function_check import notes
from relax_actors.checks import examine
from relax_actors.config import Config, load_config, validate
from relax_actors.config.load import EXAMPLES
from relax_actors.config.schema import MAX_ROLE_NAME, NOT_ROLES
from relax_actors.engines.megatron import installation
from relax_actors.errors import ConfigError
from relax_actors.monitoring.log_message import AUTHORS
from relax_actors.registry.catalog import ROLES
from relax_actors.roles import built_in_spec, make_role, replicas, role_class, role_names, section_of
from relax_actors.runtime.row import redelivery_column
from tests.support.messages import assert_says

DEMO = Path(__file__).parents[2] / "examples" / "demo" / "demo.toml"
SMALL = """\
[model]
path = "model"

[data]
kind = "jsonl"
path = "tasks.jsonl"
"""
EVAL_DATA_MISSING = """\
eval.data: is missing; add it, for example:
  [eval.data]
  kind = "jsonl"
  path = "held_out.jsonl\""""
Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def own_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a configuration lets modules beside it be imported; keep that to the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def make(more: str = "", text: str = SMALL) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(text + more)
        return path

    return make


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(overrides))
    return str(caught.value)


def test_the_demo_loads() -> None:
    config = load_config(DEMO)
    assert config.run.name == "demo"
    assert config.eval is not None
    assert role_names(config) == ["reward", "advantages", "evaluator", "prompts", "rollout", "trainer"]


def test_defaults_complete_a_minimal_file(write: Write) -> None:
    config = load_config(write())
    assert config.folder == Path("runs/run")
    assert config.store_path == Path("runs/run/store")
    assert config.staleness.max == 1
    assert config.eval is None


def test_a_saved_configuration_loads_unchanged(write: Write) -> None:
    for path in (DEMO, write('[roles.own]\nactor = "a.B"\nbudget = 3\n')):
        config = load_config(path)
        assert validate(config.model_dump(mode="json"), "saved") == config


def test_a_configuration_is_immutable(write: Write) -> None:
    config = load_config(write())
    with pytest.raises(ValidationError, match="frozen"):
        config.run.steps = 3


@pytest.mark.parametrize(
    ("more", "key", "remedy"),
    [
        ("[trainer]\nlerning_rate = 1e-3\n", "trainer.lerning_rate", "did you mean 'learning_rate'?"),
        ("[rolout]\nsamples = 4\n", "rolout", "did you mean 'rollout'?"),
        ("[trainer.warm_start]\nstep = 4\nsteps = 4\n", "trainer.warm_start.step", "did you mean 'steps'?"),
        ("[eval]\nevry = 4\n[eval.data]\nkind = 'jsonl'\n", "eval.evry", "did you mean 'every'?"),
        ("[eval.data]\nkind = 'jsonl'\nfield = {}\n", "eval.data.field", "did you mean 'fields'?"),
        ("[staleness]\nzzz = 4\n", "staleness.zzz", "known here: max, policy"),
    ],
)
def test_an_unknown_key_suggests_a_close_one(write: Write, more: str, key: str, remedy: str) -> None:
    path = write(more)
    assert refusal(path) == f"{path}: {key}: unknown key; {remedy}"


@pytest.mark.parametrize(
    ("override", "key", "remedy"),
    [
        ("run.steps=many", "run.steps", "integer"),
        ("run.steps=-1", "run.steps", "greater than or equal to 0"),
        ("run.steps=1.5", "run.steps", "integer"),
        ("run.seed=-1", "run.seed", "greater than or equal to 0"),
        ("run.name=a b", "run.name", "use 1 to 64 letters, digits, '-' or '_'"),
        ("run.deterministic=[]", "run.deterministic", "boolean"),
        ("run=3", None, "section.key=value"),
        ("rollout.group_size=0", "rollout.group_size", "greater than 0"),
        ("rollout.top_p=1.5", "rollout.top_p", "less than or equal to 1"),
        ("rollout.temperature=0", "rollout.temperature", "greater than 0"),
        ("rollout.temperature=nan", "rollout.temperature", "finite"),
        ("rollout.backend=vllm", "rollout.backend", "transformers"),
        ("rollout.stop=3", "rollout.stop", "list"),
        ("rollout.stop=[1]", "rollout.stop.0", "string"),
        ("rollout.stop=['a', '']", "rollout.stop.1", "String should have at least 1 character"),
        ("data.kind=csv", "data.kind", "jsonl"),
        ("data.template=x", "data.template", "must contain {prompt}"),
        ("data.size=0", "data.size", "greater than 0"),
        ("trainer.replicas=2", "trainer.replicas", "1"),
        ("trainer.schedule=sine", "trainer.schedule", "cosine"),
        ("trainer.betas=[0.9]", "trainer.betas.1", "is missing; add it"),
        ("broker.port=70000", "broker.port", "less than 65536"),
        ("broker.replicas=2", "broker.replicas", "1, 3 or 5"),
        ("staleness.max=-1", "staleness.max", "greater than or equal to 0"),
        ("supervision.heartbeat=0.5", "supervision.heartbeat", "greater than or equal to 1"),
        ("algorithm.dual_clip=1", "algorithm.dual_clip", "greater than 1"),
        ("algorithm.correction.high=0.9", "algorithm.correction.high", "greater than or equal to 1"),
        ("algorithm.reject.low=1.1", "algorithm.reject.low", "less than or equal to 1"),
        ("staleness.policy=correct", None, "set algorithm.correction.kind (with algorithm.proximal)"),
        ("weights.transport=nccl", "weights.transport", "store"),
        ("prompts.replicas=2", None, "prompts.replicas must be 1: one actor owns the admission of rows"),
    ],
)
def test_a_wrong_value_is_refused_with_the_allowed_values(
    write: Write, override: str, key: str | None, remedy: str
) -> None:
    path = write()
    text = refusal(path, override)
    assert remedy in text
    if key is not None:
        assert text.startswith(f"{path}: {key}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[data]\nkind = "jsonl"\n',
            (
                "model: is missing; add it, for example:\n"
                "  [model]\n"
                '  path = "Qwen3-0.6B"        # folder with config.json, tokenizer.json and *.safetensors'
            ),
        ),
        (
            '[model]\npath = "model"\n',
            (
                "data: is missing; add it, for example:\n"
                "  [data]\n"
                '  kind = "jsonl"\n'
                '  path = "tasks.jsonl"       # a row: {"prompt": "2 + 3 =", "answer": "5"}'
            ),
        ),
        (SMALL + "[eval]\nrows = 3\n", EVAL_DATA_MISSING),
        (SMALL.replace('kind = "jsonl"', ""), 'data.kind: is missing; add it, for example:\n  kind = "jsonl"'),
        (SMALL + "[trainer.warm_start]\n", "trainer.warm_start.steps: is missing; add it, for example:\n  steps = 12"),
    ],
)
def test_a_missing_section_or_key_comes_with_an_example(write: Write, text: str, message: str) -> None:
    path = write(text=text)
    assert refusal(path) == f"{path}: {message}"


def test_a_model_without_a_source_comes_with_both_examples(write: Write) -> None:
    text = refusal(write(text='[model]\n[data]\nkind = "jsonl"\n'))
    assert_says(text, "model.path", "model.architecture")
    both = text.partition(", for example:\n")[2]
    for part in both.split("\nor\n"):
        config = validate(tomllib.loads(part + '\n[data]\nkind = "jsonl"\n'), "example")
        assert (config.model.path is None) != (config.model.architecture is None)


@pytest.mark.parametrize("example", EXAMPLES.values())
def test_every_example_is_toml(example: str) -> None:
    assert tomllib.loads(example)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "rollout.group_size=0",
            "rollout.group_size: Input should be greater than 0, got 0",
        ),
        (
            "broker.sync_interval=ten",
            'broker.sync_interval: write a duration such as "10s", "500ms" or "2m", or "always", got \'ten\'',
        ),
        (
            "broker.url=me:secret@host",  # a password is not repeated
            "broker.url: write nats://[user:password@]host:port, or tls://..., several separated by commas",
        ),
    ],
)
def test_a_wrong_value_is_explained(write: Write, override: str, message: str) -> None:
    path = write()
    assert refusal(path, override) == f"{path}: {message}"


@pytest.mark.parametrize(
    "url", ["nats://one:4222", "tls://a:b@one", "nats://a:b@one:4222,nats://two:4222", "nats://[::1]:4222"]
)
def test_broker_urls_of_servers_and_clusters_are_accepted(write: Write, url: str) -> None:
    assert load_config(write(), [f"broker.url={url}"]).broker.url == url


def test_each_mistake_is_reported_on_its_own_line(write: Write) -> None:
    lines = refusal(write(), "run.steps=x", "rollout.sampels=3", "staleness.max=-1").splitlines()
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("text", "key", "remedy"),
    [
        ("", "model", "is missing; add it"),
        ("[model]\npath = 'm'\n", "data", "is missing; add it"),
        ("[model]\npath = 'm'\n[data]\n", "data.kind", "is missing; add it"),
        (SMALL + "[eval]\nrows = 3\n", "eval.data", "is missing; add it"),
        (SMALL + "[roles.own]\nbudget = 3\n", "roles.own.actor", "is missing; add it"),
        (SMALL + "[trainer.warm_start]\n", "trainer.warm_start.steps", "is missing; add it"),
        ("[model]\n[data]\nkind = 'jsonl'\n", "model", "set either model.path"),
        (
            "[model]\npath = 'm'\n[model.architecture]\nmodel_type = 'x'\n[data]\nkind = 'jsonl'\n",
            "model",
            "set either",
        ),
        ("[model.architecture]\nhidden_size = 3\n[data]\nkind = 'jsonl'\n", "model", "needs a `model_type`"),
        ("[model.architecture]\nmodel_type = 'x'\n[data]\nkind = 'jsonl'\n", "model", "a [model.tokenizer] beside it"),
        (
            "[model]\npath = 'm'\n[model.tokenizer]\nalphabet = 'a#'\n[data]\nkind = 'jsonl'\n",
            "model",
            "remove [model.tokenizer]",
        ),
    ],
)
def test_missing_and_contradictory_keys_are_named(write: Write, text: str, key: str, remedy: str) -> None:
    path = write(text=text)
    assert any(line.startswith(f"{path}: {key}:") and remedy in line for line in refusal(path).splitlines())


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    assert "give the path of a TOML file" in refusal(tmp_path / "none.toml")
    assert str(tmp_path) in refusal(tmp_path)
    broken = tmp_path / "broken.toml"
    broken.write_text("[run\n")
    assert refusal(broken).startswith(f"{broken} cannot be read as TOML: ")
    broken.write_bytes(b"\xff\xfe\x00")
    assert refusal(broken).startswith(f"{broken} cannot be read as TOML: ")


def test_overrides_are_toml_values_or_plain_strings(write: Write) -> None:
    config = load_config(
        write(),
        [
            "run.steps=7",
            "run.name=mine",
            'data.template="{prompt} ="',
            "data.fields.answer=a=b",
            "run.deterministic=true",
            "trainer.learning_rate=3e-4",
            'rollout.stop=["x", "y"]',
            "trainer.warm_start.steps=4",
            "reward.function={ exact_match = 0.5 }",
            "data.options.level=3",
            " staleness.max = 0",
        ],
    )
    assert (config.run.steps, config.run.name, config.run.deterministic) == (7, "mine", True)
    assert (config.data.template, config.data.fields, config.data.options) == (
        "{prompt} =",
        {"answer": "a=b"},
        {"level": 3},
    )
    assert config.trainer.learning_rate == 3e-4
    assert config.trainer.warm_start is not None
    assert config.trainer.warm_start.steps == 4
    assert config.rollout.stop == ["x", "y"]
    assert config.reward.function == {"exact_match": 0.5}
    assert config.staleness.max == 0


def test_the_last_override_wins_over_the_file(write: Write) -> None:
    assert load_config(write("[run]\nsteps = 3\n"), ["run.steps=4", "run.steps=5"]).run.steps == 5


@pytest.mark.parametrize("override", ["", "run", "run.steps", "=3", "steps=3", ".steps=3", "run.=3", "run..steps=3"])
def test_a_malformed_override_is_refused_with_the_form(write: Write, override: str) -> None:
    text = refusal(write(), override)
    assert repr(override) in text
    assert "section.key=value, e.g. run.steps=10" in text


def test_an_override_below_a_value_is_refused(write: Write) -> None:
    assert "'name' is a value, not a section" in refusal(write("[run]\nname = 'x'\n"), "run.name.first=3")


@given(st.text(max_size=30))
def test_any_override_is_applied_or_refused(override: str) -> None:
    try:
        load_config(DEMO, [override, f"run.name={override}"])
    except ConfigError as error:
        assert str(error)  # noqa: PT017 the other outcome is a configuration


def test_paths_in_the_file_are_relative_to_it_and_the_folder_to_the_working_directory(
    write: Write, tmp_path: Path
) -> None:
    more = '[eval.data]\nkind = "jsonl"\npath = "held.jsonl"\n[store]\npath = "/abs"\n[run]\nfolder = "out"\n'
    config = load_config(write(more + '[broker]\ncredentials = "me.creds"\n'))
    assert config.model.path == tmp_path / "model"
    assert config.data.path == tmp_path / "tasks.jsonl"
    assert config.eval is not None
    assert config.eval.data.path == tmp_path / "held.jsonl"
    assert config.broker.credentials == tmp_path / "me.creds"
    assert config.store_path == Path("/abs")
    assert config.folder == Path("out")
    assert load_config(write(), ["model.path=here"]).model_path == Path("here")


def test_modules_beside_the_file_can_be_named(write: Write, tmp_path: Path) -> None:
    (tmp_path / "beside_the_config.py").write_text(
        "from relax_actors import Role\nclass Own(Role):\n    reads = ('reward',)\n    writes = 'own'\n"
        "    size: int = 1\n"
        "    def handle(self, row):\n        return self.size\n"
    )
    config = load_config(write('[roles.own]\nactor = "beside_the_config.Own"\nsize = 4\nreplicas = 3\ndeadline = 9\n'))
    role = make_role(config, "own")
    assert role.handle(None) == 4  # type: ignore[arg-type]
    assert role_class(config, "own") is type(role)
    assert (replicas(config, "own"), section_of(config, "own").deadline) == (3, 9.0)
    assert role_names(config) == ["reward", "own", "advantages", "prompts", "rollout", "trainer"]


def test_an_unknown_role_is_refused_with_the_list_of_roles(write: Write) -> None:
    with pytest.raises(ConfigError, match="no role 'judge' in run run; its roles are reward, advantages"):
        role_class(load_config(write()), "judge")


def test_a_deterministic_run_generates_one_prompt_at_a_time(write: Write) -> None:
    assert load_config(write(), ["rollout.max_concurrent_prompts=8"]).rollout.max_concurrent_prompts == 8
    config = load_config(
        write(), ["rollout.max_concurrent_prompts=8", "run.deterministic=true", "rollout.group_size=5"]
    )
    assert config.rollout.max_concurrent_prompts == 1
    assert config.rollout.group_size == 5


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


def test_a_tree_is_validated_under_the_name_of_its_source() -> None:
    with pytest.raises(ConfigError, match="somewhere: model: is missing; add it"):
        validate({}, "somewhere")
    assert isinstance(validate({"model": {"path": "m"}, "data": {"kind": "jsonl"}}, "x"), Config)


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
    (error,) = examine(load_config(DEMO, [*overrides, "model.architecture.model_type=mixtral"])).errors
    assert "with a model of type mixtral" in error
    assert "only qwen2_moe, qwen3_moe are supported" in error


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


def test_a_module_beside_the_configuration_does_not_shadow_an_installed_one(write: Write, tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('this is not the one that is meant')")
    (tmp_path / "beside_it.py").write_text("import json; here = json.dumps(1)")
    code = (
        "import sys; from pathlib import Path; from relax_actors.config import load_config\n"
        f"load_config(Path({str(write())!r})); sys.modules.pop('json', None)\n"
        "import beside_it, json; print(json.__file__)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert str(tmp_path) not in found.stdout


def test_log_probs_that_a_custom_role_reads_are_accepted(write: Write, tmp_path: Path) -> None:
    (tmp_path / "reads_the_reference.py").write_text(
        "from relax_actors import Role\nclass Own(Role):\n    reads = ('reference',)\n    writes = 'own'\n"
        "    def handle(self, row):\n        return 1\n"
    )
    path = write('[roles.reference]\n[roles.own]\nactor = "reads_the_reference.Own"\n')
    assert not any("no role reads" in error for error in examine(load_config(path)).errors)


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
