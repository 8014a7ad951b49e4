"""Check of a run's columns: each has one writer and at least one reader."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from relax_actors.algorithms.advantages.estimation import RowEstimation
from relax_actors.algorithms.named_functions import advantages_with, spec_of_advantage
from relax_actors.config import Config
from relax_actors.errors import ConfigError
from relax_actors.registry.catalog import ADVANTAGES, ROLES
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.roles.judge_check import CheckedJudge
from relax_actors.roles.registry import built_in_spec, make_role, numbered_cells, role_names, spec_of
from relax_actors.roles.reward_model_check import CheckedRewardModel
from relax_actors.runtime import COLUMNS, Role
from relax_actors.runtime.row import FAILURES


def check_columns(config: Config) -> Iterator[str]:
    """Check that roles import, and that each column that is read has one writer."""
    optional = {built_in_spec(name).writes for name in ROLES.built_in if built_in_spec(name).section == "roles"}
    always = [column for column in COLUMNS if not any(column in writes for writes in optional)]
    writers: dict[str, str] = dict.fromkeys((*always, *FAILURES), "a built-in role")
    built_in = {name: built_in_spec(name) for name in role_names(config) if name not in config.roles}
    numbered = {kind: f"the role {name}" for name, spec in built_in.items() for kind in spec.numbered}
    roles: dict[str, Role] = {}
    built_in |= {name: spec_of(config, name) for name in ("rollout", "reward") if name in built_in}
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
    needed = set[str]() if config.from_data else _columns_of_advantages(config, writers)
    readers = list(roles.values()) if config.from_data else [*roles.values(), make_role(config, "reward")]
    read = {column for role in readers for column in role.inputs(config)} | needed
    yield from _check_log_probs(config, writers, read)
    _check_values_are_read(config, read)
    for name, role in roles.items():
        if isinstance(role, CheckedJudge | CheckedRewardModel) and role.writes not in read:
            msg = (
                f"roles.{name} would compute scores that no role reads; name it in reward.function, as "
                f"reward.function = {{ {name} = 1.0 }}, or remove the section"
            )
            raise ConfigError(msg)


def _claim_numbered(name: str, spec: RoleSpec, owners: dict[str, str]) -> None:
    """Check a role's numbered cells, and add it to the owners of these kinds."""
    for kind, cls in spec.numbered.items():
        if kind in owners:
            msg = f"roles.{name} writes {kind!r} cells, which {owners[kind]} writes; remove them from its spec"
            raise ConfigError(msg)
        if (known := numbered_cells().get(kind, cls)) is not cls:
            msg = f"roles.{name} writes {kind!r} cells, which are {known.__name__}, not {cls.__name__}; rename the kind"
            raise ConfigError(msg)
        owners[kind] = f"roles.{name}"


def _columns_of_advantages(config: Config, writers: Collection[str]) -> set[str]:
    """Return the columns that the role advantages reads.

    Raises:
        ConfigError: no role writes the column of the rewards.
    """
    reads = config.advantages.reads
    if reads not in writers:
        msg = f"advantages.reads = {reads!r} is a column that no role writes; columns are {sorted(writers)}"
        raise ConfigError(msg)
    return {reads, *RowEstimation(config).columns}  # `refusals` says which of them no role writes


def _check_log_probs(config: Config, produced: Collection[str], read: Collection[str]) -> Iterator[str]:
    """Check that needed log-probs are `produced`, and that all that are produced are `read`."""
    algorithm = config.algorithm
    wanted = {
        "reference": algorithm.needs_reference,
        "actor_fwd": algorithm.proximal == "actor_fwd",
        "squares": "squares" in read,
    }
    remedies = {
        "reference": 'algorithm.kl.place is "none"; set it to "loss" or "reward", or remove the section'
        if algorithm.rows != "pairs"
        else "the losses of algorithm.pairs need none; remove the section",
        "actor_fwd": f'algorithm.proximal is "{algorithm.proximal}"; set it to "actor_fwd", or remove the section',
        "squares": f'algorithm.advantage is "{algorithm.advantage}"; set it to '
        f"{advantages_with(lambda spec: 'squares' in spec.needs)}, or remove the section",
    }
    for name, is_wanted in wanted.items():
        if name in config.roles and not is_wanted and name not in read:
            what = "squared probabilities" if name == "squares" else "log-probs"
            msg = f"roles.{name} would compute {what} that no role reads: {remedies[name]}"
            raise ConfigError(msg)
    if wanted["actor_fwd"] and "actor_fwd" not in produced:
        msg = (
            'algorithm.proximal = "actor_fwd" needs a role that writes column actor_fwd; add [roles.actor_fwd], or set '
            'algorithm.proximal = "trainer", which uses the trainer\'s own log-probs before the step'
        )
        raise ConfigError(msg)
    if wanted["reference"] and "reference" in config.roles and "reference" not in produced:
        msg = "the actor of roles.reference does not write column reference; set its `writes`, or rename the role"
        raise ConfigError(msg)
    if wanted["reference"]:
        every = config.algorithm.reference_every
        weights = "version 0" if every is None else f"every {every}th version"
        where = f"by the role reference, from {weights}" if "reference" in config.roles else "inside the trainer"
        why = f'the KL (algorithm.kl.place = "{algorithm.kl.place}")' if algorithm.kl.place != "none" else "pairs"
        yield f"log-probs of the reference, for {why}: computed {where}"
    if config.from_data:
        return
    proximal = {
        "rollout": "log-probs of the proximal policy: those that the tokens were sampled with",
        "trainer": "log-probs of the proximal policy: those of the trainer's own forward pass, at no further cost"
        if config.trainer.updates == 1
        else "log-probs of the proximal policy: those of a forward pass of the trainer before the first update",
        "actor_fwd": "log-probs of the proximal policy: computed by the role actor_fwd, from the newest weights",
    }
    yield proximal[algorithm.proximal]
    if wanted["actor_fwd"] and config.staleness.max == 0:
        yield 'with staleness.max = 0 they equal those of algorithm.proximal = "trainer", which needs no role'


def _check_values_are_read(config: Config, read: Collection[str]) -> None:
    """Check that the critic's values are among the columns `read` by advantages or roles."""
    advantage = config.algorithm.advantage
    reads_values = advantage not in ADVANTAGES.built_in or "values" in {
        *read,
        *spec_of_advantage(config.algorithm).needs,
    }
    if config.critic is not None and not reads_values:
        msg = (
            f'[critic] would compute values that no role reads: algorithm.advantage = "{advantage}"; set '
            'algorithm.name = "ppo" or algorithm.advantage = '
            f"{advantages_with(lambda spec: 'values' in spec.needs)}, or remove [critic]"
        )
        raise ConfigError(msg)
