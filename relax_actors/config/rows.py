"""Sections that only runs with sampled rows have, or only those whose rows come from data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relax_actors.config.schema import Config

OF_SAMPLED = ("rollout", "reward", "advantages", "environment", "agent", "gateway", "critic", "simulate")
"""Sections of runs whose rows the policy samples."""
OF_DATA = ("examples",)
"""Sections of runs whose rows come from data."""


def foreign_section(config: Config) -> str:
    """Return why a section that is set has no effect with `algorithm.rows`; empty if all have one."""
    rows = config.algorithm.rows
    given = "come from data" if config.from_data else "are sampled by the policy"
    for name in OF_SAMPLED if config.from_data else OF_DATA:
        if getattr(config, name) != _unset(config, name):
            return (
                f'[{name}] has no effect: with algorithm.rows = "{rows}" rows {given}; leave it out, or choose another '
                "algorithm.name"
            )
    if (
        config.from_data
        and config.eval is not None
        and config.eval.reward != type(config.eval).model_fields["reward"].default
    ):
        return (
            f'eval.reward = {config.eval.reward!r} has no effect: with algorithm.rows = "{rows}" held-out rows are '
            "scored by the log-probs of their answers; leave it out"
        )
    return ""


def _unset(config: Config, name: str) -> Any:
    """Return what a section is if the file leaves it out."""
    default = type(config).model_fields[name].get_default()
    if name == "rollout" and config.run.deterministic:
        return default.model_copy(update={"max_concurrent_prompts": 1})
    return default
