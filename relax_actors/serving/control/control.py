"""Operations on a live run over HTTP; all state is in the run's table and bucket."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_actors.errors import ConfigError
from relax_actors.messages.operations import OperationPlan, OperationRequest
from relax_actors.operations import ConflictError, History, Operation, OperationLog, State
from relax_actors.operations.engines import discard_key, save_key
from relax_actors.operations.plan import NodeView, check_role, nodes_of, plan_scale, wanted_by
from relax_actors.serving.control.bodies import (
    EngineBody,
    MoveBody,
    RemoveBody,
    RemoveRoleBody,
    ReplaceBody,
    RoleBody,
    ScaleBody,
)
from relax_actors.serving.errors import ApiError

Leases = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What does not change while a run is up.

    Attributes:
        roles: roles of the run.
        fixed: those of them whose number of actors cannot change, each with the reason.
        backend: `rollout.backend`.
        store: folder of the store, with the keys of external engines.
        author: name under which operations are requested, e.g. "gateway.0".
    """

    roles: Collection[str]
    fixed: Mapping[str, str]
    backend: str
    store: Path
    author: str


class Control:
    """Requests, shows and cancels operations, in the event loop of the broker's connection.

    `leases` returns the leases of nodes and actors.
    """

    def __init__(self, log: OperationLog, leases: Callable[[], Awaitable[Leases]], facts: RunFacts) -> None:
        self._log, self._leases, self._facts = log, leases, facts

    async def scale(self, body: ScaleBody) -> Operation | OperationPlan:
        """Request another number of actors; with `dry_run` only return what would change.

        Raises:
            ApiError: the role or node does not exist, the number is out of bounds, or an operation is in the way.
        """
        request = OperationRequest(
            "scale",
            body.role,
            body.target,
            body.delta,
            body.node,
            force=body.force,
            seconds=body.timeout_secs,
            key=body.idempotency_key,
            author=self._facts.author,
        )
        try:
            check_role(body.role, self._facts.roles, self._facts.fixed)
            history = await self._log.read_async()
            if (known := history.with_key(request.key)) is None:
                plan = plan_scale(request, nodes_of(await self._leases()), wanted_by(history, request.role))
        except ConfigError as error:
            raise ApiError(400, str(error), "invalid_request") from error
        return plan if body.dry_run and known is None else await self._request(request)

    async def add_engine(self, body: EngineBody) -> Operation:
        """Request that an external server joins the run; raises as `check_engine`."""
        if (known := await self.check_engine(body)) is not None:
            return known
        request = OperationRequest(
            "add_engine",
            url=body.url,
            key_file=save_key(self._facts.store, body.key),
            seconds=body.timeout_secs,
            key=body.idempotency_key,
            author=self._facts.author,
        )
        try:
            operation = await self._request(request)
        except ApiError:
            discard_key(self._facts.store, request.key_file)
            raise
        if operation.request.key_file != request.key_file:  # requested by another client meanwhile
            discard_key(self._facts.store, request.key_file)
        return operation

    async def check_engine(self, body: EngineBody) -> Operation | None:
        """Check that an external server can join; return the operation of its idempotency key.

        Raises:
            ApiError: the run's backend uses none, the server is in the run already, or an operation is in the way.
        """
        history = await self._log.read_async()
        if (known := history.with_key(body.idempotency_key)) is not None:
            if known.request.url != body.url:
                msg = f"idempotency key {body.idempotency_key!r} belongs to operation {known.id}, which has another url"
                raise ApiError(409, f"{msg}; use a new key for a new request", "conflict")
            return known
        if self._facts.backend != "sglang":
            msg = f'rollout.backend = "{self._facts.backend}" uses no external engines; they need "sglang"'
            raise ApiError(400, msg, "invalid_request")
        if same := [o.id for o in history.engines() if o.request.url == body.url]:
            raise ApiError(409, f"{body.url} is engine {same[0]} of this run already; remove it first", "conflict")
        if busy := [o.id for o in history.running if o.request.url == body.url]:
            msg = f"operation {busy[0]} adds {body.url} at present; wait for its end"
            raise ApiError(409, msg, "conflict")
        return None

    async def remove_engine(self, engine: int, body: RemoveBody) -> Operation:
        """Request that an external engine leaves; raises ApiError for an unknown or the last one."""
        history = await self._log.read_async()
        if (known := history.with_key(body.idempotency_key)) is None:
            engines = {o.id: o for o in history.engines()}
            if engine not in engines:
                ids = ", ".join(map(str, engines)) or "none"
                raise ApiError(404, f"the run has no engine {engine}; its engines are {ids}", "not_found")
            await self._refuse_last(engines[engine])
        elif known.request.engine != engine:
            msg = f"idempotency key {body.idempotency_key!r} belongs to operation {known.id}, of another engine"
            raise ApiError(409, f"{msg}; use a new key for a new request", "conflict")
        else:
            return known
        return await self._request(
            OperationRequest(
                "remove_engine",
                engine=engine,
                force=body.force,
                seconds=body.timeout_secs,
                key=body.idempotency_key,
                author=self._facts.author,
            )
        )

    async def change_role(
        self, kind: str, role: str, body: RoleBody | RemoveRoleBody | ReplaceBody | MoveBody, settings: str = ""
    ) -> Operation:
        """Request that a role is added, removed or moved, or gets the code that is on disk.

        Args:
            kind: "add_role", "remove_role", "replace_role" or "move_role".
            role: name of the role.
            body: of the request.
            settings: table of the role as JSON, to add it.

        Raises:
            ApiError: the request makes no sense by itself, or an operation is in the way. What the run's supervisor
                refuses ends as a failed operation.
        """
        request = OperationRequest(
            kind,
            role,
            node=body.node if isinstance(body, MoveBody) else "",
            force=isinstance(body, RemoveRoleBody) and body.force,
            seconds=body.timeout_secs,
            key=body.idempotency_key,
            author=self._facts.author,
            settings=settings,
        )
        return await self._request(request)

    async def roles(self) -> dict[str, Any]:
        """Return the roles that have actors, as JSON."""
        leases = await self._leases()
        by_role: dict[str, list[dict[str, Any]]] = {}
        for _, node in sorted(nodes_of(leases).items()):
            for name in node.children:
                lease = leases.get(name, {})
                shown = {**_shown_actor(node, name, lease, None), "code": lease.get("code", "")}
                shown["handled"] = lease.get("handled", 0)
                by_role.setdefault(name.rpartition(".")[0], []).append(shown)
        return {"roles": [{"role": role, "actors": actors} for role, actors in by_role.items()], "total": len(by_role)}

    async def _refuse_last(self, engine: Operation) -> None:
        nodes = nodes_of(await self._leases()).values()
        rollouts = {name for node in nodes for name in node.children if name.startswith("rollout.")}
        if engine.plan is not None and rollouts and not rollouts - set(engine.plan.actors):
            msg = f"engine {engine.id} is the last rollout of the run; add another before you remove it"
            raise ApiError(400, msg, "last_engine")

    async def _request(self, request: OperationRequest) -> Operation:
        try:
            return await self._log.request_async(request)
        except ConflictError as error:
            raise ApiError(409, str(error), "conflict") from error
        except ConfigError as error:
            raise ApiError(400, str(error), "invalid_request") from error

    async def history(self) -> History:
        """Return all operations of the run."""
        return await self._log.read_async()

    async def operation(self, number: int) -> Operation:
        """Return one operation; raises ApiError if there is none of this number."""
        known = (await self._log.read_async()).operations.get(number)
        if known is None:
            msg = f"there is no operation {number}; GET /v1/operations lists the operations"
            raise ApiError(404, msg, "not_found")
        return known

    async def cancel(self, number: int, reason: str) -> Operation:
        """Cancel an operation that is not yet HEALTH_CHECKING; raises ApiError for others."""
        await self.operation(number)
        try:
            return await self._log.cancel_async(number, reason)
        except ConflictError as error:
            raise ApiError(409, str(error), "conflict") from error

    async def rollouts(self) -> dict[str, Any]:
        """Return nodes, rollout actors, external engines and running operations as JSON."""
        leases, history = await self._leases(), await self._log.read_async()
        urls = {name: o for o in history.engines() if o.plan is not None for name in o.plan.actors}
        nodes = nodes_of(leases)
        actors = [
            _shown_actor(node, name, leases.get(name), urls.get(name))
            for _, node in sorted(nodes.items())
            for name in sorted(node.children, key=lambda name: int(name.rpartition(".")[2] or 0))
            if name.rpartition(".")[0] == "rollout"
        ]
        return {
            "rollouts": actors,
            "total": len(actors),
            "engines": [_shown_engine(o) for o in history.engines()],
            "operations": [o.shown() for o in history.running],
            "revision": history.last,
        }


def _shown_actor(
    node: NodeView, name: str, lease: Mapping[str, Any] | None, engine: Operation | None
) -> dict[str, Any]:
    state, held = node.children[name], lease or {}
    return {
        "actor": name,
        "node": {"number": node.number, "name": node.name},
        "phase": str(state.get("phase", ""))[:40],
        "restarts": state.get("restarts", 0),
        "weights": held.get("weights", -1),
        "rows": len(held.get("rows", ())),
        "engine": None if engine is None else engine.id,
        "url": "" if engine is None else engine.request.url,
    }


def _shown_engine(operation: Operation) -> dict[str, Any]:
    return {
        "id": operation.id,
        "url": operation.request.url,
        "actor": operation.plan.actors[0] if operation.plan is not None else "",
        "state": operation.state.value,
        "is_active": operation.state is State.ACTIVE,
    }
