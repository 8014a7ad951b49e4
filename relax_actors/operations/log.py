"""Log of a run's operations: read, request, and advance them.

Invariant: the cells of all operations are numbered together, and each is written once. A writer reads the log, decides,
and writes the next number. If another writer was first, the server refuses the cell, and the writer reads and decides
again. So no two clients start conflicting operations, and an operation is never both cancelled and continued.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from broker.errors import CodecError
from broker.subjects import NAME
from broker.table import Cell, Table
from relax_actors.errors import ConfigError
from relax_actors.messages.operations import OPERATION, OperationPlan, OperationRequest, OperationStep
from relax_actors.operations.engines import is_url, normal_url
from relax_actors.operations.states import (
    CANCELLABLE,
    KINDS,
    ROLE_KINDS,
    History,
    Operation,
    State,
    may_follow,
    subject_of,
)

MAX_TEXT = 500
"""Longest text of a request, in characters."""
MAX_SETTINGS = 64 << 10
"""Longest settings of a role, in characters."""


class ConflictError(ConfigError):
    """Conflict of operations: one key for two requests, or the same actors."""


class OperationLog:
    """Operations of one run; `..._async` methods run in the connection's loop.

    Args:
        table: the run's table, of a user that may write operations: the operator, or a role with `RoleSpec.operates`.
        clock: returns seconds since 1970.
    """

    def __init__(self, table: Table, clock: Callable[[], float] = time.time) -> None:
        self._table, self._clock = table, clock
        self._history = History()
        # Numbers of the cells that were read, and the stream sequence up to which they were.
        self._known: set[int] = set()
        self._sequence = 0

    def read(self) -> History:
        """Return all operations; costs one request if there is no new cell."""
        return self._table.call(self.read_async())

    async def read_async(self) -> History:
        """Async variant of `read`."""
        table, every = self._table, self._table.subjects.numbered(OPERATION, "*")
        last = await table.get_async(every, direct=False)
        if last is None or last.sequence <= self._sequence:
            return self._history
        # Listed, not counted: the trainer removes malformed cells, so numbers may be missing.
        numbers = {cell.step for cell in await table.list_cells_async(every)} - self._known
        cells = await table.get_all_async([table.subjects.numbered(OPERATION, number) for number in sorted(numbers)])
        present = sorted((cell for cell in cells if cell is not None), key=lambda cell: cell.sequence)
        steps = [(table.subjects.parse(cell.subject).step, self._decoded(cell)) for cell in present]
        self._history = self._history.extended(steps)
        self._known |= {number for number, _ in steps}
        self._sequence = last.sequence
        return self._history

    def _decoded(self, cell: Cell) -> OperationStep | None:
        with suppress(CodecError):
            return self._table.read(cell.data, OperationStep, subject=cell.subject)
        return None

    def request(self, request: OperationRequest) -> Operation:
        """Record a request as an operation in state PENDING, which the run's supervisor executes.

        Returns:
            The operation; the known one if the idempotency key was used before with the same request.

        Raises:
            ConflictError: the key was used with another request, or an operation on the same subject has not ended.
            ConfigError: the request makes no sense by itself.
        """
        return self._table.call(self.request_async(request))

    async def request_async(self, request: OperationRequest) -> Operation:
        """Async variant of `request`."""
        check_request(request)
        request = replace(request, url=normal_url(request.url))
        while True:
            history = await self.read_async()
            if (known := history.with_key(request.key)) is not None:
                if known.request != request:
                    msg = (
                        f"idempotency key {request.key!r} belongs to operation {known.id}, which has another request; "
                        "use a new key for a new request"
                    )
                    raise ConflictError(msg)
                return known
            if busy := [o for o in history.running if o.subject == subject_of(request)]:
                what = "this engine" if request.kind.endswith("engine") else f"the {request.role} actors"
                msg = (
                    f"operation {busy[0].id} changes {what} and is {busy[0].state}; wait for its end, or cancel it "
                    f"before it is {State.HEALTH_CHECKING}"
                )
                raise ConflictError(msg)
            number = history.last + 1
            if await self._append(number, OperationStep(number, State.PENDING, self._clock(), request)):
                return (await self.read_async()).operations[number]

    def advance(
        self, operation: int, state: State, *, reason: str = "", plan: OperationPlan | None = None
    ) -> Operation | None:
        """Move an operation to a state; None if it may not enter the state any more."""
        return self._table.call(self.advance_async(operation, state, reason=reason, plan=plan))

    async def advance_async(
        self, operation: int, state: State, *, reason: str = "", plan: OperationPlan | None = None
    ) -> Operation | None:
        """Async variant of `advance`."""
        while True:
            history = await self.read_async()
            known = history.operations.get(operation)
            if known is None or not may_follow(known.state, state):
                return None
            step = OperationStep(operation, state, self._clock(), None, plan, reason)
            if await self._append(history.last + 1, step):
                return (await self.read_async()).operations[operation]

    def cancel(self, operation: int, reason: str) -> Operation:
        """Cancel an operation; see `cancel_async`."""
        return self._table.call(self.cancel_async(operation, reason))

    async def cancel_async(self, operation: int, reason: str) -> Operation:
        """Cancel an operation before HEALTH_CHECKING; it stays cancelled.

        Raises:
            ConfigError: there is no such operation.
            ConflictError: it has gone too far.
        """
        known = (await self.read_async()).operations.get(operation)
        if known is None:
            msg = f"there is no operation {operation}; list the operations with GET /v1/operations"
            raise ConfigError(msg)
        cancelled = await self.advance_async(operation, State.CANCELLED, reason=reason)
        known = (await self.read_async()).operations[operation]
        if cancelled is None and known.state is not State.CANCELLED:
            states = ", ".join(state for state in State if state in CANCELLABLE)
            msg = f"operation {operation} is {known.state}; only an operation that is {states} can be cancelled"
            raise ConflictError(msg)
        return known

    async def _append(self, number: int, step: OperationStep) -> bool:
        """Write the next cell; False if another writer was first."""
        table = self._table
        subject = table.subjects.numbered(OPERATION, number)
        data = table.encode(subject, step)
        if await table.put_async(subject, data):
            return True
        # After a lost acknowledgement the cell that is there may be this one.
        cell = await table.get_async(subject, direct=False)
        return cell is not None and cell.data == data


def check_settings(text: str) -> None:
    """Check the settings of a role that is added, without knowledge of the run.

    Raises:
        ConfigError: they are no JSON object, or too long.
    """
    try:
        is_table = isinstance(json.loads(text), dict)
    except ValueError:
        is_table = False
    if not is_table or len(text) > MAX_SETTINGS:
        msg = f"the settings of a role are a table as a JSON object of at most {MAX_SETTINGS} characters"
        raise ConfigError(msg)


def check_request(request: OperationRequest) -> None:
    """Check a request by itself, without knowledge of the run.

    Raises:
        ConfigError: a field is missing, superfluous or too long.
    """
    if request.kind not in KINDS:
        msg = f"there is no operation of kind {request.kind[:80]!r}; kinds are {', '.join(KINDS)}"
        raise ConfigError(msg)
    if too_long := [n for n in ("role", "node", "url", "key", "author") if len(getattr(request, n)) > MAX_TEXT]:
        msg = f"{too_long[0]} has more than {MAX_TEXT} characters; shorten it"
        raise ConfigError(msg)
    if request.kind == "scale" and (request.target is None) == (request.delta is None):
        msg = "give either `target`, the number of actors to have, or `delta`, the number to add or remove"
        raise ConfigError(msg)
    if request.kind == "add_engine" and not is_url(request.url):
        msg = f"the engine's url {request.url!r} is no address of an HTTP server; give one such as http://host:30000"
        raise ConfigError(msg)
    if request.kind in ROLE_KINDS and not NAME.fullmatch(request.role):
        msg = f"{request.role!r} is no name of a role; use letters, digits, - and _"
        raise ConfigError(msg)
    if request.kind == "move_role" and not request.node:
        msg = f"name the node to which {request.role} moves by its number or name; `relax tree` lists the nodes"
        raise ConfigError(msg)
    if request.kind == "add_role":
        check_settings(request.settings)
    if request.kind == "remove_engine" and request.engine is None:
        msg = "name the engine to remove by its id; GET /v1/rollouts lists the engines"
        raise ConfigError(msg)
    if not 0 <= request.seconds <= 7 * 86400:
        msg = f"the deadline of an operation is {request.seconds:g} s; give 0 for the default, or at most a week"
        raise ConfigError(msg)
