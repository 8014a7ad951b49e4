"""Model folders that all ranks write: each one safetensors file, and rank 0 the index and the configuration."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from relax_actors.engines.ranks.collectives import all_gather_messages
from relax_actors.weights.encoder import Take, WeightSource, ignore, visit_into
from relax_actors.weights.files import TensorFile, TensorForm

INDEX = "model.safetensors.index.json"
Convert: TypeAlias = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


def stored_names(model: PreTrainedModel) -> Convert:
    """Return the conversion of weights to those of model folders, where the names or the fusion of experts differ."""

    def convert(tensors: dict[str, Tensor]) -> Mapping[str, Tensor]:
        converted: Mapping[str, Tensor] = revert_weight_conversion(model, tensors)
        return converted

    return convert


def write_model(folder: Path, model: PreTrainedModel, source: WeightSource, dtype: str, convert: Convert) -> None:
    """Write a folder, empty or new, that transformers loads, each rank its share; collective.

    The model is the architecture on the device "meta". `convert` makes the weights in files from those in memory, one
    tensor at a time.

    Raises:
        OSError: writing failed; errno is ENOSPC if the disk is full.
    """
    forms = dict(_converted(source.forms(source.ranks), convert))
    shares = [dict(share) for share in all_gather_messages({name: form.nbytes for name, form in forms.items()})]
    names = _file_names(shares)

    def open_file(stack: ExitStack) -> Take:
        folder.mkdir(parents=True, exist_ok=True)
        if source.rank == 0:
            _write_configuration(folder, model, dtype)
            if len(set(names.values())) > 1:
                total = sum(size for share in shares for size in share.values())
                places = {name: names[rank] for rank, share in enumerate(shares) for name in share}
                index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
                (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        if not forms:
            return ignore
        file = stack.enter_context(TensorFile(folder / names[source.rank], forms, {"format": "pt"}))

        def take(name: str, tensor: Tensor) -> None:
            for stored, part in convert({name: tensor}).items():
                file.write(stored, part)

        return take

    visit_into(source, open_file, source.ranks)


def _converted(forms: Mapping[str, TensorForm], convert: Convert) -> Iterator[tuple[str, TensorForm]]:
    for name, form in forms.items():
        empty = torch.empty(form.shape, dtype=form.dtype, device="meta")
        yield from ((stored, TensorForm.of(part)) for stored, part in convert({name: empty}).items())


def _file_names(shares: list[dict[str, int]]) -> dict[int, str]:
    """Names of the files of the ranks that have tensors."""
    writers = [rank for rank, share in enumerate(shares) if share]
    if len(writers) == 1:
        return {writers[0]: "model.safetensors"}
    return {rank: f"model-{n + 1:05}-of-{len(writers):05}.safetensors" for n, rank in enumerate(writers)}


def _write_configuration(folder: Path, model: Any, dtype: str) -> None:
    """Write what `save_pretrained` writes beside the weights."""
    model.config.dtype = dtype
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def write_shared(folder: Path, make: Callable[..., PreTrainedModel], source: WeightSource, dtype: str) -> None:
    """Write a folder of a model as `write_model` does; the names of critics of multimodal models stay.

    `make` builds the model on a `device`.
    """
    with torch.device("meta"):
        model = make(device="meta")
    is_plain = model.can_generate() or hasattr(model, "score")
    write_model(folder, model, source, dtype, stored_names(model) if is_plain else dict)
