"""Which turns and service requests may begin: those that fit the key-value cache together, the oldest ones first."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from relax_actors.generation.token_ledger import TokenLedger


def test_a_waiting_conversation_keeps_its_place_in_the_cache() -> None:
    ledger = TokenLedger(None, 100)
    assert ledger.begin("a", 40)
    assert ledger.begin("b", 40)
    ledger.wait("a", 35)
    # 75 tokens are held: another conversation of 40 would push that of `a` out while its environment works.
    assert not ledger.begin("c", 40)
    assert ledger.begin("a", 50)
    ledger.end("b")
    assert ledger.begin("c", 40)


def test_the_youngest_conversation_waits_when_older_ones_have_grown() -> None:
    ledger = TokenLedger(None, 100)
    for name in "abc":
        assert ledger.begin(name, 30)
        ledger.wait(name, 30)
    assert ledger.oldest_first(["new", "c", "newer", "a"]) == ["a", "c", "new", "newer"]
    assert ledger.begin("a", 60)
    assert not ledger.begin("c", 35)
    assert ledger.begin("b", 40)
    ledger.end("a")
    assert ledger.begin("c", 35)


def test_the_limit_of_running_tokens_ignores_conversations_that_wait() -> None:
    ledger = TokenLedger(50, None)
    assert ledger.begin("a", 40)
    assert not ledger.begin("b", 20)
    ledger.wait("a", 40)
    assert ledger.begin("b", 20)
    assert ledger.begin("c", 30)
    assert not TokenLedger(None, None).has_limit


@given(st.integers(20, 200), st.lists(st.tuples(st.integers(0, 7), st.integers(1, 60)), max_size=120))
def test_running_turns_fit_and_something_always_runs(limit: int, steps: list[tuple[int, int]]) -> None:
    """Each step brings a turn of a conversation, or ends the one that it has."""
    ledger, running, tokens = TokenLedger(None, limit), dict[int, int](), dict[int, int]()
    for name, grows in steps:
        if name in running:
            tokens[name] = running.pop(name)
            if tokens[name] > limit:
                ledger.end(name)
                del tokens[name]
            else:
                ledger.wait(name, tokens[name])
            continue
        cost = tokens.get(name, 0) + grows
        idle = not running
        if ledger.begin(name, cost):
            running[name] = cost
            assert idle or sum(running.values()) <= limit
        else:
            assert not idle


class Batch:
    """Turns and service requests in flight.

    Attributes:
        ledger: says what begins.
        turns: tokens of the turns in flight, by conversation.
        service: tokens of the service requests in flight, by number.
        begun: service requests that have begun.
        order: turns and service requests in flight, in the order in which they began.
    """

    def __init__(self, running: int | None, cached: int | None) -> None:
        self.ledger = TokenLedger(running, cached, lambda: sum(self.service.values()))
        self.turns: dict[int, int] = {}
        self.service: dict[int, int] = {}
        self.begun = 0
        self.order: list[tuple[dict[int, int], int]] = []

    def begin(self, ready: dict[int, int], size: int) -> None:
        """Begin requests of so many tokens, which never cease, then turns that are ready, as `TurnRollout` does."""
        self.ledger.withdraw_service()
        found = 0
        while found < 4 - len(self.service) and self.ledger.begin_service(size, found * size):
            found += 1
        for _ in range(found):
            self.service[self.begun] = size
            self.order.append((self.service, self.begun))
            self.begun += 1
        for name in self.ledger.oldest_first(list(ready)):
            if not self.ledger.begin(name, ready[name]):
                break
            self.turns[name] = ready.pop(name)
            self.order.append((self.turns, name))

    def end(self) -> tuple[int, int] | None:
        """End what began first; return the conversation and its tokens if it was a turn."""
        kind, name = self.order.pop(0)
        tokens = kind.pop(name)
        return (name, tokens) if kind is self.turns else None


@given(
    limits=st.tuples(st.none() | st.integers(40, 100), st.integers(60, 120)),
    sizes=st.lists(st.integers(5, 130), min_size=1, max_size=5),
    size=st.integers(5, 130),
)
def test_turns_and_service_requests_fit_together_and_neither_starve(
    limits: tuple[int | None, int], sizes: list[int], size: int
) -> None:
    """Conversations have two turns, and another one of the same size follows each; so neither side ever ceases."""
    batch, ready = Batch(*limits), dict(enumerate(sizes))
    limit = min(limits[1], limits[0] or limits[1])
    second, ended, begun = set[int](), Counter[int](), list[int]()
    rounds = 16 * len(sizes)
    for _ in range(3 * rounds):
        batch.begin(ready, size)
        begun.append(batch.begun)
        together = [*batch.turns.values(), *batch.service.values()]
        assert together
        assert sum(together) <= limit or len(together) == 1
        if (turn := batch.end()) is None:
            continue
        name, tokens = turn
        if name in second:
            batch.ledger.end(name)
            ended[name % len(sizes)] += 1
            name += len(sizes)
        else:
            batch.ledger.wait(name, tokens)
            second.add(name)
        ready[name] = tokens
    assert len(ended) == len(sizes)
    assert all(begun[n] < begun[n + rounds] for n in range(2 * rounds))


def test_a_service_request_waits_for_turns_that_run_but_not_for_conversations_that_wait() -> None:
    batch = Batch(None, 100)
    for name in (1, 2):
        assert batch.ledger.begin(name, 45)
    batch.ledger.wait(1, 45)
    assert not batch.ledger.begin_service(60, 0)
    assert not batch.ledger.begin(1, 50), "it would keep the service request waiting"
    batch.ledger.wait(2, 45)
    assert batch.ledger.begin_service(60, 0)
    batch.service[0] = 60
    assert not batch.ledger.begin(1, 50)
    assert not batch.ledger.begin_service(5, 0), "the turn has waited for service requests"
    batch.service.clear()
    assert not batch.ledger.begin_service(60, 0)
    assert batch.ledger.begin(1, 50)


def test_room_is_kept_for_none_that_has_left() -> None:
    batch = Batch(None, 100)
    assert batch.ledger.begin(1, 50)
    assert not batch.ledger.begin_service(60, 0)
    batch.ledger.withdraw_service()  # its client has left
    assert batch.ledger.begin(2, 50)
    batch.ledger.end(1)
    assert batch.ledger.begin_service(30, 0)
    batch.service[0] = 30
    assert not batch.ledger.begin(3, 40)
    assert not batch.ledger.service_fits(5, 0)
    batch.ledger.end(3)  # its episode took too long
    assert batch.ledger.service_fits(5, 0)
