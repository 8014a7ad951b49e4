"""Checking a configuration deeply, without starting anything: what would fail in an hour fails now."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from relax_actors.cli.placement import placed, scored
from relax_actors.config import Config, load_config
from relax_actors.config.placement import OPTIONAL
from relax_actors.config.schema import DataSection
from relax_actors.data.model_folder import ModelFacts, measure, prepare
from relax_actors.data.prompt_maker import PromptMaker, open_data
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.megatron import architecture, layout, presence
from relax_actors.engines.sglang import presence as sglang
from relax_actors.errors import ConfigError, RowError
from relax_actors.messages.experts import compact
from relax_actors.rewards import load_reward, load_rewards
from relax_actors.roles import make_role
from relax_actors.roles.rollout import stop_id
from relax_actors.runtime import COLUMNS, Role

SAMPLE = 200
TRAINER_BYTES, ENGINE_BYTES, REFERENCE_BYTES = 16, 8, 4
# With deltas: two sets in half precision in the trainer, one in each that generates.
BASES_BYTES, COPY_BYTES = 4, 2
PROCESS_BYTES, MODELLED_BYTES, SERVER_BYTES = 700 << 20, 20 << 20, 1700 << 20


@dataclass(frozen=True, slots=True)
class Findings:
    """What the check found out: `errors` forbid a start; `notes` are worth knowing."""

    errors: tuple[str, ...]
    notes: tuple[str, ...]
    facts: ModelFacts | None = None


def examine(config: Config) -> Findings:
    """Check everything that can be checked before a start."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = config.model.path or Path(scratch)
        errors: list[str] = []
        notes: list[str] = []

        def attempt(part: Callable[[], Iterator[str]]) -> None:
            try:
                notes.extend(part())
            except ConfigError as error:
                errors.append(str(error))

        facts: list[ModelFacts] = []

        def model() -> Iterator[str]:
            prepare(config, folder)
            facts.append(measure(folder))
            tokenizer = Tokenizer(folder)
            if tokenizer.size > facts[0].vocabulary:
                msg = f"model: the tokenizer has {tokenizer.size} ids, the model's vocabulary {facts[0].vocabulary}"
                raise ConfigError(msg)
            for text in config.rollout.stop:
                stop_id(tokenizer, text)
            yield from ()

        attempt(model)
        attempt(lambda: _megatron(config, folder))
        attempt(lambda: _roles(config))
        attempt(lambda: _rewards(config))
        attempt(lambda: _arithmetic(config))
        attempt(lambda: placed(config))
        if facts:
            found = facts[0]
            attempt(lambda: _sglang(config, found))
            attempt(lambda: _router_replay(config, found))
            attempt(lambda: _data(config, config.data, "data", folder, found))
            if config.eval is not None:
                held_out = config.eval
                attempt(lambda: _data(config, held_out.data, "eval.data", folder, found))
            attempt(lambda: _room(config, found))
    return Findings(tuple(errors), tuple(notes), facts[0] if facts else None)


def _megatron(config: Config, folder: Path) -> Iterator[str]:
    roles = [name for name in OPTIONAL if name in config.roles]
    users = [f"roles.{name}" for name in roles if config.roles[name].options.get("backend") == "megatron"]
    users += ["trainer"] * (config.trainer.backend == "megatron")
    if not users:
        return
    presence.require(users[0])
    fields = json.loads((folder / "config.json").read_text())
    architecture.check(fields)
    if config.trainer.backend != "megatron":
        return
    found = layout.Layout.of(config.trainer.megatron)
    layout.check(found, fields)
    if found.ranks > 1:
        sizes = ", ".join(f"{name} {size}" for name, size in found.groups().items() if size > 1)
        yield f"the trainer has {found.ranks} ranks: {sizes}"


def _sglang(config: Config, facts: ModelFacts) -> Iterator[str]:
    if config.rollout.backend != "sglang":
        return
    if facts.moe is not None and facts.model_type not in sglang.FAMILIES_WITH_EXPERTS:
        msg = (
            f'rollout.backend = "sglang" with a model of type {facts.model_type}: of those with experts it is given '
            f'weights of {", ".join(sglang.FAMILIES_WITH_EXPERTS)} only; use "transformers"'
        )
        raise ConfigError(msg)
    if not config.owns_servers:
        yield f"rollouts use {len(config.rollout.sglang.urls)} servers that run elsewhere"
        return
    sglang.require()
    yield f"{config.rollout.replicas} inference servers, about {SERVER_BYTES >> 20} MiB each besides the model"


def _router_replay(config: Config, facts: ModelFacts) -> Iterator[str]:
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


def _roles(config: Config) -> Iterator[str]:
    produced: dict[str, str] = dict.fromkeys(COLUMNS, "a built-in role")
    roles: dict[str, Role] = {}
    for name in config.roles:
        role = make_role(config, name)
        roles[name] = role
        if role.writes in produced:
            msg = f"roles.{name} writes column {role.writes!r}, which {produced[role.writes]} writes; choose another"
            raise ConfigError(msg)
        if role.writes:
            produced[role.writes] = f"roles.{name}"
    for name, role in roles.items():
        for column in role.reads:
            if column not in produced:
                msg = f"roles.{name} reads column {column!r}, which no role writes; there are {sorted(produced)}"
                raise ConfigError(msg)
    if config.advantages.reads not in produced:
        msg = f"advantages.reads is {config.advantages.reads!r}, a column no role writes; there are {sorted(produced)}"
        raise ConfigError(msg)
    read = {column for role in roles.values() for column in role.inputs()} | {config.advantages.reads}
    yield from scored(config, produced, read)


