"""Role `squares`: sums of squared probabilities over the vocabulary, for the optimal token baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from broker.codec import Array
from relax_actors.engines.protocols import TrainSample
from relax_actors.engines.protocols.scoring import SupportsSquares
from relax_actors.errors import ConfigError
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.roles.actor_fwd import ActorFwd


class Squares(ActorFwd):
    """Computes the sum of the squared probabilities of the whole vocabulary at each token of a trajectory.

    The column is `[total] float32` in the layout of `Trajectory.logprobs`. The weights are chosen as by `ActorFwd`.
    """

    writes: ClassVar = "squares"
    spec: ClassVar = RoleSpec(device=True, start_order=72)

    def setup(self) -> None:
        """Build the engine.

        Raises:
            ConfigError: the scoring engine computes no squared probabilities.
        """
        super().setup()
        if not isinstance(self._engine, SupportsSquares):
            msg = (
                f'roles.{self.context.role}.backend = "{self.backend}" computes no squared probabilities; set "torch" '
                'or "megatron"'
            )
            raise ConfigError(msg)

    def score(self, samples: list[TrainSample]) -> Sequence[Array]:
        """Compute sums of squared probabilities with the weights in use."""
        assert isinstance(self._engine, SupportsSquares)  # noqa: S101 checked in `setup`
        return self._engine.squares(samples, self.progress)
