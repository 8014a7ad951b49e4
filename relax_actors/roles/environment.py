"""Role `environment`: hosts environments, and answers the rollouts' requests."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from broker.codec import decode_fields, encode, open_envelope
from relax_actors.config import Config
from relax_actors.config.environment import EnvironmentSection
from relax_actors.data.checked_run import CheckedRun
from relax_actors.errors import CodecError, ConfigError
from relax_actors.messages import EnvironmentAnswer, EnvironmentAnswers, EnvironmentRequest, Open
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.runtime.service_role import ServiceRole

if TYPE_CHECKING:  # `relax check` loads every role, and needs no NATS
    from nats.aio.msg import Msg

    from relax_actors.envs.host import SessionHost

GATHER_SECONDS = 0.002
"""Time for which answers are gathered, so that the turns of many sessions share a message."""
KEEPALIVE_SECONDS = 1.0
"""Interval of messages about a request that is not finished: a rollout takes a silent actor for dead."""
SWEEP_SECONDS = 10.0
MAX_GATHERED_BYTES = 1 << 20


class EnvironmentRole(ServiceRole):
    """Hosts sessions, each in a process of its own.

    A request carries the operations of many sessions. Their answers are sent as soon as each is ready, so a slow
    environment delays no other.
    """

    spec: ClassVar = RoleSpec(section="environment", requires="environment", serves=("env",), start_order=15)

    def check(self, run: CheckedRun) -> Iterator[str]:
        """Check that the environment imports, takes its options, and has enough actors."""
        from relax_actors.envs.loading import load_environment  # noqa: PLC0415 `relax check` loads every role
        from relax_actors.envs.tools.python import PythonEnvironment  # noqa: PLC0415

        config, section = run.config, self._section(run.config)
        cls, options = load_environment(section, hosted=False)
        if section.isolation == "sandbox" and issubclass(cls, PythonEnvironment) and options["sandbox"] != "none":
            msg = (
                f'environment.options.sandbox = "{options["sandbox"]}" with environment.isolation = "sandbox": a '
                'sandbox can start no other one for `run_python`. Write environment.options.sandbox = "none": the code '
                "then does what the sandboxed actor may; or leave environment.isolation out"
            )
            raise ConfigError(msg)
        load_environment(section)
        episodes = config.rollout.replicas * config.rollout.max_concurrent_prompts * config.most_samples
        room = section.replicas * section.sessions
        if room < episodes:
            yield (
                f"environment.replicas x environment.sessions = {room}, and the rollouts play up to {episodes} "
                "episodes at once: the others wait"
            )

    @staticmethod
    def _section(config: Config) -> EnvironmentSection:
        if config.environment is None:
            msg = "role environment needs the section [environment]"
            raise ConfigError(msg)
        return config.environment

    def setup(self) -> None:
        """Import the class of the environment, in the process that forks sessions."""
        from relax_actors.envs.forks import Forks  # noqa: PLC0415 `relax check` loads every role
        from relax_actors.envs.host import SessionHost  # noqa: PLC0415
        from relax_actors.envs.tools.container import OWNER, owner_labels  # noqa: PLC0415

        context, section = self.context, self._section(self.context.config)
        self._forks = Forks(section, {OWNER: owner_labels(context.config, context.role, context.n)})
        self._host: SessionHost = SessionHost(section, self._forks, self._report)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Accept requests."""
        table = self.context.table
        subject = table.subjects.service("env", self.context.n)
        self._subscription = await table.connection.nc.subscribe_direct(subject, self._receive)
        self._spawn(self._sweep())

    async def stop(self) -> None:
        """End all sessions; rollouts open them again on other actors."""
        await self._subscription.unsubscribe()
        for task in self._tasks:
            task.cancel()
        await self._host.end()

    def close(self) -> None:
        """End the process that forks sessions."""
        self._forks.close()

    def handled(self) -> int:
        """Return the number of turns taken."""
        return self._host.turns

    def metrics(self) -> dict[str, float]:
        """Return the open sessions, and the failed and replayed turns of this incarnation."""
        host = self._host
        return {
            "environment_sessions": host.count,
            "environment_faults": host.faults,
            "environment_replayed_turns": host.replayed,
        }

    def _receive(self, message: Msg) -> None:
        try:
            envelope = open_envelope(message.data)
            request = decode_fields(envelope, EnvironmentRequest)
        except CodecError as error:
            self.context.journal.event("malformed_request", error=str(error)[:500])
            return
        for name in request.closes:
            self._host.close(name, envelope.author)
        if request.opens or request.acts:
            self._spawn(self._serve(request, envelope.author, message.reply))

    async def _serve(self, request: EnvironmentRequest, holder: str, reply: str) -> None:
        work: list[Coroutine[Any, Any, EnvironmentAnswer]] = [
            *(self._host.open(self._with_files(operation), holder) for operation in request.opens),
            *(self._host.act(operation, holder) for operation in request.acts),
        ]
        pending = {asyncio.ensure_future(operation) for operation in work}
        while pending:
            done, pending = await asyncio.wait(pending, timeout=KEEPALIVE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if done and pending:
                more, pending = await asyncio.wait(pending, timeout=GATHER_SECONDS)
                done |= more
            await self._answer([operation.result() for operation in done], len(pending), reply)

    def _with_files(self, opening: Open) -> Open:
        """Return an opening whose task names stored media by their paths on this node."""
        media = opening.task.get("media")
        if not media:
            return opening
        store = self.context.table.store
        files = [
            {"kind": one["kind"], "path": str(store.path(one["path"])) if one["stored"] else one["path"]}
            for one in media
        ]
        return replace(opening, task={**opening.task, "media": files})

    async def _answer(self, answers: list[EnvironmentAnswer], remaining: int, reply: str) -> None:
        """Publish answers, in as many messages as their size needs."""
        import nats.errors  # noqa: PLC0415 `relax check` loads every role

        parts: list[list[EnvironmentAnswer]] = [[]]
        size = 0
        for answer in answers:
            own = len(encode(answer, self.context.author))
            if size + own > MAX_GATHERED_BYTES and parts[-1]:
                parts.append([])
                size = 0
            parts[-1].append(answer)
            size += own
        for part in parts:
            data = encode(EnvironmentAnswers(part, remaining), self.context.author)
            with suppress(nats.errors.Error, OSError):  # the rollout asks again, and gets the same answers
                await self.context.table.connection.nc.publish(reply, data)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self._host.sweep()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def _report(self, session: str, turn: int, problem: str) -> None:
        self.context.journal.event("environment_failed", session=session, turn=turn, error=problem)
