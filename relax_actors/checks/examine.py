"""Collect the checks of a configuration and run them, without starting anything."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from relax_actors.algorithms.function_check import check_functions
from relax_actors.algorithms.refusals import refusals
from relax_actors.checks import machine
from relax_actors.checks.calls import check_calls
from relax_actors.checks.capacity import check_disk, check_memory
from relax_actors.checks.cluster import check_nodes
from relax_actors.config import Config
from relax_actors.config.notes import check_steps, check_weight_files
from relax_actors.data.adapter_check import check_adapter, check_adapter_settings
from relax_actors.data.check import check_characters, check_data, check_set
from relax_actors.data.checked_run import CheckedModel, CheckedRun
from relax_actors.data.duplicates import note_duplicates
from relax_actors.data.example_check import check_examples
from relax_actors.data.model_folder import ModelFacts, measure, prepare
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.data.trace_check import check_traces
from relax_actors.devices.inventory import Inventory, machine_inventory
from relax_actors.engines.backends import check_adapters, inference_backend, training_backend, unused_settings
from relax_actors.engines.protocols.backend import Backend
from relax_actors.errors import ConfigError, MissingPackageError, RelaxError
from relax_actors.messages.experts import compact
from relax_actors.monitoring.notify.channels import check_notify
from relax_actors.registry.catalog import ALL
from relax_actors.roles import make_role, replicas, role_names, roles_at_start
from relax_actors.roles.columns import check_columns
from relax_actors.supervision.sandbox import check_sandbox
from relax_actors.training.stops import stops_of
from relax_actors.weights.transports import transport_class

Check = Callable[[], Iterator[str] | None]
"""Checks one concern: yields notes, or returns None if it has none; raises ConfigError for what cannot work."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Result of a check.

    Attributes:
        errors: what cannot work; a run does not start with any.
        notes: what is worth knowing.
        facts: size and shape of the model; None if it cannot be read.
    """

    errors: tuple[str, ...]
    notes: tuple[str, ...]
    facts: ModelFacts | None = None


def examine(
    config: Config,
    roles: Collection[str] | None = None,
    spelled: Collection[str] = (),
    *,
    calls: Path | None = None,
    inventory: Inventory | None = None,
    nodes: Sequence[Inventory] = (),
    shape: Path | None = None,
) -> Findings:
    """Run all checks of a configuration; write to temporary files only.

    Args:
        config: configuration of the run.
        roles: roles whose actors start on this machine; all if None.
        spelled: dotted names that the file or an override sets; see `relax_actors.config.load.set_by`.
        inventory: GPUs that the actors here may use; None for those of this machine.
        calls: folder from which dotted paths are imported, to call rewards and the environment; None for no calls.
        nodes: GPUs of several nodes, which exist on paper; this machine's devices and memory are then not checked, and
            a package that it lacks is a note.
        shape: folder with the config.json of the model, in place of the model's folder; tokenizer, data and calls are
            then not checked.
    """
    errors: list[str] = []
    notes: list[str] = []
    model: CheckedModel | None = None
    facts: ModelFacts | None = None
    with tempfile.TemporaryDirectory() as scratch:
        folder = shape or config.model.path or Path(scratch)
        try:
            if shape is None:
                model = check_model(config, folder)
                facts = model.facts
            else:
                facts = measure(shape, setting="--shape")
                notes.append(
                    f"the model has the shape of {shape}; tokenizer, weights, lora.targets and data are not checked"
                )
        except ConfigError as error:
            errors.extend(error.problems)
        here, gpus = set(roles_at_start(config) if roles is None else roles), inventory or machine_inventory()
        run = CheckedRun(config=config, here=here, inventory=gpus, model=model)
        errors += [*refusals(config, spelled), *unused_settings(config, spelled)]
        checks: list[Check] = [*_checks(run), *(_shape_checks(run, folder, facts) if facts is not None else ())]
        checks += [] if shape is not None else _file_checks(run)
        checks += _node_checks(run, nodes, facts) if nodes else _machine_checks(run, facts)
        for check in checks:
            _attempt(check, errors, notes, elsewhere=bool(nodes))
        if calls is not None and not errors and shape is None:
            for check in (*check_calls(run, calls), *_comparisons(run)):
                _attempt(check, errors, notes, elsewhere=bool(nodes))
    # Several checks may meet the same cause, such as a role that does not import.
    return Findings(tuple(dict.fromkeys(errors)), tuple(dict.fromkeys(notes)), facts)


def _attempt(check: Check, errors: list[str], notes: list[str], *, elsewhere: bool) -> None:
    try:
        notes.extend(check() or ())
    except MissingPackageError as error:
        if elsewhere:
            notes.append(f"not checked, as this machine lacks a package: {error}")
        else:
            errors.append(str(error))
    except ConfigError as error:
        errors.extend(error.problems)


def _checks(run: CheckedRun) -> Iterator[Check]:
    config, here = run.config, run.here
    yield from (registry.check_installed for registry in ALL)
    yield partial(check_columns, config)
    yield partial(check_functions, config)
    for name in role_names(config):
        yield partial(_check_role, run, name)
    yield lambda: transport_class(config).check(config, here)
    yield partial(check_sandbox, config, sorted(here))
    yield partial(check_steps, config)
    yield partial(machine.check_shared_devices, config)
    yield partial(machine.check_broker, config)


def _shape_checks(run: CheckedRun, folder: Path, facts: ModelFacts) -> Iterator[Check]:
    """Checks of the model's shape, by the config.json in a folder."""
    config = run.config
    yield partial(describe_run, run, facts)
    yield partial(_check_backend, config, folder, "trainer", training_backend)
    if config.generates:
        yield partial(_check_backend, config, folder, "rollout", inference_backend)
        yield partial(check_entropies, config)
        yield partial(check_lengths, config, facts)
    if run.model is None:  # else `check_adapter` looks at the files, too
        yield partial(check_adapter_settings, config, folder)
    yield partial(check_router_replay, config, facts)


