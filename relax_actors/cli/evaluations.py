"""Evaluations in a terminal: models, a run of no steps for each, and figures.

The folder of an evaluation is named after a digest of what its answers depend on, so that the same command resumes it
or shows its result, and another model or other settings are another evaluation.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_actors.cli.evaluation_tables import Result, print_json, show_evaluations
from relax_actors.cli.foreground import Request, complete, finished_before
from relax_actors.config import Config, validate
from relax_actors.config.evaluation_run import digest_of, evaluation_tree
from relax_actors.config.load import load_tree, stages_of
from relax_actors.data.files import files_at
from relax_actors.devices.inventory import NO_REQUEST, GpuRequest
from relax_actors.errors import ConfigError
from relax_actors.evaluation.models import INITIAL, digest_of_files, model_folder
from relax_actors.evaluation.records import read_evaluation
from relax_actors.monitoring.screen import Screen
from relax_actors.runtime import logs
from relax_actors.runtime.run_folder import RunFolder

STAGES = "stages"
"""MODEL of the initial model and those of all stages."""
BASE = "base"
"""How the initial model is called beside the stages."""
MAX_NAME = 40
"""Characters of the run's name that are part of the evaluation's."""


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """Arguments and options of one `relax eval`.

    Attributes:
        model: model folder, run, `initial` or `stages`.
        path: TOML file.
        settings: `section.key=value` each.
        sets: names of the sets to evaluate; all if empty.
        samples: prompts of each set that are shown.
        gpus: GPUs of this machine that may be used.
        as_json: print the result as one line of JSON; all other output goes to stderr.
        quiet: print no progress.
        fresh: evaluate again what is evaluated already.
    """

    model: str
    path: Path
    settings: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    samples: int = 2
    gpus: GpuRequest = NO_REQUEST
    as_json: bool = False
    quiet: bool = False
    fresh: bool = False

    def training(self) -> Request:
        """Return the request of the run of no steps."""
        return Request(
            self.path,
            self.settings,
            gpus=self.gpus,
            as_json=self.as_json,
            quiet=self.quiet,
            fresh=self.fresh,
            command=("eval", self.model),
            options=tuple(part for name in self.sets for part in ("--set", name)),
        )


def run(request: EvalRequest) -> int:
    """Evaluate a model, or those of all stages; return the exit code.

    Raises:
        ConfigError: there is no such model or set, or the configuration cannot work.
    """
    logs.configure()
    console = Screen(stderr=request.as_json)
    configs = configs_of(request)
    for name, config in configs.items():
        folder = RunFolder(config.folder)
        if request.model == STAGES and _is_finished(folder, config):
            continue
        if len(configs) > 1:
            console.show(f"evaluating {name}")
        code, summary = complete(request.training(), console, config, {}, replace_finished=request.fresh)
        if summary is None:
            return code
        if not folder.evaluation(0).exists():
            msg = (
                f"the evaluation of {name} in {folder.root} is finished, but its answers {folder.evaluation(0)} are "
                f"missing; remove the folder to evaluate {name} again"
            )
            raise ConfigError(msg)
        _tidy(folder)
        if len(configs) > 1:  # a process runs one run
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 this command, as it was given
    results = [_result(name, RunFolder(config.folder)) for name, config in configs.items()]
    show_evaluations(console, results, request.samples)
    if request.as_json:
        print_json(results, is_chain=request.model == STAGES)
    return 0


def configs_of(request: EvalRequest) -> dict[str, Config]:
    """Return each model's evaluation configuration by name; raises as `run`."""
    stages = stages_of(request.path, list(request.settings))
    if request.model != STAGES:
        return {request.model: _of_model(request, stages)}
    if request.fresh or not stages:
        why = "--fresh evaluates one model again" if stages else f"{request.path} has no [[stages]]"
        msg = f"MODEL = stages: {why}; give a model folder, a run, or `{INITIAL}`"
        raise ConfigError(msg)
    return _of_stages(request, stages)


def _of_model(request: EvalRequest, stages: Sequence[str]) -> Config:
    """Return one model's evaluation configuration; of stages, the last one's."""
    trees = _trees(request, stages)
    if request.model == INITIAL:
        return _config(request, _from_start(trees), None)
    return _config(request, trees[-1], model_folder(request.model))


def _trees(request: EvalRequest, stages: Sequence[str]) -> list[dict[str, Any]]:
    """Return the settings of each stage; of a file with one run, its settings."""
    each = [[f"run.stage={name}"] for name in stages] or [[]]
    return [load_tree(request.path, [*request.settings, *more]) for more in each]


def _from_start(trees: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the settings of the last stage with the model that the first one starts from."""
    first = ("model", "data", "trainer")
    kept = {name: section for name, section in trees[-1].items() if name not in first}
    return kept | {name: trees[0][name] for name in first if name in trees[0]}


def _of_stages(request: EvalRequest, stages: Sequence[str]) -> dict[str, Config]:
    """Return evaluation configurations of the initial and each stage's model.

    All are evaluated on the sets of the last stage.
    """
    trees = _trees(request, stages)
    configs = {BASE: _config(request, _from_start(trees), None)}
    for name, tree in zip(stages, trees, strict=True):
        folder = RunFolder(validate(tree, str(request.path)).folder)
        configs[name] = _config(request, trees[-1], model_folder(str(folder.root)))
    return configs


def _config(request: EvalRequest, tree: dict[str, Any], model: Path | None) -> Config:
    """Return an evaluation's configuration, in a folder of its own."""
    source = str(request.path)
    evaluation = evaluation_tree(tree, model, request.sets, source)
    config = validate(evaluation, source)
    assert config.eval is not None  # noqa: S101 `evaluation_tree` refuses settings without it
    digest = digest_of(evaluation, digest_of_files(config.model.path, _data_files(config)))
    name = f"{config.run.name[:MAX_NAME]}-eval-{digest}"
    given = [each.partition("=")[0].strip() for each in request.settings]
    update: dict[str, Any] = {"name": name, "folder": None}
    if "run.folder" in given:
        folder = Path(tree["run"]["folder"])
        update["folder"] = (folder.parent if "stage" in tree["run"] else folder) / name
    rollout = config.rollout.model_copy(update={"group_size": max(2, config.most_samples)})
    return config.model_copy(update={"run": config.run.model_copy(update=update), "rollout": rollout})


def _data_files(config: Config) -> list[Path]:
    """Return the files that the held-out rows are read from, and those of a warm start."""
    assert config.eval is not None  # noqa: S101 `evaluation_tree` refuses settings without it
    sections = [each.source for each in config.eval.named.values()]
    sections += [config.data] if config.trainer.warm_start is not None else []
    paths = [part.path for each in sections for part in (each, *each.mixture.values()) if part.path is not None]
    return [file for path in paths for file in files_at(path)]


def _is_finished(folder: RunFolder, config: Config) -> bool:
    """Whether a folder holds this evaluation's result; raises ConfigError for another."""
    return finished_before(folder, config) is not None and folder.evaluation(0).exists()


def _tidy(folder: RunFolder) -> None:
    """Remove an evaluation's copies of the model; answers and record stay."""
    for path in (folder.model, folder.checkpoints, folder.root / "store"):
        shutil.rmtree(path, ignore_errors=True)


def _result(name: str, folder: RunFolder) -> Result:
    return Result(name, folder, read_evaluation(folder.evaluation(0)))
