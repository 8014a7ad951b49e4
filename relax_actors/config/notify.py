"""The section [notify]: messages about a run to people."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from relax_actors.config.sections import PositiveFloat, Section

Rule = Literal["started", "finished", "gave_up", "findings"]
_VARIABLE = re.compile(r"\$[A-Za-z_][A-Za-z0-9_]*")
_WEB = re.compile(r"https?://\S+")


class NotifySection(Section):
    """[notify]: messages about the run to a webhook, a command or a service. A run does not wait for them."""

    on: tuple[Rule, ...] = ("finished", "gave_up", "findings")
    """What to report: the run `started` or resumed, is `finished`, supervision `gave_up` or `relax up` was killed, or
    there are new problems among the `findings` of `relax doctor`."""
    webhook: str | None = None
    """URL that gets each message by POST as JSON; `$NAME` takes the URL from an environment variable, for URLs that
    hold a secret."""
    command: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Program and arguments that are run for each message, without a shell; the message is JSON on its standard
    input."""
    apprise: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """URLs of services as Apprise names them, or `$NAME`; needs the extra `apprise`."""
    every: PositiveFloat = 60.0
    """Least seconds between two messages of one rule, and between two looks for findings."""

    @field_validator("webhook")
    @classmethod
    def _webhook(cls, value: str | None) -> str | None:
        if value is not None and not _WEB.fullmatch(value) and not _VARIABLE.fullmatch(value):
            msg = "write https://..., or $NAME for an environment variable that holds the URL"
            raise ValueError(msg)
        return value

    @model_validator(mode="after")
    def _somewhere(self) -> NotifySection:
        if not (self.webhook or self.command or self.apprise):
            msg = "messages go nowhere: set webhook, command or apprise, or leave [notify] out"
            raise ValueError(msg)
        return self
