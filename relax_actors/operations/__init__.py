"""Operations: changes of a live run, requests with states in its table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker.lazy import lazy

if TYPE_CHECKING:
    from relax_actors.messages.operations import OPERATION, OperationPlan, OperationRequest, OperationStep
    from relax_actors.operations.log import ConflictError, OperationLog
    from relax_actors.operations.states import History, Operation, State
else:
    __getattr__ = lazy(__name__)

__all__ = [
    "OPERATION",
    "ConflictError",
    "History",
    "Operation",
    "OperationLog",
    "OperationPlan",
    "OperationRequest",
    "OperationStep",
    "State",
]
