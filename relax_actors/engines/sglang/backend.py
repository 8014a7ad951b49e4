"""The backend `rollout.backend = "sglang"`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from relax_actors.algorithms.advantages.estimation import needs_greedy
from relax_actors.config import Config
from relax_actors.data.adapter import form_of
from relax_actors.data.model_folder import measure
from relax_actors.data.nested_config import text_fields
from relax_actors.engines.protocols import InferenceEngine
from relax_actors.engines.protocols.backend import InferenceBackend
from relax_actors.engines.protocols.footprint import PROCESS_BYTES, WEIGHT_BYTES, Footprint, held_copies, served_bytes
from relax_actors.engines.protocols.server import ServerRecord, ServerSpec
from relax_actors.engines.sglang import launch, presence
from relax_actors.engines.sglang.adapter_form import adapter_arguments
from relax_actors.engines.sglang.launch_media import served_family
from relax_actors.engines.sglang.quantization import check_quantization, layer_bytes
from relax_actors.engines.sglang.settings_check import (
    check_adapter,
    check_class,
    check_held,
    check_model,
    check_places,
)
from relax_actors.errors import ConfigError
from relax_actors.operations.engines import engine_of
from relax_actors.runtime import Context
from relax_actors.runtime.run_folder import RunFolder

if TYPE_CHECKING:
    from relax_actors.engines.sglang.weight_loaders import WeightLoader

SERVER_BYTES = 1700 << 20
"""Memory of a server without its model."""
QUANTISES = ("--quantization", "--modelopt-quant", "--quantize-and-serve")
"""Arguments of a server with which it holds other numbers than the trainer's."""
SEGMENTS = ("sglang_", "sgl_shm", "sem.mp-", "psm_", "torch_")
"""Beginnings of the names of the shared-memory segments of a server."""


