"""Role `reference`: log-probs of the initial weights, for the KL term of the loss."""

from __future__ import annotations

from typing import ClassVar

from relax_actors.registry.role_spec import RoleSpec
from relax_actors.roles.scorer import Scorer


class Reference(Scorer):
    """Scores trajectories with version 0, the model at the start of the run."""

    writes: ClassVar = "reference"
    spec: ClassVar = RoleSpec(device=True, start_order=70)
    follows_weights: ClassVar = False

    def use_weights(self, newest_sampled: int) -> None:  # noqa: ARG002 always version 0
        """Load version 0."""
        self._stager.use_version(0)
