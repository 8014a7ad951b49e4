"""Role `actor_fwd`: log-probs of the newest weights, for the proximal policy of decoupled PPO."""

from __future__ import annotations

from typing import ClassVar

from relax_actors.registry.role_spec import RoleSpec
from relax_actors.roles.scorer import Scorer


class ActorFwd(Scorer):
    """Scores trajectories with the newest weights that are ready when the row arrives.

    They are never older than the weights that sampled the row's newest token. On-policy, with staleness.max = 0, they
    are exactly the weights that the row's step starts from.
    """

    writes: ClassVar = "actor_fwd"
    spec: ClassVar = RoleSpec(device=True, start_order=71)
    follows_weights: ClassVar = True
    replays: ClassVar = True

    def use_weights(self, newest_sampled: int) -> None:
        """Load the newest weights that are ready, at least `newest_sampled`."""
        self._stager.use_newest(newest_sampled)
