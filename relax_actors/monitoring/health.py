"""What is wrong with a run, decided from `monitoring.examination`."""

from __future__ import annotations

import shutil
import statistics
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from broker.subjects import RowId
from broker.table import Fill
from relax_actors.config import Config
from relax_actors.counted import counted
from relax_actors.messages import Quarantined
from relax_actors.monitoring.finding import Finding
from relax_actors.monitoring.leases import activity, age, children_of, number
from relax_actors.supervision.absence import START, needed_roles, present_roles
from relax_actors.training.collector import FULL
from relax_actors.training.ledger import Ledger

START_SECONDS = 60.0
"""How long a process may take to start."""
STALL_SECONDS, STALL_STEPS = 60.0, 10
"""A run is stalled if its last step is older than this, and than this many steps."""
QUARANTINED_SHARE = 0.01
"""Share of quarantined rows from which they are a problem."""
MIN_FREE = 1 << 30
MAX_SHOWN, MAX_ROWS = 20, 3
LEASE_KINDS = ("node", "root", "owner")
Leases = Mapping[str, dict[str, Any]]


def supervision(config: Config, leases: Leases) -> Iterator[Finding]:
    """Find dead supervisors and nodes, slow starts, and roles without an actor."""
    if "root.0" not in leases:
        yield Finding(
            f"no `relax up` supervises run {config.run.name}: it ended, or is cut off from the broker; start the same "
            "command again, which resumes the run"
        )
    nodes = {name: lease for name, lease in leases.items() if name.startswith("node.")}
    for name, lease in leases.items():
        n = name.partition(".")[2]
        if name.startswith("root.") and f"node.{n}" not in nodes:
            yield Finding(
                f"node {n} has no lease: its supervisor is down or cut off from the broker; its rows go to other nodes "
                f"after {config.supervision.ack_wait:g} s (supervision.ack_wait)"
            )
        if name.startswith(("root.", "node.")):
            of_node = "" if n == "0" else f" of node {n}"
            yield from _processes(children_of(lease), of_node, config.supervision.longest_start)
    if nodes:
        present = present_roles(nodes.values())
        for role, what in needed_roles(config, imports=False).items():
            if role not in present:
                yield Finding(f"role {role} has no actor on any node: {what}. {START.format(role=role)}")


def _processes(children: Mapping[str, Any], of_node: str, longest_start: float) -> Iterator[Finding]:
    for name, state in children.items():
        if not isinstance(state, dict):
            continue
        phase, restarts = str(state.get("phase"))[:20], int(number(state.get("restarts"), 0))
        seconds = time.time() - number(state.get("since"), 0.0)
        late, log = phase == "starting" and seconds > START_SECONDS, f"logs/{name[:90]}.log"
        if late or phase in ("down", "backing_off"):
            yield Finding(
                f"{name[:90]}{of_node} has been {phase.replace('_', ' ')} for {age(state)} after "
                f"{counted(restarts, 'restart')}; its log is {log} in the folder of the run or of the node",
                # A server that loads a large model takes minutes, and is killed if it makes no progress.
                is_problem=not late or seconds > longest_start,
            )


def missing_consumers(
    stream: str, expected: Mapping[str, Iterable[str]], present: Collection[str]
) -> Iterator[Finding]:
    """Find roles that get no rows since the broker lacks their consumers.

    A role that answers requests and handles no rows expects none.
    """
    for role, names in expected.items():
        for name in names:
            if name not in present:
                yield Finding(
                    f"consumer {name[:90]} of stream {stream} is missing, so {role[:80]} gets no rows; stop the run "
                    "and start it again, which creates it"
                )


def forged(entries: Mapping[str, str]) -> Iterator[Finding]:
    """Find entries of the bucket that are under a lease's key and are none."""
    for name, why in sorted(entries.items())[:MAX_SHOWN]:
        yield Finding(f"entry lease.{name[:80]} is no lease and is ignored: {why}; find out who writes it")


