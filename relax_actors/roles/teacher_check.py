"""Options of the role `teacher`, and their check before a run starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from string import Formatter
from typing import cast

from pydantic import Field

from relax_actors.config import Config
from relax_actors.data.checked_run import CheckedRun
from relax_actors.data.mixture import SOURCE
from relax_actors.data.model_folder import measure
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.backends import check_frozen
from relax_actors.engines.torch.architectures import check_architecture
from relax_actors.errors import ConfigError, RowError
from relax_actors.media.family import family_of
from relax_actors.roles.scorer import Scorer
from relax_actors.runtime import Row

SECTION = "roles.teacher"
SERVER_SECONDS = 3.0
"""Deadline of the question which model a server serves."""


class CheckedTeacher(Scorer):
    """Options of a teacher, and their check."""

    model: Path | None = None
    """Model folder of the teacher, with weights and the tokenizer of the student."""
    models: dict[str, Path] = Field(default_factory=dict)
    """Model folder of the teacher of each source of a mixture, by its name in [data.mixture], in place of `model`."""
    server: str = ""
    """URL of an SGLang server that serves the teacher."""
    api_key_file: Path | None = None
    """File with the API key of `server`."""
    hint: str = ""
    """Text that the teacher reads in place of the prompt. It contains {prompt}, the text that the student reads, and
    may contain {answer} and the names of metadata of the row. With a chat template write its markers, such as
    "<|im_start|>system\\nThe answer is {answer}.<|im_end|>\\n{prompt}"."""
    patience: float = 60.0
    """Seconds to wait for a `server` that does not answer; then the actor ends and is restarted."""

    @property
    def folders(self) -> dict[str, Path]:
        """Model folders of frozen teachers, by the setting that names each."""
        own = {} if self.model is None else {f"{SECTION}.model": self.model}
        return own | {f"{SECTION}.models.{name}": path for name, path in self.models.items()}

    @property
    def by_source(self) -> dict[str, Path]:
        """Folders of frozen teachers by the source of a mixture; by "" if one teaches all rows."""
        return {"": self.model} if self.model is not None else self.models

    def source_of(self, row: Row) -> str:
        """Return the source of the mixture that a row comes from, if each has a teacher of its own."""
        return str(row.prompt.metadata.get(SOURCE, "")) if self.models else ""

    def check(self, run: CheckedRun) -> Iterator[str]:
        """Check the scoring engine, the options, the teacher's model and its vocabulary."""
        yield from super().check(run)
        if run.model is None:
            return
        config, folder = run.config, run.model.folder
        distil = config.algorithm.distil
        if distil.place == "none":
            msg = f'[{SECTION}] has no effect without algorithm.distil.place; set it to "advantage" or "loss"'
            raise ConfigError(msg)
        _check_source(self)
        if config.media is not None and self.server:
            msg = f"{SECTION}.server works with text only, and this model takes media; set {SECTION}.model or a hint"
            raise ConfigError(msg)
        if self.hint:
            _check_hint(self.hint, folder)
        family = family_of(folder)
        # Barred tokens have no probability, so they are among the most likely ones of no distribution.
        barred = 0 if family is None else len(family.barred)
        if distil.top_k is not None and distil.top_k > (vocabulary := measure(folder).vocabulary - barred):
            most = f"{vocabulary} without the tokens of media" if barred else str(vocabulary)
            msg = f"algorithm.distil.top_k = {distil.top_k} is more than the vocabulary of {most}; lower it"
            raise ConfigError(msg)
        if self.server:
            yield from _check_server(self, config, folder)
        if self.models:
            _check_sources(self, config)
        for setting, path in self.folders.items():
            yield from _check_model(config, setting, path, folder)
        yield from _check_writes(self, config)


def teacher_of(config: Config) -> CheckedTeacher:
    """Return the options of [roles.teacher]."""
    return cast("CheckedTeacher", CheckedTeacher.build(config.roles["teacher"].options, SECTION))


