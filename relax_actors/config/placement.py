"""Where roles compute: the section [placement], and the roles that may stand beside the trainer or in it."""

from __future__ import annotations

from collections import Counter

from pydantic import Field, field_validator

from relax_actors.config.sections import PositiveFloat, Section

OPTIONAL = {
    "reference": "relax_actors.roles.scoring.Reference",
    "actor_fwd": "relax_actors.roles.scoring.ActorFwd",
}
"""Roles of ours that run only where the configuration has a section for them; each writes the column of its name."""


class PlacementSection(Section):
    """[placement]: which roles share a device. `reference` and `actor_fwd` have actors of their own where there is a
    section [roles.reference] or [roles.actor_fwd]; else the trainer computes what the algorithm needs of them.
    """

    colocate: list[list[str]] = Field(default_factory=list)
    """Groups of roles that share one device, e.g. [["rollout", "trainer"]]: of a group one actor computes at a time.
    Each keeps its weights on the device. All other roles compute whenever they can."""
    patience: PositiveFloat = 600.0
    """Seconds that an actor waits for its turn before it gives up."""

    @field_validator("colocate")
    @classmethod
    def _groups(cls, value: list[list[str]]) -> list[list[str]]:
        if short := next((group for group in value if len(set(group)) < 2), None):  # noqa: PLR2004
            msg = f"placement.colocate: {short} is one role, which shares its device with nobody; name two, or none"
            raise ValueError(msg)
        twice = [name for name, n in Counter(name for group in value for name in group).items() if n > 1]
        if twice:
            msg = f"placement.colocate names {twice[0]!r} twice; a role's actors are on one device"
            raise ValueError(msg)
        return value

    def device_of(self, role: str) -> int | None:
        """Number of the device that a role shares; None if it has its own."""
        return next((n for n, group in enumerate(self.colocate) if role in group), None)