class SglangBackend(InferenceBackend):
    """Generates with one SGLang server per actor; implements `InferenceBackend`."""

    has_adapters = True
    repeats_samples = True

    def build(self, context: Context) -> InferenceEngine:
        """Wait for the actor's server and connect to it."""
        from relax_actors.engines.sglang.connection import SglangSettings  # noqa: PLC0415 imports torch
        from relax_actors.engines.sglang.engine import SglangEngine  # noqa: PLC0415
        from relax_actors.engines.sglang.media_reference import MediaReferences  # noqa: PLC0415
        from relax_actors.engines.sglang.merged_adapter import MergedAdapter  # noqa: PLC0415
        from relax_actors.engines.torch.process_setup import configure_torch  # noqa: PLC0415

        config, path = context.config, context.folder.server(context.n)
        configure_torch(config.run)
        rollout, external = config.rollout, external_server(context)
        facts, family, merged = measure(config.model_path), served_family(config.model_path), None
        if config.lora is not None and rollout.sglang.merge_adapter:
            import torch  # noqa: PLC0415

            merged = MergedAdapter(config.model_path, form_of(config.lora), getattr(torch, config.trainer.precision))
        engine = SglangEngine(
            lambda: external or ServerRecord.load(path),
            _loader(context, is_own=external is None),
            SglangSettings(
                facts.context_length,
                rows=rollout.max_concurrent_prompts,
                group=config.most_samples + (1 if needs_greedy(config.algorithm) else 0),
                patience=config.supervision.longest_start if external is None else config.supervision.start_deadline,
                stall=rollout.deadline / 2,
                moe=facts.moe if config.trainer.router_replay else None,
                media=None if family is None else MediaReferences(family, context.table.store.root),
                prefixes=() if family is None else family.spec.sglang.prefixes,
                parts=presence.RENAMED.get(facts.model_type, ()),
                merged=merged,
                quantization=rollout.sglang.quantization,
                grammars=external is None and config.gateway is not None,
                keep_partial=not config.run.deterministic,
                progress=context.progress,
                stopping=context.stopping,
            ),
        )
        engine.wait_for_server()
        return engine

    def build_frozen(self, context: Context, model: Path, device: str) -> InferenceEngine:
        """Start a server of the model as a child of the actor; see `InferenceBackend`."""
        from relax_actors.engines.sglang.frozen_server import FrozenEngine  # noqa: PLC0415 imports torch
        from relax_actors.engines.torch.process_setup import configure_torch  # noqa: PLC0415

        configure_torch(context.config.run)
        return FrozenEngine(context, self.own_server(), model, device)

    def check_frozen(self, config: Config, model: Path, setting: str) -> Iterator[str]:
        """Refuse models that a server cannot hold, and those that take media."""
        if served_family(model) is not None:
            msg = f'{setting} serves frozen models of text alone, and {model} takes media; use "transformers"'
            raise ConfigError(msg)
        presence.require()
        fields = text_fields(json.loads((model / "config.json").read_text()))
        own = config.rollout.sglang.model_copy(update={"tensor_parallel": 1})  # as `launch` starts it
        alone = config.model_copy(update={"rollout": config.rollout.model_copy(update={"sglang": own})})
        check_model(alone, fields, measure(model).model_type, reads_text_only=True)
        check_class(fields, model)
        yield f"a server of {model}, about {SERVER_BYTES >> 20} MiB besides the model"

    def check(self, config: Config, model: Path) -> Iterator[str]:
        """Refuse settings that SGLang does not support and models whose weights it cannot load."""
        rollout, urls, facts = config.rollout, config.rollout.sglang.urls, measure(model)
        reads_text_only = served_family(model) is None
        if urls and not reads_text_only:
            msg = (
                "rollout.sglang.urls: a server that the run does not start cannot read the media of prompts; leave it "
                "out, so that the run starts its servers"
            )
            raise ConfigError(msg)
        check_adapter(config, model, reads_text_only=reads_text_only)
        if rollout.min_tokens:
            msg = (
                f"rollout.min_tokens = {rollout.min_tokens}: log-probs of SGLang leave out the suppressed stop tokens; "
                "set it to 0, or use another backend"
            )
            raise ConfigError(msg)
        check_places(config)
        if (key := rollout.sglang.api_key_file) is not None and not key.is_file():
            msg = f"rollout.sglang.api_key_file {key} does not exist; write the key of the servers to it"
            raise ConfigError(msg)
        given = [argument.partition("=")[0] for argument in rollout.sglang.arguments]
        if quantises := next((name for name in given if name in QUANTISES), None):
            msg = (
                f"rollout.sglang.arguments: SGLang cannot update weights that it has quantised by {quantises}; leave "
                'it out, and use rollout.sglang.quantization = "fp8"'
            )
            raise ConfigError(msg)
        if len(urls) not in (0, rollout.replicas):
            msg = f"rollout.replicas = {rollout.replicas}, but rollout.sglang.urls has {len(urls)}; give each actor one"
            raise ConfigError(msg)
        fields = text_fields(json.loads((model / "config.json").read_text()))
        yield from check_held(config, fields)
        check_model(config, fields, facts.model_type, reads_text_only=reads_text_only)
        yield from check_quantization(config, fields, facts, takes_media=not reads_text_only)
        if urls:
            flags = ["--enable-fp32-lm-head"] if config.model.fp32_lm_head else []
            flags += adapter_arguments(config, cuda=True)
            needed = f", which must run with {' '.join(flags)}" if flags else ""
            yield f"rollouts use {len(urls)} external servers{needed}"
            return
        presence.require()
        if reads_text_only:
            check_class(fields, model)
        yield f"{rollout.replicas} inference servers, about {SERVER_BYTES >> 20} MiB each besides the model"

    def server(self, config: Config) -> ServerSpec | None:
        """Return how to start a server for each actor, unless external servers are configured."""
        return None if config.rollout.sglang.urls else self.own_server()

    @staticmethod
    def own_server() -> ServerSpec:
        """Return how to start a server."""
        return ServerSpec(
            command=(sys.executable, "-m", launch.__name__),
            health="/model_info",
            generates="/health_generate",
            key_variable=launch.KEY_VARIABLE,
            environment={"GLOO_SOCKET_IFNAME": "lo"},
            shared_memory=SEGMENTS,
            leave=_leave,
        )

    def check_engine(self, config: Config, url: str, key: str) -> None:
        """Check model, tokenizer, context and version of a server that is to join a live run."""
        from relax_actors.engines.sglang.external import check_server  # noqa: PLC0415 for runs with such servers alone

        if served_family(config.model_path) is not None:
            msg = f"{url} cannot join: a server that the run does not start cannot read the media of prompts"
            raise ConfigError(msg)
        if config.rollout.sglang.quantization != "none":
            msg = f"{url} cannot join: the run starts servers that quantise weights; add one with `relax scale`"
            raise ConfigError(msg)
        if config.rollout.sglang.weights != "disk":
            msg = f'{url} cannot join: rollout.sglang.weights = "{config.rollout.sglang.weights}"; set it to "disk"'
            raise ConfigError(msg)
        check_server(config, url, key)

    def engine_fault(self, url: str, key: str) -> str:
        """Return why a server that has joined does not answer now; empty if it does."""
        from relax_actors.engines.sglang.external import answers  # noqa: PLC0415 as above

        return answers(url, key)

    def footprint(self, config: Config) -> Footprint:
        """Return what an actor needs with its server, which holds the weights in use.

        Without files the actors of a node hold these and the next ones in memory, also for servers that start again.
        """
        settings, served, held = config.rollout.sglang, served_bytes(config), layer_bytes(config)
        if settings.urls:
            return Footprint(gpus=0)
        published = WEIGHT_BYTES[config.trainer.precision]
        return Footprint(
            process_bytes=PROCESS_BYTES + SERVER_BYTES,
            parameter_bytes=held,
            table_bytes=served - held,
            node_bytes=0 if settings.weights == "disk" else held_copies(config) * published,
            gpus=settings.tensor_parallel,
            computes_on_cpu=False,
        )


