"""Rows of a run: sections that only sampled rows have, or only rows of data, and how many rows wait at once."""

from __future__ import annotations

from typing import Any

from relax_actors.config.evaluation import SAMPLING, EvalSection, EvalSet

OF_SAMPLED = ("rollout", "reward", "advantages", "environment", "agent", "gateway", "autoscaler", "critic", "simulate")
"""Sections of runs whose rows the policy samples."""
OF_DATA = ("examples",)
"""Sections of runs whose rows come from data."""
OF_GENERATED = ("environment", "agent", "gateway", "eval", "simulate")
"""Sections of runs in which the policy samples rows, in addition to [rollout], whose sizes describe samples."""


def foreign_section(config: Any, rows: str) -> str:
    """Return why a section that is set has no effect in a run; empty if all have one."""
    from_data = rows != "sampled"
    given = "come from data" if from_data else "are sampled by the policy"
    if config.data.has_traces and (problem := _foreign_to_traces(config)):
        return problem
    if config.record.entropy and not config.generates:
        return "record.entropy has no effect: no policy samples the rows of this run; leave it out"
    for name in OF_SAMPLED if from_data else () if config.data.has_traces else OF_DATA:
        if getattr(config, name) != _unset(config, name):
            return (
                f'[{name}] has no effect: with algorithm.rows = "{rows}" rows {given}; leave it out, or choose another '
                "algorithm.name"
            )
    data = config.data
    if rows != "examples" and data.oversize == "split":
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


def _foreign_to_traces(config: Any) -> str:
    """Return why a setting has no effect in a run that trains on recorded samples; empty if all have one."""
    if config.from_data and (config.algorithm.rows != "examples" or config.algorithm.trains_scores):
        return (
            f'data.kind = "traces" holds samples, and algorithm.rows = "{config.algorithm.rows}" takes none; choose an '
            'algorithm.name of sampled rows, such as "grpo", or of examples, such as "sft"'
        )
    for name in OF_GENERATED:
        if getattr(config, name) is not None:
            return (
                f'[{name}] has no effect: with data.kind = "traces" samples are recorded, and no rollout generates '
                "any; leave it out"
            )
    if config.trainer.router_replay:
        return 'trainer.router_replay = true replays experts, which data.kind = "traces" does not hold; leave it out'
    if config.media is not None:
        return 'data.kind = "traces" holds no features of media, which the model of this run reads; use a text model'
    return ""


def rows_of_roles(config: Any) -> frozenset[str]:
    """Return the `RoleSpec.rows` of the roles of a run."""
    made = "generated" if config.generates else "data"
    return frozenset(("", made) if config.from_data else ("", made, "sampled"))


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
    if name == "reward" and config.data.has_traces:
        return default.model_copy(update={"function": "recorded"})
    if name == "rollout" and config.run.deterministic:
        return default.model_copy(update={"max_concurrent_prompts": 1})
    return default