def progress(config: Config, ledger: Ledger, leases: Leases, now: float) -> Iterator[Finding]:
    """Find a run that makes no step, with what its actors wait for."""
    times = [batch.unix_time for _, batch in sorted(ledger.batches.items())]
    steps = [b - a for a, b in pairwise(times[-20:])]
    usual = statistics.median(steps) if steps else 0.0
    began = number(leases.get("root.0", {}).get("since"), 0.0)
    last = times[-1] if times else 0.0
    since = max(last, began) or now
    # A run that was started, or started again, after its last step loads its model first.
    limit = max(STALL_SECONDS, STALL_STEPS * usual) + (START_SECONDS if began > last else 0.0)
    if now - since <= limit:
        return
    if config.run.steps - 1 in ledger.batches:
        text = f"the last step was trained {now - since:.0f} s ago, and the run is not over yet"
        yield Finding(f"{text}: it saves its last checkpoint and its model, and evaluates", is_problem=False)
    else:
        took = f"; a step took {usual:.1f} s" if steps else ""
        yield Finding(f"no step for {now - since:.0f} s, at step {ledger.version or 0} of {config.run.steps}{took}")
    for name, lease in sorted(leases.items())[:MAX_SHOWN]:
        if not name.startswith(LEASE_KINDS):
            yield Finding(f"{name}: {activity(lease)}", is_problem=False)


def table(fill: Fill, stall: str) -> Iterator[Finding]:
    """Find a table without room; `stall` is the trainer's last report of it."""
    if fill.max_size and fill.size > FULL * fill.max_size:
        share = round(100 * fill.size / fill.max_size)
        yield Finding(f"stalled: {stall}" if stall else f"the table is {share} % full; raise broker.max_bytes")


def lost(rows: Mapping[str, Collection[RowId]]) -> Iterator[Finding]:
    """Find roles that took rows without writing their column."""
    for role, of_role in rows.items():
        if of_role:
            shown = ", ".join(map(str, sorted(of_role)[:MAX_ROWS])) + (" ..." if len(of_role) > MAX_ROWS else "")
            number = counted(len(of_role), "row")
            yield Finding(
                f"role {role} took {number} without writing its column: {shown}. Each was "
                "delivered again, and is quarantined if it is lost again; look for an error in the role, or for "
                "another program with its credentials"
            )


def quarantine(run: str, rows: Iterable[tuple[RowId, Quarantined]], ledger: Ledger) -> Iterator[Finding]:
    """Count quarantined rows by role, with the last errors; a problem from 1 % on."""
    counts: Counter[str] = Counter()
    errors: dict[str, str] = {}
    for _, cell in rows:
        counts[cell.role] += 1
        errors[cell.role] = cell.error.strip().partition("\n")[0][:200]
    many = counts.total() > QUARANTINED_SHARE * max(1, ledger.account().admitted)
    for role, n in counts.most_common(MAX_SHOWN):
        rows_ = f"{counted(n, 'row')} {'is' if n == 1 else 'are'}"
        text = f"{rows_} quarantined in {role[:80]}: {errors[role]}; `relax quarantine list {run}` shows them"
        yield Finding(text, is_problem=many)


def characters(counts: Mapping[str, Mapping[str, float]]) -> Iterator[Finding]:
    """Count the characters that the tokenizer cannot encode."""
    escaped = sum(int(metrics.get("characters_escaped", 0)) for metrics in counts.values())
    dropped = sum(int(metrics.get("characters_dropped", 0)) for metrics in counts.values())
    if escaped or dropped:
        yield Finding(
            f"{escaped} characters of observations and messages were escaped and {dropped} left out, because the "
            "tokenizer cannot encode them: the model reads less than its environment or agent wrote. `relax check` "
            "names such characters; add them to model.tokenizer.alphabet, or use a tokenizer that encodes every byte",
            is_problem=False,
        )


def accounts(ledger: Ledger) -> Iterator[Finding]:
    """Find rows that are lost or trained twice."""
    for violation in ledger.violations()[:MAX_SHOWN]:
        yield Finding(f"the ledger does not add up: {violation}; keep the run's folder and report this")


def disks(folders: Iterable[Path]) -> Iterator[Finding]:
    """Find disks that are nearly full."""
    seen: set[int] = set()
    for folder in folders:
        if folder.exists() and (device := folder.stat().st_dev) not in seen:
            seen.add(device)
            if (free := shutil.disk_usage(folder).free) < MIN_FREE:
                yield Finding(
                    f"the disk of {folder} has {free >> 20} MiB free; free space, or the run will wait for it"
                )
