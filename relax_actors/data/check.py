"""Checks of data: its first rows fit the model, are trainable, and can be tokenized."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Collection, Iterator

from relax_actors.config import Config
from relax_actors.config.data import DataSection
from relax_actors.config.evaluation import EvalSet
from relax_actors.data.checked_run import CheckedRun
from relax_actors.data.escapes import escape
from relax_actors.data.field_names import FieldNames
from relax_actors.data.mixture import Mixture, first_items, shares_of
from relax_actors.data.oversize import CUT
from relax_actors.data.prompt_maker import PromptMaker, admission_of
from relax_actors.data.source import DataSource
from relax_actors.data.task import Task
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import ConfigError, RowError, SlowRowError
from relax_actors.media.families.spec import FamilySpec
from relax_actors.media.timestamps import missing_characters
from relax_actors.messages import Prompt
from relax_actors.messages.media import IMAGE, VIDEO
from relax_actors.registry.catalog import REWARDS

MAX_SLOW_ROWS = 2
"""Rows whose prompts may take too long before the check gives up."""
SAMPLED_ROWS = 200
"""Rows of a data source that are read."""
USUAL = string.digits + string.ascii_letters + string.punctuation + " \n"
"""Characters of an ordinary error text."""


def check_data(run: CheckedRun, data: DataSection, where: str) -> Iterator[str]:
    """Check that a data source opens and that prompts fit the model and a micro-batch.

    The run's `first_rows` get the first row of the section `where` that can be used.
    """
    config, model = run.config, run.model
    source = run.source(data)
    if model is None:
        return
    tokenizer, facts = model.tokenizer, model.facts
    whole = min(facts.context_length, config.trainer.max_tokens_per_microbatch)
    if config.rollout.max_tokens >= whole:
        return  # `check_lengths` reports it once, for all data
    admission = admission_of(config, folder=model.folder)
    maker = PromptMaker(data, tokenizer, whole, config.rollout.max_tokens, admission)
    sampled = min(SAMPLED_ROWS, len(source))
    good, prompts, bad = _sample(source, maker, sampled, where)
    longest = max((len(prompt.tokens) for prompt in prompts), default=0)
    if prompts:
        run.first_rows[where] = prompts[0]
    if admission is not None:
        _check_written(tokenizer, admission.family.spec, good, where)
    if len(bad) == sampled:
        msg = f"{where}: none of the first {sampled} rows can be used; the first: {bad[0]}"
        raise ConfigError(msg)
    if bad:
        yield f"{where}: {len(bad)} of the first {sampled} rows will be quarantined; the first: {bad[0]}"
    if config.trainer.warm_start is not None and data is config.data:
        yield from _note_answers(tokenizer, good, sampled)
    yield from note_source(config, data, source, where)
    cut = sum(CUT in prompt.metadata for prompt in prompts)
    cut_off = f"; {cut} of them are cut off" if cut else ""
    yield f"{where}: {len(source)} rows, prompts of up to {longest} tokens among the first {sampled}{cut_off}"


def note_source(config: Config, data: DataSection, source: DataSource, where: str) -> Iterator[str]:
    """Note what a run takes from a source, and names of fields that look misspelled."""
    for own in (data, *data.mixture.values()):
        yield from FieldNames(own.fields).misspelled()
    if isinstance(source, Mixture) and data is config.data:
        size = config.trainer.prompts_per_step
        rows = config.run.steps * size if config.run.rows is None else config.run.rows
        yield f"{where}: shares of {rows} rows: {', '.join(shares_of(data, source, rows, size))}"


def _check_written(tokenizer: Tokenizer, spec: FamilySpec, tasks: Collection[Task], where: str) -> None:
    """Raise ConfigError if the tokenizer cannot write the times of a row's video, or the text around its image."""
    times = spec.timestamp.format(seconds=0.1)
    for kind, text, reads in (
        (VIDEO, spec.timestamp, f"a video, and the model reads its times as text such as {times!r}"),
        (IMAGE, spec.around, f"an image, and the model reads {spec.around!r} around it"),
    ):
        shown = next((task for task in tasks if any(medium.kind == kind for medium in task.media)), None)
        if text and shown is not None and (missing := missing_characters(tokenizer.inner, text)):
            msg = (
                f"{where}: {shown.origin or 'a task'} has {reads}, but the tokenizer has no token for the characters "
                f"{missing!r}; add them to model.tokenizer.alphabet, or use the model's own tokenizer"
            )
            raise ConfigError(msg)


