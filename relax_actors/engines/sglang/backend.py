"""The backend `rollout.backend = "sglang"`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from relax_actors.engines.sglang.adapter_form import MERGE, adapter_arguments, check_served
from relax_actors.engines.sglang.launch_media import served_family
from relax_actors.engines.sglang.quantization import check_quantization, layer_bytes
from relax_actors.engines.torch.architectures import causal_model_class
from relax_actors.errors import ConfigError
from relax_actors.operations.engines import engine_of
from relax_actors.runtime import Context
from relax_actors.runtime.run_folder import RunFolder

if TYPE_CHECKING:
    from relax_actors.engines.sglang.weight_loaders import WeightLoader

EXPERTS = "--moe-runner-backend"
"""Argument of a server that chooses its kernels of experts."""
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
        _check_model(alone, fields, measure(model).model_type, reads_text_only=True)
        _check_class(fields, model)
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
        _check_adapter(config, model, reads_text_only=reads_text_only)
        if rollout.min_tokens:
            msg = (
                f"rollout.min_tokens = {rollout.min_tokens}: log-probs of SGLang leave out the suppressed stop tokens; "
                "set it to 0, or use another backend"
            )
            raise ConfigError(msg)
        _check_places(config)
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
        yield from _check_held(config, fields)
        _check_model(config, fields, facts.model_type, reads_text_only=reads_text_only)
        yield from check_quantization(config, fields, facts, takes_media=not reads_text_only)
        if urls:
            flags = ["--enable-fp32-lm-head"] if config.model.fp32_lm_head else []
            flags += adapter_arguments(config, cuda=True)
            needed = f", which must run with {' '.join(flags)}" if flags else ""
            yield f"rollouts use {len(urls)} external servers{needed}"
            return
        presence.require()
        if reads_text_only:
            _check_class(fields, model)
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


def _check_model(config: Config, fields: Mapping[str, Any], model_type: str, *, reads_text_only: bool) -> None:
    """Refuse a model that SGLang cannot load or computes otherwise.

    `fields` are the part of config.json that describes the model of text.

    Raises:
        ConfigError: names the field, or the setting to change.
    """
    known = presence.TEXT_WITH_EXPERTS
    if reads_text_only and presence.has_experts(fields) and model_type not in known:
        msg = (
            f'rollout.backend = "sglang" with a model of type {model_type}: among text models with experts '
            f'only {", ".join(known)} are supported; use "transformers"'
        )
        raise ConfigError(msg)
    if why := presence.difference(fields):
        msg = f'rollout.backend = "sglang": {why}, or use "transformers"'
        raise ConfigError(msg)
    heads = fields.get("num_attention_heads", 0)
    if heads % (parallel := config.rollout.sglang.tensor_parallel):
        msg = (
            f"rollout.sglang.tensor_parallel = {parallel} does not divide the model's num_attention_heads = "
            f"{heads}; lower it"
        )
        raise ConfigError(msg)


def _check_held(config: Config, fields: Mapping[str, Any]) -> Iterator[str]:
    """Refuse a policy whose weights or experts a server would hold in a form that updates and replays cannot follow.

    Raises:
        ConfigError: config.json names quantised weights, or an argument chooses kernels that report no experts.
    """
    if quantised := fields.get("quantization_config"):
        kind = quantised.get("quant_method", "unnamed") if isinstance(quantised, dict) else quantised
        msg = (
            f'rollout.backend = "sglang": config.json of the model has quantization_config ({kind}), and updates hold '
            "weights that are not quantised, so its server could not take them; use the folder of the model in "
            "bfloat16, without that field"
        )
        raise ConfigError(msg)
    if fields.get("model_type") != "gpt_oss":
        return
    given = [argument.partition("=")[0] for argument in config.rollout.sglang.arguments]
    if config.trainer.router_replay and EXPERTS in given:
        msg = (
            f"rollout.sglang.arguments: the run sets {EXPERTS} itself, because only some kernels of SGLang report the "
            "experts of gpt_oss; leave it out, or set trainer.router_replay = false"
        )
        raise ConfigError(msg)
    yield "SGLang holds the attention sinks of gpt_oss in bfloat16, whatever rollout.sglang.dtype is"


def _check_class(fields: Mapping[str, Any], model: Path) -> None:
    """Refuse a model whose class the installed SGLang lacks."""
    name = next(iter(fields.get("architectures") or ()), "") or causal_model_class(model)
    if name and not presence.serves(name):
        msg = (
            f'rollout.backend = "sglang" with a model of type {measure(model).model_type}: the installed SGLang has no '
            f'model class {name}; use "transformers"'
        )
        raise ConfigError(msg)


def _check_places(config: Config) -> None:
    """Check that samples may wait for others, and that some do; raises ConfigError."""
    places, most = (
        config.rollout.sglang.max_concurrent_samples,
        config.rollout.max_concurrent_prompts * config.most_samples,
    )
    if places is None:
        return
    setting = f"rollout.sglang.max_concurrent_samples = {places}"
    if config.run.deterministic:
        msg = f"{setting} makes batches depend on time, which run.deterministic = true forbids; leave it out"
        raise ConfigError(msg)
    if places >= most:
        msg = (
            f"{setting} has no effect: rollout.max_concurrent_prompts = {config.rollout.max_concurrent_prompts} rows "
            f"have {most} samples; lower it, or raise rollout.max_concurrent_prompts"
        )
        raise ConfigError(msg)


def _check_adapter(config: Config, model: Path, *, reads_text_only: bool) -> None:
    """Refuse an adapter that servers cannot serve.

    Raises:
        ConfigError: there is none to merge, servers cannot compute with it, or the model has towers, whose names in
            SGLang differ.
    """
    settings = config.rollout.sglang
    if config.lora is None:
        if settings.merge_adapter:
            msg = "rollout.sglang.merge_adapter = true, but the run trains no adapter; add [lora], or leave it out"
            raise ConfigError(msg)
        return
    if not reads_text_only:
        msg = 'rollout.backend = "sglang" with [lora] serves models of text alone; use "transformers"'
        raise ConfigError(msg)
    if settings.merge_adapter:
        return
    if settings.weights != "disk":
        msg = (
            f'rollout.sglang.weights = "{settings.weights}" is for full sets of weights, and servers get the adapter '
            f"of [lora] in requests; leave it out, or {MERGE}"
        )
        raise ConfigError(msg)
    fields = text_fields(json.loads((model / "config.json").read_text()))
    check_served(form_of(config.lora), model, has_experts=presence.has_experts(fields))


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
