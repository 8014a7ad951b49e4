"""Write docs/refusals.md from the checks that refuse docs/refusal_cases.py: `python docs/make_refusals.py`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from refusal_cases import (
    AGENT,
    ALGORITHM,
    ECHO,
    ENGINES,
    FROM_DATA,
    LAYOUTS,
    RECORDED,
    REQUESTS,
    REWARD_MODELS,
    SAMPLES,
    TAUGHT,
    TEACHERS,
    Case,
    Layout,
    Request,
)

from relax_actors.algorithms.refusals import refusals
from relax_actors.checks import examine
from relax_actors.config import Config, load_config
from relax_actors.config.load import set_by
from relax_actors.config.training import MegatronSection
from relax_actors.engines.megatron import layout
from relax_actors.errors import ConfigError
from relax_actors.serving.anthropic import MessagesBody
from relax_actors.serving.ask import ChatBody, CompletionBody, GenerateBody
from relax_actors.serving.errors import ApiError
from relax_actors.serving.forms import IN_SESSION
from relax_actors.serving.responses import ResponsesBody

_PLACE = re.compile(r"^(\w+): (?=\1\.)")
"""Section of an error that names its setting in full."""
TARGET = Path(__file__).parent / "refusals.md"
BODIES = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/inference/v1/generate": GenerateBody,
}
Refused = Case | Layout | Request
SHOWN = {ECHO: "[environment]", AGENT[0]: "[agent]", AGENT[1]: "[gateway]", TAUGHT[1]: "[roles.teacher]"}
"""Sections in place of what a check needs to load them."""
SECTIONS: tuple[tuple[str, str, tuple[Refused, ...]], ...] = (
    ("Algorithms", "Combinations of settings that would train something else than they say.", ALGORITHM),
    ("Episodes, agents and staleness", "", SAMPLES),
    ("Engines and roles", "", ENGINES),
    ("Layouts of Megatron-Core", "Settings of [trainer.megatron] and [critic.megatron].", LAYOUTS),
    ("Teachers", "", TEACHERS),
    ("Reward models", "", REWARD_MODELS),
    ("Rows from the data", "", FROM_DATA),
    ("Recorded samples", "", RECORDED),
    ("Requests to the gateway", "The answer has status 400 and this text.", REQUESTS),
)


def message_of(case: Refused) -> str:
    """Return why a case is refused.

    Raises:
        ValueError: it is accepted, or refused for several reasons.
    """
    if isinstance(case, Layout):
        reasons = _refused_layout(case)
    elif isinstance(case, Request):
        reasons = _refused_request(case)
    else:
        reasons = _refused_settings(case)
    if len(reasons) != 1:
        msg = f"case {case.name!r} of docs/refusal_cases.py is refused for {len(reasons)} reasons, not one: {reasons}"
        raise ValueError(msg)
    return reasons[0]


def _refused_settings(case: Case) -> list[str]:
    settings = list(case.settings)
    try:
        config: Config = load_config(case.file, settings)
    except ConfigError as error:
        return [_PLACE.sub("", line.removeprefix(f"{case.file}: ")) for line in str(error).splitlines()]
    return list(refusals(config, set_by(case.file, settings))) or list(examine(config).errors)


def _refused_layout(case: Layout) -> list[str]:
    try:
        layout.check(layout.Layout.of(MegatronSection(**case.section)), case.model)
    except ConfigError as error:
        return [str(error)]
    return []


def _refused_request(case: Request) -> list[str]:
    try:
        BODIES[case.route].model_validate(case.fields).ask()
    except ApiError as error:
        return [str(error)]
    return []


def parts_of(message: str) -> tuple[str, str]:
    """Return the reason and the remedy of a message.

    Raises:
        ValueError: it has no remedy.
    """
    reason, semicolon, remedy = message.rpartition("; ")
    if not semicolon:
        msg = f"no remedy follows a semicolon: {message}"
        raise ValueError(msg)
    return reason, remedy


def rows(cases: Iterable[Refused]) -> list[str]:
    """Return the lines of a table."""
    lines = ["| refused | why | remedy |", "| --- | --- | --- |"]
    for case in cases:
        reason, remedy = parts_of(message_of(case))
        lines.append(f"| {_shown(case)} | {_plain(reason)} | {_plain(remedy[:1].upper() + remedy[1:])} |")
    return lines


def _shown(case: Refused) -> str:
    if isinstance(case, Case):
        return " ".join(f"`{SHOWN.get(setting, setting)}`" for setting in case.settings)
    fields = case.section if isinstance(case, Layout) else case.fields
    shown = ", ".join(f"{name} = {json.dumps(value)}" for name, value in fields.items())
    return f"`{shown}`" + (f" ({case.route})" if isinstance(case, Request) else "")


def _plain(text: str) -> str:
    for sign, written in {"<": "&lt;", "|": "\\|", "*": "\\*", "[": "\\["}.items():
        text = text.replace(sign, written)
    return text


def page() -> str:
    """Return the text of the page."""
    lines = [
        "# What is refused",
        "",
        "Generated by `python docs/make_refusals.py`, which runs the checks on the cases of `docs/refusal_cases.py`.",
        "`relax check` and `relax up` refuse such settings before anything starts. The first column has settings on",
        "top of an example; the others are the text of the error.",
        "",
    ]
    for title, intro, cases in SECTIONS:
        lines += [f"## {title}", "", *([_plain(intro), ""] if intro else []), *rows(cases), ""]
    lines += [f"{IN_SESSION[:1].upper()}{IN_SESSION[1:]}.", ""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    TARGET.write_text(page())