def _file_checks(run: CheckedRun) -> Iterator[Check]:
    """Checks of weights, tokenizer and data."""
    config = run.config
    if run.model is not None:
        yield partial(check_weight_files, config)
        yield partial(check_adapter, config, run.model.folder)
        yield partial(check_characters, config, run.model.tokenizer)
    check_rows = check_traces if config.data.has_traces else check_examples if config.from_data else check_data
    yield partial(check_rows, run, config.data, "data")
    for where, each in config.held_out_sets.items():
        yield partial(check_rows, run, each.source, f"{where}.data")
        yield partial(check_set, run, each, where)


def _check_backend(config: Config, folder: Path, section: str, load: Callable[[Config], Backend]) -> Iterator[str]:
    """Check the backend that a section names with the model."""
    backend = load(config)
    check_adapters(config, backend, f"{section}.backend", getattr(config, section).backend)
    yield from backend.check(config, folder)


def _comparisons(run: CheckedRun) -> Iterator[Check]:
    """Comparisons of held-out data with the training data, which take a second each."""
    for where, each in run.config.held_out_sets.items():
        yield partial(note_duplicates, run, each.source, f"{where}.data")


def _machine_checks(run: CheckedRun, facts: ModelFacts | None) -> Iterator[Check]:
    """Checks of what the actors that start on this machine find there."""
    yield partial(machine.check_ranks, run)
    yield partial(machine.check_devices, run)
    yield partial(machine.check_folders, run.config)
    yield partial(check_notify, run.config.notify)
    if facts is not None:
        yield partial(check_memory, run, facts)
        yield partial(check_disk, run.config, facts)


def _node_checks(run: CheckedRun, nodes: Sequence[Inventory], facts: ModelFacts | None) -> Iterator[Check]:
    """Checks of nodes that exist on paper."""
    if facts is not None:
        yield partial(check_nodes, run, nodes, facts)


def check_role(config: Config, role: str) -> None:
    """Run a role's own checks; raises ConfigError."""
    run = CheckedRun(config=config, here={role}, inventory=machine_inventory(), model=None)
    list(_check_role(run, role))


def _check_role(run: CheckedRun, name: str) -> Iterator[str]:
    role = make_role(run.config, name)
    try:
        yield from role.check(replace(run, role=name)) or ()
    except RelaxError:
        raise
    except Exception as error:
        msg = f"{type(role).__name__}.check of role {name} raised {type(error).__name__}: {error}; correct it"
        raise ConfigError(msg) from error


def require(
    config: Config,
    roles: Collection[str] | None = None,
    spelled: Collection[str] = (),
    *,
    inventory: Inventory | None = None,
) -> Findings:
    """Run all checks as `examine`; raises ConfigError with a line an error."""
    findings = examine(config, roles, spelled, inventory=inventory)
    if findings.errors:
        raise ConfigError(*findings.errors)
    return findings


def check_model(config: Config, folder: Path) -> CheckedModel:
    """Check the model against its tokenizer and the stop strings; return what it is.

    Files of a model that is given by its architecture are written to the folder.

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


def check_entropies(config: Config) -> None:
    """Check that the inference engine gives entropies where record.entropy asks for them."""
    if config.record.entropy and not getattr(inference_backend(config), "has_entropies", False):
        engine = "simulated engines give" if config.simulate is not None else f'"{config.rollout.backend}" gives'
        msg = (
            f"record.entropy = true, but {engine} log-probs of the sampled tokens alone, and no entropies; set "
            'rollout.backend = "transformers", or leave record.entropy out'
        )
        raise ConfigError(msg)


def check_lengths(config: Config, facts: ModelFacts) -> None:
    """Check that a completion leaves room for a prompt in context and micro-batch."""
    completion = config.rollout.max_tokens
    limits = {
        "the model's context (max_position_embeddings)": facts.context_length,
        "trainer.max_tokens_per_microbatch": config.trainer.max_tokens_per_microbatch,
    }
    for name, limit in limits.items():
        if completion >= limit:
            msg = f"rollout.max_tokens = {completion} leaves no room for a prompt in {name} = {limit}; lower it"
            raise ConfigError(msg)
