"""The models of `relax eval`, and the folders of their evaluations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_actors.cli.evaluations import EvalRequest, configs_of, run
from relax_actors.config import Config, load_config
from relax_actors.config.load import stages_of
from relax_actors.errors import ConfigError
from relax_actors.evaluation.models import model_folder
from relax_actors.monitoring.summary import Summary
from relax_actors.runtime.run_folder import RunFolder
from tests.support.running import SUPPORT

EVAL, STAGES = SUPPORT / "tiny_eval.toml", SUPPORT / "tiny_stages.toml"
HELD_OUT = ("stages.grpo.eval.data.kind=python", "stages.grpo.eval.data.function=tiny_tasks.make")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def finish(config: Config, steps: int | None = None) -> Path:
    """Write what a finished run leaves of its model; return the folder of the model."""
    folder = RunFolder(config.folder)
    folder.model.mkdir(parents=True)
    folder.save_config(config, "")
    done = config.run.steps if steps is None else steps
    folder.summary.write_text(json.dumps(Summary(config.run.name, done, None, None, 1, 0, 0, 0, 0, 0, "").json()))
    (folder.model / "config.json").write_text("{}")
    (folder.model / "model.safetensors").write_text(config.run.name)
    return folder.model


def of_stages(*settings: str) -> dict[str, Config]:
    return configs_of(EvalRequest("stages", STAGES, (*HELD_OUT, *settings)))


@pytest.mark.parametrize(
    ("setting", "below"), [("run.seed=3", "runs"), ("run.name=my", "runs"), ("run.folder=given", "given")]
)
def test_models_of_stages_are_evaluated_in_folders_of_their_own(tmp_path: Path, setting: str, below: str) -> None:
    trained = [
        load_config(STAGES, [*HELD_OUT, setting, f"run.stage={name}"]) for name in stages_of(STAGES, [*HELD_OUT])
    ]
    for config in trained:
        finish(config)
    folders = {name: RunFolder(config.folder).root for name, config in of_stages(setting).items()}
    assert list(folders) == ["base", "sft", "grpo"]
    assert len(set(folders.values())) == 3
    assert {folder.parent for folder in folders.values()} == {(tmp_path / below).resolve()}
    assert not any(folder.exists() for folder in folders.values())


def test_a_changed_model_is_another_evaluation_also_under_a_given_name(tmp_path: Path) -> None:
    model = finish(load_config(EVAL))
    request = EvalRequest("eval", EVAL, ("run.name=cmp",))
    before = configs_of(request)["eval"].run.name
    assert before.startswith("cmp-eval-")
    assert configs_of(request)["eval"].run.name == before
    (model / "model.safetensors").write_text("other weights")
    assert configs_of(request)["eval"].run.name != before


def test_rows_of_a_pattern_the_initial_model_and_the_rows_of_a_warm_start_are_part_of_the_digest(
    tmp_path: Path,
) -> None:
    for name in ("held_out", "train"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text('{"prompt": "1>", "answer": "1"}\n')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "run.toml").write_text(
        '[run]\nname = "r"\n[model]\npath = "model"\n[data]\nkind = "jsonl"\npath = "train/*.jsonl"\n'
        '[eval.data]\nkind = "jsonl"\npath = "held_out/*.jsonl"\n[trainer.warm_start]\nsteps = 2\n'
    )

    def name() -> str:
        return configs_of(EvalRequest("initial", tmp_path / "run.toml"))["initial"].run.name

    names = [name()]
    assert name() == names[0]
    for path in ("held_out/a.jsonl", "train/a.jsonl", "model/config.json"):
        (tmp_path / path).write_text((tmp_path / path).read_text() + " ")
        names.append(name())
    assert len(set(names)) == 4


def test_the_initial_model_of_stages_is_that_of_the_first_one_on_the_sets_of_the_last_one(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "run.toml").write_text(
        '[model]\npath = "model"\n[data]\nkind = "jsonl"\npath = "train.jsonl"\n[[stages]]\nname = "one"\n'
        '[stages.algorithm]\nname = "sft"\n[[stages]]\nname = "two"\n[stages.trainer.warm_start]\nsteps = 2\n'
        '[stages.eval]\nrows = 5\n[stages.eval.data]\nkind = "jsonl"\npath = "held_out.jsonl"\n'
    )
    config = configs_of(EvalRequest("initial", tmp_path / "run.toml"))["initial"]
    assert config.eval is not None
    assert (config.model.path, config.eval.rows) == (tmp_path / "model", 5)
    assert config.trainer.warm_start is None


def test_an_evaluation_without_its_answers_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    request = EvalRequest("initial", EVAL)
    config = configs_of(request)["initial"]
    finish(config)
    with pytest.raises(ConfigError, match=r"0\.jsonl are missing"):
        run(request)
    assert "finished already" in capsys.readouterr().out


def test_the_model_of_a_run_with_steps_left_is_refused() -> None:
    config = load_config(EVAL, ["run.steps=20"])
    model = finish(config, steps=10)
    with pytest.raises(ConfigError, match=r"step 10, not of step 20; finish the run"):
        model_folder("eval")
    RunFolder(config.folder).summary.unlink()
    with pytest.raises(ConfigError, match=r"its model is that of an unknown step"):
        model_folder("eval")
    RunFolder(config.folder).summary.write_text('{"steps": 20}')
    assert model_folder("eval") == model.resolve()
