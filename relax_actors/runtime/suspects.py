"""Redelivered rows that may have killed an actor, and are therefore handled alone."""

from __future__ import annotations

from collections.abc import Sequence

from nats.aio.msg import Msg

from broker.pull import Delivery, delivery_of, is_redelivery
from relax_actors.errors import SubjectError
from relax_actors.runtime.context import Context


class Suspects:
    """Tells rows whose actors were killed from outside from those that may be the cause of a death.

    Args:
        context: context of the actor.
        isolates: whether rows that may be the cause are handled alone.
    """

    def __init__(self, context: Context, *, isolates: bool) -> None:
        self._context, self._isolates = context, isolates
        self._known: dict[Delivery, bool] = {}

    async def examine(self, messages: Sequence[Msg]) -> None:
        """Look up why messages were delivered again; forgets those of earlier calls."""
        found: dict[Delivery, bool] = {}
        for message in filter(is_redelivery, messages):
            if (delivery := delivery_of(message)) is not None:
                known = self._known.get(delivery)
                found[delivery] = await self._may_be_cause(message, delivery) if known is None else known
        self._known = found

    def __contains__(self, message: Msg) -> bool:
        """Whether a message is handled alone; so is a redelivery that was not examined."""
        delivery = delivery_of(message)
        return self._isolates and is_redelivery(message) and (delivery is None or self._known.get(delivery, True))

    async def _may_be_cause(self, message: Msg, delivery: Delivery) -> bool:
        try:
            row = self._context.table.subjects.parse(message.subject).row
        except SubjectError:
            return True
        failed = await self._context.state.failures(self._context.role, row)
        # A row may use up the machine's memory without a trace. Its neighbours must not reach the limit with it.
        most = self._context.config.supervision.max_kills // 2
        return failed.count > 0 or not delivery.deliveries - 1 <= failed.external_kills <= most
