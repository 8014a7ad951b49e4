"""The adapter of a model of megatron-core, published and saved as that of the torch engine."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor, distributed, nn
from transformers import PreTrainedModel

from relax_actors.config import Config
from relax_actors.config.lora import LoraSection
from relax_actors.data.adapter import DOWN, UP, AdapterModules, form_of
from relax_actors.engines.megatron.adapter_parts import adapter_weights, layers_with_parts
from relax_actors.engines.megatron.conversion import ADAPTER, Conversion
from relax_actors.engines.megatron.mcore.adapter_layers import LayerAdapter
from relax_actors.engines.megatron.mcore.frozen import require_gradient_of_embeddings
from relax_actors.engines.megatron.mcore.model_chunks import ModelChunks
from relax_actors.engines.megatron.mcore.process_groups import device
from relax_actors.engines.megatron.mcore.rank_weights import RankWeights, key_of, local_shards
from relax_actors.engines.megatron.mcore.shard_files import LocalShard
from relax_actors.engines.ranks.collectives import all_gather_messages
from relax_actors.engines.ranks.model_folder import write_shared
from relax_actors.engines.torch.adapter import BASE, MARKS, SCALE, check_base, check_scale, digest_of, scale_mark
from relax_actors.engines.torch.adapter_folder import FOLDER, write_adapter
from relax_actors.engines.torch.adapter_modules import drawn_down, modules_of
from relax_actors.engines.torch.lora_linear import REFERENCE, Switch
from relax_actors.engines.torch.model import build, build_critic
from relax_actors.engines.torch.module_memory import without_memory
from relax_actors.engines.torch.peft_tensors import read_adapter
from relax_actors.engines.torch.score_model import model_maker
from relax_actors.errors import ConfigError
from relax_actors.runtime.seeds import derive_seed
from relax_actors.weights import files as weights


class MegatronAdapter:
    """The adapter of this rank's part of a model, whose other weights are frozen.

    Methods are collective: all ranks must call them in the same order.

    Args:
        chunks: model chunks of this rank, with the weights of the base.
        conversion: of the model's weights.
        modules: modules that the adapter concerns.
        base: fingerprint of the base.
        seed: of dropped inputs.

    Attributes:
        modules: modules that the adapter concerns.
        weights: what is published and saved: A and B, modules that are trained as a whole, and the marks.
        names: names of what is published.
        model: weights of the whole model; those of the base, but for modules that are trained as a whole.
        first: what is trained as it was in version 0, by key; empty if the reference is the base.

    Raises:
        ConfigError: a target is no linear layer of megatron-core, a module that is trained as a whole is part of a
            parameter, or a pipeline stage has nothing to train.
    """

    def __init__(
        self, chunks: ModelChunks, conversion: Conversion, modules: AdapterModules, base: str, seed: int
    ) -> None:
        self.modules, self._seed = modules, seed
        self.model = RankWeights(local_shards(chunks.bare), conversion)
        self._switches = [Switch() for _ in chunks.bare]
        self._layers: list[LayerAdapter] = []
        layers = layers_with_parts(conversion, modules)
        by_key = {layer.key: layer for layer in layers}
        for model, switch in zip(chunks.bare, self._switches, strict=True):
            model.requires_grad_(False)
            for name, module in list(model.named_modules()):
                if (parts := by_key.get(key_of(model, f"{name}.weight"))) is not None:
                    self._layers.append(LayerAdapter(module, parts, modules.form, switch))
            model.register_forward_pre_hook(self._next_seed(switch))
            require_gradient_of_embeddings(model)
        self._seeds: dict[int, Iterator[int]] = {}
        self._marks = {BASE: digest_of(base), SCALE: scale_mark(modules.form.scale)}
        self._published = adapter_weights(conversion, layers, modules)
        self.names = {name for weight in self._published for name in weight.names}
        keys = {key for weight in self._published for key in weight.keys}
        own = {key: local for key, local in local_shards(chunks.bare).items() if key in keys}
        if not own:
            msg = (
                "lora.targets leaves nothing to train in a pipeline stage; name layers of all stages, or lower "
                "pipeline_parallel"
            )
            raise ConfigError(msg)
        for local in own.values():
            local.parameter.requires_grad_()
        dtype = chunks.config.params_dtype
        marks = {name: LocalShard(mark.to(device(), dtype, copy=True), 1, 0) for name, mark in self._marks.items()}
        self.weights = RankWeights(own | marks, conversion.of(self._published))
        whole = {id(local.parameter) for key, local in own.items() if ADAPTER not in key}
        self._saved = [
            (module, name, parameter)
            for model in chunks.bare
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if id(parameter) in whole
        ]
        self._saved_first: list[Tensor] = []
        self.first: dict[str, LocalShard] = {}

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """Parameters of this rank that are trained, by key."""
        return {key: tensor for key, tensor in self.weights.parameters.items() if key not in MARKS}

    def initialise(self, seed: int) -> None:
        """Read the adapter of the folder to start from, or `draw` it; see `engines.torch.adapter.Adapter`."""
        path = self.modules.form.path
        if path is None:
            self.draw(seed)
        else:
            tensors = read_adapter(path, self.modules.form.rank)
            self.load(tensors | self._marks, f"lora.path {path}")

    def draw(self, seed: int) -> None:
        """Draw A from a seed, and set B to 0; the numbers are those of the torch engine."""
        whole: dict[str, Tensor] = {}
        for weight in self._published:
            (name, *_), (shape, *_) = weight.names, weight.shapes
            if name.endswith(DOWN):
                whole[name] = drawn_down(seed, name.removesuffix(DOWN), shape)
            elif name.endswith(UP):
                whole[name] = torch.zeros(shape)
        keys = [key for key in self.parameters if ADAPTER in key]
        self._copy(self.weights.shards(whole, keys))

    def load(self, tensors: Mapping[str, Tensor], source: str) -> None:
        """Copy a published adapter into the model; raises ConfigError for another base, scale or shape."""
        self._copy(self.fitted(tensors, source))

    def fitted(self, tensors: Mapping[str, Tensor], source: str) -> Iterable[tuple[str, Tensor]]:
        """Return this rank's shards of a published adapter, by the keys of `parameters`; see `load`."""
        check_base(tensors.get(BASE), self._marks[BASE], source)
        check_scale(tensors.get(SCALE), self.modules.form.scale, source)
        if tensors.keys() != self.names:
            missing, unknown = sorted(self.names - tensors.keys())[:3], sorted(tensors.keys() - self.names)[:3]
            msg = f"the adapter of {source} does not fit the model: missing {missing}, unknown {unknown}"
            raise ConfigError(msg)
        return self.weights.shards(tensors, list(self.parameters))

    @torch.no_grad()
    def _copy(self, shards: Iterable[tuple[str, Tensor]]) -> None:
        for key, shard in shards:
            self.weights.local[key].parameter.copy_(shard)

    def check(self, source: str) -> None:
        """Check that the marks, which a checkpoint has overwritten, are those of this run; errors as of `load`."""
        marks = {name: self.weights.local[name].parameter.float().cpu() for name in self._marks}
        check_base(marks[BASE], self._marks[BASE], source)
        check_scale(marks[SCALE], self.modules.form.scale, source)

    def _next_seed(self, switch: Switch) -> Callable[..., None]:
        """Return a hook that gives a model chunk the seed of the next micro-batch before its forward pass."""

        def hook(*_: Any) -> None:
            seeds = self._seeds.get(id(switch))
            switch.seed = None if seeds is None else next(seeds)

        return hook

    @contextmanager
    def dropping(self, update: int, part: int) -> Iterator[None]:
        """Drop inputs of the adapter in the passes of an update's micro-batches, in order from number `part` on."""
        place = parallel_state.get_data_parallel_rank(), parallel_state.get_context_parallel_rank()
        self._seeds = {
            id(switch): (derive_seed(self._seed, "dropout", update, number, *place) for number in count(part))
            for switch in self._switches
        }
        try:
            yield
        finally:
            self._seeds = {}

    def keep_first(self) -> None:
        """Make the current weights those of the reference, unless the adapter is zero."""
        if self.modules.form.path is None and not self.modules.saved:
            return
        for layer in self._layers:
            layer.keep_first()
        self._saved_first = [parameter.detach().clone() for _, _, parameter in self._saved]
        copies = {id(own): first for layer in self._layers for own, first in layer.first()}
        copies |= {id(own): first for (_, _, own), first in zip(self._saved, self._saved_first, strict=True)}
        self.first = {
            key: LocalShard(copies[id(local.parameter)], local.shards, local.shard)
            for key, local in self.weights.local.items()
            if key not in MARKS
        }

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Compute with the weights of version 0.

        The parameters in training keep their numbers: a thread that publishes reads them.
        """
        with ExitStack() as stack:
            for switch in self._switches:
                stack.enter_context(switch.using(REFERENCE if self.first else None))
            try:
                for (module, name, _), first in zip(self._saved, self._saved_first, strict=True):
                    setattr(module, name, nn.Parameter(first, requires_grad=False))
                yield
            finally:
                for module, name, parameter in self._saved:
                    setattr(module, name, parameter)

    def export(self, folder: Path, config: Config, make: Callable[..., PreTrainedModel], *, merged: bool) -> None:
        """Write the adapter as a PEFT folder in `folder`, and with `merged` the whole model beside it.

        `make` builds the model of transformers on a `device`.

        Raises:
            OSError: writing failed; errno is ENOSPC if the disk is full.
        """
        if merged:
            self.export_merged(folder, make, config.trainer.precision)
        tensors = self.weights.whole()
        if self.weights.rank == 0:
            write_adapter(tensors, self.modules, folder / FOLDER, config)

    @torch.no_grad()
    def export_merged(self, folder: Path, make: Callable[..., PreTrainedModel], precision: str) -> None:
        """Write the model with the adapter added to its weights; arguments as of `export`."""
        base = [adapter.layer.weight.detach().to("cpu", copy=True) for adapter in self._layers]
        try:
            for adapter in self._layers:
                adapter.layer.weight.copy_(adapter.merged())
            write_shared(folder, make, self.model, precision)
        finally:
            for adapter, weight in zip(self._layers, base, strict=True):
                adapter.layer.weight.copy_(weight)


def run_adapter(
    config: Config,
    section: LoraSection,
    chunks: ModelChunks,
    conversion: Conversion,
    base: tuple[Path, Mapping[str, Tensor]],
) -> MegatronAdapter:
    """Load the base of a run into a model, in the run's precision, and give it the run's adapter.

    `base` is the folder of the base, and its weights by Hugging Face name. A head in place of the output layer is
    trained as a whole, besides `lora.modules_to_save`.

    Raises:
        ConfigError: the base does not fit the model, or the model cannot have the adapter.
    """
    folder, stored = base
    RankWeights(local_shards(chunks.bare), conversion).load(stored)
    head, trains_scores = conversion.head, config.algorithm.trains_scores
    with without_memory():
        if head is None or trains_scores:
            model = model_maker(config)(device=None) if trains_scores else build(folder, device=None)
        else:
            model = build_critic(folder, seed=0, device=None)
    modules = modules_of(model, form_of(section), () if head is None else head.modules)
    return MegatronAdapter(chunks, conversion, modules, _common_fingerprint(folder), config.run.seed)


def _common_fingerprint(folder: Path) -> str:
    """Return the fingerprint of the base, which the first rank of each node reads; collective."""
    nodes = all_gather_messages(socket.gethostname())
    is_first = nodes.index(nodes[distributed.get_rank()]) == distributed.get_rank()
    files = sorted(folder.glob("*.safetensors"))
    fingerprints = all_gather_messages(weights.fingerprint_of_files(files) if is_first else "")
    return one_base({node: own for node, own in zip(nodes, fingerprints, strict=True) if own})


def one_base(fingerprints: Mapping[str, str]) -> str:
    """Return the fingerprint of the base that the nodes share, by their names; raises ConfigError if one differs."""
    (first, expected), *others = fingerprints.items()
    for node, own in others:
        if own != expected:
            msg = (
                f"the base in model.path has fingerprint {own} on node {node}, and {expected} on node {first}: ranks "
                "would train an adapter of a mixture of both; copy the same files to all nodes"
            )
            raise ConfigError(msg)
    return expected
