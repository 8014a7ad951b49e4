"""`relax status`, `ledger`, `tree`, `quarantine` and `fingerprint`: what happened, proved from the table."""

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

from broker.subjects import RowId
from broker.table import Table
from relax_actors.actor import COLUMNS
from relax_actors.cli.connect import Connected, connected
from relax_actors.cli.render import fields_of
from relax_actors.cli.summary import read_ledger
from relax_actors.errors import CodecError, ConfigError, StoreError
from relax_actors.messages import Quarantined
from relax_actors.roles import replicas, role_names


def status(run: str, *, as_json: bool) -> None:
    """Print where a run stands."""
    with connected(run) as at:
        ledger = read_ledger(at.table, at.config)
        leases = at.table.bridge.call(at.state.leases(), 10)
    account = ledger.account()
    last = ledger.batches[max(ledger.batches)] if ledger.batches else None
    body = {
        "run": at.config.run.name,
        "step": ledger.version or 0,
        "steps": at.config.run.steps,
        "reward": last.reward if last else None,
        "age": last.age if last else None,
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
        cells = (name, str(lease.get("pid"))[:20], str(lease.get("incarnation"))[:20], _up(lease), _doing(lease))
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
    """Print the supervision tree with what each actor does."""
    with connected(run) as at:
        leases = at.table.bridge.call(at.state.leases(), 10)
    root = Tree(f"run {at.config.run.name}" + ("" if at.live else " (not up)"))
    root.add("broker, embedded" if at.config.broker.url is None else f"broker {at.table.bridge.address.url}")
    node = root.add("node")
    for role in role_names(at.config):
        pool = node.add(f"{role}, one_for_one")
        for n in range(replicas(at.config, role)):
            lease = leases.get(f"{role}.{n}")
            if lease is None:
                pool.add(f"{role}.{n} [red]no lease[/]")
                continue
            lives = int(_number(lease.get("incarnation"), 1))
            text = f"{role}.{n} pid {lease.get('pid')}, up {_up(lease)}, {lives - 1} earlier lives: {_doing(lease)}"
            pool.add(escape(text))
    Console().print(root, highlight=False, soft_wrap=True)


def quarantine(run: str, row: str | None, *, as_json: bool) -> None:
    """List quarantined rows, or show one with its inputs and traceback."""
    with connected(run) as at:
        table = at.table
        if row is not None:
            _show_row(at, RowId.parse(row))
            return
        columns = [table.subjects.column("quarantined", kind) for kind in ("group", "eval")]
        found = [(c.row, _quarantined(table, cell.data)) for c, cell in table.snapshot(columns)]
    if as_json:
        for at_row, cell in found:
            body = {"row": str(at_row), "role": cell.role, "deliveries": cell.deliveries, "error": cell.error}
            sys.stdout.write(json.dumps(body) + "\n")
        return
    shown = RichTable("row", "role", "deliveries", "error")
    for at_row, cell in found:
        first = (cell.error.splitlines() or [""])[0][:500]
        shown.add_row(str(at_row), escape(cell.role), str(cell.deliveries), escape(first))
    Console().print(shown if found else "nothing is quarantined")


def _show_row(at: Connected, row: RowId) -> None:
    console = Console()
    there = at.table.get(at.table.cell(row, "quarantined"))
    if there is None:
        msg = f"{row} is not quarantined in run {at.config.run.name}; `relax quarantine RUN` lists what is"
        raise ConfigError(msg)
    cell = _quarantined(at.table, there.data)
    console.print(f"{row} quarantined by {cell.role} after {cell.deliveries} deliveries", highlight=False, markup=False)
    console.print(cell.error, highlight=False, markup=False, soft_wrap=True)
    console.print(cell.traceback, highlight=False, markup=False, soft_wrap=True)
    for name, fields in _inputs(at.table, row, [*COLUMNS, *at.config.roles]).items():
        console.print(f"{name}: {fields}", highlight=False, markup=False, soft_wrap=True)


def _quarantined(table: Table, data: bytes) -> Quarantined:
    """What a cell says; of one that cannot be read, that and why."""
    try:
        return table.read(data, Quarantined)
    except (CodecError, StoreError) as error:
        return Quarantined("?", 0, f"unreadable: {error}", "")


def _inputs(table: Table, row: RowId, columns: list[str]) -> dict[str, Any]:
    names = [name for name in columns if name != "quarantined"]
    cells = table.get_all(table.cell(row, name) for name in names)
    return {name: fields_of(cell.data) for name, cell in zip(names, cells, strict=True) if cell is not None}


def fingerprint(path: Path) -> str:
    """The digest of the weights in a checkpoint, a model folder or a safetensors file."""
    from relax_actors.engines import weights

    shards = [path] if path.is_file() else sorted(path.glob("model*.safetensors"))
    if not shards:
        msg = f"{path} holds no weights: expected a checkpoint or model folder with model*.safetensors"
        raise ConfigError(msg)
    return weights.fingerprint(weights.load(shards).items())


def _up(lease: dict[str, Any]) -> str:
    return f"{time.time() - _number(lease.get('since'), 0.0):.0f} s"


def _number(value: Any, otherwise: float) -> float:
    """A number out of an entry that anybody may have written."""
    return value if isinstance(value, int | float) and abs(value) < 1e18 else otherwise  # noqa: PLR2004


def _doing(lease: dict[str, Any]) -> str:
    rows = lease.get("rows")
    rows = [str(row)[:40] for row in rows] if isinstance(rows, list) else []
    more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""  # noqa: PLR2004
    return ", ".join(rows[:3]) + more if rows else f"waits for {str(lease.get('waits_for') or 'work')[:200]}"
