"""Checks of a configuration, one function a concern.

Each yields notes, and raises ConfigError for what cannot work.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from relax_actors.algorithms.advantages.estimation import REFERENCE, VALUES, RowEstimation, estimator_of
from relax_actors.algorithms.advantages.examples import try_advantage
from relax_actors.algorithms.named_functions import check_user_functions, has_own_functions
from relax_actors.algorithms.notes import notes as algorithm_notes
from relax_actors.cli.critic import check_values_are_read
from relax_actors.cli.placement import check_log_probs
from relax_actors.config import Config
from relax_actors.data.model_folder import ModelFacts, measure, prepare
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.backends import scoring_backend
from relax_actors.errors import ConfigError
from relax_actors.messages.experts import compact
from relax_actors.registry.catalog import ALL, ROLES
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.rewards import load_reward, load_rewards
from relax_actors.roles import FAILURES, built_in_spec, make_role, numbered_cells, replicas, role_names, spec_of
from relax_actors.roles.scorer import Scorer
from relax_actors.runtime import COLUMNS, Role
from relax_actors.supervision.sandbox import check_sandbox, is_sandboxed
from relax_actors.training.stops import stops_of


def check_model(config: Config, folder: Path) -> tuple[ModelFacts, Tokenizer]:
    """Check the model against its tokenizer and the stop strings; return its size and shape, and the tokenizer.

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
    return facts, tokenizer


def describe_run(config: Config, facts: ModelFacts, here: Collection[str]) -> Iterator[str]:
    """Note the model and the actors of each role on this machine."""
    experts = "" if facts.moe is None else f", {facts.moe.experts} experts in {facts.moe.layers} layers"
    yield (
        f"model: {facts.model_type}, {facts.parameters / 1e6:.2f} M parameters{experts}, context of "
        f"{facts.context_length} tokens, vocabulary of {facts.vocabulary}"
    )
    names = [name for name in role_names(config) if name in here]
    yield f"actors on this machine: {', '.join(f'{name} {replicas(config, name)}' for name in names)}"


def check_weight_files(config: Config) -> Iterator[str]:
    """Check that a model folder with weights has them in the format that is read."""
    path = config.model.path
    if path is None or any(path.glob("*.safetensors")):
        return
    if others := sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for file in path.glob(pattern)):
        msg = f"model.path {path} has no *.safetensors, only {', '.join(others)}; convert the weights to safetensors"
        raise ConfigError(msg)
    yield f"model.path {path} has no *.safetensors: weights are drawn at random from run.seed"


def check_installed() -> Iterator[str]:
    """Check that installed packages register no conflicting names."""
    for registry in ALL:
        registry.check_installed()
    yield from ()


def check_scoring(config: Config, folder: Path) -> Iterator[str]:
    """Check the backends of roles that compute log-probs.

    Args:
        config: configuration of the run.
        folder: folder of the model.
    """
    for name in config.roles:
        role = make_role(config, name)
        if isinstance(role, Scorer):
            setting = f"roles.{name}.backend"
            yield from scoring_backend(role.backend, setting).check(config, folder, setting)


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


def _claim_numbered(name: str, spec: RoleSpec, owners: dict[str, str]) -> None:
    """Check the numbered cells that a role of the user writes, and add the role to the owners of these kinds."""
    for kind, cls in spec.numbered.items():
        if kind in owners:
            msg = f"roles.{name} writes {kind!r} cells, which {owners[kind]} writes; remove them from its spec"
            raise ConfigError(msg)
        if (known := numbered_cells().get(kind, cls)) is not cls:
            msg = f"roles.{name} writes {kind!r} cells, which are {known.__name__}, not {cls.__name__}; rename the kind"
            raise ConfigError(msg)
        owners[kind] = f"roles.{name}"


def check_roles(config: Config) -> Iterator[str]:
    """Check that roles import, that no two write the same cells, and that every column that is read has a writer."""
    optional = {built_in_spec(name).writes for name in ROLES.built_in if built_in_spec(name).section == "roles"}
    always = [column for column in COLUMNS if not any(column in writes for writes in optional)]
    writers: dict[str, str] = dict.fromkeys((*always, *FAILURES), "a built-in role")
    built_in = {name: built_in_spec(name) for name in role_names(config) if name not in config.roles}
    numbered = {kind: f"the role {name}" for name, spec in built_in.items() for kind in spec.numbered}
    roles: dict[str, Role] = {}
    built_in |= {name: spec_of(config, name) for name in ("rollout", "reward")}
    writers |= dict.fromkeys(built_in["critic"].writes, "critic") if "critic" in built_in else {}
    for name in config.roles:
        roles[name], spec = make_role(config, name), spec_of(config, name)
        for column in (column for column in spec.writes if column not in FAILURES):
            if column in writers:
                msg = f"roles.{name} writes column {column!r}, which {writers[column]} writes; choose another"
                raise ConfigError(msg)
            writers[column] = f"roles.{name}"
        _claim_numbered(name, spec, numbered)
        if spec.single and config.roles[name].replicas != 1:
            msg = f"roles.{name}.replicas = {config.roles[name].replicas}: the role owns state and has one actor; set 1"
            raise ConfigError(msg)
    for name, role in roles.items():
        for column in role.reads:
            if column not in writers:
                msg = f"roles.{name} reads column {column!r}, which no role writes; columns are {sorted(writers)}"
                raise ConfigError(msg)
    needed = _columns_of_advantages(config, writers)
    read = {column for role in roles.values() for column in role.inputs(config)} | needed
    yield from check_log_probs(config, writers, read)
    check_values_are_read(config, read)


