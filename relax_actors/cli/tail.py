"""`relax tail`: the messages of a subject as they come."""

from __future__ import annotations

import sys
from contextlib import suppress

from nats.aio.msg import Msg

from broker.ordered_consumer import OrderedConsumer
from relax_actors.errors import ConfigError
from relax_actors.monitoring.connection import Connected, connected
from relax_actors.monitoring.render import printable, readable

FOREVER = 1e9
TICK = 1.0


def tail(subject: str, run: str | None, *, history: bool, count: int) -> None:
    """Print messages of a subject, one line each; of a run that is not up, those that are stored.

    Raises:
        ConfigError: there is no such run, or it is not up and `history` is not asked for.
    """
    seen = 0

    def show(message: Msg) -> bool:
        nonlocal seen
        line = f"{message.subject} {readable(message.data)}"
        sys.stdout.write(printable(line) + "\n")
        sys.stdout.flush()
        seen += 1
        return bool(count) and seen >= count

    async def stored(at: Connected) -> None:
        subjects = at.table.subjects
        is_log = subject.split(".")[2:3] in (["event"], ["metric"])
        follower = OrderedConsumer(
            at.table.connection, subjects.log_stream if is_log else subjects.table_stream, [subject]
        )
        async for batch in follower.batches(tick=TICK):
            if any(show(message) for message in batch) or (not at.live and not batch and follower.drained):
                break
        await follower.close()

    async def coming(at: Connected) -> None:
        subscription = await at.table.connection.nc.subscribe(subject)
        async for message in subscription.messages:
            if show(message):
                return

    with connected(run or run_of(subject)) as at:
        if not at.live and not history:
            msg = f"run {at.config.run.name} is not up, nothing will come; --history shows what is stored"
            raise ConfigError(msg)
        with suppress(KeyboardInterrupt):
            at.table.connection.call(stored(at) if history else coming(at), FOREVER)


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
