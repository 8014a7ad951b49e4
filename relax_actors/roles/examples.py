"""Role `examples`: turns rows of the data into tokens and a mask of the trained ones."""

from __future__ import annotations

from typing import ClassVar

from relax_actors.config import Config
from relax_actors.data.examples import ExampleMaker
from relax_actors.data.model_folder import measure
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.messages import Trajectory
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.runtime import Role, Row


class Examples(Role):
    """Writes the trajectory of an example or of a pair of answers; the same row gives the same bytes."""

    reads: ClassVar = ("prompt",)
    writes: ClassVar = "trajectory"
    kinds: ClassVar = ("group", "eval")
    max_concurrent_rows: ClassVar = 32
    spec: ClassVar = RoleSpec(section="examples", rows="data", start_order=20)

    def setup(self) -> None:
        """Load the tokenizer."""
        config: Config = self.context.config
        tokenizer, context = Tokenizer(config.model_path), measure(config.model_path).context_length
        self._maker = ExampleMaker(config, config.data, tokenizer, context)
        held_out = config.data if config.eval is None else config.eval.data
        self._held_out = ExampleMaker(config, held_out, tokenizer, context)

    def handle(self, row: Row) -> Trajectory:
        """Return the samples of a row.

        Raises:
            RowError: the row cannot be trained; see `ExampleMaker.make`.
        """
        return (self._held_out if row.is_eval else self._maker).make(row.prompt)
