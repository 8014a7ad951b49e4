"""Reading a configuration: strict validation, and errors that name the file, the key and the remedy."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from relax_actors.config import Config, load_config, validate
from relax_actors.config.load import EXAMPLES
from relax_actors.errors import ConfigError
from relax_actors.roles import make_role, replicas, role_class, role_names, section_of
from tests.support.messages import assert_says
from tests.support.written_config import SMALL, Write, refusal

pytestmark = pytest.mark.usefixtures("own_import_path")
DEMO = Path(__file__).parents[2] / "examples" / "demo" / "demo.toml"
EVAL_DATA_MISSING = """\
eval.data: is missing; add it, for example:
  [eval.data]
  kind = "jsonl"
  path = "held_out.jsonl\""""


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


def test_a_deterministic_run_generates_one_prompt_at_a_time(write: Write) -> None:
    assert load_config(write(), ["rollout.max_concurrent_prompts=8"]).rollout.max_concurrent_prompts == 8
    config = load_config(
        write(), ["rollout.max_concurrent_prompts=8", "run.deterministic=true", "rollout.group_size=5"]
    )
    assert config.rollout.max_concurrent_prompts == 1
    assert config.rollout.group_size == 5


def test_a_tree_is_validated_under_the_name_of_its_source() -> None:
    with pytest.raises(ConfigError, match="somewhere: model: is missing; add it"):
        validate({}, "somewhere")
    assert isinstance(validate({"model": {"path": "m"}, "data": {"kind": "jsonl"}}, "x"), Config)


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
