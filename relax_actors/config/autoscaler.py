"""Section [autoscaler]."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from relax_actors.config.sections import Fraction, NonNegative, NonNegativeInt, PoolSection, Positive, PositiveFloat


class AutoscalerSection(PoolSection):
    """[autoscaler]: adds rollouts while rows wait for them, and takes them away when they are idle."""

    min: Positive = 1
    """Least number of rollouts, those of nodes marked as spot not counted."""
    max: Positive
    """Largest number of rollouts, those of nodes marked as spot not counted."""
    node: str = ""
    """Number or name of the only node whose rollouts are scaled. Default: rollouts are added on the node with most free
    GPUs, or without GPUs on the node with fewest actors, and taken away where most are."""
    interval: PositiveFloat = 5.0
    """Seconds between two looks at the run."""
    out_for: NonNegative = 30.0
    """Seconds for which more rollouts must be needed before some are added."""
    in_for: NonNegative = 300.0
    """Seconds during which fewer rollouts are needed before a rollout is removed."""
    out_cooldown: NonNegative = 60.0
    """Seconds after a change, or after the start of the actor, before rollouts are added."""
    in_cooldown: NonNegative = 300.0
    """Seconds after a change, or after the start of the actor, before a rollout is removed."""
    changes_an_hour: Annotated[int, Field(ge=2)] = 3
    """No rollout is removed if that and the addition that may follow would be more changes than this within an hour.
    Rollouts that starve the trainer are added in any case."""
    most_out: Positive = 4
    """Rollouts added at once, at most."""
    waiting_seconds: NonNegative = 10.0
    """Rollouts are added once the oldest waiting row has waited this many seconds."""
    starved: Fraction = 0.1
    """If the trainer waits for rows for this share of its time, rollouts are added as soon as a row waits. Until no row
    waits or is computed, rollouts are not removed."""
    restarts: NonNegativeInt = 5
    """Restarts of rollouts within `restart_period`, at most. After more restarts no rollout is added, since it would
    fail, too."""
    restart_period: PositiveFloat = 600.0
    """Seconds in which `restarts` are counted."""
    dry_run: bool = False
    """Publish the decisions as events, but change nothing."""

    @model_validator(mode="after")
    def _check(self) -> AutoscalerSection:
        if self.min > self.max:
            msg = f"autoscaler.min = {self.min} is more than autoscaler.max = {self.max}; raise max or lower min"
            raise ValueError(msg)
        if self.replicas != 1:
            msg = f"autoscaler.replicas = {self.replicas}: a run has one autoscaler; leave replicas out"
            raise ValueError(msg)
        return self
