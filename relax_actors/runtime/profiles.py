"""Profiles on demand: a live actor records its next steps with its engine's profiler.

Invariant: a profile changes nothing that the run computes. It begins and ends between two steps, its errors are answers
to the request, and an actor that is killed meanwhile forgets it.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from broker.codec import decode, encode
from broker.files import make_private_folder, remove_unfinished
from relax_actors.errors import CodecError
from relax_actors.messages.profile import ProfileAnswer, ProfileCall
from relax_actors.runtime.context import Context

if TYPE_CHECKING:  # `relax check` loads every role, and needs no NATS
    from nats.aio.msg import Msg

MAX_STEPS = 20
"""Most steps of a profile, which is in memory until it ends."""
MAX_WAIT_SECONDS = 24 * 3600.0
"""Longest time from the request to the last step of a profile."""
REPORT_SECONDS = 1.0
"""Interval of the answers to a client that waits."""


def request_kind(role: str) -> str:
    """Return the kind of the requests to profile the actors of a role."""
    return f"profile_{role}"


@runtime_checkable
class SupportsProfile(Protocol):
    """Engine whose computation can be profiled. Called in the role's thread, between two steps."""

    def begin_profile(self) -> None:
        """Begin to record operators and kernels."""

    def end_profile(self, path: Path) -> list[Path]:
        """End the recording and write it as Chrome trace JSON.

        Args:
            path: file to write, which ends in `.json.gz`; several ranks add their numbers before the suffix.

        Returns:
            The files.

        Raises:
            OSError: a file cannot be written.
        """

    def cancel_profile(self) -> None:
        """End the recording, if there is one, without writing it."""


class _Profile:
    """A profile that a client waits for: "waiting", "running", "writing" or "ended"."""

    def __init__(self, call: ProfileCall) -> None:
        self.steps = self.left = call.steps
        self.patience, self.state = call.seconds, "waiting"
        self.end: asyncio.Future[ProfileAnswer] = asyncio.get_running_loop().create_future()


class ProfileRequests:
    """Answers `relax.<run>.request.profile_<role>.<n>`, and profiles the steps of one actor.

    `start`, `begin` and `end_step` run in the role's thread.
    """

    def __init__(self, context: Context, engine: object) -> None:
        self._context, self._engine = context, engine
        self._profile: _Profile | None = None
        self._is_abandoned = False
        """Whether the engine still records a profile whose time is over."""
        self._changing = threading.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._serials = count()

    def start(self) -> None:
        """Accept requests."""
        table, context = self._context.table, self._context
        remove_unfinished(context.folder.profiles)
        subject = table.subjects.service(request_kind(context.role), context.n)
        table.connection.call(table.connection.nc.subscribe_direct(subject, self._receive), 30)

    def begin(self) -> None:
        """Begin the profile that was asked for, if there is one. Called before a step."""
        self._cancel_abandoned()
        with self._changing:
            profile = self._profile
            if profile is None or profile.state != "waiting" or not isinstance(self._engine, SupportsProfile):
                return
            profile.state = "running"
        try:
            self._engine.begin_profile()
        except Exception as error:  # noqa: BLE001 the run goes on without a profile
            self._drop(profile, f"the profiler did not start: {type(error).__name__}: {error}"[:500], ("running",))

    def end_step(self) -> None:
        """Count a step of the running profile, and write the profile after the last one."""
        self._cancel_abandoned()
        with self._changing:
            profile = self._profile
            if profile is None or profile.state != "running" or not isinstance(self._engine, SupportsProfile):
                return
            profile.left -= 1
            if profile.left:
                return
            profile.state = "writing"
        context, folder = self._context, self._context.folder.profiles
        name = f"{context.role}.{context.n}-{context.incarnation}-{next(self._serials)}.json.gz"
        try:
            make_private_folder(folder)
            files = [str(path) for path in self._engine.end_profile(folder / name)]
        except Exception as error:  # noqa: BLE001 the run goes on without a profile
            self._finish(profile, _refused(f"the profile was not written: {type(error).__name__}: {error}"[:500]))
        else:
            context.journal.event("profiled", files=[Path(file).name for file in files])
            self._finish(profile, ProfileAnswer("written", host=socket.gethostname(), files=files))
        context.progress()

    def _finish(self, profile: _Profile, answer: ProfileAnswer) -> None:
        self._profile = None
        profile.state = "ended"
        profile.end.get_loop().call_soon_threadsafe(profile.end.set_result, answer)

    def _cancel_abandoned(self) -> None:
        """End the recording of a profile whose time is over; called between two steps."""
        if self._is_abandoned and isinstance(self._engine, SupportsProfile):
            self._is_abandoned = False
            self._engine.cancel_profile()

    def _drop(self, profile: _Profile, reason: str, states: tuple[str, ...] = ("waiting",)) -> bool:
        """Refuse a profile that is in one of these states; return False if it is in no such state."""
        with self._changing:
            if profile.state not in states:
                return False
            self._is_abandoned = self._is_abandoned or profile.state == "running"
            self._finish(profile, _refused(reason))
            return True

    def _receive(self, message: Msg) -> None:
        """Take a request. Called in the event loop's thread."""
        refusal, earlier = self._problem_with(message.data), self._profile
        name = f"{self._context.role}.{self._context.n}"
        # The client of a profile that waits may be gone: a new request takes its place.
        if refusal is None and earlier and not self._drop(earlier, f"a later request to profile {name} took its place"):
            refusal = _refused(f"{name} is being profiled for another request; wait for its end")
        if refusal is not None:
            work = self._send(message.reply, refusal)
        else:
            self._profile = _Profile(decode(message.data, ProfileCall))
            work = self._report(message.reply, self._profile)
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _problem_with(self, data: bytes) -> ProfileAnswer | None:
        """Return why a request is refused; None if its profile is due."""
        name = f"{self._context.role}.{self._context.n}"
        try:
            call = decode(data, ProfileCall)
        except CodecError as error:
            return _refused(f"the request cannot be read: {error}"[:500])
        if not 1 <= call.steps <= MAX_STEPS:
            return _refused(f"a profile has 1 to {MAX_STEPS} steps, not {call.steps}")
        if not 0 < call.seconds <= MAX_WAIT_SECONDS:
            return _refused(f"a profile may take up to {MAX_WAIT_SECONDS:g} s, not {call.seconds:g}")
        if not isinstance(self._engine, SupportsProfile):
            engine = type(self._engine).__name__
            return _refused(f"{name} computes in no process of its own ({engine}): profile its server by its own means")
        return None

    async def _report(self, reply: str, profile: _Profile) -> None:
        """Send the state of a profile until it ends."""
        end = time.monotonic() + profile.patience
        while not (await asyncio.wait({profile.end}, timeout=min(REPORT_SECONDS, profile.patience)))[0]:
            if time.monotonic() > end:
                name, done = f"{self._context.role}.{self._context.n}", profile.steps - profile.left
                reason = f"{name} did {done} of {profile.steps} steps in {profile.patience:g} s"
                self._drop(profile, reason, ("waiting", "running"))
            if (state := profile.state) != "ended":
                await self._send(reply, ProfileAnswer(state))
        await self._send(reply, profile.end.result())

    async def _send(self, reply: str, answer: ProfileAnswer) -> None:
        import nats.errors  # noqa: PLC0415 `relax check` loads every role

        with suppress(nats.errors.Error, OSError):  # the profile is written all the same
            await self._context.table.connection.nc.publish(reply, encode(answer, self._context.author))


def _refused(detail: str) -> ProfileAnswer:
    return ProfileAnswer("refused", detail)
