"""The adapter of a model: its layers, its weights, and what is published of it.

Published are A and B of each layer, modules that are trained as a whole, and two marks: the fingerprint of the base and
the scale of the adapter, one number for each byte. So the fingerprint of a version covers base, adapter and scale, and
an adapter is loaded only over its base and with its scale.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from relax_actors.config import Config
from relax_actors.config.lora import LoraSection
from relax_actors.data.adapter import DOWN, UP, AdapterForm, form_of, of_experts, weight_name
from relax_actors.engines.torch.adapter_modules import drawn_down, modules_of
from relax_actors.engines.torch.lora_experts import ExpertTensor, LoraExperts
from relax_actors.engines.torch.lora_linear import POLICY, REFERENCE, SLOTS, LoraLinear, Switch
from relax_actors.engines.torch.model import copy_into, copy_tensor, is_shared, read_folder, tensors_of
from relax_actors.engines.torch.peft_tensors import read_adapter
from relax_actors.engines.torch.score_model import stored_scores
from relax_actors.engines.torch.trained_weights import AllWeights, TrainedWeights
from relax_actors.errors import ConfigError
from relax_actors.runtime.seeds import derive_seed
from relax_actors.weights import files as weights
from relax_actors.weights.encoder import published_dtype

BASE, SCALE = "base.fingerprint", "adapter.scale"
"""Names of the published marks: fingerprint of the base, `[16]`, and scale of the adapter (a double), `[8]`.

