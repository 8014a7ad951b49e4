"""Messages of a subject, printed one a line."""

from __future__ import annotations

import sys
from contextlib import suppress

from nats.aio.msg import Msg

from broker.ordered_consumer import OrderedConsumer
from relax_actors.errors import ConfigError
from relax_actors.monitoring.access import Access
from relax_actors.monitoring.connection import Connected, connected
from relax_actors.monitoring.render import readable
from relax_actors.printable import printable

FOREVER = 1e9
TICK = 1.0


def print_messages(subject: str, run: str | None, access: Access, *, history: bool, count: int) -> None:
    """Print the messages of a subject until interrupted, or to the end of a run that is not up.

    Args:
        subject: NATS subject, may have wildcards.
        run: name or folder of the run; taken from the subject if None.
        access: options for the run's broker.
        history: start with the stored messages instead of the next one.
        count: return after this many messages; 0 for no limit.

    Raises:
        ConfigError: no such run, or the run is not up and `history` is False.
    """
    printed = 0

    def show(message: Msg) -> bool:
        nonlocal printed
        line = f"{message.subject} {readable(message.data)}"
        sys.stdout.write(printable(line) + "\n")
        sys.stdout.flush()
        printed += 1
        return bool(count) and printed >= count

    async def follow_stored(at: Connected) -> None:
        subjects = at.table.subjects
        is_log = subject.split(".")[2:3] in (["event"], ["metric"])
        follower = OrderedConsumer(
            at.table.connection, subjects.log_stream if is_log else subjects.table_stream, [subject]
        )
        async for batch in follower.batches(tick=TICK):
            if any(show(message) for message in batch) or (not at.live and not batch and follower.drained):
                break
        await follower.close()

    async def follow_new(at: Connected) -> None:
        subscription = await at.table.connection.nc.subscribe(subject)
        async for message in subscription.messages:
            if show(message):
                return

    with connected(run or run_of(subject), access) as at:
        if not at.live and not history:
            msg = f"run {at.config.run.name} is not up and publishes nothing; --history prints the stored messages"
            raise ConfigError(msg)
        with suppress(KeyboardInterrupt):
            at.table.connection.call(follow_stored(at) if history else follow_new(at), FOREVER)


def run_of(subject: str) -> str:
    """Return the run that a subject names.

    Raises:
        ConfigError: the subject names no run.
    """
    parts = subject.split(".")
    if len(parts) < 3 or parts[0] != "relax" or parts[1] in ("*", ">"):  # noqa: PLR2004
        msg = f"subject {subject!r} names no run; write e.g. relax.<run>.event.>, or give --run"
        raise ConfigError(msg)
    return parts[1]
