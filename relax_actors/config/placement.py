"""The section [placement]: which roles share a device."""

from __future__ import annotations

from collections import Counter
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from relax_actors.config.sections import NonNegative, PositiveFloat, Section


class PlacementSection(Section):
    """[placement]: which roles share a device. Log-probs of the roles `reference` and `actor_fwd` are computed by their
    own actors if there is a section [roles.reference] or [roles.actor_fwd], else by the trainer.
    """

    colocate: list[list[str]] = Field(default_factory=list)
    """Groups of roles that share one device, e.g. [["rollout", "trainer"]]: one actor of a group computes at a time.
    Roles outside of every group compute whenever they can."""
    release: Literal["none", "host", "disk"] = "host"
    """Where an actor moves its weights, gradients and optimizer state while others of its group compute, all ranks of a
    trainer together; they stay as long as nobody waits. "host": from the GPU to pinned memory of the host; "disk": to a
    file without a name in the folder of the run, also from the memory of a CPU; "none": nowhere. SGLang keeps its
    weights in host memory and forgets keys and values, unless it is "none"; on a CPU it keeps both."""
    turn: NonNegative | None = None
    """Seconds for which an actor whose memory leaves keeps the device from others that wait for it, as long as further
    rows wait for itself, so that an on-policy step takes one turn of each role. By default half of `patience`; 0: hand
    the device over after each batch."""
    patience: PositiveFloat = 600.0
    """Seconds for which one actor may hold the shared device before an actor that waits for it fails; more than
    `turn`, by at least the time of a batch."""

    @field_validator("colocate")
    @classmethod
    def _groups(cls, value: list[list[str]]) -> list[list[str]]:
        if short := next((group for group in value if len(set(group)) < 2), None):  # noqa: PLR2004
            msg = f"placement.colocate: {short} has only one role; name at least two, or remove the group"
            raise ValueError(msg)
        twice = [name for name, n in Counter(name for group in value for name in group).items() if n > 1]
        if twice:
            msg = f"placement.colocate names {twice[0]!r} twice; a role's actors are on one device"
            raise ValueError(msg)
        return value

    @model_validator(mode="after")
    def _turn_ends(self) -> Self:
        if self.turn is not None and self.turn >= self.patience:
            msg = (
                f"placement.turn = {self.turn:g} lets an actor keep its device for longer than others wait for it "
                f"(placement.patience = {self.patience:g}); lower placement.turn, or raise placement.patience"
            )
            raise ValueError(msg)
        return self

    @property
    def longest_turn(self) -> float:
        """Seconds after which an actor with more work hands the device over to one that waits."""
        return self.patience / 2 if self.turn is None else self.turn

    def device_of(self, role: str) -> int | None:
        """Number of the device that a role shares; None if it shares none."""
        return next((n for n, group in enumerate(self.colocate) if role in group), None)

    def leaves_device(self, role: str) -> bool:
        """Whether the actors of a role leave their device while others compute there."""
        return self.release != "none" and self.device_of(role) is not None
