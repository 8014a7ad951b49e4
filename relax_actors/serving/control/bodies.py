"""Bodies of the requests of operators."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from broker.subjects import NAME
from relax_actors.operations.engines import is_url, normal_url

WEEK = 7 * 86400.0


def _checked(url: str) -> str:
    if not is_url(url) or any(letter.isspace() for letter in url):
        msg = "not the address of an HTTP server, such as http://host:30000"
        raise ValueError(msg)
    return normal_url(url)


EngineUrl: TypeAlias = Annotated[str, Field(max_length=500), AfterValidator(_checked)]
"""Address of an inference server, in its normal form."""


class Strict(BaseModel):
    """Body in which unknown fields are refused: a misspelled field must not change a run."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class ScaleBody(Strict):
    """Body of `POST /v1/rollouts/scale`: `target` actors in all, or `delta` actors more."""

    target: int | None = Field(default=None, gt=0, lt=1000)
    delta: int | None = Field(default=None, gt=-1000, lt=1000)
    role: str = Field(default="rollout", max_length=64)
    node: str = Field(
        default="", max_length=200, description="Number or name of a node; by default that of `relax up`."
    )
    force: bool = Field(default=False, description="Actors that leave return their rows instead of finishing them.")
    dry_run: bool = Field(default=False, description="Answer with the plan, and change nothing.")
    timeout_secs: float = Field(default=0.0, ge=0, le=WEEK, description="Deadline of the operation; 0 for the default.")
    idempotency_key: str = Field(default="", max_length=200, description="The same key gives the same operation again.")

    @model_validator(mode="after")
    def _one_number(self) -> ScaleBody:
        if (self.target is None) == (self.delta is None):
            msg = "give either `target` or `delta`"
            raise ValueError(msg)
        return self


class EngineBody(Strict):
    """Body of `POST /v1/engines`: an inference server that the run does not start."""

    url: EngineUrl
    key: str = Field(
        default="", max_length=500, description="API key of the server; kept in a private file of the store."
    )
    timeout_secs: float = Field(default=0.0, ge=0, le=WEEK)
    idempotency_key: str = Field(default="", max_length=200)


class RemoveBody(Strict):
    """Body of `DELETE /v1/engines/{id}`."""

    force: bool = False
    timeout_secs: float = Field(default=0.0, ge=0, le=WEEK)
    idempotency_key: str = Field(default="", max_length=200)


class RoleBody(Strict):
    """Body of `POST /v1/roles`: a role that joins the run, as a table of the TOML file."""

    role: str = Field(pattern=NAME.pattern, max_length=64)
    settings: dict[str, Any] = Field(description="The table [roles.<name>]: `actor`, `replicas` and options.")
    timeout_secs: float = Field(default=0.0, ge=0, le=WEEK)
    idempotency_key: str = Field(default="", max_length=200)


class RemoveRoleBody(Strict):
    """Body of `DELETE /v1/roles/{role}`."""

    force: bool = Field(default=False, description="Actors return their rows instead of finishing them.")
    timeout_secs: float = Field(default=0.0, ge=0, le=WEEK)
    idempotency_key: str = Field(default="", max_length=200)


class ReplaceBody(Strict):
    """Body of `POST /v1/roles/{role}/replace`: actors restart one by one with the code on disk."""

    timeout_secs: float = Field(default=0.0, ge=0, le=WEEK)
    idempotency_key: str = Field(default="", max_length=200)


class MoveBody(Strict):
    """Body of `POST /v1/roles/{role}/move`: a role with state moves to another node."""

    node: str = Field(min_length=1, max_length=200, description="Number or name of the node; `relax up` has number 0.")
    timeout_secs: float = Field(default=0.0, ge=0, le=WEEK)
    idempotency_key: str = Field(default="", max_length=200)


class CancelBody(Strict):
    """Body of `POST /v1/operations/{id}/cancel`."""

    reason: str = Field(default="cancelled by a client", max_length=500)


class ScaleOutBody(Strict):
    """Body of `POST /rollout/scale_out`, as in Relax: total of own engines, or external urls."""

    model_name: Literal["default"] = "default"
    num_replicas: int = Field(default=0, ge=0, lt=1000)
    engine_urls: list[EngineUrl] = Field(default_factory=list, max_length=64)
    timeout_secs: float | None = Field(default=None, gt=0, le=WEEK)

    @model_validator(mode="after")
    def _something(self) -> ScaleOutBody:
        if self.num_replicas == 0 and not self.engine_urls:
            msg = "give num_replicas, the total to have, or engine_urls"
            raise ValueError(msg)
        return self


class ScaleInBody(Strict):
    """Body of `POST /rollout/scale_in`, as in Relax: own engines that stay, or urls that leave."""

    model_name: Literal["default"] = "default"
    num_replicas: int = Field(default=0, ge=0, lt=1000)
    engine_urls: list[EngineUrl] = Field(default_factory=list, max_length=64)
    force: bool = False
    dry_run: bool = False
    timeout_secs: float | None = Field(default=None, gt=0, le=WEEK)

    @model_validator(mode="after")
    def _something(self) -> ScaleInBody:
        if self.num_replicas == 0 and not self.engine_urls:
            msg = "give num_replicas, the number to keep, or engine_urls"
            raise ValueError(msg)
        return self


class CancelOutBody(Strict):
    """Body of `POST /rollout/scale_out_cancel`: cancel all that can be cancelled."""

    model_name: Literal["default"] = "default"
    status_filter: Literal["PENDING", "CREATING", "CONNECTING", ""] = ""
    dry_run: bool = False