def _rewards(config: Config) -> Iterator[str]:
    settings: dict[str, str | dict[str, float]] = {"reward.function": config.reward.function}
    if config.eval is not None:
        settings["eval.reward"] = config.eval.reward
    for where, setting in settings.items():
        if isinstance(setting, dict):
            load_rewards(setting, where)
        else:
            load_reward(setting, where)
    yield from ()


def _arithmetic(config: Config) -> Iterator[str]:
    trainer, rollout = config.trainer, config.rollout
    if trainer.warmup_steps > config.run.steps:
        msg = f"trainer.warmup_steps = {trainer.warmup_steps} is more than run.steps = {config.run.steps}; lower it"
        raise ConfigError(msg)
    samples = trainer.prompts_per_step * rollout.group_size
    yield f"a step trains {trainer.prompts_per_step} rows x {rollout.group_size} samples = {samples} completions"
    window = trainer.prompts_per_step * (config.staleness.max + 1)
    yield f"at most {window} rows are in flight (staleness.max = {config.staleness.max})"
    if config.staleness.max > 0 and config.run.deterministic:
        yield "run.deterministic with staleness.max > 0: rows still depend on when weights arrive"


def _data(config: Config, data: DataSection, where: str, folder: Path, facts: ModelFacts) -> Iterator[str]:
    source = open_data(data)
    tokenizer = Tokenizer(folder)
    maker = PromptMaker(data, tokenizer, facts.context_length, config.rollout.max_tokens)
    longest, bad, first = 0, 0, ""
    looked = min(SAMPLE, len(source))
    for i in range(looked):
        try:
            longest = max(longest, len(maker.make(source[i], seed=0, min_version=0).tokens))
        except RowError as error:
            bad, first = bad + 1, first or str(error)
    if bad == looked:
        msg = f"{where}: not one of the first {looked} rows can be used: {first}"
        raise ConfigError(msg)
    if bad:
        yield f"{where}: {bad} of the first {looked} rows will be quarantined, e.g. {first}"
    whole = longest + config.rollout.max_tokens
    if whole > (most := config.trainer.max_tokens_per_microbatch):
        msg = (
            f"trainer.max_tokens_per_microbatch = {most} is below one sequence of up to {whole} tokens ({longest} "
            f"of prompt + rollout.max_tokens); raise it"
        )
        raise ConfigError(msg)
    yield f"{where}: {len(source)} rows, prompts of up to {longest} tokens among the first {looked}"


def _room(config: Config, facts: ModelFacts) -> Iterator[str]:
    reference = REFERENCE_BYTES if config.computes_reference else 0
    bases, copy = (BASES_BYTES, COPY_BYTES) if config.publishes_deltas else (0, 0)
    following = config.rollout.replicas + (config.roles["actor_fwd"].replicas if "actor_fwd" in config.roles else 0)
    fixed = config.roles["reference"].replicas if "reference" in config.roles else 0
    # What is given out from memory must not change as training goes on: a copy, unless there is one for deltas.
    bases = bases or (ENGINE_BYTES // 2 if config.weights.transport == "torch" else 0)
    engines = (ENGINE_BYTES + copy) * following + REFERENCE_BYTES * fixed
    model = facts.parameters * (TRAINER_BYTES + reference + bases + engines)
    process = PROCESS_BYTES if config.simulate is None else MODELLED_BYTES
    ranks = config.trainer.megatron.ranks if config.trainer.backend == "megatron" else 1
    processes = process * (1 + following + fixed + (ranks if ranks > 1 else 0))
    servers = SERVER_BYTES * config.rollout.replicas if config.owns_servers else 0
    need = model + processes + servers
    have = _memory()
    text = f"{facts.parameters / 1e6:.2f} M parameters, about {need >> 20} MiB of memory"
    if have and need > have and config.trainer.device in ("auto", "cpu"):
        msg = f"model: {text}, this machine has {have >> 20} MiB; use a smaller model or fewer replicas"
        raise ConfigError(msg)
    disk = facts.parameters * 12 * (config.trainer.keep_checkpoints + 1)
    disk += facts.parameters * 4 * (config.staleness.max + 6 + 2 * ("reference" in config.roles))
    base = config.folder.absolute()
    while not base.exists():
        base = base.parent
    free = shutil.disk_usage(base).free
    if disk > free:
        msg = f"run.folder {config.folder}: needs about {disk >> 20} MiB, {free >> 20} MiB are free; free space"
        raise ConfigError(msg)
    yield f"{text} and {disk >> 20} MiB of disk"


def _memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemTotal")), 0)


def require(config: Config) -> Findings:
    """Check, and refuse what cannot work.

    Raises:
        ConfigError: one line a mistake.
    """
    findings = examine(config)
    if findings.errors:
        raise ConfigError("\n".join(findings.errors))
    return findings


def check(path: Path, settings: list[str]) -> int:
    """The verb: print the resolved configuration and what was found; gives the exit code."""
    import typer

    config = load_config(path, settings)
    findings = examine(config)
    shown = config.model_dump(mode="json", exclude_none=True)
    if config.broker.url:
        shown["broker"]["url"] = config.broker.url.rpartition("@")[2]
    typer.echo(json.dumps(shown, indent=1))
    for note in findings.notes:
        typer.echo(f"note: {note}", err=True)
    for error in findings.errors:
        typer.echo(f"error: {error}", err=True)
    if findings.errors:
        return 2
    typer.echo("ok: this configuration can be run", err=True)
    return 0


__all__ = ["Findings", "check", "examine", "require"]