def _loader(context: Context, *, is_own: bool) -> WeightLoader:
    """Return how weights get into the server of an actor; `is_own` if the run has started it."""
    from relax_actors.engines.sglang.adapter_loader import AdapterLoader  # noqa: PLC0415 imports torch
    from relax_actors.engines.sglang.weight_loaders import BroadcastLoader, FileLoader  # noqa: PLC0415
    from relax_actors.weights.node_sets import files_of_node, node_sets  # noqa: PLC0415

    config, settings, own = context.config, context.config.rollout.sglang, context.folder.server(context.n)
    if config.lora is not None and not settings.merge_adapter:
        return AdapterLoader(config.model_path, form_of(config.lora), own.with_suffix(""), settings.tensor_parallel)
    if settings.weights == "group":
        return BroadcastLoader(settings.tensor_parallel, node_sets(context))
    if settings.weights == "shared":
        return FileLoader(RunFolder(context.node_folder).weights, in_memory=True, patience=config.trainer.deadline)
    # Another machine reads the files for a server that the run does not start. The folder of a node may be small.
    room = files_of_node(context) if is_own else own.with_suffix("")
    return FileLoader(room, patience=config.trainer.deadline)


def _leave(record: ServerRecord, is_held: Callable[[], bool]) -> None:
    """Have a server leave its GPU; see `ServerSpec.leave`."""
    from relax_actors.engines.sglang.server import Server  # noqa: PLC0415 for the keepers of such servers alone

    server = Server(record)
    try:
        server.leave(is_held)
    finally:
        server.close()


def external_server(context: Context) -> ServerRecord | None:
    """The actor's server if the run does not start it: one of `rollout.sglang.urls`, or one that joined at run time.

    Raises:
        ConfigError: there is no URL for this actor, or the key file cannot be read.
    """
    settings = context.config.rollout.sglang
    if (joined := engine_of(context.folder.engines, context.n)) is not None:
        return ServerRecord(*joined, "elsewhere")
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
