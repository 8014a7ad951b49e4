"""Ranks of a trainer on other nodes: found by their leases, invited through the broker, connected by TCP.

The broker is the rendezvous. Actors of the role `trainer_rank` answer whether they would join, and the trainer invites
as many as it needs to a group with a fresh id, an address and a token. Nobody joins a group later: its port is closed
when the ranks are there, and another try is another group.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from ipaddress import IPv4Address

import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.js.errors import NoStreamResponseError

from broker.codec import decode, encode
from broker.routes import local_address
from relax_actors.engines.ranks.rank_group import JoinedRanks
from relax_actors.engines.ranks.rank_host import rank_platform, settings_digest
from relax_actors.engines.ranks.rank_wire import keep, receive_token
from relax_actors.engines.ranks.wire import Channel
from relax_actors.errors import CodecError, ConfigError, RelaxError
from relax_actors.messages.ranks import RankAnswer, RankInvitation
from relax_actors.runtime import Context

ROLE = "trainer_rank"
JOIN_SECONDS = 20.0
POLL_SECONDS = 0.5
REPORT_SECONDS = 10.0
log = structlog.get_logger()


class NotJoinedError(RelaxError):
    """An actor that would join did not."""


class RemoteRanks:
    """Gathers `count` ranks that are on other nodes, from number `first` on."""

    def __init__(self, context: Context, first: int, count: int) -> None:
        self._context, self._first, self._count = context, first, count
        connection = context.table.connection
        self._connection, self._subjects = connection, context.table.subjects
        self._own = local_address(connection.host)
        # Actors that did not connect to the last group: spares come before them.
        self._absent: set[int] = set()
        self._question = RankInvitation("", context.incarnation, rank_platform(), settings_digest(context.config))

    def join(self) -> JoinedRanks:
        """Wait for actors that can host the ranks, and have them join a new group.

        Raises:
            ConfigError: there are not enough of them within `supervision.patience`.
            RelaxError: this actor was asked to stop.
        """
        began = reported = time.monotonic()
        while True:
            answers = self._connection.call(self._ask(), 30)
            ready = {n: answer.host for n, answer in answers.items() if not answer.problem}
            problem = self._shortage(len(ready), answers)
            if not problem:
                try:
                    chosen = sorted(ready.items(), key=lambda one: (one[0] in self._absent, one[0]))[: self._count]
                    return self._gather(dict(chosen))
                except NotJoinedError as error:
                    problem = str(error)
            now, patience = time.monotonic(), self._context.config.supervision.patience
            if self._context.stopping():
                msg = f"asked to stop while {problem}"
                raise RelaxError(msg)
            if now - began > patience:
                msg = f"{problem}. After {patience:g} s (supervision.patience) the trainer gave up"
                raise ConfigError(msg)
            if now - reported > REPORT_SECONDS:
                reported = now
                # A line of log is progress: the supervisor does not take this start for hung.
                log.info("waiting_for_ranks", reason=problem, seconds=round(now - began))
                self._context.journal.event("waiting_for_ranks", reason=problem, seconds=round(now - began))
            time.sleep(POLL_SECONDS)

    def _shortage(self, ready: int, answers: dict[int, RankAnswer]) -> str:
        """Return why there are too few ranks; empty if there are enough."""
        if ready >= self._count:
            return ""
        reasons = [f"{ROLE}.{n} does not join: {answer.problem}" for n, answer in answers.items() if answer.problem]
        missing = f"{ready} of {self._count} ranks of other nodes are ready"
        remedy = f"start the others with `relax node --role {ROLE}={self._count - ready}`"
        return "; ".join([missing, *(reasons or [remedy])])

    async def _ask(self) -> dict[int, RankAnswer]:
        """Ask all live actors whether they would join; return the answers by number of the actor."""
        numbers = [int(name.rpartition(".")[2]) for name in await self._context.state.leases(ROLE)]
        answers = await asyncio.gather(*(self._request(n, self._question) for n in numbers))
        return {n: answer for n, answer in zip(numbers, answers, strict=True) if answer is not None}

    async def _request(self, n: int, invitation: RankInvitation) -> RankAnswer | None:
        """Send an invitation; return None if nobody answers."""

        def take(message: Msg) -> RankAnswer | None:
            try:
                return decode(message.data, RankAnswer)
            except CodecError as error:
                log.warning("malformed_answer", actor=f"{ROLE}.{n}", error=str(error)[:500])
                return None

        data = encode(invitation, self._context.author)
        try:
            return await (await self._connection.requests.send(self._subjects.service(ROLE, n), data, take))
        except (nats.errors.Error, NoStreamResponseError, TimeoutError):
            return None

    def _gather(self, hosts: dict[int, str]) -> JoinedRanks:
        """Invite actors to a new group and wait for their connections; raises NotJoinedError after `JOIN_SECONDS`."""
        host = self._address_for(hosts.values())
        with socket.create_server((host, 0), backlog=128) as listener:
            group, token = secrets.token_hex(8), secrets.token_hex(32)
            port = listener.getsockname()[1]
            invitation = replace(self._question, group=group, host=host, port=port, token=token)
            invitations = {n: replace(invitation, rank=self._first + i) for i, n in enumerate(hosts)}
            self._connection.call(self._invite(invitations), 30)
            connected = self._accept(listener, token, list(hosts))
        log.info("ranks_joined", group=group, host=host, actors=[f"{ROLE}.{n}" for n in hosts])
        return JoinedRanks(host, [Channel(connected[rank]) for rank in sorted(connected)])

    def _address_for(self, hosts: Iterable[str]) -> str:
        """Return the address of this machine that ranks can reach; loopback only if all are on this machine.

        An actor on the machine of the broker may reach it by loopback: then the route to a rank elsewhere decides.
        """
        if not IPv4Address(self._own).is_loopback:
            return self._own
        return next((local_address(host) for host in hosts if not IPv4Address(host).is_loopback), self._own)

    async def _invite(self, invitations: dict[int, RankInvitation]) -> None:
        answers = await asyncio.gather(*(self._request(n, invitation) for n, invitation in invitations.items()))
        for n, answer in zip(invitations, answers, strict=True):
            if answer is None or answer.problem:
                why = "it does not answer" if answer is None else answer.problem
                msg = f"{ROLE}.{n} did not join: {why}"
                raise NotJoinedError(msg)

    def _accept(self, listener: socket.socket, token: str, hosts: Sequence[int]) -> dict[int, socket.socket]:
        """Wait for the connections of all ranks, which the actors `hosts` start; return them by rank."""
        wanted = range(self._first, self._first + self._count)
        connected: dict[int, socket.socket] = {}
        end = time.monotonic() + JOIN_SECONDS
        try:
            while len(connected) < self._count:
                if (left := end - time.monotonic()) <= 0:
                    raise TimeoutError
                listener.settimeout(left)
                connection, _ = listener.accept()
                rank = receive_token(connection, token)
                if rank is None or rank not in wanted or rank in connected:
                    connection.close()
                    continue
                keep(connection)
                connected[rank] = connection
        except OSError as error:
            for connection in connected.values():
                connection.close()
            host, port = listener.getsockname()
            missing = [rank for rank in wanted if rank not in connected]
            self._absent = {hosts[rank - self._first] for rank in missing}
            msg = (
                f"{' and '.join(f'{ROLE}.{n}' for n in sorted(self._absent))} did not connect to {host}:{port} within "
                f"{JOIN_SECONDS:g} s; the node must reach this address"
            )
            raise NotJoinedError(msg) from error
        return connected
