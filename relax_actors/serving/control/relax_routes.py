"""Routes below `/rollout` with the paths, fields and states of Relax (redai-studio/Relax).

A request for several external engines is several operations; its id joins their numbers with commas.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from relax_actors.operations import Operation, OperationPlan, State
from relax_actors.operations.states import CANCELLABLE, IN
from relax_actors.serving.control.bodies import (
    CancelOutBody,
    EngineBody,
    RemoveBody,
    ScaleBody,
    ScaleInBody,
    ScaleOutBody,
)
from relax_actors.serving.control.control import Control
from relax_actors.serving.control.routes import MAX_DIGITS, Handler, body_of
from relax_actors.serving.errors import ApiError

_ORDER = [*State]


class RelaxRoutes:
    """The routes: method and path of each, with its handler."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def handlers(self) -> list[tuple[str, str, Handler]]:
        """Return method, path and handler of each route."""
        return [
            ("POST", "/rollout/scale_out", self.scale_out),
            ("GET", "/rollout/scale_out", self.list_out),
            ("GET", "/rollout/scale_out/{numbers}", self.show),
            ("POST", "/rollout/scale_out/{numbers}/cancel", self.cancel),
            ("POST", "/rollout/scale_out_cancel", self.cancel_all),
            ("POST", "/rollout/scale_in", self.scale_in),
            ("GET", "/rollout/scale_in", self.list_in),
            ("GET", "/rollout/scale_in/{numbers}", self.show),
            ("GET", "/rollout/engines", self.engines),
        ]

    async def scale_out(self, request: Request, _: str) -> Response:
        """Scale to `num_replicas` own engines in total, or let the servers `engine_urls` join."""
        body = await body_of(request, ScaleOutBody)
        seconds = body.timeout_secs or 0.0
        if body.num_replicas:
            have = await self._have(body.num_replicas, out=True)
            if have == body.num_replicas:
                return JSONResponse(_noop(have))
            return self._begun(
                [await self._control.scale(ScaleBody(target=body.num_replicas, delta=None, timeout_secs=seconds))]
            )
        known = {o.request.url for o in (await self._control.history()).engines()}
        urls = [url for url in dict.fromkeys(body.engine_urls) if url not in known]
        if not urls:
            return JSONResponse(_noop(len(known)))
        bodies = [EngineBody(url=url, key="", timeout_secs=seconds, idempotency_key="") for url in urls]
        for engine in bodies:  # all of them before the first request, so that a refusal leaves nothing behind
            await self._control.check_engine(engine)
        return self._begun([await self._control.add_engine(engine) for engine in bodies])

    async def scale_in(self, request: Request, _: str) -> Response:
        """Keep `num_replicas` engines of the run's own, or let the servers `engine_urls` leave."""
        body = await body_of(request, ScaleInBody)
        seconds = body.timeout_secs or 0.0
        if body.num_replicas:
            have = await self._have(body.num_replicas, out=False)
            if have == body.num_replicas:
                return JSONResponse(_noop(have))
            wanted = ScaleBody(
                target=body.num_replicas, delta=None, force=body.force, dry_run=body.dry_run, timeout_secs=seconds
            )
            return self._begun([await self._control.scale(wanted)])
        engines = {o.request.url: o for o in (await self._control.history()).engines()}
        if unknown := [url for url in body.engine_urls if url not in engines]:
            raise ApiError(404, f"{unknown[0][:200]} is no engine of this run; see GET /rollout/engines", "not_found")
        leaving = [engines[url] for url in dict.fromkeys(body.engine_urls)]
        if body.dry_run:
            return JSONResponse({"status": "DRY_RUN", "selected_engines": [str(o.id) for o in leaving]})
        remove = RemoveBody(force=body.force, timeout_secs=seconds, idempotency_key="")
        return self._begun([await self._control.remove_engine(o.id, remove) for o in leaving])

    async def _have(self, wanted: int, *, out: bool) -> int:
        """Return the run's own engines on node 0; raises ApiError if the direction is wrong."""
        plan = await self._control.scale(ScaleBody(target=wanted, delta=None, dry_run=True))
        have = plan.before if isinstance(plan, OperationPlan) else wanted
        if (wanted < have) if out else (wanted > have):
            other = "scale_in" if out else "scale_out"
            msg = f"num_replicas = {wanted}, but the run has {have} engines; use POST /rollout/{other}"
            raise ApiError(400, msg, "invalid_request")
        return have

    def _begun(self, begun: Sequence[Operation | OperationPlan]) -> Response:
        plans = [plan for plan in begun if isinstance(plan, OperationPlan)]
        if plans:
            return JSONResponse({"status": "DRY_RUN", "selected_engines": plans[0].actors})
        operations = [operation for operation in begun if isinstance(operation, Operation)]
        ids = ",".join(str(operation.id) for operation in operations)
        kind = "scale_in" if operations[0].request.kind == "remove_engine" else "scale"
        message = f"{kind} is operation {ids}"
        return JSONResponse({"request_id": ids, "status": _status(operations), "message": message})

    async def list_out(self, request: Request, _: str) -> Response:
        """List the operations that add engines; `?status=` selects."""
        return await self._list(request, removes=False)

    async def list_in(self, request: Request, _: str) -> Response:
        """List the operations that remove engines; `?status=` selects."""
        return await self._list(request, removes=True)

    async def _list(self, request: Request, *, removes: bool) -> Response:
        status = request.query_params.get("status", "")
        history = (await self._control.history()).operations.values()
        shown = [_shown([o]) for o in history if o.request.role == "rollout" and _removes(o) == removes]
        entries = [entry for entry in shown if status in ("", entry["status"])]
        return JSONResponse({"requests": entries, "total_count": len(entries)})

    async def show(self, request: Request, _: str) -> Response:
        """Show a request."""
        return JSONResponse(_shown([await self._control.operation(n) for n in _numbers(request)]))

    async def cancel(self, request: Request, _: str) -> Response:
        """Cancel a request that has not gone too far."""
        cancelled = [await self._control.cancel(n, "cancelled by a client") for n in _numbers(request)]
        return JSONResponse(_shown(cancelled))

    async def cancel_all(self, request: Request, _: str) -> Response:
        """Cancel all requests that can be cancelled."""
        body = await body_of(request, CancelOutBody)
        running = [o for o in (await self._control.history()).running if not _removes(o)]
        fit = [o for o in running if o.state in CANCELLABLE and body.status_filter in ("", o.state)]
        succeeded, skipped = [], [str(o.id) for o in running if o not in fit]
        for operation in fit:
            try:
                if not body.dry_run:
                    await self._control.cancel(operation.id, "cancelled by a client")
                succeeded.append(str(operation.id))
            except ApiError:  # it went on meanwhile
                skipped.append(str(operation.id))
        return JSONResponse({"succeeded": succeeded, "skipped": skipped, "dry_run": body.dry_run})

    async def engines(self, request: Request, _: str) -> Response:
        """List the engines by model, in Relax's second schema."""
        del request
        topology = await self._control.rollouts()
        engines = [
            {
                "engine_id": actor["actor"],
                "url": actor["url"],
                "status": "ACTIVE" if actor["phase"] == "ready" else actor["phase"].upper(),
                "is_healthy": actor["phase"] == "ready",
            }
            for actor in topology["rollouts"]
        ]
        body = {"models": {"default": {"engines": engines}}, "total_engines": len(engines)}
        return JSONResponse({"schema_version": 2, **body, "topology_revision": topology["revision"]})


