"""The backend `rollout.backend = "sglang"`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from relax_actors.algorithms.advantages.estimation import needs_greedy
from relax_actors.config import Config
from relax_actors.data.model_folder import measure
from relax_actors.data.nested_config import text_fields
from relax_actors.engines.backends import refuse_options
from relax_actors.engines.protocols import InferenceEngine
from relax_actors.engines.sglang import presence
from relax_actors.engines.sglang.families import served_family
from relax_actors.engines.sglang.server_record import ServerRecord
from relax_actors.engines.torch.architectures import causal_model_class
from relax_actors.errors import ConfigError
from relax_actors.runtime import Context

SERVER_BYTES = 1700 << 20
"""Memory of a server without its model."""


class SglangBackend:
    """Generates with one SGLang server per actor; implements `InferenceBackend`."""

    def build(self, context: Context) -> InferenceEngine:
        """Wait for the actor's server and connect to it."""
        from relax_actors.engines.sglang.connection import SglangSettings  # noqa: PLC0415 imports torch
        from relax_actors.engines.sglang.engine import SglangEngine  # noqa: PLC0415
        from relax_actors.engines.sglang.media_reference import MediaReferences  # noqa: PLC0415
        from relax_actors.engines.sglang.weight_loaders import (  # noqa: PLC0415
            BroadcastLoader,
            DiskLoader,
            TensorLoader,
            WeightLoader,
        )
        from relax_actors.engines.torch.process_setup import configure_torch  # noqa: PLC0415

        config, path = context.config, context.folder.server(context.n)
        configure_torch(config.run)
        rollout, settings = config.rollout, config.rollout.sglang
        external = external_server(context)
        loader: WeightLoader = DiskLoader(path.with_suffix(""))
        if settings.weights != "disk":
            loader = (TensorLoader if settings.weights == "tensors" else BroadcastLoader)(settings.tensor_parallel)
        facts, served = measure(config.model_path), served_family(config.model_path)
        engine = SglangEngine(
            lambda: external or ServerRecord.load(path),
            loader,
            SglangSettings(
                facts.context_length,
                rows=rollout.max_concurrent_prompts,
                group=rollout.group_size + (1 if needs_greedy(config.algorithm) else 0),
                patience=config.supervision.longest_start if external is None else config.supervision.start_deadline,
                stall=rollout.deadline / 2,
                moe=facts.moe if config.trainer.router_replay else None,
                media=None if served is None else MediaReferences(served[0], context.table.store.root),
                prefixes=() if served is None else served[1].prefixes,
                grammars=external is None and config.gateway is not None,
                keep_partial=not config.run.deterministic,
                progress=context.progress,
                stopping=context.stopping,
            ),
        )
        engine.wait_for_server()
        return engine

    def check(self, config: Config, model: Path) -> Iterator[str]:
        """Refuse settings that SGLang does not support and models whose weights it cannot load."""
        refuse_options(config, "rollout")
        rollout, urls, facts = config.rollout, config.rollout.sglang.urls, measure(model)
        if served_family(model) is not None and urls:
            msg = (
                "rollout.sglang.urls: a server that the run does not start cannot read the media of prompts; leave it "
                "out, so that the run starts its servers"
            )
            raise ConfigError(msg)
        if rollout.min_tokens:
            msg = (
                f"rollout.min_tokens = {rollout.min_tokens}: log-probs of SGLang leave out the suppressed stop tokens; "
                "set it to 0, or use another backend"
            )
            raise ConfigError(msg)
        if len(urls) not in (0, rollout.replicas):
            msg = f"rollout.replicas = {rollout.replicas}, but rollout.sglang.urls has {len(urls)}; give each actor one"
            raise ConfigError(msg)
        fields = text_fields(json.loads((model / "config.json").read_text()))
        if presence.has_experts(fields) and facts.model_type not in presence.FAMILIES_WITH_EXPERTS:
            msg = (
                f'rollout.backend = "sglang" with a model of type {facts.model_type}: among models with experts only '
                f'{", ".join(presence.FAMILIES_WITH_EXPERTS)} are supported; use "transformers"'
            )
            raise ConfigError(msg)
        heads = fields.get("num_attention_heads", 0)
        if heads % (parallel := rollout.sglang.tensor_parallel):
            msg = (
                f"rollout.sglang.tensor_parallel = {parallel} does not divide the model's num_attention_heads = "
                f"{heads}; lower it"
            )
            raise ConfigError(msg)
        if urls:
            yield f"rollouts use {len(urls)} external servers"
            return
        presence.require()
        name = next(iter(fields.get("architectures") or ()), causal_model_class(facts.model_type))
        if name and served_family(model) is None and not presence.serves(name):
            msg = (
                f'rollout.backend = "sglang" with a model of type {facts.model_type}: the installed SGLang has no '
                f'model class {name}; use "transformers"'
            )
            raise ConfigError(msg)
        yield f"{rollout.replicas} inference servers, about {SERVER_BYTES >> 20} MiB each besides the model"

    def server_module(self, config: Config) -> str:
        """A server for each actor, unless external servers are configured."""
        return "" if config.rollout.sglang.urls else "relax_actors.supervision.inference_server"


def external_server(context: Context) -> ServerRecord | None:
    """The actor's server among `rollout.sglang.urls`; None if the run starts its own servers.

    Raises:
        ConfigError: there is no URL for this actor, or the key file cannot be read.
    """
    settings = context.config.rollout.sglang
    if not settings.urls:
        return None
    if context.n >= len(settings.urls):
        msg = (
            f"rollout.sglang.urls has no server for {context.role}.{context.n}; actors of a node that joins later "
            "cannot use external servers"
        )
        raise ConfigError(msg)
    try:
        key = "" if settings.api_key_file is None else settings.api_key_file.read_text().strip()
    except OSError as error:
        msg = f"rollout.sglang.api_key_file cannot be read: {error}; put the servers' key there, readable by this user"
        raise ConfigError(msg) from error
    return ServerRecord(settings.urls[context.n], key, "elsewhere")
