"""Cells of operations: requests to change a live run, and the states that each goes through."""

from __future__ import annotations

from dataclasses import dataclass, field

OPERATION = "operation"
"""Kind of the numbered cells of operations."""


@dataclass(frozen=True, slots=True)
class OperationRequest:
    """What an operation is to do.

    Attributes:
        kind: "scale", "add_engine", "remove_engine", "add_role", "remove_role", "replace_role" or "move_role".
        role: role whose actors are scaled, or that is added, removed or moved, or gets other code.
        target: number of actors to have afterwards; None with `delta`.
        delta: number of actors to add, negative to remove; None with `target`.
        node: number or name of the node; for "move_role" that to which the role moves, else empty for the node of
            `relax up` or the only one that has the role.
        url: address of an inference server that the run does not start, for "add_engine".
        key_file: name of the file in `<store>/engine-keys` with the key of that server; empty without a key.
        engine: number of the operation that added an engine, for "remove_engine".
        force: whether actors that leave return their rows at once instead of finishing them.
        seconds: deadline of the whole operation; 0 for the default of its role.
        key: idempotency key of the client; empty without one.
        author: who requested it, e.g. "relax scale" or "autoscaler.0".
        settings: table `[roles.<name>]` as JSON, for "add_role".
    """

    kind: str
    role: str = "rollout"
    target: int | None = None
    delta: int | None = None
    node: str = ""
    url: str = ""
    key_file: str = ""
    engine: int | None = None
    force: bool = False
    seconds: float = 0.0
    key: str = ""
    author: str = ""
    settings: str = ""


@dataclass(frozen=True, slots=True)
class OperationPlan:
    """Changes of an operation, fixed at its beginning, so that steps are repeatable.

    Attributes:
        node: number of the node.
        node_name: its name.
        before: actors of the role on the node before.
        after: actors of the role on the node afterwards.
        actors: names of the actors that start, leave or get other code.
        code: version of the code that they get, for "replace_role".
        old_code: version of the code that they had; they get it back if the new one fails.
        source: number of the node that a role leaves, for "move_role"; -1 if no node has it.
        source_name: its name.
    """

    node: int
    node_name: str
    before: int
    after: int
    actors: list[str] = field(default_factory=list)
    code: str = ""
    old_code: str = ""
    source: int = -1
    source_name: str = ""


@dataclass(frozen=True, slots=True)
class OperationStep:
    """Cell `operation.<number>`: an operation enters a state; numbered over all operations.

    Attributes:
        operation: number of the operation, that of its first cell.
        state: see `relax_actors.operations.states.State`.
        time: seconds since 1970.
        request: of the first cell.
        plan: of the cell with which the operation begins.
        reason: why it failed, was cancelled, or had nothing to do.
    """

    operation: int
    state: str
    time: float
    request: OperationRequest | None = None
    plan: OperationPlan | None = None
    reason: str = ""
