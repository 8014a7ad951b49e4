"""Watch over the starts of a process tree's children."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from relax_actors.isolation.proc import Process, processes
from relax_actors.supervision.child import ChildProcess
from relax_actors.supervision.start_progress import usage_of
from relax_actors.supervision.supervisor import Phase, Supervisor


def late_starts(
    pools: Collection[Supervisor], running: Mapping[str, ChildProcess], resumed: float, now: float
) -> Iterator[tuple[ChildProcess, str]]:
    """Yield the children whose start is to be ended, with the reason.

    Args:
        pools: supervisors of the children.
        running: the children's processes by name.
        resumed: end of the last pause of the whole machine, in seconds on the monotonic clock.
        now: seconds on the monotonic clock.
    """
    states = {name: state for pool in pools for name, state in pool.children.items()}
    table: dict[int, Process] | None = None
    for name, child in running.items():
        if states[name].phase is not Phase.STARTING or child.verdict is not None:
            continue
        since, progress = states[name].since, child.start_progress
        if progress.is_due(since, now):
            table = table or processes()
            progress.observe(usage_of(child.process.pid, child.launch.log, table), now)
        awaited = states.get(child.launch.awaits)
        if awaited is not None and awaited.phase is not Phase.READY:
            progress.hold(now)
        elif why := progress.lateness(since, resumed, now):
            yield child, why
