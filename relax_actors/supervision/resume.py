"""Changed settings at the resumption of a run: which may change, which are refused, and why.

Pure functions of the saved and the new configuration.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

from relax_actors.config import Config
from relax_actors.config.masking import masked
from relax_actors.errors import ConfigError
from relax_actors.roles import role_class
from relax_actors.roles.fitting import check_removal
from relax_actors.runtime.run_folder import RunFolder

OPERATIONAL = (
    "run.folder",
    "run.keep_steps",
    "run.stage",
    "broker.*",
    "store.*",
    "supervision.*",
    "record.*",
    "prompts.*",
    "*.replicas",
    "*.deadline",
    "*.memory_limit_mib",
    "*.secrets",
    "*.isolation",
    "*.readable",
    "*.max_processes",
    "media.folders",
    "media.max_concurrent_rows",
    "media.urls.*",
    "placement.patience",
    "placement.turn",
    "trainer.checkpoint_every",
    "trainer.keep_checkpoints",
    "trainer.async_checkpoints",
    "weights.transport",
    "notify",
    "notify.*",
    "autoscaler",
    "autoscaler.*",
    "rollout.spot_backlog",
    "gateway.operator_token_file",
)
"""Settings that do not change what is trained."""
MOVABLE = ("data.path", "model.path", "eval.data.path", "data.mixture.*.path", "eval.sets.*.data.path")
"""Files that may be moved; their content must stay."""
EVALUATION = ("eval", "eval.*")
"""Settings of the evaluation. They apply from the next evaluated version on, and rows that the current version has with
other settings count in no figure; see `EvalSection.marks`.
"""
MAY_CHANGE = ", ".join(
    [
        "run.steps with a constant schedule",
        "run.epochs if the last step is full",
        "eval.*",
        "an added [roles.<name>]",
        "a removed [roles.<name>] whose column no role reads",
        *MOVABLE[:2],
        *OPERATIONAL,
    ]
)
MAX_SHOWN = 100


class Effect(StrEnum):
    """Effect of a changed setting on a run that has trained."""

    NONE = "none"
    """What is trained stays the same."""
    CONTENT = "content"
    """Allowed if the files are the same."""
    RESULT = "result"
    """Allowed; the run continues with the new setting."""
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Change:
    """A setting that differs from the saved one.

    Attributes:
        key: dotted name of the setting.
        old: saved value; None if it was not set.
        new: new value; None if it is not set.
        effect: what the change means for a run that has trained.
        reason: why it is refused, if that needs an explanation.
    """

    key: str
    old: Any
    new: Any
    effect: Effect = Effect.REFUSED
    reason: str = ""

    def __str__(self) -> str:
        text = f"{self.key}: {_shown(self.key, self.old)} -> {_shown(self.key, self.new)}"
        return f"{text} ({self.reason})" if self.reason else text


def absolute(config: Config) -> Config:
    """Return a configuration whose run folder is absolute, as it is saved: other processes have other directories."""
    return config.model_copy(update={"run": config.run.model_copy(update={"folder": RunFolder(config.folder).root})})


def compare(old: Config, new: Config) -> list[Change]:
    """Return the settings that differ, by name, with their effects; raises as `role_class` for added roles."""
    changes = _differences(old.model_dump(mode="json"), absolute(new).model_dump(mode="json"))
    added = [name for name in new.roles if name not in old.roles]
    columns = {role_class(new, name).writes for name in added}
    return [_judged(change, old, new, columns) for change in sorted(changes, key=lambda change: change.key)]


def needs_new_start(changes: Iterable[Change]) -> bool:
    """Whether a run that has not trained must start from nothing, because its first weights or rows may differ."""
    return any(change.effect in (Effect.REFUSED, Effect.CONTENT) for change in changes)


def continues(changes: Sequence[Change]) -> bool:
    """Whether a finished run goes on: `run.steps` was raised, and nothing else speaks against it."""
    raised = any(change.key == "run.steps" and change.new > change.old for change in changes)
    return raised and all(change.effect is not Effect.REFUSED for change in changes)


def listed(changes: Iterable[Change]) -> str:
    """Format changes, one on a line."""
    return "\n".join(f"  {change}" for change in changes)


def _judged(change: Change, old: Config, new: Config, added_columns: set[str]) -> Change:
    effect, reason = Effect.REFUSED, ""
    section, _, name = change.key.partition(".")
    if any(fnmatchcase(change.key, pattern) for pattern in OPERATIONAL):
        effect = Effect.NONE
    elif any(fnmatchcase(change.key, pattern) for pattern in MOVABLE):
        effect = Effect.CONTENT
    elif any(fnmatchcase(change.key, pattern) for pattern in EVALUATION):
        effect = Effect.RESULT
    elif change.key == "run.steps":
        reason = _bound_to_steps(old, new)
        effect = Effect.REFUSED if reason else Effect.RESULT
    elif change.key in ("run.epochs", "run.rows"):
        reason = _bound_to_rows(old, new)
        effect = Effect.REFUSED if reason else Effect.RESULT
    elif section == "roles" and name in old.roles and name not in new.roles:
        reason = _needed_by_others(old, name)
        effect = Effect.REFUSED if reason else Effect.RESULT
    elif section == "roles" and name in new.roles and name not in old.roles:
        reason = role_class(new, name).spec.needs_weights
        effect = Effect.REFUSED if reason else Effect.RESULT
    elif change.key == "advantages.reads":
        effect = Effect.RESULT if change.new in added_columns else Effect.REFUSED
        reason = "" if effect is Effect.RESULT else "only to the column of a role that is added with it"
    return Change(change.key, change.old, change.new, effect, reason)


def _bound_to_steps(old: Config, new: Config) -> str:
    """Why the learning rate of a step depends on `run.steps`; empty if it does not."""
    trainer = new.trainer
    if trainer.schedule != "constant":
        return f'trainer.schedule = "{trainer.schedule}" decays over run.steps'
    if trainer.warmup_steps > min(old.run.steps, new.run.steps):
        return f"trainer.warmup_steps = {trainer.warmup_steps} is cut to run.steps"
    return ""


def _bound_to_rows(old: Config, new: Config) -> str:
    """Why a run cannot have other rows; empty if the last step is as full as all others, or goes on as it is."""
    size = old.trainer.prompts_per_step
    rows = old.run.steps * size if old.run.rows is None else old.run.rows
    if rows % size == 0 and (new.run.rows is None or new.run.rows % size == 0 or new.run.rows > rows):
        return ""
    if rows % size == 0:
        return "the last step of fewer rows would be one that the run may have trained in full; set run.steps"
    return (
        f"the last step has the {rows % size} of {size} rows that remained, and would have had others; choose "
        "run.epochs such that steps are full, or begin another run from the model of this one"
    )


def _needed_by_others(old: Config, role: str) -> str:
    """Why a role cannot be left out of a run that has trained; empty if no other role needs it."""
    rest = {name: section for name, section in old.roles.items() if name != role}
    try:
        check_removal(old, old.model_copy(update={"roles": rest}), role)
    except ConfigError as error:
        return str(error)
    return ""


def _differences(old: Any, new: Any, at: str = "") -> list[Change]:
    if isinstance(old, dict) and isinstance(new, dict):
        changes = []
        for key in {**old, **new}:
            changes += _differences(old.get(key), new.get(key), f"{at}.{key}" if at else str(key))
        return changes
    return [] if old == new else [Change(at, old, new)]


def _shown(key: str, value: Any) -> str:
    if value is None:
        return "not set"
    set_ones = {name: inner for name, inner in value.items() if inner is not None} if isinstance(value, dict) else value
    text = json.dumps(masked(set_ones, key.rpartition(".")[2]))
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