def _columns_of_advantages(config: Config, writers: Collection[str]) -> set[str]:
    """Return the columns that the role advantages reads.

    Raises:
        ConfigError: no role writes one of them.
    """
    reads = config.advantages.reads
    if reads not in writers:
        msg = f"advantages.reads = {reads!r} is a column that no role writes; columns are {sorted(writers)}"
        raise ConfigError(msg)
    needed = RowEstimation(config).columns
    for column in needed:
        if column not in writers:
            why = 'kl.place = "reward"' if column == REFERENCE else f'advantage = "{config.algorithm.advantage}"'
            remedy = "add the section [critic]" if column == VALUES else f"add [roles.{column}] with replicas = 1"
            msg = f"algorithm.{why} needs column {column!r}, which no role writes; {remedy}"
            raise ConfigError(msg)
    return {reads, *needed}


def check_rewards(config: Config) -> Iterator[str]:
    """Check that the functions of rewards and of the algorithm import; note unusual algorithm settings.

    A user's advantage, policy loss and correction run on examples. Functions for a sandbox are imported in it only.
    """
    estimator_of(config.algorithm)
    check_user_functions(config.algorithm)
    yield from try_advantage(config)
    if has_own_functions(config.algorithm):
        from relax_actors.algorithms.policy_check import try_functions

        try_functions(config.algorithm)
    settings: dict[str, str | dict[str, float]] = {"reward.function": config.reward.function}
    if is_sandboxed(config, "reward"):
        # This process is in no sandbox, and importing a module runs its code.
        settings = {}
    elif config.eval is not None:
        settings["eval.reward"] = config.eval.reward
    for where, setting in settings.items():
        if isinstance(setting, dict):
            load_rewards(setting, where)
        else:
            load_reward(setting, where)
    yield from algorithm_notes(config)


def check_isolation(config: Config, roles: Collection[str]) -> Iterator[str]:
    """Check that this machine can run the roles that need a sandbox."""
    check_sandbox(config, sorted(roles))
    yield from ()


def check_steps(config: Config) -> Iterator[str]:
    """Note the size of a step, the number of rows in flight, and settings that are longer than the run."""
    trainer, rollout = config.trainer, config.rollout
    samples = trainer.prompts_per_step * rollout.group_size
    yield f"a step trains {trainer.prompts_per_step} rows x {rollout.group_size} samples = {samples} completions"
    if trainer.updates > 1:
        rows = trainer.prompts_per_step // trainer.minibatches
        yield (
            f"a batch is used for {trainer.updates} optimizer updates of {rows} rows each (trainer.minibatches = "
            f"{trainer.minibatches}, trainer.epochs = {trainer.epochs}); a step is computed when all of its rows are "
            "there, as with trainer.stream = false"
        )
    window = trainer.prompts_per_step * (config.staleness.max + 1)
    yield f"at most {window} rows are in flight (staleness.max = {config.staleness.max})"
    if config.staleness.max > 0 and config.run.deterministic:
        yield "run.deterministic with staleness.max > 0: rows still depend on the time at which weights arrive"
    yield from shortened(config)


def shortened(config: Config) -> Iterator[str]:
    """Note the settings that `run.steps` cuts short, so that any run can be shortened by this setting alone."""
    trainer, steps = config.trainer, config.run.steps
    if trainer.warmup_steps > steps:
        yield (
            f"trainer.warmup_steps = {trainer.warmup_steps} is cut to run.steps = {steps}: the learning rate reaches "
            "its peak at the last step"
        )
    if trainer.checkpoint_every > steps:
        yield (
            f"trainer.checkpoint_every = {trainer.checkpoint_every} is more than run.steps = {steps}: checkpoints are "
            "written before the first and after the last step only"
        )
    if config.critic is not None and config.critic.warmup_steps >= steps:
        yield (
            f"critic.warmup_steps = {config.critic.warmup_steps} leaves no step of run.steps = {steps} to train the "
            "policy: its weights stay those of version 0"
        )
    if config.eval is not None and config.eval.every > steps:
        yield (
            f"eval.every = {config.eval.every} is more than run.steps = {steps}: versions 0 and {steps} are evaluated"
        )
    if trainer.warm_start is not None and trainer.warm_start.steps > steps:
        yield (
            f"trainer.warm_start.steps = {trainer.warm_start.steps} is more than run.steps = {steps}: these supervised "
            "steps come before version 0 and are not cut"
        )


def check_lengths(config: Config, facts: ModelFacts) -> Iterator[str]:
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
    yield from ()