def _check_writes(role: CheckedTeacher, config: Config) -> Iterator[str]:
    """Check that a teacher can write samples of the run, if it has to."""
    if config.algorithm.distil.student_share == 1:
        return
    setting = f"algorithm.distil.student_share = {config.algorithm.distil.student_share:g}"
    if not role.by_source:
        msg = (
            f"{setting} lets the teacher write samples, which needs its weights; set {SECTION}.model, or "
            "algorithm.distil.student_share = 1"
        )
        raise ConfigError(msg)
    if role.hint and config.media is not None:
        msg = f"{setting}: a teacher with a hint writes to prompts of text only; remove {SECTION}.hint"
        raise ConfigError(msg)
    if config.rollout.sglang.urls:
        msg = (
            f"{setting}: actors of rollout.sglang.urls have no GPU for a teacher; leave the urls out, so that the run "
            "starts its servers, or set algorithm.distil.student_share = 1"
        )
        raise ConfigError(msg)
    yield from _check_shared_gpu(config, setting)
    for folder in role.by_source.values():
        yield from check_frozen(config, config.rollout.backend, "rollout.backend", folder)
    yield "each rollout holds the teacher's weights beside those of the policy"


def _check_shared_gpu(config: Config, setting: str) -> Iterator[str]:
    """Check that the policy's server leaves GPU memory to a teacher that writes."""
    rollout = config.rollout
    if rollout.backend != "sglang" or rollout.sglang.memory_fraction is not None or rollout.device == "cpu":
        return
    need = "the servers of policy and teacher share a GPU, and the first would take nearly all of its memory"
    if rollout.device != "auto":
        msg = f"{setting}: {need}; set rollout.sglang.memory_fraction, such as 0.5"
        raise ConfigError(msg)
    yield f"on a GPU {need}: set rollout.sglang.memory_fraction, such as 0.5"


def _check_source(role: CheckedTeacher) -> None:
    """Check that the teacher is exactly one of a folder, a server and the live policy."""
    given = [name for name in ("model", "models", "server") if getattr(role, name)]
    if len(given) > 1:
        msg = f"{SECTION} has both {given[0]} and {given[1]}; remove one"
        raise ConfigError(msg)
    is_live = not given
    if is_live and not role.hint:
        msg = (
            f"[{SECTION}] without model and server is the policy itself, which has nothing to teach; set model or "
            "server, or a hint that it reads and the student does not (self-distillation)"
        )
        raise ConfigError(msg)
    if is_live and role.backend not in ("torch", "megatron"):
        msg = f'{SECTION}.backend = "{role.backend}" scores no most likely tokens; set "torch" or "megatron"'
        raise ConfigError(msg)
    if role.server and not role.server.startswith(("http://", "https://")):
        msg = f"{SECTION}.server = {role.server!r} is not a URL such as http://127.0.0.1:30000"
        raise ConfigError(msg)
    if role.api_key_file is not None:
        if not role.server:
            msg = f"{SECTION}.api_key_file is the key of a server; set {SECTION}.server, or remove it"
            raise ConfigError(msg)
        if not role.api_key_file.is_file():
            msg = f"{SECTION}.api_key_file {role.api_key_file} does not exist"
            raise ConfigError(msg)


def _check_sources(role: CheckedTeacher, config: Config) -> None:
    """Check that every source of the run's mixture has a teacher, and no other."""
    sources = [*config.data.mixture]
    if not sources:
        msg = f"{SECTION}.models names a teacher for each source of a mixture, and [data] is none; set {SECTION}.model"
        raise ConfigError(msg)
    if unknown := [name for name in role.models if name not in sources]:
        msg = f"{SECTION}.models names {unknown[0]!r}, and the sources of [data.mixture] are {', '.join(sources)}"
        raise ConfigError(msg)
    if lacking := [name for name in sources if name not in role.models]:
        msg = f"{SECTION}.models has no teacher for data.mixture.{lacking[0]}; add {lacking[0]} = <model folder>"
        raise ConfigError(msg)


