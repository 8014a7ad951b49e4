"""Stages of a file: runs that follow one another, each from the model that the last one has trained.

    [[stages]]
    name = "sft"
    [stages.algorithm]
    name = "sft"

Sections outside of `stages` are those of every stage. A stage replaces their keys by its own, and `[data]`, `[eval]`,
`[algorithm]` and `[reward]` as a whole. The stage after one that trains a reward model begins with the same model as
that one did, and a role names the model of an earlier stage as `model = { stage = "NAME" }`.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from broker.subjects import check_name
from relax_actors.config.presets import filled
from relax_actors.errors import ConfigError, RelaxError

STAGES = "stages"
WHOLE = ("data", "eval", "algorithm", "reward")
"""Sections that a stage replaces as a whole: their keys depend on each other."""


def names_of_stages(tree: dict[str, Any], source: str) -> list[str]:
    """Return the names of the stages in order; none if the file describes one run.

    Raises:
        ConfigError: a stage has no name, two stages have the same one, or a stage sets a key outside of a section.
    """
    stages = tree.get(STAGES, [])
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        msg = f"{source}: stages: write each stage as [[stages]]"
        raise ConfigError(msg)
    names = [stage.get("name") for stage in stages]
    for i, name in enumerate(names, 1):
        try:
            check_name(name if isinstance(name, str) else "", "name")
        except RelaxError as error:
            msg = f'{source}: stages: stage {i} needs a name, such as name = "sft": {error}'
            raise ConfigError(msg) from error
        if names.count(name) > 1:
            msg = f"{source}: stages: {name!r} names more than one stage; rename one"
            raise ConfigError(msg)
    for stage in stages:
        for section, body in stage.items():
            if section != "name" and not isinstance(body, dict):
                msg = (
                    f"{source}: stages: {section} of the stage {stage['name']!r} is not a section; write it in one, "
                    "such as [stages.run]"
                )
                raise ConfigError(msg)
    return names


def tree_of_stage(tree: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the tree of the stage that `run.stage` names; of a file with one run, the tree itself.

    Raises:
        ConfigError: `run.stage` names none, or the file has stages and it is not set.
    """
    names, run = names_of_stages(tree, source), tree.get("run", {})
    chosen = run.get("stage") if isinstance(run, dict) else None
    if not names and chosen is None:
        return tree
    if chosen not in names:
        known = ", ".join(names) or "none: the file has no [[stages]]"
        said = "is not set" if chosen is None else f"= {chosen!r} names no stage"
        msg = f"{source}: run.stage {said}; stages: {known}" + (f"; write run.stage={names[0]}" if names else "")
        raise ConfigError(msg)
    whole, models = tree, dict[str, str]()
    for k, name in enumerate(names):
        merged = _merged(tree, tree[STAGES][k], name)
        if k and "model" not in tree[STAGES][k]:
            # A policy cannot start from a reward model; it starts from the same model as the reward model.
            if not _trains_scores(whole):
                _refuse_adapter_alone(whole, names[k - 1], f"{source}: stages")
                merged["model"] = {"path": models[names[k - 1]]}
            elif "model" in whole:
                merged["model"] = whole["model"]
        merged = _with_models(merged, models, f"{source}: stages.{name}")
        whole, models[name] = merged, str(_model_of(merged))
        if name == chosen:
            break
    return whole


def _refuse_adapter_alone(tree: dict[str, Any], name: str, where: str) -> None:
    """Refuse a stage that leaves no whole model for the next one.

    Raises:
        ConfigError: it trains an adapter, and does not add it to the weights of the model at its end.
    """
    lora = tree.get("lora")
    if isinstance(lora, dict) and not lora.get("export_merged"):
        msg = (
            f"{where}: the stage {name!r} trains an adapter, and the next one begins with its model; set "
            "lora.export_merged = true in it, or give the next stage a [stages.model]"
        )
        raise ConfigError(msg)


def _trains_scores(tree: dict[str, Any]) -> bool:
    algorithm = tree.get("algorithm")
    with suppress(ValueError):  # an unknown preset, which is refused where the stage is read
        return isinstance(algorithm, dict) and filled(algorithm).get("head") == "scores"
    return False


def _with_models(tree: dict[str, Any], models: dict[str, str], where: str) -> dict[str, Any]:
    """Return a stage with folders of earlier stages in place of `{ stage = NAME }`; raises ConfigError for others."""
    roles = tree.get("roles")
    if not isinstance(roles, dict):
        return tree
    changed = dict(roles)
    for name, section in roles.items():
        model = section.get("model") if isinstance(section, dict) else None
        if not isinstance(model, dict):
            continue
        stage = model.get("stage")
        if stage not in models or len(model) > 1:
            known = ", ".join(models) or "none"
            msg = f"{where}.roles.{name}.model: {model} names no earlier stage; write {{ stage = NAME }} of: {known}"
            raise ConfigError(msg)
        changed[name] = section | {"model": models[stage]}
    return tree | {"roles": changed}


def _merged(tree: dict[str, Any], stage: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the sections of a stage, with the model that the file names."""
    merged = {section: body for section, body in tree.items() if section != STAGES}
    for section, body in stage.items():
        if section != "name":
            own = merged.get(section)
            merged[section] = body if section in WHOLE or not isinstance(own, dict) else own | body
    run = dict(merged.get("run", {}))
    folder = run.get("folder")
    run |= {"stage": name, "name": f"{run.get('name', 'run')}-{name}"}
    return merged | {"run": run | ({} if folder is None else {"folder": str(Path(folder) / name)})}


def _model_of(tree: dict[str, Any]) -> Path:
    run = tree["run"]
    return Path(run.get("folder") or Path("runs") / run["name"]).resolve() / "model"
