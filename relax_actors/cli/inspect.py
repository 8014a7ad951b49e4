"""`relax status`, `ledger`, `tree` and `fingerprint`: what happened, proved from the table."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable
from rich.tree import Tree

from relax_actors.cli.summary import read_ledger
from relax_actors.config import Config
from relax_actors.errors import ConfigError
from relax_actors.monitoring.connection import children_of, connected
from relax_actors.roles import replicas, role_names

SUPERVISION = ("node.", "root.", "owner.")
WIDE = 250


def status(run: str, *, as_json: bool) -> None:
    """Print where a run stands."""
    with connected(run) as at:
        ledger = read_ledger(at.table, at.config)
        leases = at.table.connection.call(at.state.leases(), 10)
    leases = {name: lease for name, lease in leases.items() if not name.startswith(SUPERVISION)}
    account = ledger.account()
    last = ledger.batches[max(ledger.batches)] if ledger.batches else None
    body = {
        "run": at.config.run.name,
        "step": ledger.version or 0,
        "steps": at.config.run.steps,
        "reward": last.reward if last else None,
        "staleness": last.staleness if last else None,
        "floor": ledger.floor,
        "admitted": account.admitted,
        "trained": account.trained,
        "dropped": account.dropped,
        "quarantined": account.quarantined,
        "in_flight": account.in_flight,
        "violations": ledger.violations(),
        "actors": leases,
    }
    if as_json:
        sys.stdout.write(json.dumps(body) + "\n")
        return
    console = Console()
    for name, value in body.items():
        if name != "actors":
            console.print(f"{name:12} {value}", highlight=False)
    shown = RichTable("actor", "pid", "life", "up", "waits for, or has in hand")
    for name, lease in sorted(leases.items()):
        cells = (name, str(lease.get("pid"))[:20], str(lease.get("incarnation"))[:20], _since(lease), _doing(lease))
        shown.add_row(*map(escape, cells))
    console.print(shown)


def ledger(run: str, *, as_json: bool) -> int:
    """Print what became of every row; 1 if any row violates the law."""
    with connected(run) as at:
        found = read_ledger(at.table, at.config)
    account = found.account()
    ended = account.trained + account.dropped + account.quarantined
    violations = found.violations()
    body = {
        "run": at.config.run.name,
        "steps": found.version or 0,
        "floor": found.floor,
        "admitted": account.admitted,
        "trained": account.trained,
        "dropped": account.dropped,
        "quarantined": account.quarantined,
        "in_flight": account.in_flight,
        "violations": violations,
    }
    if as_json:
        sys.stdout.write(json.dumps(body) + "\n")
    else:
        console = Console()
        console.print(
            f"admitted {account.admitted} = trained {account.trained} + dropped {account.dropped} + quarantined "
            f"{account.quarantined} + in flight {account.in_flight}",
            highlight=False,
            soft_wrap=True,
        )
        for violation in violations:
            console.print(f"violation: {violation}", highlight=False, soft_wrap=True)
        holds = account.admitted == ended + account.in_flight and not violations
        console.print("the ledger is complete" if holds else "the ledger does not hold")
    return 1 if violations else 0


def tree(run: str) -> None:
    """Print the supervision tree with the state of each actor and what it does."""
    with connected(run) as at:
        leases = at.table.connection.call(at.state.leases(), 10)
    machines = {key[5:]: leases.pop(key) for key in sorted(leases, key=_order) if key.startswith("node.")}
    kept = {key[5:]: children_of(leases.pop(key)) for key in list(leases) if key.startswith("root.")}
    root = Tree(f"run {at.config.run.name}" + ("" if at.live else " (not up)"))
    if at.config.broker.url is None:
        root.add(f"broker, embedded {_state(kept.get('0', {}).get('broker') if at.live else None)}")
    else:
        root.add(escape(f"broker {at.table.connection.address.url}"))
    for number in machines or ["0"]:
        state = kept.get(number, {}).get("node") if at.live else None
        _add_node(root, at.config, number, state, machines.get(number, {}), leases)
    # Elsewhere than on a terminal a line must not be cut.
    width = None if sys.stdout.isatty() else WIDE
    Console(width=width).print(root, highlight=False)


def _add_node(
    root: Tree, config: Config, number: str, state: Any, node: dict[str, Any], leases: dict[str, Any]
) -> None:
    """The actors of a node as it tells them; without a lease those that the run should have."""
    name = ("node" if number == "0" else f"node {number}") + (f" {str(node['name'])[:80]}" if "name" in node else "")
    lease = escape(f", lease for {_since(node)}") if node else ", [red]no lease[/]"
    machine = root.add(f"{escape(name)} {_state(state)}{lease}")
    if not node or node.get("zygote") is not None:
        machine.add(f"zygote {_state(node.get('zygote'))}")
    states = children_of(node)
    due = states if node else [f"{role}.{n}" for role in role_names(config) for n in range(replicas(config, role))]
    pools: dict[str, Tree] = {}
    for child in due:
        role = child.rpartition(".")[0]
        if role not in pools:
            pools[role] = machine.add(escape(f"{role[:80]}, one_for_one"))
        pools[role].add(f"{escape(child[:90])} {_state(states.get(child))}{_life(leases.get(child))}")


def _order(name: str) -> tuple[str, int]:
    role, _, n = name.rpartition(".")
    return role, int(n) if n.isdigit() else -1


def _state(state: Any) -> str:
    if not isinstance(state, dict):
        return "[red]unknown[/]"
    restarts = int(_number(state.get("restarts"), 0))
    pid = f", pid {str(state['pid'])[:20]}" if state.get("pid") else ""
    return escape(f"{str(state.get('phase'))[:20]} for {_since(state)}, {restarts} restarts{pid}")


def _life(lease: dict[str, Any] | None) -> str:
    if lease is None:
        return ""
    life = str(lease.get("incarnation"))[:20]
    return escape(f", life {life}, up {_since(lease)}: {_doing(lease)}")


def fingerprint(path: Path) -> str:
    """The digest of the weights in a checkpoint, a model folder or a safetensors file."""
    from relax_actors.weights import files as weights

    shards = [path] if path.is_file() else sorted(path.glob("model*.safetensors"))
    if not shards:
        msg = f"{path} holds no weights: expected a checkpoint or model folder with model*.safetensors"
        raise ConfigError(msg)
    return weights.fingerprint(weights.load(shards).items())


def _since(lease: dict[str, Any]) -> str:
    return f"{time.time() - _number(lease.get('since'), 0.0):.0f} s"


def _number(value: Any, otherwise: float) -> float:
    """A number out of an entry that anybody may have written."""
    return value if isinstance(value, int | float) and abs(value) < 1e18 else otherwise  # noqa: PLR2004


def _doing(lease: dict[str, Any]) -> str:
    rows = lease.get("rows")
    rows = [str(row)[:40] for row in rows] if isinstance(rows, list) else []
    more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""  # noqa: PLR2004
    waits_for = str(lease.get("waits_for") or "work")[:200]
    doing = f"has {', '.join(rows[:3])}{more}" if rows else f"waits for {waits_for}"
    since = _number(lease.get("doing_since"), 0.0)
    return f"{doing}, since {max(0.0, time.time() - since):.1f} s" if since else doing
