"""`relax tail` and `relax status`: reading a live run through its broker."""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from nats.aio.msg import Msg
from rich.console import Console
from rich.table import Table as RichTable

from broker.bridge import Address, Bridge
from broker.codec import TensorRef, open_envelope
from broker.lease import RunState
from broker.pull import Follower
from broker.store import Store
from broker.streams import ensure_bucket
from broker.subjects import Subjects
from broker.table import Table
from relax_actors.cli.summary import read_ledger
from relax_actors.errors import CodecError, ConfigError
from relax_actors.runfolder import RunFolder
from relax_actors.supervision import logs

FOREVER = 1e9


def find(run: str) -> RunFolder:
    """The folder of a run, by its name below `runs/` or by path.

    Raises:
        ConfigError: there is none.
    """
    for path in (Path(run), Path("runs") / run):
        if (path / "config.json").exists():
            return RunFolder(path)
    msg = f"no run {run!r}: neither {run}/config.json nor runs/{run}/config.json is here; give the run's folder"
    raise ConfigError(msg)


def tail(subject: str, run: str | None, *, history: bool, count: int) -> None:
    """Print messages of a subject, one line each."""
    parts = subject.split(".")
    if run is None and (len(parts) < 3 or parts[0] != "relax" or "*" in parts[1] or ">" in parts[1]):  # noqa: PLR2004
        msg = f"subject {subject!r} names no run; write relax.<run>.event.> or the like, or give --run"
        raise ConfigError(msg)
    logs.configure(logging.WARNING)
    folder = find(run or parts[1])
    bridge = Bridge(Address.load(folder.address), "tail", deadline=5.0)
    seen = 0

    def show(message: Msg) -> bool:
        nonlocal seen
        sys.stdout.write(f"{message.subject} {readable(message.data)}\n")
        sys.stdout.flush()
        seen += 1
        return bool(count) and seen >= count

    async def stored() -> None:
        subjects = Subjects(folder.load_config().run.name)
        is_log = len(parts) > 2 and parts[2] in ("event", "metric")  # noqa: PLR2004
        stream = subjects.log_stream if is_log else subjects.table_stream
        async for batch in Follower(bridge, stream, [subject]).batches():
            for message in batch:
                if show(message):
                    return

    async def coming() -> None:
        subscription = await bridge.nc.subscribe(subject)
        async for message in subscription.messages:
            if show(message):
                return

    try:
        bridge.call(stored() if history else coming(), FOREVER)
    except KeyboardInterrupt:
        return
    finally:
        bridge.close()


def readable(data: bytes) -> str:
    """A message as one line: JSON as it is, a cell as its type, author and fields."""
    if data[:1] in (b"{", b"["):
        try:
            return json.dumps(json.loads(data), ensure_ascii=False)
        except ValueError:
            pass
    try:
        envelope = open_envelope(data)
    except CodecError as error:
        return f"({len(data)} bytes: {error})"
    fields = json.dumps({k: _plain(v) for k, v in envelope.fields.items()}, ensure_ascii=False)
    return f"{envelope.type} by {envelope.author} {fields}"


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        flat = value.reshape(-1)
        shown = [x.item() for x in flat[:8]] + (["..."] if flat.size > 8 else [])  # noqa: PLR2004
        return f"{value.dtype}{list(value.shape)} {shown}"
    if isinstance(value, TensorRef):
        return f"{value.dtype}{list(value.shape)} in {value.uri}"
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return value.hex() if isinstance(value, bytes) else value


def status(run: str, *, as_json: bool) -> None:
    """Print where a run stands."""
    logs.configure(logging.WARNING)
    folder = find(run)
    config = folder.load_config()
    bridge = Bridge(Address.load(folder.address), "status", deadline=5.0)
    try:
        subjects = Subjects(config.run.name)
        table = Table(bridge, subjects, Store(config.store_path), "status")
        ledger = read_ledger(table, config)
        state = RunState(bridge, bridge.call(ensure_bucket(bridge, subjects), 10))
        leases = bridge.call(state.leases(), 10)
    finally:
        bridge.close()
    account = ledger.account()
    last = ledger.batches[max(ledger.batches)] if ledger.batches else None
    body = {
        "run": config.run.name,
        "step": ledger.version or 0,
        "steps": config.run.steps,
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
        doing = ", ".join(lease.get("rows", [])[:3]) or lease.get("waits_for", "")
        up = f"{time.time() - float(lease.get('since', 0)):.0f} s"
        shown.add_row(name, str(lease.get("pid")), str(lease.get("incarnation")), up, doing)
    console.print(shown)
