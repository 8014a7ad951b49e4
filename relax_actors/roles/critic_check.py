"""Checks of the role `critic` before a run starts: its folder and its architecture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from relax_actors.config import Config
from relax_actors.config.training import CriticSection
from relax_actors.data.checked_run import CheckedModel
from relax_actors.data.model_folder import measure, stored_shapes
from relax_actors.engines.backends import check_adapters, critic_backend
from relax_actors.errors import ConfigError
from relax_actors.media.family import Family, family_of


def check_critic(section: CriticSection, config: Config, model: CheckedModel) -> Iterator[str]:
    """Check that a critic can be built, and that its folder fits the policy's tokens."""
    path, backend, folder, policy = section.path, critic_backend(section), model.folder, model.facts
    check_adapters(config, backend, "critic.backend", section.backend)
    if path is None:
        yield from backend.check(config, folder)
        yield "the critic starts from version 0 of the policy, with a value head of zeros"
        return
    facts = measure(path, setting="critic.path")
    yield from backend.check(config, path)
    _check_family(path, folder)
    shapes, head = stored_shapes(path), "score.weight" if family_of(path) is None else "lm_head.weight"
    if shapes.get(head, [])[:1] != [1]:
        msg = (
            f"critic.path {path} holds no value head: its *.safetensors have no tensor {head} of one row; give "
            "a folder `critic` that a run has written, or leave critic.path out to start from version 0 of the policy"
        )
        raise ConfigError(msg)
    if facts.vocabulary != policy.vocabulary:
        msg = (
            f"critic.path {path} has a vocabulary of {facts.vocabulary} ids, the policy one of {policy.vocabulary}; "
            "give a critic of the policy's tokenizer"
        )
        raise ConfigError(msg)
    if facts.context_length < policy.context_length:
        msg = (
            f"critic.path {path} has a context of {facts.context_length} tokens, the policy one of "
            f"{policy.context_length}; give a critic with the policy's context"
        )
        raise ConfigError(msg)
    yield f"the critic starts from {path}, {facts.parameters / 1e6:.2f} M parameters"


def _check_family(path: Path, folder: Path) -> None:
    """Raise ConfigError unless a critic reads the media that are prepared for the policy."""
    critic, policy = family_of(path), family_of(folder)
    if _inputs(critic) != _inputs(policy):
        kinds = [f"type {family.model_type}" if family else "text alone" for family in (critic, policy)]
        msg = (
            f"critic.path {path} holds a model of {kinds[0]}, and the policy is one of {kinds[1]}; a critic reads the "
            "features that are prepared for the policy, so give one with the same towers"
        )
        raise ConfigError(msg)


def _inputs(family: Family | None) -> tuple[object, ...]:
    """Return what the features of a family depend on; how they are normalised is the policy's."""
    if family is None:
        return ()
    vision, audio = family.vision, family.audio
    return (
        family.model_type,
        None if vision is None else (vision.patch, vision.merge, vision.temporal),
        None if audio is None else (audio.mels, audio.chunk),
    )