Their numbers are bytes, which every precision represents.
"""
MARK_BYTES = {BASE: 16, SCALE: 8}
MARKS = frozenset(MARK_BYTES)


class Adapter:
    """The adapter of a model, whose other weights are frozen; implements `TrainedWeights`.

    Where ranks share the model, each has A and B of all layers, and its rows of modules that are trained as a whole.

    Args:
        model: the model with the weights of the base; its linear layers get adapters.
        form: form of the adapter.
        base: fingerprint of the base.
        seed: of dropped inputs.
        heads: modules that are trained as a whole besides those of `form`.
        device: device of A and B; None for that of the layers.

    Attributes:
        model: the model.
        form: form of the adapter.
        modules: names of its modules.
        layers: layers with an adapter, by name.

    Raises:
        ConfigError: a target or module matches nothing, or shares its weights with another one.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        form: AdapterForm,
        base: str,
        seed: int,
        heads: Collection[str] = (),
        device: torch.device | None = None,
    ) -> None:
        self.model, self.form, self._seed, self._switch, self._device = model, form, seed, Switch(), device
        self._marks = {BASE: digest_of(base), SCALE: scale_mark(form.scale)}
        self.modules = modules_of(model, form, heads)
        model.requires_grad_(False)
        self.layers = {name: self._adapted(name) for name in self.modules.targets}
        self._whole = self._unfreeze()
        self._first: dict[str, Tensor] | None = None

    def _adapted(self, name: str) -> LoraLinear | ExpertTensor:
        adapted: LoraLinear | ExpertTensor
        if of_experts(name):
            module, _, part = name.rpartition(".")
            experts = self.model.get_submodule(module)
            adapted = ExpertTensor(LoraExperts.adapt(experts, scale=self.form.scale, switch=self._switch), part)
        else:
            layer: Any = self.model.get_submodule(name)
            settings = {"scale": self.form.scale, "dropout": self.form.dropout}
            adapted = LoraLinear.adapt(layer, name, switch=self._switch, **settings)
        adapted.add_slot(POLICY, self.form.rank, self._device or adapted.weight.device)
        return adapted

    def _unfreeze(self) -> dict[str, nn.Parameter]:
        """Let the weights of saved modules be trained; return them by name."""
        names = {f"{module}." for module in self.modules.saved}
        parameters = {n: p for n, p in self.model.named_parameters() if n.startswith(tuple(names))} if names else {}
        everywhere = [id(p) for _, p in self.model.named_parameters(remove_duplicate=False)]
        for name, parameter in parameters.items():
            if everywhere.count(id(parameter)) > 1:
                msg = (
                    f"lora.modules_to_save: {name} shares its weights with another module (tie_word_embeddings), "
                    "which PEFT would train apart; leave it out"
                )
                raise ConfigError(msg)
            parameter.requires_grad_()
        return dict(parameters)

    def initialise(self, seed: int) -> None:
        """Read the adapter of the folder to start from, or `draw` it."""
        if self.form.path is None:
            self.draw(seed)
            return
        tensors = read_adapter(self.form.path, self.form.rank)
        # A folder of a policy has no head of a reward model.
        heads = {name: tensor for name, tensor in self._whole.items() if name not in tensors}
        self.copy(heads | tensors | self._marks, f"lora.path {self.form.path}")

    def draw(self, seed: int) -> None:
        """Draw A from a seed, and set B to 0, as PEFT does."""
        for name, layer in self.layers.items():
            with torch.no_grad():
                own = layer.of_slot(POLICY)
                own.down.copy_(drawn_down(seed, name, own.down.shape))
                own.up.zero_()

    def parameters(self) -> Mapping[str, Tensor]:
        """Return the trained parameters by name; see `TrainedWeights`."""
        return self._of_slot(POLICY) | self._whole

    def _of_slot(self, slot: str) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, layer in self.layers.items():
            tensors |= {name + DOWN: layer.of_slot(slot).down, name + UP: layer.of_slot(slot).up}
        return tensors

    def tensors(self) -> dict[str, Tensor]:
        """Return what is published; see `TrainedWeights`."""
        return {name: tensor.detach() for name, tensor in self.parameters().items()} | self._marks

    def fitted(self, tensors: Mapping[str, Tensor], source: str) -> Iterable[tuple[str, Tensor]]:
        """Return the tensors without the marks; see `TrainedWeights`."""
        check_base(tensors.get(BASE), self._marks[BASE], source)
        fitted = self._checked({name: t for name, t in tensors.items() if name not in MARKS}, self.parameters(), source)
        check_scale(tensors.get(SCALE), self.form.scale, source)
        return fitted

    @staticmethod
    def _checked(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], source: str) -> Iterable[tuple[str, Tensor]]:
        if tensors.keys() != own.keys():
            missing, unknown = sorted(own.keys() - tensors.keys())[:3], sorted(tensors.keys() - own.keys())[:3]
            msg = f"the adapter of {source} does not fit the model: missing {missing}, unknown {unknown}"
            raise ConfigError(msg)
        for name, tensor in tensors.items():
            if tensor.shape != own[name].shape:
                msg = f"the adapter of {source}: {name} has shape {list(tensor.shape)}, not {list(own[name].shape)}"
                raise ConfigError(msg)
        return tensors.items()

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor], source: str) -> None:
        """Copy a published adapter into the model; see `TrainedWeights`."""
        own = self.parameters()
        for name, tensor in self.fitted(tensors, source):
            copy_tensor(own[name], tensor)

    def merged(self) -> dict[str, Tensor]:
        """Return all weights of the model with the adapter added to them, by Hugging Face name."""
        added = {weight_name(name): layer.merged() for name, layer in self.layers.items()}
        own = {name: tensor for name, tensor in tensors_of(self.model).items() if SLOTS not in name}
        return own | added

    def cast(self, dtype: torch.dtype) -> None:
        """Keep the frozen weights of the adapted layers in the dtype of a computation under autocast: half the memory.

        The numbers are the same, as autocast would round the weights to this dtype.
        """
        for layer in self.layers.values():
            layer.cast(dtype)

    def dropping(self, update: int, part: int) -> AbstractContextManager[None]:
        """Drop inputs of the adapter; see `TrainedWeights`."""
        return self._switch.dropping(derive_seed(self._seed, "dropout", update, part))

    @property
    def first(self) -> dict[str, Tensor] | None:
        """The adapter of version 0, which scores as the reference; None if it is the base alone."""
        return self._first

    def keep_first(self) -> None:
        """Make the current weights those of the reference, unless the adapter is zero."""
        if self.form.path is not None or self._whole:
            self.set_first(self.tensors())

    @torch.no_grad()
    def set_first(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the adapter of version 0; see `first`."""
        own = self.parameters()
        self._first = {name: own.get(name, tensor).detach().clone() for name, tensor in tensors.items()}
        for name in own:
            copy_tensor(self._first[name], tensors[name])
        for name, layer in self.layers.items():
            slot = layer.add_slot(REFERENCE, self.form.rank, self._first[name + UP].device).requires_grad_(False)
            slot.down.copy_(tensors[name + DOWN])
            slot.up.copy_(tensors[name + UP])

    @property
    def changes_for_reference(self) -> bool:
        """Whether parameters in training have other numbers within `as_reference`."""
        return self._first is not None and any(map(is_shared, self._whole.values()))

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Compute with the weights of version 0.

        The parameters in training leave the model, but keep their numbers: a thread that publishes reads them. Those
        that ranks share get other numbers meanwhile, since FSDP2 knows their objects; see `changes_for_reference`.
        """
        if self._first is None:
            with self._switch.using(None):
                yield
            return
        trained = {name: p.detach().clone() for name, p in self._whole.items() if is_shared(p)}
        try:
            for name, parameter in self._whole.items():
                if name in trained:
                    copy_tensor(parameter, self._first[name])
                else:
                    self._place(name, nn.Parameter(self._first[name], requires_grad=False))
            with self._switch.using(REFERENCE):
                yield
        finally:
            for name, parameter in self._whole.items():
                if name in trained:
                    copy_tensor(parameter, trained[name])
                else:
                    self._place(name, parameter)

    def _place(self, name: str, parameter: nn.Parameter) -> None:
        """Let the module that owns a parameter compute with another one."""
        module, _, own = name.rpartition(".")
        setattr(self.model.get_submodule(module), own, parameter)


def digest_of(fingerprint: str) -> Tensor:
    """Return the bytes of a fingerprint as `[16] float32`."""
    return torch.tensor(list(bytes.fromhex(fingerprint)), dtype=torch.float32)


def check_base(given: Tensor | None, own: Tensor, source: str) -> None:
    """Check that an adapter's published tensor `BASE`, if any, is that of the base here; raises ConfigError if not."""
    if given is None or not torch.equal(given.float(), own):
        msg = (
            f"the adapter of {source} belongs to the base with fingerprint {'none' if given is None else _hex(given)}, "
            f"the model folder here holds {_hex(own)}; restore the folder that model.path names"
        )
        raise ConfigError(msg)


def scale_mark(scale: float) -> Tensor:
    """Return the bytes of a scale as `[8] float32`."""
    return torch.tensor(list(struct.pack("<d", scale)), dtype=torch.float32)


def check_scale(given: Tensor | None, own: float, source: str) -> None:
    """Check that an adapter's published tensor `SCALE`, if any, is the scale here; raises ConfigError if not."""
    if given is None or not torch.equal(given.float().cpu(), scale_mark(own)):
        theirs = "none" if given is None else f"{struct.unpack('<d', bytes(map(int, given.tolist())))[0]:g}"
        msg = (
            f"the adapter of {source} was trained with scale {theirs}, the settings here give {own:g}; restore "
            "lora.alpha and lora.rslora"
        )
        raise ConfigError(msg)


def _hex(base: Tensor) -> str:
    return bytes(int(number) for number in base.tolist()).hex()


def run_adapter(
    config: Config,
    section: LoraSection,
    model: PreTrainedModel,
    base: tuple[Path, Mapping[str, Tensor]],
    heads: Collection[str] = (),
    device: torch.device | None = None,
) -> Adapter:
    """Load the base of a run into a model, in the run's precision, and give it the run's adapter.

    `base` is the folder of the base, and its weights by their names in the model. `heads` are modules that are trained
    as a whole besides `lora.modules_to_save`. A and B are on `device`, or that of the layers.

    Raises:
        ConfigError: the base does not fit the model, or the model cannot have the adapter.
    """
    (folder, stored), precision = base, getattr(torch, config.trainer.precision)
    rounded = {n: t.to(published_dtype(n, precision)) if t.is_floating_point() else t for n, t in stored.items()}
    copy_into(model, rounded, str(folder))
    fingerprint = weights.fingerprint_of_files(sorted(folder.glob("*.safetensors")))
    return Adapter(model, form_of(section), fingerprint, config.run.seed, heads, device)


def run_weights(config: Config, model: PreTrainedModel, device: torch.device | None = None) -> TrainedWeights:
    """Return the weights of a model that the run trains; those of an adapter, on `device`, have their base loaded."""
    if config.lora is None:
        return AllWeights(model)
    scores, path = config.algorithm.trains_scores, config.model_path
    stored = stored_scores(model, path, config.run.seed) if scores else read_folder(model, path)
    heads = ("score",) if scores else ()
    return run_adapter(config, config.lora, model, (path, stored), heads=heads, device=device)
