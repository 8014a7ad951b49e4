"""Role `examples`: turns rows of the data, or traces, into tokens and a mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from relax_actors.config import Config
from relax_actors.data.examples import ExampleMaker
from relax_actors.data.model_folder import measure
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.data.trace_maker import TraceMaker, traces_of
from relax_actors.messages import Trajectory
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.runtime import Role, Row

if TYPE_CHECKING:
    from relax_actors.training.example_media import ExampleMedia


class Examples(Role):
    """Writes the trajectory of examples, pairs or recorded samples; deterministic."""

    reads: ClassVar = ("prompt",)
    writes: ClassVar = "trajectory"
    kinds: ClassVar = ("group", "eval")
    max_concurrent_rows: ClassVar = 32
    spec: ClassVar = RoleSpec(section="examples", rows="data", start_order=20)

    def setup(self) -> None:
        """Load the tokenizer."""
        config: Config = self.context.config
        tokenizer, facts = Tokenizer(config.model_path), measure(config.model_path)
        context = facts.context_length
        self._media: ExampleMedia | None = None
        self._traces: TraceMaker | None = None
        if config.data.has_traces:
            self._traces = TraceMaker(traces_of(config.data), tokenizer, facts.vocabulary, as_examples=config.from_data)
            return
        expand = dict[str, Any]()
        if config.media is not None:
            from relax_actors.training.example_media import ExampleMedia  # noqa: PLC0415 decoders of media

            self._media = media = ExampleMedia(config, self.context.table.store, self.progress)
            expand = {"family": media.family, "expand": media.expand}
        sets = () if config.eval is None else config.eval.named.values()
        self._maker = ExampleMaker(config, config.data, tokenizer, context, **expand)
        self._held_out = [(each, ExampleMaker(config, each.source, tokenizer, context, **expand)) for each in sets]

    def handle(self, row: Row) -> Trajectory:
        """Return the samples of a row.

        Raises:
            RowError: the row cannot be trained, see `ExampleMaker.make` and `TraceMaker.make`, or no set of [eval] has
                it.
            StoreError: the store has lost a file that the data held itself.
        """
        if self._traces is not None:
            return self._traces.make(row.prompt)
        if self._media is not None:
            self._media.folder = f"{row.id.kind}/{row.id.step}"
        own = self.context.config.held_out(row.id)
        return next((maker for each, maker in self._held_out if each is own), self._maker).make(row.prompt)