def _check_server(role: CheckedTeacher, config: Config, folder: Path) -> Iterator[str]:
    """Check the vocabulary of a server, or note that it cannot be checked."""
    import httpx  # noqa: PLC0415 only a server needs it

    if config.rollout.temperature != 1:
        msg = (
            f"{SECTION}.server computes log-probs at temperature 1, and not at rollout.temperature = "
            f"{config.rollout.temperature}; set {SECTION}.model, or rollout.temperature = 1"
        )
        raise ConfigError(msg)
    where = f"{SECTION}.server {role.server}"
    key = "" if role.api_key_file is None else role.api_key_file.read_text().strip()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        verify = role.server.startswith("https:")
        url = f"{role.server.rstrip('/')}/model_info"
        answer = httpx.get(url, headers=headers, timeout=SERVER_SECONDS, verify=verify)
        named = answer.raise_for_status().json()["tokenizer_path"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        yield f"the vocabulary of {where} is not checked: it does not say which model it serves ({why})"
        return
    if not isinstance(named, str) or not (Path(named) / "tokenizer.json").is_file():
        yield (
            f"the vocabulary of {where} is not checked: {named!r}, its tokenizer, is no folder of this machine; the "
            "teacher needs the student's tokenizer"
        )
    elif difference := Tokenizer(folder).difference(Tokenizer(Path(named))):
        msg = (
            f"{where} serves {named}, which has another vocabulary than the student: {difference}. A teacher scores "
            "the student's tokens, so both need the same tokenizer"
        )
        raise ConfigError(msg)


def _check_hint(hint: str, folder: Path) -> None:
    try:
        parts = list(Formatter().parse(hint))
    except ValueError as error:
        msg = f"{SECTION}.hint {hint[:60]!r} is not a template: {error}; write {{{{ and }}}} for braces"
        raise ConfigError(msg) from error
    if not any(name == "prompt" for _, name, _, _ in parts):
        msg = f"{SECTION}.hint {hint[:60]!r} lacks {{prompt}}, where the teacher reads the prompt; add it"
        raise ConfigError(msg)
    if not any(literal or name != "prompt" for literal, name, _, _ in parts):
        msg = (
            f"{SECTION}.hint {hint[:60]!r} adds nothing to the prompt; write text around {{prompt}} that the student "
            "does not read, or remove the hint"
        )
        raise ConfigError(msg)
    try:
        if text := "".join(literal for literal, _, _, _ in parts):
            Tokenizer(folder).encode(text, special=False)
    except RowError as error:
        msg = f"{SECTION}.hint {hint[:60]!r} has text that the model cannot read: {error}"
        raise ConfigError(msg) from error


def _check_model(config: Config, setting: str, path: Path, folder: Path) -> Iterator[str]:
    """Check a teacher's folder: a model with the student's vocabulary, enough context."""
    if not any(path.glob("*.safetensors")):
        why = "has no *.safetensors" if path.is_dir() else "does not exist"
        msg = f"{setting} {path} {why}; name the folder of a trained model, such as runs/demo/model"
        raise ConfigError(msg)
    facts = measure(path)
    check_architecture(config, path)
    families = [family_of(one) for one in (folder, path)]
    if len({None if family is None else family.reading for family in families}) > 1:
        msg = (
            f"{setting} {path} reads media in another way than the student, or none; a teacher needs features, "
            "placeholders and positions as the student's"
        )
        raise ConfigError(msg)
    if difference := Tokenizer(folder).difference(Tokenizer(path)):
        msg = (
            f"{setting} {path} has another vocabulary than the student: {difference}. A teacher scores the "
            "student's tokens, so both need the same tokenizer"
        )
        raise ConfigError(msg)
    room = min(measure(folder).context_length, config.trainer.max_tokens_per_microbatch)
    if facts.context_length < room:
        yield (
            f"{setting} has a context of {facts.context_length} tokens; longer sequences, up to {room}, are quarantined"
        )
    yield f"the teacher has {facts.parameters / 1e6:.2f} M parameters"
