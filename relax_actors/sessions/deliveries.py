"""Answers on their way to agents, and the notes of gateways on what became of them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from broker.subjects import RowId
from relax_actors.sessions.session_book import Session

MAX_DELIVERING = 4096
"""Answers on their way; of older ones it stays unknown whether they arrived."""


@dataclass(slots=True, eq=False)
class Delivery:
    """A request of an agent, and the turns that answer it.

    Attributes:
        call: id of the request.
        session: session of the request.
        numbers: numbers of the turns; empty while the request has no answer.
        has_left: whether the client has left without the answer.
    """

    call: str
    session: Session
    numbers: Sequence[int] = ()
    has_left: bool = False

    @property
    def turn_call(self) -> str:
        """Id of the call that the turns were recorded for."""
        return self.session.forest.turns[self.numbers[0]].call

    def depart(self) -> None:
        """Note in the session that the client has left without the answer."""
        for number in self.numbers:
            self.session.forest.departed(number)


class Deliveries:
    """Requests whose answers may not have arrived, by the ids of their calls.

    A turn that was recorded for one call may answer later ones. Gateways report its arrival under the id of the call
    that it was recorded for, which therefore leads to the newest delivery of the turn.
    """

    def __init__(self) -> None:
        self._expected: dict[str, Delivery] = {}
        self._given: dict[str, Delivery] = {}

    @contextmanager
    def expected(self, call: str, session: Session) -> Iterator[Delivery]:
        """Keep the notes on a request while it is answered."""
        delivery = self._expected[call] = Delivery(call, session)
        try:
            yield delivery
        finally:
            if self._expected.get(call) is delivery:
                del self._expected[call]
            if delivery.numbers:
                for name in (call, delivery.turn_call):
                    self._given.pop(name, None)
                    self._given[name] = delivery
            while len(self._given) > MAX_DELIVERING:
                del self._given[next(iter(self._given))]

    def give(self, delivery: Delivery, numbers: Sequence[int]) -> None:
        """Answer a request with turns; its client may have left before."""
        delivery.numbers = numbers
        if delivery.has_left:
            delivery.depart()

    def on_arrival(self, call: str) -> None:
        """Note that a client has its answer, although the gateway reported that it left."""
        if (delivery := self._given.pop(call, None)) is not None:
            for number in delivery.numbers:
                delivery.session.forest.arrived(number)

    def on_departure(self, call: str) -> None:
        """Note that the client of a call has left without its answer."""
        if (expected := self._expected.get(call)) is not None:
            expected.has_left = True
            return
        given = self._given.get(call)
        # Else the turn has arrived, or a later request got it.
        if given is not None and given.call == call and self._given.get(given.turn_call) is given:
            given.depart()

    def forget(self, row: RowId) -> None:
        """Forget the answers of a row."""
        self._given = {call: one for call, one in self._given.items() if one.session.row != row}
