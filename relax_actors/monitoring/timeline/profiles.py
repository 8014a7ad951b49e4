"""Profiles of live actors: asked for as the operator of a run, and found in its folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from nats.aio.msg import Msg
from nats.js.errors import NoStreamResponseError

from broker.codec import decode, encode
from broker.connection import Connection
from broker.leases import RunState
from broker.subjects import Subjects
from relax_actors.errors import ConfigError
from relax_actors.messages.profile import ProfileAnswer, ProfileCall
from relax_actors.monitoring.leases import activity
from relax_actors.runtime.profiles import request_kind
from relax_actors.runtime.run_folder import RunFolder

PROFILED = ("trainer", "rollout")
"""Roles whose actors can be profiled."""
AUTHOR = "relax profile"
SILENCE_SECONDS = 30.0
"""Time without a sign of life, after which the actor counts as gone; it answers every second."""


def parse_actor(text: str) -> tuple[str, int]:
    """Parse the name of an actor that can be profiled, such as "trainer" or "rollout.1".

    Raises:
        ConfigError: it names none.
    """
    role, _, number = text.partition(".")
    if role not in PROFILED or (number and not (number.isascii() and number.isdigit())):
        msg = f"{text!r} cannot be profiled; name an actor: trainer, or rollout.N (rollout is rollout.0)"
        raise ConfigError(msg)
    return role, int(number or 0)


async def take_profile(
    connection: Connection,
    run: str,
    actor: str,
    call: ProfileCall,
    on_state: Callable[[str], object] = lambda _: None,
    state: RunState | None = None,
) -> ProfileAnswer:
    """Have a live actor profile its next steps, and wait until the traces are written.

    Args:
        connection: of the operator of the run.
        run: name of the run.
        actor: the actor, as `parse_actor` reads it.
        call: how many steps, and how long they may take.
        on_state: called with "waiting" and "running" when the profile gets there.
        state: leases of the run, so that an error says what the actor waits for.

    Raises:
        ConfigError: no such actor answers, it refuses or does not make the steps in time, or it has died meanwhile.
    """
    role, n = parse_actor(actor)
    subject = Subjects(run).service(request_kind(role), n)
    answers: asyncio.Queue[ProfileAnswer | None] = asyncio.Queue()
    inbox = connection.nc.new_inbox()

    def take(message: Msg) -> None:
        answers.put_nowait(decode(message.data, ProfileAnswer) if message.data else None)

    subscription = await connection.nc.subscribe_direct(inbox, take)
    try:
        await connection.nc.publish(subject, encode(call, AUTHOR), reply=inbox)
        answer = await _last_answer(answers, f"{role}.{n}", run, on_state)
        if answer.state == "refused":
            lease = None if state is None else await state.lease(role, n)
            raise ConfigError(answer.detail if lease is None else f"{answer.detail}; it is {activity(lease)}")
        return answer
    finally:
        await subscription.unsubscribe()


async def _last_answer(
    answers: asyncio.Queue[ProfileAnswer | None], name: str, run: str, on_state: Callable[[str], object]
) -> ProfileAnswer:
    state = ""
    while True:
        try:
            answer = await asyncio.wait_for(answers.get(), SILENCE_SECONDS)
        except TimeoutError as error:
            what = f"has ended or was restarted while it was {state}" if state else "does not answer"
            msg = f"{name} of run {run} {what}; it goes on without a profile: ask again (`relax tree {run}` shows it)"
            raise ConfigError(msg) from error
        if answer is None:
            msg = f"run {run} has no live {name}; `relax tree {run}` lists its actors, wait if this one is restarted"
            raise ConfigError(msg) from NoStreamResponseError()
        if answer.state in ("refused", "written"):
            return answer
        if answer.state != state:
            state = answer.state
            on_state(state)


def profiles_of(folder: RunFolder) -> list[Path]:
    """Return the written traces of a run, oldest first."""
    paths = [path for path in folder.profiles.glob("[!.]*.json.gz") if path.is_file() and not path.is_symlink()]
    return sorted(paths, key=lambda path: (path.stat().st_mtime, path.name))
