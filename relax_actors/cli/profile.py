"""`relax profile`: record what a live actor computes in its next steps."""

from __future__ import annotations

from typing import Annotated

import typer

from relax_actors.cli.options import AsJson, Broker, Credentials, RunName

BEGIN_SECONDS = 1800.0
"""Longest wait for the first step of a profile."""
WAIT_SECONDS = 3600.0
"""Longest wait for a profile; an actor that has died is noticed sooner."""


def profile(
    run: RunName,
    actor: Annotated[str, typer.Argument(help="Actor: trainer, or rollout.N.", metavar="ACTOR")],
    steps: Annotated[
        int, typer.Option(help="Optimizer steps of the trainer, or batches of a rollout.", min=1, max=20)
    ] = 2,
    json: AsJson = False,
    broker: Broker = None,
    credentials: Credentials = None,
) -> None:
    """Record the operators and kernels of a live actor with torch.profiler, and write them as Chrome trace.

    The profile begins at the next step and changes nothing that the run computes. Traces are in the folder `profiles`
    of the run; open them in ui.perfetto.dev. An actor that is killed meanwhile goes on without a profile.
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
        call = ProfileCall(steps, BEGIN_SECONDS)
        answer = connection.call(take_profile(connection, name, actor, call, on_state), WAIT_SECONDS)
    if json:
        sys.stdout.write(json_module.dumps(asdict(answer)) + "\n")
        return
    place = "" if answer.host == socket.gethostname() else f"on {answer.host}: "
    for file in answer.files:
        sys.stdout.write(f"{place}{file}\n")
