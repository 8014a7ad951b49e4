"""A file with stages describes a run for each; bad ones are refused with the place and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_actors.config import load_config
from relax_actors.config.load import set_by, stages_of
from relax_actors.errors import ConfigError
from tests.support.running import SUPPORT, relax_here

FILE = SUPPORT / "tiny_stages.toml"


def test_each_stage_has_a_name_a_folder_and_the_model_of_the_one_before(tmp_path: Path) -> None:
    assert stages_of(FILE) == ["sft", "grpo"]
    first, second = (load_config(FILE, [f"run.stage={name}", f"run.folder={tmp_path}"]) for name in ("sft", "grpo"))
    assert [(c.run.name, c.folder.name, c.run.steps) for c in (first, second)] == [
        ("stages-sft", "sft", 8),
        ("stages-grpo", "grpo", 6),
    ]
    assert first.model.architecture is not None
    assert second.model.path == tmp_path / "sft" / "model"
    assert (first.algorithm.name, second.algorithm.name) == ("sft", None)
    assert second.trainer.learning_rate == 1e-3
    unset = load_config(FILE, ["run.stage=grpo"])
    assert unset.model.path == Path("runs/stages-sft/model").resolve()


def test_settings_of_the_command_stand_above_those_of_stages() -> None:
    settings = ["run.stage=grpo", "run.steps=3", "run.name=own", "stages.grpo.trainer.prompts_per_step=2"]
    config = load_config(FILE, [*settings, "stages.sft.trainer.prompts_per_step=7"])
    assert (config.run.name, config.run.steps, config.trainer.prompts_per_step) == ("own-grpo", 3, 2)
    spelled = set_by(FILE, settings)
    assert spelled["run.steps"] == "override"
    assert spelled["rollout.group_size"] == "file"
    assert stages_of(FILE, settings) == []


def test_sections_whose_keys_depend_on_each_other_are_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "stages.toml"
    data = '[stages.data]\nkind = "jsonl"\npath = "rows.jsonl"\n[stages.algorithm]\nname = "sft"\n'
    file.write_text(FILE.read_text() + '[[stages]]\nname = "own"\n' + data)
    config = load_config(file, ["run.stage=own"])
    assert (config.data.kind, config.data.path, config.data.size) == ("jsonl", tmp_path / "rows.jsonl", None)


@pytest.mark.parametrize(
    ("more", "settings", "said"),
    [
        ("[[stages]]\n", [], "stage 3 needs a name"),
        ('[[stages]]\nname = "a/b"\n', [], "stage 3 needs a name"),
        ('[[stages]]\nname = "sft"\n', [], "'sft' names more than one stage"),
        ('[[stages]]\nname = "x"\nsteps = 3\n', [], "steps of the stage 'x' is not a section"),
        ("", ["run.stage=ppo"], "'ppo' names no stage; stages: sft, grpo"),
        ("", ["stages.ppo.run.steps=1"], "no stage has this name; stages: sft, grpo"),
        ("", [], "run.stage is not set; stages: sft, grpo; write run.stage=sft"),
    ],
)
def test_what_names_no_stage_is_refused(tmp_path: Path, more: str, settings: list[str], said: str) -> None:
    file = tmp_path / "stages.toml"
    file.write_text(FILE.read_text() + more)
    with pytest.raises(ConfigError) as caught:
        load_config(file, settings)
    assert said in str(caught.value)


def test_a_file_without_stages_has_none() -> None:
    tiny = SUPPORT / "tiny.toml"
    assert stages_of(tiny) == []
    with pytest.raises(ConfigError, match=r"names no stage; stages: none"):
        load_config(tiny, ["run.stage=sft"])


def test_check_looks_at_every_stage(tmp_path: Path) -> None:
    found = relax_here("check", str(FILE), cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert [line for line in found.stderr.splitlines() if line.startswith("stage ")] == ["stage sft", "stage grpo"]
    bad = relax_here("check", str(FILE), "stages.grpo.reward.function=exact_mach", cwd=tmp_path)
    assert bad.returncode == 2
    assert "did you mean 'exact_match'" in bad.stderr


def of_scores(folder: Path, model: str = '{ stage = "scores" }') -> Path:
    """Write a file whose stages train a reward model, and then a policy by its scores."""
    tree = FILE.read_text()
    common = tree[: tree.index("[[stages]]")]
    file = folder / "stages.toml"
    file.write_text(
        f'{common}[[stages]]\nname = "scores"\n[stages.algorithm]\nname = "reward_model"\n'
        f'[[stages]]\nname = "policy"\n[stages.reward]\nfunction = "reward_model"\n'
        f"[stages.roles.reward_model]\nmodel = {model}\n"
    )
    return file


def test_stage_after_a_reward_model_begins_with_a_policy_and_serves_the_reward_model(tmp_path: Path) -> None:
    config = load_config(of_scores(tmp_path), ["run.stage=policy", f"run.folder={tmp_path}"])
    assert config.model.path is None
    assert config.model.architecture is not None
    assert config.roles["reward_model"].options == {"model": str(tmp_path / "scores" / "model")}


def test_stages_without_a_model_are_refused_as_any_file(tmp_path: Path) -> None:
    file, tree = tmp_path / "stages.toml", of_scores(tmp_path).read_text()
    begin, end = tree.index("[model"), tree.index("[data]")
    file.write_text(tree[:begin] + tree[end:])
    with pytest.raises(ConfigError, match="model"):
        load_config(file, ["run.stage=policy"])


@pytest.mark.parametrize("model", ['{ stage = "policy" }', '{ stage = "nobody" }', "{ name = 1 }"])
def test_role_with_the_model_of_no_earlier_stage_is_refused(tmp_path: Path, model: str) -> None:
    with pytest.raises(ConfigError, match=r"stages\.policy\.roles\.reward_model\.model.*earlier stage.*scores"):
        load_config(of_scores(tmp_path, model), ["run.stage=policy"])


def test_stage_that_leaves_an_adapter_alone_is_no_beginning_of_the_next(tmp_path: Path) -> None:
    file = tmp_path / "stages.toml"
    more = '[[stages]]\nname = "two"\n[stages.lora]\nrank = 4\n{}[[stages]]\nname = "three"\n'
    file.write_text(FILE.read_text() + more.format(""))
    assert load_config(file, ["run.stage=two"]).lora is not None
    with pytest.raises(ConfigError, match="stage 'two' trains an adapter"):
        load_config(file, ["run.stage=three"])
    file.write_text(FILE.read_text() + more.format("export_merged = true\n"))
    assert load_config(file, ["run.stage=three"]).lora is None
