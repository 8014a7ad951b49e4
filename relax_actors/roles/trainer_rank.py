"""Role `trainer_rank`: hosts a rank of the trainer on another node than the trainer's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

from broker.codec import decode, encode
from relax_actors.data.checked_run import CheckedRun
from relax_actors.errors import CodecError
from relax_actors.messages.ranks import RankAnswer, RankInvitation
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.runtime.service_role import ServiceRole

if TYPE_CHECKING:  # `relax check` loads every role, and needs no NATS
    from nats.aio.msg import Msg

    from relax_actors.engines.ranks.rank_host import RankHost


class TrainerRank(ServiceRole):
    """Answers the trainer's invitations, and runs the rank in a process of its own.

    A rank that ends by itself ends the actor the same way, so that its supervisor judges the death and restarts it.
    """

    spec: ClassVar = RoleSpec(
        section="trainer_rank", requires="trainer_rank", serves=("trainer_rank",), is_elsewhere=True, start_order=70
    )

    def check(self, run: CheckedRun) -> Iterator[str]:
        """Say which ranks other nodes host."""
        megatron = run.config.trainer.megatron
        remote = megatron.remote_ranks
        yield (
            f"{remote} of {megatron.ranks} ranks of the trainer are on other nodes: start them with "
            f"`relax node --role trainer_rank=<number>`, {remote} in all"
        )
        if megatron.own_ranks % megatron.tensor_parallel:
            yield (
                f"trainer.megatron.local_ranks = {megatron.local_ranks} is not a multiple of tensor_parallel = "
                f"{megatron.tensor_parallel}: ranks that share layers talk over the network; a multiple keeps "
                "them on one node"
            )

    def setup(self) -> None:
        """Prepare to host ranks."""
        from broker.routes import local_address  # noqa: PLC0415 `relax check` loads every role
        from relax_actors.engines.ranks.rank_group import exit_like_rank  # noqa: PLC0415
        from relax_actors.engines.ranks.rank_host import RankHost  # noqa: PLC0415

        context = self.context
        self._address = local_address(context.table.connection.host)
        self._groups = 0
        self._answering: set[asyncio.Task[None]] = set()
        self._host: RankHost = RankHost(
            context.config, context.node_folder, lambda rank, code: exit_like_rank("trainer", rank, code)
        )

    async def start(self) -> None:
        """Accept invitations."""
        table = self.context.table
        subject = table.subjects.service("trainer_rank", self.context.n)
        self._subscription = await table.connection.nc.subscribe_direct(subject, self._receive)

    async def stop(self) -> None:
        """Accept no more invitations."""
        await self._subscription.unsubscribe()

    def close(self) -> None:
        """End the rank; the trainer then restarts its group."""
        self._host.close()

    def handled(self) -> int:
        """Return the number of groups joined."""
        return self._groups

    def metrics(self) -> dict[str, float]:
        """Return whether a rank lives."""
        return {"ranks": float(self._host.is_hosting)}

    def _receive(self, message: Msg) -> None:
        try:
            invitation = decode(message.data, RankInvitation)
        except CodecError as error:
            self.context.journal.event("malformed_request", error=str(error)[:500])
            return
        problem = self._host.problem_with(invitation)
        if invitation.port and not problem:
            self._groups += 1
            self._host.join(invitation)
        task = asyncio.ensure_future(self._answer(RankAnswer(self._address, problem), message.reply))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, answer: RankAnswer, reply: str) -> None:
        import nats.errors  # noqa: PLC0415 `relax check` loads every role

        with suppress(nats.errors.Error, OSError):  # the trainer asks again
            await self.context.table.connection.nc.publish(reply, encode(answer, self.context.author))
