"""Changes of the number of actors of a role in a live run, as operations."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from relax_actors.config import Config
from relax_actors.errors import ConfigError
from relax_actors.messages.operations import OperationPlan, OperationRequest
from relax_actors.monitoring.access import Access
from relax_actors.monitoring.connection import Connected, connected
from relax_actors.operations import Operation, OperationLog, State
from relax_actors.operations.plan import SPAN, check_role, nodes_of, plan_scale, wanted_by
from relax_actors.roles import role_names, section_of, unscalable_roles

WAIT_SECONDS = 180.0
"""Time to wait for the end of an operation, besides its own deadline and that of its role."""
POLL_SECONDS = 0.1
_SETTING = re.compile(r"([A-Za-z0-9_-]{1,64})=([+-]?)([0-9]{1,6})")


@dataclass(frozen=True, slots=True)
class ScaleOptions:
    """How roles are scaled.

    Attributes:
        node: number or name of the node; empty for the node of `relax up`, or the only one that has the role.
        force: whether surplus actors return their rows at once.
        seconds: deadline of the operation; 0 for its default.
    """

    node: str = ""
    force: bool = False
    seconds: float = 0.0


def plans_of(
    run: str, settings: list[str], options: ScaleOptions, access: Access | None = None
) -> dict[str, OperationPlan]:
    """Return what `scale_roles` would change, by role; errors as there."""
    with connected(run, access) as at:
        return {request.role: plan for request, plan in _planned(at, settings, options)}


def scale_roles(
    run: str,
    settings: list[str],
    options: ScaleOptions,
    access: Access | None = None,
    on_state: Callable[[str], object] = lambda _: None,
) -> list[Operation]:
    """Change roles' numbers of actors, and wait until actors have joined or left.

    Settings are `role=number`, `role=+number` or `role=-number`. `on_state` is called with a line for each state that
    an operation enters. Returns the operations, one for each role.

    Raises:
        ConfigError: an unknown role or node, a number that the role cannot have, a run that is not up, a conflicting
            operation, or one that failed; operations on other roles go on.
    """
    with connected(run, access) as at:
        begun = begin_scaling(at, settings, options)
        return wait_for(at, OperationLog(at.table), begun, on_state)


def begin_scaling(at: Connected, settings: list[str], options: ScaleOptions) -> list[Operation]:
    """Request operations that change numbers of actors; see `scale_roles`.

    Raises:
        ConfigError: as of `scale_roles`, before an operation has begun.
    """
    log = OperationLog(at.table)
    return [log.request(request) for request, _ in _planned(at, settings, options)]


def wait_for(
    at: Connected, log: OperationLog, begun: list[Operation], on_state: Callable[[str], object]
) -> list[Operation]:
    """Wait for the end of operations; raises ConfigError if one failed."""
    roles = [o.request.role for o in begun if o.request.role in role_names(at.config)]
    own = max([o.request.seconds for o in begun] + [section_of(at.config, role).deadline for role in roles])
    began, shown = time.monotonic(), dict.fromkeys((o.id for o in begun), 0)
    while True:
        known = log.read().operations
        now = [known[operation.id] for operation in begun]
        for operation in now:
            for state in list(operation.times)[shown[operation.id] :]:
                on_state(f"operation {operation.id}, {operation.request.url or operation.request.role}: {state}")
            shown[operation.id] = len(operation.times)
        if all(operation.is_over for operation in now):
            break
        # Code is replaced in one actor after the other, and may be taken back from all of them.
        times = max([1, *(2 * len(o.plan.actors) for o in now if o.plan is not None and o.plan.code)])
        if time.monotonic() - began > times * (WAIT_SECONDS + own):
            states = ", ".join(f"operation {o.id} is {o.state}" for o in now if not o.is_over)
            msg = f"{states} after {times * (WAIT_SECONDS + own):g} s; is the run's supervisor up? See `relax tree`"
            raise ConfigError(msg)
        time.sleep(POLL_SECONDS)
    if bad := [o for o in now if o.state in (State.FAILED, State.CANCELLED)]:
        raise ConfigError(*(f"operation {o.id} is {o.state}: {o.reason}" for o in bad))
    return now


def require_live(at: Connected) -> None:
    """Refuse a run that is not up; raises ConfigError."""
    if not at.live:
        msg = f"run {at.config.run.name} is not up; set replicas in its TOML file, or start it with `relax up`"
        raise ConfigError(msg)


def _planned(at: Connected, settings: list[str], options: ScaleOptions) -> list[tuple[OperationRequest, OperationPlan]]:
    """Return the requests that settings stand for, each with what it would change now."""
    require_live(at)
    requests = [_request(at.config, setting, options) for setting in settings]
    if twice := [r.role for n, r in enumerate(requests) if r.role in {other.role for other in requests[:n]}]:
        msg = f"{twice[0]} is given twice; give each role once"
        raise ConfigError(msg)
    nodes, history = nodes_of(at.table.call(at.state.leases())), OperationLog(at.table).read()
    return [(request, plan_scale(request, nodes, wanted_by(history, request.role))) for request in requests]


def _request(config: Config, setting: str, options: ScaleOptions) -> OperationRequest:
    names = role_names(config)
    match = _SETTING.fullmatch(setting)
    if match is None or match[1] not in names or int(match[3]) >= SPAN or (not match[2] and int(match[3]) == 0):
        msg = f"{setting!r} is no role=number; roles are {', '.join(names)}, with 1 to {SPAN - 1} actors each"
        raise ConfigError(msg)
    role, sign, number = match[1], match[2], int(match[3])
    check_role(role, names, unscalable_roles(config, [role]))
    return OperationRequest(
        "scale",
        role,
        target=None if sign else number,
        delta=int(f"{sign}{number}") if sign else None,
        node=options.node,
        force=options.force,
        seconds=options.seconds,
        author="relax scale",
    )