def _removes(operation: Operation) -> bool:
    plan = operation.plan
    is_less = plan is not None and plan.after < plan.before
    return operation.request.kind == "remove_engine" or operation.state in IN[1:] or is_less


def _noop(have: int) -> dict[str, Any]:
    return {"request_id": "", "status": "NOOP", "message": f"the run has {have} engines already"}


def _status(operations: Iterable[Operation]) -> str:
    """Return a state in Relax's words: the earliest of several operations, or PARTIAL."""
    states = {operation.state for operation in operations}
    if State.FAILED in states and len(states) > 1:
        return "PARTIAL"
    state = min(states, key=_ORDER.index)
    return "COMPLETED" if state is State.REMOVED else state.value


def _shown(operations: Sequence[Operation]) -> dict[str, Any]:
    first = operations[0]
    actors = [name for o in operations if o.plan is not None for name in o.plan.actors]
    failed = [o for o in operations if o.state is State.FAILED]
    times = [seconds for o in operations for seconds in o.times.values()]
    shown: dict[str, Any] = {
        "request_id": ",".join(str(o.id) for o in operations),
        "status": _status(operations),
        "model_name": "default",
        "num_replicas": first.plan.after if first.plan is not None else first.request.target or 0,
        "engine_urls": [o.request.url for o in operations if o.request.url],
        "failed_engines": [o.request.url or name for o in failed for name in (o.plan.actors if o.plan else [""])],
        "created_at": min(times),
        "updated_at": max(times),
        "error_message": "; ".join(o.reason for o in failed),
        # An operation that has ended has removed what it had started.
        "cleanup_required": False if all(o.is_over for o in operations) else None,
    }
    if _removes(first):
        removed = [name for o in operations if o.state is State.REMOVED and o.plan for name in o.plan.actors]
        return shown | {"selected_engines": actors, "removed_engines": removed}
    return shown | {"engine_ids": actors}


def _numbers(request: Request) -> list[int]:
    texts = str(request.path_params["numbers"])[:1000].split(",")
    if not all(text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS for text in texts):
        raise ApiError(404, "no such request; ids are those of the answers to scale_out and scale_in", "not_found")
    return [int(text) for text in texts]
