"""`relax notify`: send messages about a run, as [notify] says."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from relax_actors.cli.options import RunName

if TYPE_CHECKING:
    from relax_actors.monitoring.notify.channels import Channel

PRIORITY = 10
"""Added to the nice value: training goes first."""


def notify(
    run: RunName,
    test: Annotated[bool, typer.Option("--test", help="Send one message to every channel, and exit.")] = False,
    child: Annotated[
        bool, typer.Option("--child", hidden=True, help="Started by `relax up`, on the standard input.")
    ] = False,
) -> None:
    """Send messages about a run, as its section [notify] says, until it ends.

    `relax up` does so by itself. Use it for a run that other machines or containers started.
    """
    from relax_actors.config.notify import NotifySection
    from relax_actors.errors import ConfigError
    from relax_actors.monitoring.connection import find
    from relax_actors.monitoring.notify.channels import channels_of
    from relax_actors.monitoring.notify.notifier import Notifier, follow
    from relax_actors.monitoring.notify.sent import Sent
    from relax_actors.runtime import logs

    folder = find(run)
    config = folder.load_config()
    if config.notify is None:
        msg = f"run {config.run.name} has no section [notify]; add one, e.g. notify.webhook, and `relax up` it again"
        raise ConfigError(msg)
    section: NotifySection = config.notify
    channels = channels_of(section)
    if test:
        _send_test(config.run.name, channels)
        return
    logs.configure()
    for number in (signal.SIGINT, signal.SIGHUP) if child else ():
        signal.signal(number, signal.SIG_IGN)  # of the terminal, for `relax up`
    os.nice(PRIORITY)
    folder.notified.mkdir(exist_ok=True)
    sent = Sent(folder.notified / "sent.json")
    if not sent.acquire():
        msg = f"another `relax notify` sends the messages of run {config.run.name}; stop it first"
        raise ConfigError(msg)
    try:
        follow(Notifier(config.run.name, folder, section, channels, sent), sys.stdin if child else None)
    finally:
        sent.close()
    sys.stdout.flush()
    os._exit(0)  # a look may still wait for a broker that has ended with the run


def _send_test(run: str, channels: list[Channel]) -> None:
    import time

    from relax_actors.errors import ConfigError
    from relax_actors.monitoring.notify.channels import ChannelError, Message

    message = Message(run, "test", f"relax run {run}: a test", "this channel works", time.time())
    failed = []
    for channel in channels:
        name = type(channel).__name__.lower()
        try:
            channel.send(message)
            sys.stdout.write(f"{name}: sent\n")
        except ChannelError as error:
            failed.append(str(error))
    if failed:
        raise ConfigError("; ".join(failed))
