"""Freeze weights by patterns of their Hugging Face names (trainer.freeze)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from torch import nn

from relax_actors.errors import ConfigError


def frozen_names(names: Collection[str], patterns: Sequence[str]) -> set[str]:
    """Return the weights that match a pattern of trainer.freeze; raises ConfigError if it matches none, or all."""
    frozen: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if fnmatchcase(name, pattern)}
        if not matched:
            msg = f"trainer.freeze: {pattern!r} matches no weight of the model; it has {sorted(names)[:8]} ..."
            raise ConfigError(msg)
        frozen |= matched
    if frozen == set(names):
        msg = f"trainer.freeze: {list(patterns)} leaves nothing to train; remove a pattern"
        raise ConfigError(msg)
    return frozen


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Disable the gradients of the parameters of a transformers model that match; see `frozen_names`."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in frozen_names(parameters, patterns):
        parameters[name].requires_grad_(False)
