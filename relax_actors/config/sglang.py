"""Section [rollout.sglang]: the inference servers of `rollout.backend = "sglang"`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from relax_actors.config.sections import Fraction, Positive, Section


class SglangSection(Section):
    """[rollout.sglang]: one server on this machine per rollout actor, unless `urls` are set.

    A server's model, context length, concurrency and seeds follow from the other sections.
    """

    urls: list[str] = Field(default_factory=list)
    """External servers, one per rollout actor. They must see the run's folder and serve this run alone. Actors of nodes
    that join later cannot use them. Refused for models that take images, video or sound."""
    api_key_file: Path | None = None
    """File with the API key of the servers in `urls`."""
    weights: Literal["disk", "tensors", "group"] = "disk"
    """How a server receives weights: from a file in the run's folder; in the request, pickled as SGLang requires; or by
    broadcast in a gloo process group. The last two are refused with `urls`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the server; "auto" is `trainer.precision`."""
    tensor_parallel: Positive = 1
    """GPUs per server, as SGLang's tensor parallel size."""
    kv_tokens: Positive | None = None
    """Capacity of the key-value cache in tokens. Default: on a GPU SGLang's own choice, on a CPU all samples of
    `rollout.max_concurrent_prompts` rows at full length, up to 65536 tokens."""
    memory_fraction: Fraction | None = None
    """Share of a GPU's memory for weights and key-value cache; default: SGLang's own choice."""
    arguments: list[str] = Field(default_factory=list)
    """Additional arguments of `sglang.launch_server`."""

    @model_validator(mode="after")
    def _check_external(self) -> SglangSection:
        if self.urls and self.weights != "disk":
            msg = f'rollout.sglang.weights = "{self.weights}" needs servers that the run starts; use "disk" with urls'
            raise ValueError(msg)
        urls = [url.rstrip("/") for url in self.urls]
        if duplicates := sorted({url for url in urls if urls.count(url) > 1}):
            msg = (
                f"rollout.sglang.urls names {duplicates} more than once: actors that share a server would abort each "
                "other's requests; give each actor its own"
            )
            raise ValueError(msg)
        if self.api_key_file is not None and not self.urls:
            msg = "rollout.sglang.api_key_file is for urls; servers that the run starts get random keys. Remove it"
            raise ValueError(msg)
        return self
