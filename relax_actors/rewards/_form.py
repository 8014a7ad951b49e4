"""Rewards for the form of a completion: format, length, and no repetition."""

from __future__ import annotations

import json
import math
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from relax_actors.config.sections import NonNegativeInt, Positive, PositiveFloat
from relax_actors.errors import ConfigError, RowError
from relax_actors.messages import Prompt, Sample
from relax_actors.registry.dotted import import_extra
from relax_actors.rewards._text import final_part
from relax_actors.rewards.loading import requires

THINK_ANSWER = r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*"
_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)
_PLACES = 8


def format_match(completion: str, prompt: Prompt, *, pattern: str = THINK_ANSWER) -> float:
    """Return 1 if a regular expression matches the whole completion, else 0.

    By default a text in `<think>` tags and then one in `<answer>` tags, each once. An expression that backtracks
    without end is stopped with its actor by `reward.deadline`.
    """
    del prompt
    return float(_compiled(pattern).fullmatch(completion) is not None)


format_match.may_hang = True  # type: ignore[attr-defined]


@lru_cache(maxsize=_PLACES)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        msg = f"reward.options.format_match.pattern: {error}: {pattern!r:.80}"
        raise ConfigError(msg) from error


def length_limits(
    completion: str, prompt: Prompt, sample: Sample, *, least: NonNegativeInt = 0, most: Positive, slope: PositiveFloat
) -> float:
    """Return 0 for `least` to `most` sampled tokens, minus `slope` a token beyond.

    The value is at least -1.
    """
    del completion, prompt
    length = len(sample.tokens)
    return -min(1.0, slope * max(least - length, length - most, 0))


def repetition(completion: str, prompt: Prompt, *, n: Positive = 4) -> float:
    """Return minus the share of a completion's n-grams of words that occurred before, -1 to 0.

    The penalty of arXiv 2502.03373, appendix C.2, as one number for the completion.
    """
    del prompt
    words = completion.split()
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) - 1.0 if grams else 0.0


def package() -> Any:
    """The package jsonschema; raises ConfigError if it is not installed."""
    return import_extra("jsonschema", "schema", "reward 'json_schema'")


@requires(package)
def json_schema(completion: str, prompt: Prompt, *, file: Path | None = None) -> float:
    r"""Return 1 if the completion is JSON that fits a schema, else 0.

    The value is the last fenced block, otherwise the last `<answer>` tag or `\boxed{}`, otherwise the whole completion;
    NaN and infinity are no JSON. The schema is the row's field `schema`, or that in `file`. References to other
    documents are not followed.

    Raises:
        RowError: the schema is missing or invalid.
    """
    validator = _validator(_schema_of(prompt, file))
    fenced = _FENCED.findall(completion)
    text = fenced[-1] if fenced else final_part(completion)
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
        return float(validator.is_valid(value))
    except (ValueError, RecursionError, OverflowError):
        return 0.0
    except import_extra("referencing", "schema", "reward 'json_schema'").exceptions.Unresolvable as error:
        msg = f"reward json_schema: the schema refers to another document: {error}"
        raise RowError(msg) from error


def _refuse(constant: str) -> float:
    msg = f"{constant} is no JSON"
    raise ValueError(msg)


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


def _schema_of(prompt: Prompt, file: Path | None) -> str:
    """Return a schema as JSON."""
    if (own := prompt.metadata.get("schema")) is not None:
        return own if isinstance(own, str) else json.dumps(own, sort_keys=True)
    if file is None:
        msg = "reward json_schema finds no field schema in the row; add it, or set reward.options.json_schema.file"
        raise RowError(msg)
    return _read(file)


@lru_cache(maxsize=_PLACES)
def _read(file: Path) -> str:
    try:
        return json.dumps(json.loads(file.read_text()))
    except (OSError, ValueError) as error:
        msg = f"reward.options.json_schema.file: {file} cannot be read: {error}"
        raise ConfigError(msg) from error


@lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    jsonschema = package()
    try:
        body = json.loads(schema)
        kind = jsonschema.validators.validator_for(body, jsonschema.Draft202012Validator)
        kind.check_schema(body)
    except (ValueError, TypeError, jsonschema.SchemaError) as error:
        msg = f"reward json_schema: the row's schema is invalid: {getattr(error, 'message', error)!s:.200}"
        raise RowError(msg) from error
    # Without a registry, references would be fetched.
    return kind(body, registry=import_extra("referencing", "schema", "reward 'json_schema'").Registry())
