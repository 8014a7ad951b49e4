"""The section [rollout.sglang]: the servers of `rollout.backend = "sglang"`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from relax_actors.config.sections import Fraction, Positive, Section


class SglangSection(Section):
    """[rollout.sglang]: a server for each actor of the rollout, on this machine, unless `urls` are given. What a server
    is told of model, context, samples and seeds follows from the other sections.
    """

    urls: list[str] = Field(default_factory=list)
    """Servers that run elsewhere, one for each actor. They must see the run's folder, and be used by this run alone;
    actors of a node that joins later cannot use them."""
    api_key_file: Path | None = None
    """File with the key that the servers of `urls` ask for."""
    weights: Literal["disk", "tensors", "group"] = "disk"
    """How a server takes a version: from a file in the run's folder; in the request, pickled as SGLang wants it; or by
    broadcast in a process group (gloo). The last two are for servers of our own."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What the server computes in; "auto" is `trainer.precision`."""
    tensor_parallel: Positive = 1
    kv_tokens: Positive | None = None
    """Tokens that the server's keys and values have room for. If not set, what SGLang finds room for on a GPU, and all
    samples of `rollout.max_concurrent_prompts` rows at full length, up to 65536 tokens, on a CPU."""
    memory_fraction: Fraction | None = None
    """Share of a GPU's memory for weights, keys and values; SGLang's own choice if not set."""
    arguments: list[str] = Field(default_factory=list)
    """More arguments of `sglang.launch_server`."""

    @model_validator(mode="after")
    def _foreign(self) -> SglangSection:
        if self.urls and self.weights != "disk":
            msg = f'rollout.sglang.weights = "{self.weights}" is for servers of our own; use "disk" for urls'
            raise ValueError(msg)
        places = [url.rstrip("/") for url in self.urls]
        if twice := sorted({place for place in places if places.count(place) > 1}):
            msg = f"rollout.sglang.urls names {twice} more than once: actors would end each other's requests; one each"
            raise ValueError(msg)
        if self.api_key_file is not None and not self.urls:
            msg = "rollout.sglang.api_key_file is for urls; servers of our own have a new key in each life"
            raise ValueError(msg)
        return self
