"""Routes of operators under `/v1`, and the page that describes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from relax_actors.operations import Operation, OperationPlan, State
from relax_actors.serving.ask import validated
from relax_actors.serving.control.bodies import (
    CancelBody,
    EngineBody,
    MoveBody,
    RemoveBody,
    RemoveRoleBody,
    ReplaceBody,
    RoleBody,
    ScaleBody,
)
from relax_actors.serving.control.control import Control
from relax_actors.serving.errors import ApiError
from relax_actors.serving.requests import read_object

Handler: TypeAlias = Callable[[Request, str], Coroutine[Any, Any, Response]]
Body = TypeVar("Body", bound=BaseModel)
MAX_BODY = 64 << 10
MAX_DIGITS = 15


class ControlRoutes:
    """The routes: method and path of each, with its handler."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def handlers(self) -> list[tuple[str, str, Handler]]:
        """Return method, path and handler of each route."""
        return [
            ("POST", "/v1/rollouts/scale", self.scale),
            ("GET", "/v1/rollouts", self.rollouts),
            ("GET", "/v1/operations", self.operations),
            ("GET", "/v1/operations/{number}", self.operation),
            ("POST", "/v1/operations/{number}/cancel", self.cancel),
            ("POST", "/v1/engines", self.add_engine),
            ("DELETE", "/v1/engines/{number}", self.remove_engine),
            ("GET", "/v1/roles", self.roles),
            ("POST", "/v1/roles", self.add_role),
            ("DELETE", "/v1/roles/{role}", self.remove_role),
            ("POST", "/v1/roles/{role}/replace", self.replace_role),
            ("POST", "/v1/roles/{role}/move", self.move_role),
        ]

    async def roles(self, request: Request, _: str) -> Response:
        """List the roles, and each actor's node, phase, handled rows and code version."""
        del request
        return JSONResponse(await self._control.roles())

    async def add_role(self, request: Request, _: str) -> Response:
        """Add a role to the run; the run's supervisor checks it before anything starts."""
        body = await body_of(request, RoleBody)
        return accepted(await self._control.change_role("add_role", body.role, body, json.dumps(body.settings)))

    async def remove_role(self, request: Request, _: str) -> Response:
        """Remove a role of [roles] whose column no other role reads."""
        body = await body_of(request, RemoveRoleBody)
        return accepted(await self._control.change_role("remove_role", role_in(request), body))

    async def replace_role(self, request: Request, _: str) -> Response:
        """Restart the actors of a role one by one with the code on disk; roll back if it fails."""
        body = await body_of(request, ReplaceBody)
        return accepted(await self._control.change_role("replace_role", role_in(request), body))

    async def move_role(self, request: Request, _: str) -> Response:
        """Move a role with state to another node; it returns if it does not start there."""
        body = await body_of(request, MoveBody)
        return accepted(await self._control.change_role("move_role", role_in(request), body))

    async def scale(self, request: Request, _: str) -> Response:
        """Change the number of actors of a role: 202 with the operation, or 200 for a dry run."""
        result = await self._control.scale(await body_of(request, ScaleBody))
        if isinstance(result, OperationPlan):
            shown = ("node", "node_name", "before", "after", "actors")
            return JSONResponse({"dry_run": True, **{name: getattr(result, name) for name in shown}})
        return accepted(result)

    async def rollouts(self, request: Request, _: str) -> Response:
        """List rollout actors, their states and weights, external engines, and operations."""
        del request
        return JSONResponse(await self._control.rollouts())

    async def operations(self, request: Request, _: str) -> Response:
        """List the operations, newest last; `?state=` selects those in one state."""
        state = request.query_params.get("state", "").upper()
        if state and state not in State.__members__:
            msg = f"state {state[:40]!r} does not exist; states are {', '.join(State.__members__)}"
            raise ApiError(400, msg, "invalid_request")
        shown = [o for o in (await self._control.history()).operations.values() if state in ("", o.state)]
        return JSONResponse({"operations": [o.shown() for o in shown], "total": len(shown)})

    async def operation(self, request: Request, _: str) -> Response:
        """Show one operation with the times of its states."""
        return JSONResponse((await self._control.operation(number_of(request))).shown())

    async def cancel(self, request: Request, _: str) -> Response:
        """Cancel an operation that is PENDING, CREATING or CONNECTING."""
        body = await body_of(request, CancelBody)
        return JSONResponse((await self._control.cancel(number_of(request), body.reason)).shown())

    async def add_engine(self, request: Request, _: str) -> Response:
        """Let an external SGLang server join; the id of its operation is the id of the engine."""
        return accepted(await self._control.add_engine(await body_of(request, EngineBody)))

    async def remove_engine(self, request: Request, _: str) -> Response:
        """Let an external engine finish its rows, then leave."""
        return accepted(await self._control.remove_engine(number_of(request), await body_of(request, RemoveBody)))


async def body_of(request: Request, model: type[Body]) -> Body:
    """Return a checked body with the header `Idempotency-Key` as a field; raises ApiError."""
    body = await read_object(request, MAX_BODY)
    if (key := request.headers.get("idempotency-key")) and "idempotency_key" in model.model_fields:
        body.setdefault("idempotency_key", key)
    return validated(model, body)


def number_of(request: Request) -> int:
    """Return the number in the path of a request; raises ApiError if it is none."""
    text = str(request.path_params["number"])
    if not text.isascii() or not text.isdigit() or len(text) > MAX_DIGITS:
        raise ApiError(404, f"{text[:40]!r} is no id; ids are numbers, see GET /v1/operations", "not_found")
    return int(text)


def role_in(request: Request) -> str:
    """Return the role in the path of a request."""
    return str(request.path_params["role"])[:200]


def accepted(operation: Operation) -> Response:
    """Return the answer to a request that became an operation: 202, or 200 if it has ended."""
    return JSONResponse(
        operation.shown(),
        200 if operation.is_over else 202,
        {"Location": f"/v1/operations/{operation.id}"},
    )
