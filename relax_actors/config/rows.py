"""Rows of a run: sections that only sampled rows have, or only rows of data, and how many rows wait at once."""

from __future__ import annotations

from typing import Any

from relax_actors.config.evaluation import SAMPLING, EvalSection, EvalSet
from relax_actors.config.sections import Section

OF_SAMPLED = ("rollout", "reward", "advantages", "environment", "agent", "gateway", "autoscaler", "critic", "simulate")
"""Sections of runs whose rows the policy samples."""
OF_DATA = ("examples",)
"""Sections of runs whose rows come from data."""


def foreign_section(config: Section, rows: str) -> str:
    """Return why a section that is set has no effect in a run; empty if all have one.

    Args:
        config: configuration of the run.
        rows: its `algorithm.rows`.
    """
    from_data = rows != "sampled"
    given = "come from data" if from_data else "are sampled by the policy"
    for name in OF_SAMPLED if from_data else OF_DATA:
        if getattr(config, name) != _unset(config, name):
            return (
                f'[{name}] has no effect: with algorithm.rows = "{rows}" rows {given}; leave it out, or choose another '
                "algorithm.name"
            )
    data: Any = getattr(config, "data", None)
    if rows != "examples" and data is not None and data.oversize == "split":
        return (
            f'data.oversize = "split" divides examples, and with algorithm.rows = "{rows}" a row is not an example; '
            'set "truncate_left", "truncate_right" or "skip"'
        )
    held_out: EvalSection | None = getattr(config, "eval", None)
    for where, each in {}.items() if held_out is None or not from_data else held_out.located.items():
        for key in ("reward", *SAMPLING):
            if (value := getattr(each, key)) != EvalSet.model_fields[key].default:
                return (
                    f'{where}.{key} = {value!r} has no effect: with algorithm.rows = "{rows}" '
                    "held-out rows are scored by the log-probs of their answers; leave it out"
                )
    return ""


def keeps_messages(config: Any) -> bool:
    """Whether the prompts of a run hold their chat messages: episodes continue them, and a reward model reads them."""
    return config.playing is not None or "reward_model" in config.roles


def admitted_rows(config: Any) -> int:
    """Return how many rows are admitted and not trained yet, at most; held-out rows come on top."""
    return int(config.trainer.prompts_per_step * (config.staleness.max + 1))


def spot_backlog(config: Any) -> int:
    """Return how many rows must wait before rollouts on nodes marked as spot get any."""
    usual = min(config.rollout.max_concurrent_prompts, admitted_rows(config) // 2)
    return int(config.rollout.spot_backlog or max(2, usual))


def unreachable_backlog(config: Any) -> str:
    """Return why rollouts on nodes marked as spot would never get a row; empty if they would."""
    backlog, most = config.rollout.spot_backlog, admitted_rows(config)
    if backlog is None or backlog <= most:
        return ""
    return (
        f"rollout.spot_backlog = {backlog} rows never wait at once, since at most {most} are admitted "
        "(trainer.prompts_per_step x (staleness.max + 1)); rollouts on spot nodes would get none; lower it"
    )


def _unset(config: Any, name: str) -> Any:
    """Return what a section is if the file leaves it out."""
    default = type(config).model_fields[name].get_default()
    if name == "rollout" and config.run.deterministic:
        return default.model_copy(update={"max_concurrent_prompts": 1})
    return default