def _sample(
    source: DataSource, maker: PromptMaker, count: int, where: str
) -> tuple[list[Task], list[Prompt], list[str]]:
    """Make the prompts of the first rows.

    Returns:
        The good tasks, their prompts, and the errors.

    Raises:
        ConfigError: prompts take too long, so that making further ones would take hours.
    """
    good: list[Task] = []
    prompts: list[Prompt] = []
    slow, bad = 0, []
    for i, item in enumerate(first_items(source, count)):
        try:
            task = source[item]
            prompts.append(maker.make(task, seed=0, min_version=0))
            good.append(task)
        except RowError as error:
            bad.append(str(error))
            slow += isinstance(error, SlowRowError)
            if slow == MAX_SLOW_ROWS:
                msg = f"{where}: {slow} of the first {i + 1} rows take too long; the last: {error}"
                raise ConfigError(msg) from error
    return good, prompts, bad


def _note_answers(tokenizer: Tokenizer, tasks: Collection[Task], sampled: int) -> Iterator[str]:
    """Note tasks without an answer that a warm start can train."""
    if problems := [problem for task in tasks if (problem := _answer_problem(tokenizer, task))]:
        yield f"trainer.warm_start skips {len(problems)} of the first {sampled} rows; the first: {problems[0]}"


def _answer_problem(tokenizer: Tokenizer, task: Task) -> str:
    """Reason why an answer cannot be trained on; empty if it can."""
    try:
        tokens = tokenizer.encode(task.answer, special=False)
    except RowError as error:
        return f"{task.origin}: answer: {error}"
    return "" if len(tokens) else f"{task.origin}: it has no answer"


def check_characters(config: Config, tokenizer: Tokenizer) -> Iterator[str]:
    """Note ordinary characters that the tokenizer lacks, if the model reads texts of others."""
    if config.environment is None and config.gateway is None:
        return
    escapes = tokenizer.escapes
    if not (lacking := escapes.lacking(USUAL)):
        return
    ways = Counter(_way(character, escapes[ord(character)]) for character in lacking)
    done = ", ".join(f"{count} are {way}" for way, count in ways.items())
    yield (
        f"the tokenizer cannot encode {len(lacking)} of {len(USUAL)} usual characters ({_shown(lacking)}): where an "
        f"observation, an error text or an agent's message has one, {done}. Add them to model.tokenizer.alphabet, or "
        "use a tokenizer that encodes every byte"
    )


def _way(character: str, spelling: str) -> str:
    if not spelling:
        return "left out"
    return "escaped, as in \\x41" if spelling == escape(character) else f"replaced by {spelling!r}"


def _shown(characters: str) -> str:
    return repr(characters if len(characters) <= 12 else characters[:12] + "...")  # noqa: PLR2004


def check_set(run: CheckedRun, held_out: EvalSet, where: str) -> Iterator[str]:
    """Check a set of held-out rows.

    Raises:
        ConfigError: its reward compares with the answer, and rows have none; or no row has its category.
    """
    source = run.source(held_out.source)
    tasks = []
    for i in first_items(source, min(held_out.rows, SAMPLED_ROWS)):
        try:
            tasks.append(source[i])
        except RowError:  # the check of the data says why
            continue
    names = [held_out.reward] if isinstance(held_out.reward, str) else list(held_out.reward)
    if not run.config.from_data and (comparing := next(filter(_compares, names), None)) is not None:
        _check_answers(tasks, comparing, f"{where}.data")
    if held_out.category is not None:
        lacking = [task for task in tasks if held_out.category not in task.metadata]
        if tasks and len(lacking) == len(tasks):
            known = ", ".join(sorted(tasks[0].metadata)) or "none"
            msg = f"{where}.data: no row has the field {held_out.category!r}, which `category` names; fields: {known}"
            raise ConfigError(msg)
        if lacking:
            yield f"{where}.data: {len(lacking)} of the first {len(tasks)} rows have no {held_out.category!r}"
    if held_out.rows > len(source):
        count = len(source)
        yield f"{where}.rows = {held_out.rows}, but {where}.data has {count} rows: {count} are evaluated"


def _compares(name: str) -> bool:
    """Whether a reward function is built in and compares with the answer of the row."""
    return name in REWARDS.built_in and getattr(REWARDS.load(name, ""), "compares", False)


def _check_answers(tasks: list[Task], reward: str, where: str) -> None:
    lacking = [task for task in tasks if not task.answer.strip()]
    if lacking:
        msg = (
            f"{where}: {len(lacking)} of the first {len(tasks)} rows have no answer, which reward {reward!r} compares "
            f"with; the first: {lacking[0].origin or 'a task'}. Name the field with the answer in {where}.fields, "
            "remove the rows, or choose another reward"
        )
        raise ConfigError(msg)
