"""`relax tail`: the messages of a subject as they come."""

from __future__ import annotations

import logging
import sys

from nats.aio.msg import Msg

from broker.bridge import Address, Bridge
from broker.pull import Follower
from broker.subjects import Subjects
from relax_actors.cli.connect import find
from relax_actors.cli.render import readable
from relax_actors.errors import ConfigError
from relax_actors.supervision import logs

FOREVER = 1e9


def tail(subject: str, run: str | None, *, history: bool, count: int) -> None:
    """Print messages of a subject, one line each."""
    logs.configure(logging.WARNING)
    folder = find(run or run_of(subject))
    bridge = Bridge(Address.load(folder.address), "tail", deadline=5.0)
    seen = 0

    def show(message: Msg) -> bool:
        nonlocal seen
        line = f"{message.subject} {readable(message.data)}"
        sys.stdout.write("".join(c if c.isprintable() else "?" for c in line) + "\n")
        sys.stdout.flush()
        seen += 1
        return bool(count) and seen >= count

    async def stored() -> None:
        subjects = Subjects(folder.load_config().run.name)
        is_log = subject.split(".")[2:3] in (["event"], ["metric"])
        follower = Follower(bridge, subjects.log_stream if is_log else subjects.table_stream, [subject])
        async for batch in follower.batches():
            for message in batch:
                if show(message):
                    await follower.close()
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


def run_of(subject: str) -> str:
    """The run that a subject names.

    Raises:
        ConfigError: it names none.
    """
    parts = subject.split(".")
    if len(parts) < 3 or parts[0] != "relax" or parts[1] in ("*", ">"):  # noqa: PLR2004
        msg = f"subject {subject!r} names no run; write relax.<run>.event.> or the like, or give --run"
        raise ConfigError(msg)
    return parts[1]
