"""Types that the sections of a configuration share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from relax_actors.errors import ConfigError
from relax_actors.registry.registry import Registry

Positive = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, slots=True, eq=False)
class Named:
    """Annotation of a string that names an entry of a registry; refuses unknown names, and imports no user's module."""

    registry: Registry[Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Validate as a string, then look the name up."""
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, name: str) -> str:
        try:
            return self.registry.check(name)
        except ConfigError as error:
            raise ValueError(str(error)) from error


class MissingKeyError(ValueError):
    """A section lacks a key, `key` from the section on, that it needs where other keys are as they are."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key} is missing")
        self.key = key


class Section(BaseModel):
    """A table of the TOML file; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class PoolSection(Section):
    """Keys that every role has."""

    replicas: Positive = 1
    """Number of actors, each a process."""
    deadline: PositiveFloat = 60.0
    """Seconds without progress after which an actor counts as hung, is killed and replaced."""
    memory_limit_mib: Positive | None = None
    """Memory limit of an actor's process; a row that exceeds it fails. Unlimited if not set."""
    secrets: tuple[str, ...] | None = None
    """Names of environment variables with secrets that this role's actors get, e.g. `["OPENAI_API_KEY"]`. Other
    variables named like a secret (`*_TOKEN`, `*_KEY`, `*_PASSWORD` and the like), or with a password in a URL, are
    kept from them."""
