"""`relax profile`: record what a live actor computes in its next steps."""

from __future__ import annotations

from typing import Annotated

import typer

from relax_actors.cli.options import AsJson, Broker, Credentials, RunName

WRITE_SECONDS = 600.0
"""Time for the traces to be written after the last step; an actor that has died is noticed sooner."""


def profile(
    run: RunName,
    actor: Annotated[str, typer.Argument(help="Actor: trainer, or rollout.N.", metavar="ACTOR")],
    steps: Annotated[
        int, typer.Option(help="Optimizer steps of the trainer, or batches of a rollout.", min=1, max=20)
    ] = 2,
    timeout: Annotated[
        float, typer.Option(help="Seconds until the last step; an actor that waits for rows makes none.", min=1.0)
    ] = 600.0,
    json: AsJson = False,
    broker: Broker = None,
    credentials: Credentials = None,
) -> None:
    """Profile operators and kernels of a live actor, and write them as Chrome trace.

    The profile begins at the next step and changes nothing that the run computes. Traces are in the folder `profiles`
    of the run; open them in ui.perfetto.dev. An actor that is killed meanwhile goes on without a profile. An actor that
    does not make the steps within --timeout, e.g. because it waits for rows, is reported with what it waits for.
    """
    import json as json_module
    import socket
    import sys
    from dataclasses import asdict

    from relax_actors.messages.profile import ProfileCall
    from relax_actors.monitoring.access import Access
    from relax_actors.monitoring.connection import NotUpError, connected
    from relax_actors.monitoring.timeline.profiles import parse_actor, take_profile

    parse_actor(actor)

    def on_state(state: str) -> None:
        sys.stderr.write(f"{actor}: {'waits for its next step' if state == 'waiting' else f'{steps} steps'}\n")

    with connected(run, Access(broker, credentials)) as at:
        connection, name = at.table.connection, at.settings.run.name
        if not at.live:
            raise NotUpError(name)
        call = ProfileCall(steps, timeout)
        taken = take_profile(connection, name, actor, call, on_state, at.state)
        answer = connection.call(taken, timeout + WRITE_SECONDS)
    if json:
        sys.stdout.write(json_module.dumps(asdict(answer)) + "\n")
        return
    place = "" if answer.host == socket.gethostname() else f"on {answer.host}: "
    for file in answer.files:
        sys.stdout.write(f"{place}{file}\n")
