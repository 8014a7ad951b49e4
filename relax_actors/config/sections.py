"""What the sections of a configuration have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """A table of the TOML file."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class PoolSection(Section):
    """What every role has."""

    replicas: Positive = 1
    """Actors of the role, each a process."""
    deadline: PositiveFloat = 60.0
    """Seconds without progress after which an actor counts as hung, is killed and replaced."""
    memory_limit_mib: Positive | None = None
    """Memory that an actor's process may use; a row that takes more fails. Not limited if not set."""
