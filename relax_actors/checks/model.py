"""Checks of the model: against its tokenizer, and against the lengths and the replay that a run asks for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from relax_actors.config import Config
from relax_actors.data.checked_run import CheckedModel, CheckedRun
from relax_actors.data.model_folder import ModelFacts, measure, prepare
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import ConfigError
from relax_actors.messages.experts import compact
from relax_actors.roles import replicas, role_names
from relax_actors.training.stops import stops_of


def check_model(config: Config, folder: Path) -> CheckedModel:
    """Check the model against its tokenizer and the stop strings; return what it is.

    Args:
        config: configuration of the run.
        folder: folder of the model; where the model is given by its architecture, files are written to it.

    Raises:
        ConfigError: the model cannot be read, or contradicts its tokenizer or `rollout.stop`.
    """
    prepare(config, folder)
    facts = measure(folder, "model.architecture" if config.model.path is None else "")
    tokenizer = Tokenizer(folder)
    if tokenizer.size > facts.vocabulary:
        msg = (
            f"model: the tokenizer has {tokenizer.size} ids, the model's vocabulary {facts.vocabulary}; "
            "use the tokenizer of this model"
        )
        raise ConfigError(msg)
    stops_of(tokenizer, config.rollout.stop)
    return CheckedModel(folder, facts, tokenizer)


def describe_run(run: CheckedRun, facts: ModelFacts) -> Iterator[str]:
    """Note the model and the actors of each role on this machine."""
    experts = "" if facts.moe is None else f", {facts.moe.experts} experts in {facts.moe.layers} layers"
    yield (
        f"model: {facts.model_type}, {facts.parameters / 1e6:.2f} M parameters{experts}, context of "
        f"{facts.context_length} tokens, vocabulary of {facts.vocabulary}"
    )
    actors = [f"{name} {replicas(run.config, name)}" for name in role_names(run.config) if name in run.here]
    yield f"actors on this machine: {', '.join(actors)}"


def check_router_replay(config: Config, facts: ModelFacts) -> Iterator[str]:
    """Check that the model has experts where their choice is to be replayed."""
    if not config.trainer.router_replay:
        return
    if config.simulate is not None:
        msg = "trainer.router_replay = true, but simulated engines choose no experts; leave it out"
        raise ConfigError(msg)
    if facts.moe is None:
        msg = (
            f"trainer.router_replay = true, but the model ({facts.model_type}) has no experts: its config.json has no "
            "num_experts or no num_experts_per_tok; leave it out"
        )
        raise ConfigError(msg)
    moe = facts.moe
    size = moe.layers * moe.experts_of_token * compact(np.array([moe.experts - 1])).itemsize
    yield f"the experts chosen for every token are recorded and replayed: {size} bytes a token of a trajectory"


def check_lengths(config: Config, facts: ModelFacts) -> None:
    """Check that a completion leaves room for a prompt in the model's context and in a micro-batch."""
    completion = config.rollout.max_tokens
    limits = {
        "the model's context (max_position_embeddings)": facts.context_length,
        "trainer.max_tokens_per_microbatch": config.trainer.max_tokens_per_microbatch,
    }
    for name, limit in limits.items():
        if completion >= limit:
            msg = f"rollout.max_tokens = {completion} leaves no room for a prompt in {name} = {limit}; lower it"
            raise ConfigError(msg)
